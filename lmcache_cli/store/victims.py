"""Which chunks a prune would take: pure selection over the arrays of one or several namespaces (SPEC §12.3).

Whatever the rule, the chosen chunks are closed downwards: a chunk goes only together with every chunk after it, so none
is ever left without its beginning. To that end what counts of a chunk (last use, age, a pin) is the best of its own and
of all chunks after it. No time counts as later than now: what seems to come from the future is new, and no newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmcache_format.encodings import get_encoding
from lmcache_format.errors import UnsupportedVersion
from lmcache_format.keys import ChunkKey, chunk_keys, next_key
from lmcache_format.segment import key_number

from .chunk_table import Bools, ChunkTable, Ints, sum_by_group
from .manifest import DAY_MS
from .state import State

NO_PARENT = -1
NEVER = -1


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

    def count_children(self, chosen: Bools) -> Ints:
        """For every chunk how many of the chosen ones come right after it."""
        parents = self.parents[chosen & (self.parents != NO_PARENT)]
        return np.bincount(parents, minlength=len(self.table)).astype(np.int64)

    def closed(self, chosen: Bools) -> Bools:
        """The chosen chunks without those that have one after them that was not chosen."""
        return chosen & ~self.with_ancestors(~chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What selection needs to know of one namespace: families, times in ms, which chunks must stay, which count."""

    family: Family
    last_used_ms: Ints
    created_ms: Ints
    is_kept: Bools
    is_counted: Bools

    @classmethod
    def of(cls, table: ChunkTable, now_ms: int) -> Candidates:
        """`now_ms` is the store's clock: it decides which pins hold. A chunk that nobody used counts from its write."""
        family = Family.of(table)
        written = np.minimum(table.created_ms, now_ms)
        created = family.best_of_descendants(written)
        used = family.best_of_descendants(np.maximum(written, np.minimum(_last_used_ms(table), now_ms)))
        pinned = family.with_ancestors(pinned_chunks(table, now_ms))
        return cls(family, used, created, pinned, np.ones(len(table), np.bool_))

    def within(self, scope: Bools) -> Candidates:
        """The same, where chunks outside of `scope` (closed downwards) neither go nor count."""
        return replace(self, is_kept=self.is_kept | ~scope, is_counted=scope)

    @property
    def size_bytes(self) -> Ints:
        """Bytes of every chunk, all its shards together."""
        return self.family.table.size_bytes

    @property
    def order(self) -> Ints:
        """All chunks, least recently used first and children before parents: every beginning of it is closed."""
        order: Ints = np.lexsort((-self.family.table.depths, self.last_used_ms))
        return order


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
    sizes: Sequence[Ints] | None = None,
) -> list[Bools]:
    """`chosen` and, least recently used and deepest first, as many more as bring the rest down to the limits.

    `sizes` are those of the chunks where not all of their shards are to be counted. Kept chunks are never chosen, so a
    limit may be missed.
    """
    if not namespaces:
        return []
    size = np.concatenate(list(sizes) if sizes is not None else [one.size_bytes for one in namespaces])
    used = np.concatenate([one.last_used_ms for one in namespaces])
    depths = np.concatenate([one.family.table.depths for one in namespaces])
    kept = np.concatenate([one.is_kept for one in namespaces])
    counted = np.concatenate([one.is_counted for one in namespaces])
    taken = np.concatenate(list(chosen))
    order = np.lexsort((-depths, used))
    order = order[~(taken | kept)[order]]
    excess_bytes = 0 if max_bytes is None else int(size[counted & ~taken].sum()) - max_bytes
    excess_chunks = 0 if max_chunks is None else int((counted & ~taken).sum()) - max_chunks
    count = max(0, excess_chunks)
    if excess_bytes > 0:
        count = max(count, int(np.searchsorted(np.cumsum(size[order]), excess_bytes)) + 1)
    taken[order[:count]] = True
    edges = np.cumsum([len(one.family.table) for one in namespaces])[:-1]
    return [np.asarray(piece) for piece in np.split(taken, edges)]


def choose_prompt(candidates: Candidates, root: ChunkKey, words: npt.NDArray[np.uint32], chunk_tokens: int) -> Bools:
    """Chunks that are there for one prompt alone: its last ones with all after them, and those before that no other
    sequence goes through or, by a label, ends with."""
    family = candidates.family
    table = family.table
    keys = chunk_keys(root, words, chunk_tokens)
    rest = words[len(keys) * chunk_tokens :]
    chain = [_chunk_of(table, key) for key in keys]
    ends = [] if len(rest) else chain[-1:]
    if len(rest):
        ends = _tails_of(table, keys[-1] if len(keys) else root, rest, len(keys))
    chosen = np.zeros(len(table), np.bool_)
    chosen[[end for end in ends if end is not None]] = True
    chosen = family.with_descendants(chosen)
    names = _label_names(table)
    own = {name for chunk in np.flatnonzero(chosen) for name in names.get(table.key_of(int(chunk)), ())}
    num_staying = family.count_children(~chosen)
    for chunk in reversed(chain):
        if chunk is None or chosen[chunk]:
            continue
        if num_staying[chunk] or names.get(table.key_of(chunk), set()) - own:
            break
        chosen[chunk] = True
        if family.parents[chunk] != NO_PARENT:
            num_staying[family.parents[chunk]] -= 1
    return family.closed(chosen & ~candidates.is_kept)


def superseded_rows(table: ChunkTable, chunk_tokens: int) -> Bools:
    """Rows of the state that another makes dispensable: `raw` beside a lossless encoding of the same part, and tails
    that nobody used since a full chunk was written after the same parent."""
    state = table.state
    rows = np.zeros(len(state), np.bool_)
    if not len(state):
        return rows
    adds = state.adds
    lossless = np.array([_is_readable_lossless(label) for label in state.encodings], np.bool_)[adds["encoding"]]
    is_raw = np.array([name == "raw" for name in state.encodings], np.bool_)[adds["encoding"]]
    chunk = np.repeat(np.arange(len(table)), table.stops - table.starts)
    name = chunk * max(len(state.parts), 1) + adds["part"]
    encoded = np.unique(name[lossless & ~is_raw])
    rows |= is_raw & np.isin(name, encoded)
    return rows | np.repeat(superseded_tails(table, chunk_tokens), table.stops - table.starts)


def superseded_tails(table: ChunkTable, chunk_tokens: int) -> Bools:
    """Tails not written and not used (a touch keeps the day alone) after a whole full chunk was that follows the same
    parent. Which tokens a chunk has the index does not tell: that nobody used the tail since speaks for it."""
    is_full = (table.num_tokens == chunk_tokens) & table.is_whole
    parents, written = table.parents[is_full], table.created_ms[is_full]
    if not len(parents):
        return np.zeros(len(table), np.bool_)
    order = np.lexsort((written, parents))
    parents, written = parents[order], written[order]
    at = np.searchsorted(parents, table.parents, side="right") - 1  # the latest after that parent
    known = (at >= 0) & (parents[at] == table.parents)
    since = np.where(known, written[at], NEVER)
    result: Bools = known & (table.created_ms <= since) & (_last_used_days(table) <= since // DAY_MS)
    result &= table.num_tokens < chunk_tokens
    return result


def under_root(family: Family, root: ChunkKey) -> Bools:
    """Chunks that descend from a root key: those of one tenant's salt."""
    table = family.table
    firsts = (table.depths == 0) & (table.parents == np.uint64(key_number(root)))
    return family.with_descendants(firsts)


def find_chunks(state: State, table: ChunkTable, start: str) -> Bools:
    """Chunks whose key begins so (hex digits, of which the first 32 count)."""
    low = int(start[:16].ljust(16, "0"), 16)
    high = int(start[:16].ljust(16, "f"), 16)
    chosen = (table.keys >= np.uint64(low)) & (table.keys <= np.uint64(high))
    if len(start) > 16:
        rest = state.adds["key_rest"][table.starts]
        chosen &= rest >= np.uint64(int(start[16:32].ljust(16, "0"), 16))
        chosen &= rest <= np.uint64(int(start[16:32].ljust(16, "f"), 16))
    result: npt.NDArray[np.bool_] = chosen
    return result


def pinned_chunks(table: ChunkTable, now_ms: int) -> Bools:
    """Chunks that a pin names which holds at `now_ms`, without those before them."""
    held = {pin.key for pin in table.state.pins if pin.expires_ms is None or pin.expires_ms > now_ms}
    numbers = np.array(sorted({key_number(key) for key in held}), np.uint64)
    pinned = np.isin(table.keys, numbers) if len(numbers) else np.zeros(len(table), np.bool_)
    for chunk in np.flatnonzero(pinned).tolist():
        pinned[chunk] = table.key_of(chunk) in held
    return pinned


def sizes_without(table: ChunkTable, rows: Bools) -> Ints:
    """Bytes of every chunk, without those of some rows of the state."""
    sizes = table.state.adds["size_bytes"].astype(np.int64)
    return sum_by_group(np.where(rows, 0, sizes), table.starts)


def _is_readable_lossless(label: str) -> bool:
    """True for encodings that this release can decode, to the bit."""
    name, _, quality = label.partition("-")
    try:
        return not quality and get_encoding(name).lossless
    except UnsupportedVersion:
        return False


def _last_used_days(table: ChunkTable) -> Ints:
    touches = table.state.touches
    result = np.full(len(table), NEVER, np.int64)
    if not len(touches) or not len(table):
        return result
    at = np.minimum(np.searchsorted(touches["key"], table.keys), len(touches) - 1)
    is_touched = touches["key"][at] == table.keys
    result[is_touched] = touches["day"][at[is_touched]]
    return result


def _last_used_ms(table: ChunkTable) -> Ints:
    """The end of the day of the last touch: a touch keeps no time of day. 0 for chunks that were never touched."""
    return np.maximum((_last_used_days(table) + 1) * DAY_MS - 1, 0)


def _chunk_of(table: ChunkTable, key: bytes) -> int | None:
    rows = table.state.rows_of(key)
    return int(np.searchsorted(table.starts, rows.start, side="right")) - 1 if rows else None


def _tails_of(table: ChunkTable, parent: ChunkKey, rest: npt.NDArray[np.uint32], depth: int) -> list[int | None]:
    """Tails after `parent` whose tokens `rest` begins with."""
    here = (table.parents == np.uint64(key_number(parent))) & (table.depths == depth) & (table.num_tokens <= len(rest))
    lengths = np.unique(table.num_tokens[here]).tolist()
    return [_chunk_of(table, next_key(parent, rest[:length])) for length in lengths]


def _label_names(table: ChunkTable) -> dict[bytes, set[str]]:
    names: dict[bytes, set[str]] = {}
    for label in table.state.labels:
        names.setdefault(label.key, set()).add(label.name)
    return names
