"""Which chunks a prune would take: pure selection over the arrays of one or several namespaces (SPEC §12.3).

Whatever the rule, the chosen chunks are closed downwards: a chunk goes only together with every chunk after it, so none
is ever left without its beginning. To that end what counts of a chunk (last use, age, a pin) is the best of its own and
of all chunks after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chunk_table import Bools, ChunkTable, Ints
from .manifest import DAY_MS
from .state import State

NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The chunks of one namespace with who comes after whom. `parents[i]` is the row of chunk i's parent, or -1."""

    table: ChunkTable
    parents: Ints
    by_depth: tuple[Ints, ...]

    @classmethod
    def of(cls, table: ChunkTable) -> Family:
        """Find every chunk's parent by its key."""
        keys, depths = table.keys, table.depths
        count = len(table)
        at = np.minimum(np.searchsorted(keys, table.parents), max(count - 1, 0))
        is_known = (keys[at] == table.parents) & (depths[at] == depths - 1) if count else np.zeros(0, np.bool_)
        parents = np.where(is_known, at, NO_PARENT).astype(np.int64)
        order = np.argsort(depths, kind="stable")
        edges = np.flatnonzero(np.diff(depths[order])) + 1
        return cls(table, parents, tuple(np.split(order, edges)) if count else ())

    def best_of_descendants(self, values: Ints) -> Ints:
        """For every chunk the largest of its own value and those of all chunks after it."""
        best = values.copy()
        for level in reversed(self.by_depth):
            children = level[self.parents[level] != NO_PARENT]
            np.maximum.at(best, self.parents[children], best[children])
        return best

    def with_ancestors(self, chosen: Bools) -> Bools:
        """The chosen chunks and all before them."""
        return self.best_of_descendants(chosen.astype(np.int64)) > 0

    def with_descendants(self, chosen: Bools) -> Bools:
        """The chosen chunks and all after them."""
        result = chosen.copy()
        for level in self.by_depth:
            children = level[self.parents[level] != NO_PARENT]
            result[children] |= result[self.parents[children]]
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What selection needs to know of one namespace: families, times in ms, which chunks must stay."""

    family: Family
    last_used_ms: Ints
    created_ms: Ints
    is_kept: Bools

    @classmethod
    def of(cls, table: ChunkTable, now_ms: int) -> Candidates:
        """`now_ms` is the store's clock: it decides which pins hold. A chunk that nobody used counts from its write."""
        family = Family.of(table)
        created = family.best_of_descendants(table.created_ms)
        used = family.best_of_descendants(np.maximum(table.created_ms, _last_used_ms(table)))
        pinned = family.with_ancestors(_pinned(table, now_ms))
        return cls(family, used, created, pinned)

    @property
    def size_bytes(self) -> Ints:
        """Bytes of every chunk, all its shards together."""
        return self.family.table.size_bytes


def choose_old(candidates: Candidates, *, created_before_ms: int | None, used_before_ms: int | None) -> Bools:
    """Chunks written, and last used, before the times given (None: whenever)."""
    chosen = ~candidates.is_kept
    if created_before_ms is not None:
        chosen &= candidates.created_ms < created_before_ms
    if used_before_ms is not None:
        chosen &= candidates.last_used_ms < used_before_ms
    return chosen


def choose_excess(
    namespaces: Sequence[Candidates],
    chosen: Sequence[Bools],
    *,
    max_bytes: int | None,
    max_chunks: int | None,
    other_bytes: int = 0,
) -> list[Bools]:
    """`chosen` and, least recently used and deepest first, as many more as bring the rest down to the limits.

    `other_bytes` count towards the limit and cannot be chosen. Kept chunks are never chosen, so a limit may be missed.
    """
    sizes = np.concatenate([one.size_bytes for one in namespaces]) if namespaces else np.zeros(0, np.int64)
    used = np.concatenate([one.last_used_ms for one in namespaces]) if namespaces else sizes
    depths = np.concatenate([one.family.table.depths for one in namespaces]) if namespaces else sizes
    kept = np.concatenate([one.is_kept for one in namespaces]) if namespaces else sizes.astype(np.bool_)
    taken = np.concatenate(list(chosen)) if namespaces else kept
    order = np.lexsort((-depths, used))
    order = order[~(taken | kept)[order]]
    excess_bytes = 0 if max_bytes is None else int(sizes[~taken].sum()) + other_bytes - max_bytes
    excess_chunks = 0 if max_chunks is None else int((~taken).sum()) - max_chunks
    count = max(0, excess_chunks)
    if excess_bytes > 0:
        count = max(count, int(np.searchsorted(np.cumsum(sizes[order]), excess_bytes)) + 1)
    taken[order[:count]] = True
    edges = np.cumsum([len(one.family.table) for one in namespaces])[:-1]
    return [np.asarray(piece) for piece in np.split(taken, edges)] if namespaces else []


def superseded_rows(table: ChunkTable, is_lossless: Sequence[bool]) -> Bools:
    """Rows of the state that another makes dispensable: `raw` beside a lossless encoding of the same part, and tails
    beside a full chunk after the same parent. `is_lossless[i]` is about encoding i of the state."""
    state = table.state
    rows = np.zeros(len(state), np.bool_)
    if not len(state):
        return rows
    adds = state.adds
    lossless = np.array(is_lossless, np.bool_)[adds["encoding"]]
    is_raw = np.array([name == "raw" for name in state.encodings], np.bool_)[adds["encoding"]]
    chunk = np.repeat(np.arange(len(table)), table.stops - table.starts)
    name = chunk * max(len(state.parts), 1) + adds["part"]
    encoded = np.unique(name[lossless & ~is_raw])
    rows |= is_raw & np.isin(name, encoded)
    return rows | np.repeat(_superseded_tails(table), table.stops - table.starts)


def _superseded_tails(table: ChunkTable) -> Bools:
    """Tails after whose parent a whole full chunk stands too."""
    full = table.num_tokens == table.num_tokens.max(initial=0)
    beside: Bools = np.isin(table.parents, table.parents[full & table.is_whole])
    result: Bools = ~full & beside
    return result


def find_chunks(state: State, table: ChunkTable, start: str) -> Bools:
    """Chunks whose key begins so (hex digits, at most 32)."""
    low = int(start[:16].ljust(16, "0"), 16)
    high = int(start[:16].ljust(16, "f"), 16)
    chosen = (table.keys >= np.uint64(low)) & (table.keys <= np.uint64(high))
    if len(start) > 16:
        rest = state.adds["key_rest"][table.starts]
        chosen &= rest >= np.uint64(int(start[16:32].ljust(16, "0"), 16))
        chosen &= rest <= np.uint64(int(start[16:32].ljust(16, "f"), 16))
    result: npt.NDArray[np.bool_] = chosen
    return result


def _last_used_ms(table: ChunkTable) -> Ints:
    """The end of the day of the last touch: a touch keeps no time of day."""
    touches = table.state.touches
    result = np.zeros(len(table), np.int64)
    if not len(touches) or not len(table):
        return result
    at = np.minimum(np.searchsorted(touches["key"], table.keys), len(touches) - 1)
    is_touched = touches["key"][at] == table.keys
    result[is_touched] = (touches["day"][at[is_touched]].astype(np.int64) + 1) * DAY_MS - 1
    return result


def _pinned(table: ChunkTable, now_ms: int) -> Bools:
    pinned = np.zeros(len(table), np.bool_)
    for pin in table.state.pins:
        if pin.expires_ms is None or pin.expires_ms > now_ms:
            pinned |= find_chunks(table.state, table, pin.key.hex())
    return pinned
