"""The documents of a namespace, by the names their writers gave them: is all of each there, or how much?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_format.segment import Label

from .chunk_table import ChunkTable

_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Document:
    """A named sequence of `num_tokens` tokens, of which a reader gets the first `num_usable_tokens`.

    None where that cannot be told without the tokens: the chunk is gone that leads from the name to the others."""

    name: str
    key: bytes
    num_tokens: int
    num_usable_tokens: int | None
    created_ms: int

    @property
    def is_complete(self) -> bool:
        """True where every token can be read."""
        return self.num_usable_tokens == self.num_tokens

    @property
    def status(self) -> str:
        """`complete`, or `incomplete (512/1280 tokens)`."""
        if self.is_complete:
            return "complete"
        usable = "?" if self.num_usable_tokens is None else self.num_usable_tokens
        return f"incomplete ({usable}/{self.num_tokens} tokens)"


def documents_of(table: ChunkTable, chunk_tokens: int) -> list[Document]:
    """All documents, by name. A name that was given several times stands for the longest of its sequences; the shorter
    ones tell how far it has come."""
    usable = usable_tokens(table, chunk_tokens)
    by_name: dict[str, list[Label]] = defaultdict(list)
    for label in table.state.labels:
        by_name[label.name].append(label)
    return [_document(name, labels, table, usable) for name, labels in sorted(by_name.items())]


def _document(name: str, labels: list[Label], table: ChunkTable, usable: npt.NDArray[np.int64]) -> Document:
    last = max(labels, key=lambda label: (label.num_tokens, label.created_ms, label.key))
    chunks = [chunk for label in labels if (chunk := chunk_of(table, label.key)) is not None]
    known = [min(int(usable[chunk]), last.num_tokens) for chunk in chunks if usable[chunk] != _UNKNOWN]
    return Document(name, last.key, last.num_tokens, max(known, default=None), last.created_ms)


def chunk_of(table: ChunkTable, key: bytes) -> int | None:
    """The number of the chunk with this key (at least its first 16 bytes); None where it is not here."""
    rows = table.state.rows_of(key)
    return int(np.searchsorted(table.starts, rows.start, side="right")) - 1 if rows else None


def usable_tokens(table: ChunkTable, chunk_tokens: int) -> npt.NDArray[np.int64]:
    """For every chunk how many tokens a prompt that goes through it can get: all up to its end where it and all chunks
    before it are whole; else those up to the first that is not; -1 where a chunk before it is gone."""
    parents = parent_chunks(table)
    depths, ends = table.depths, table.depths * chunk_tokens + table.num_tokens
    usable = np.where(depths == 0, 0, _UNKNOWN)
    order = np.argsort(depths, kind="stable")
    edges = np.flatnonzero(np.concatenate([[True], np.diff(depths[order]) != 0])) if len(order) else order
    before_ends = depths * chunk_tokens
    for level in np.split(order, edges[1:]):
        has_parent = parents[level] != _UNKNOWN
        usable[level[has_parent]] = usable[parents[level[has_parent]]]
        is_reached = usable[level] == before_ends[level]
        done = level[is_reached & table.is_whole[level]]
        usable[done] = ends[done]
    return usable


def parent_chunks(table: ChunkTable) -> npt.NDArray[np.int64]:
    """For every chunk the number of its parent, -1 where that is not here or the chunk is a first one."""
    if not len(table):
        return np.zeros(0, np.int64)
    keys, wanted = table.keys, table.parents
    at = np.searchsorted(keys, wanted)
    at[at == len(keys)] = 0
    found = (keys[at] == wanted) & (table.depths > 0) & (table.depths[at] == table.depths - 1)
    return np.where(found, at, _UNKNOWN)
