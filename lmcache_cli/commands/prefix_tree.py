"""The chunks of a namespace as the tree they form: prompts that share a beginning share its chunks.

A row of the tree is a run of chunks without a branch. A chunk's parent is known by the first eight bytes of its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lmcache_cli.rendering import utc_day

if TYPE_CHECKING:
    from lmcache_cli.store import State


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


def prefix_runs(state: State) -> Iterator[PrefixRun]:
    """All runs, each before those that branch off it, in order of keys."""
    chunks = _Chunks(state)
    waiting = [(root, 0, 0, chunks.depth[root] > 0) for root in reversed(chunks.roots())]
    while waiting:
        first, level, tokens_before, detached = waiting.pop()
        run = [first]
        while len(children := chunks.children(run[-1])) == 1:
            run.append(children[0])
        num_tokens = sum(chunks.num_tokens[chunk] for chunk in run)
        yield chunks.run(run, level=level, num_tokens=num_tokens, tokens_before=tokens_before, detached=detached)
        end = tokens_before + num_tokens
        waiting += [(child, level + 1, end, detached) for child in reversed(children)]


class _Chunks:
    """The shards of a state gathered to chunks, as lists by chunk number."""

    def __init__(self, state: State) -> None:
        adds, rest = state.adds, state.adds["key_rest"]
        changes = (state.keys[1:] != state.keys[:-1]) | (rest[1:] != rest[:-1])
        starts = np.flatnonzero(np.concatenate([[True], changes])) if len(state) else np.empty(0, np.int64)
        self._keys = state.keys[starts]
        self._rests = rest[starts]
        self._labels = _labels(state)
        self.depth: list[int] = adds["depth"][starts].tolist()
        self.num_tokens: list[int] = adds["num_tokens"][starts].tolist()
        sizes = adds["size_bytes"].astype(np.int64)
        self._size_bytes: list[int] = np.add.reduceat(sizes, starts).tolist() if len(starts) else []
        self._used = {int(touch["key"]): (int(touch["day"]), int(touch["hits"])) for touch in state.touches}
        parents = adds["parent"][starts]
        self._order = np.argsort(parents, kind="stable")
        self._sorted_parents = parents[self._order]
        first, last = (np.searchsorted(self._sorted_parents, self._keys, side=side) for side in ("left", "right"))
        self._first: list[int] = first.tolist()
        self._last: list[int] = last.tolist()
        self._is_root = ~np.isin(parents, self._keys) | (adds["depth"][starts] == 0)

    def roots(self) -> list[int]:
        """Chunks whose parent is not here, by key."""
        found: list[int] = np.flatnonzero(self._is_root).tolist()
        return found

    def children(self, chunk: int) -> list[int]:
        """Chunks that follow this one; a key that damage made its own ancestor is not followed."""
        rows = self._order[self._first[chunk] : self._last[chunk]]
        return [int(row) for row in rows if self.depth[row] == self.depth[chunk] + 1]

    def run(self, chunks: list[int], *, level: int, num_tokens: int, tokens_before: int, detached: bool) -> PrefixRun:
        used = [self._used[key] for chunk in chunks if (key := int(self._keys[chunk])) in self._used]
        return PrefixRun(
            level=level,
            key=self._key(chunks[-1]).hex(),
            depth=self.depth[chunks[0]],
            num_chunks=len(chunks),
            num_tokens=num_tokens,
            end_tokens=tokens_before + num_tokens,
            size_bytes=sum(self._size_bytes[chunk] for chunk in chunks),
            last_used=utc_day(max(day for day, _ in used)) if used else None,
            num_hits=max((hits for _, hits in used), default=0),
            detached=detached,
            labels=tuple(name for chunk in chunks for name in self._labels.get(self._key(chunk), ())),
        )

    def _key(self, chunk: int) -> bytes:
        return int(self._keys[chunk]).to_bytes(8, "big") + int(self._rests[chunk]).to_bytes(8, "big")


def _labels(state: State) -> dict[bytes, list[str]]:
    names: dict[bytes, list[str]] = {}
    for label in state.labels:
        names.setdefault(label.key, []).append(label.name)
    return names
