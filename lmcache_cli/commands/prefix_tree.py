"""The chunks of a namespace as the tree they form: prompts that share a beginning share its chunks.

A row of the tree is a run of chunks without a branch. A chunk's parent is known by the first eight bytes of its key.
Rows are made one by one, so that the first ones of a million chunks are there in a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcache_cli.rendering import utc_day

if TYPE_CHECKING:
    from lmcache_cli.store.chunk_table import ChunkTable

_NONE = -1


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """A run of chunks: `depth` chunks and `end_tokens - num_tokens` tokens come before it.

    `key` is the last chunk's (its first 16 bytes). A run that is `detached` can match no prompt, because a chunk before
    it is gone; its `end_tokens` count from there. `size_bytes` is that of all parts and encodings.
    """

    level: int
    key: str
    depth: int
    num_chunks: int
    num_tokens: int
    end_tokens: int
    size_bytes: int
    last_used: str | None
    num_hits: int
    detached: bool
    labels: tuple[str, ...]

    @property
    def tree(self) -> str:
        """The key, set in by its level."""
        return "  " * self.level + self.key


class PrefixTree:
    """The runs of a namespace; `num_runs` is known before any of them is made."""

    def __init__(self, table: ChunkTable) -> None:
        from lmcache_cli.store.documents import parent_chunks

        self._table = table
        parents = parent_chunks(table)
        is_root = parents == _NONE
        num_children = np.bincount(parents[~is_root], minlength=len(table))
        self.num_runs = int(is_root.sum() + num_children[num_children > 1].sum())
        self._roots = np.flatnonzero(is_root)
        self._by_parent = np.argsort(parents, kind="stable")
        self._first_child = np.searchsorted(parents[self._by_parent], np.arange(len(table) + 1)).tolist()
        self._num_children: list[int] = num_children.tolist()
        self._keys, self._depths = table.keys, table.depths
        self._num_tokens, self._size_bytes = table.num_tokens, table.size_bytes
        self._labels = _labels(table)

    def runs(self) -> Iterator[PrefixRun]:
        """All runs, each before those that branch off it, in order of keys."""
        waiting = [(int(root), 0, 0, bool(self._depths[root] > 0)) for root in self._roots[::-1]]
        while waiting:
            first, level, tokens_before, detached = waiting.pop()
            chunks = self._chunks_from(first)
            end = tokens_before + int(self._num_tokens[chunks].sum())
            yield self._run(chunks, level=level, tokens_before=tokens_before, end_tokens=end, detached=detached)
            waiting += [(child, level + 1, end, detached) for child in reversed(self._children(chunks[-1]))]

    def _chunks_from(self, chunk: int) -> list[int]:
        """The chunk and those that follow it, up to the next branch or end."""
        chunks = [chunk]
        while self._num_children[chunk] == 1:
            chunk = int(self._by_parent[self._first_child[chunk]])
            chunks.append(chunk)
        return chunks

    def _children(self, chunk: int) -> list[int]:
        found: list[int] = self._by_parent[self._first_child[chunk] : self._first_child[chunk + 1]].tolist()
        return found

    def _run(self, chunks: list[int], *, level: int, tokens_before: int, end_tokens: int, detached: bool) -> PrefixRun:
        touches = self._touches(chunks)
        return PrefixRun(
            level=level,
            key=self._table.key_of(chunks[-1]).hex(),
            depth=int(self._depths[chunks[0]]),
            num_chunks=len(chunks),
            num_tokens=end_tokens - tokens_before,
            end_tokens=end_tokens,
            size_bytes=int(self._size_bytes[chunks].sum()),
            last_used=utc_day(int(touches["day"].max())) if len(touches) else None,
            num_hits=int(touches["hits"].max()) if len(touches) else 0,
            detached=detached,
            labels=tuple(name for chunk in chunks for name in self._labels.get(chunk, ())),
        )

    def _touches(self, chunks: list[int]) -> npt.NDArray[np.void]:
        """Those of these chunks, as the state has them: sorted by key, one a key."""
        touches = self._table.state.touches
        keys = self._keys[chunks]
        at = np.searchsorted(touches["key"], keys)
        known = at < len(touches)
        at, keys = at[known], keys[known]
        found: npt.NDArray[np.void] = touches[at[touches["key"][at] == keys]]
        return found


def _labels(table: ChunkTable) -> dict[int, list[str]]:
    """Names by the chunk that their sequence ends with."""
    from lmcache_cli.store.documents import chunk_of

    names: dict[int, list[str]] = {}
    for label in table.state.labels:
        if (chunk := chunk_of(table, label.key)) is not None:
            names.setdefault(chunk, []).append(label.name)
    return names
