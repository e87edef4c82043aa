"""The chunks of a namespace as arrays: shards grouped by key, with what they add up to and whether they are whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_format.geometry import Part

from .coverage import covers
from .state import State

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
_MASK_BITS = 63


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """One row a chunk, in key order; `starts[i]` to `stops[i]` are its rows of the state.

    `is_whole`: the shards that count cover all layers and heads. `num_good` is how many of its shards count.
    """

    state: State
    starts: Ints
    stops: Ints
    is_whole: Bools
    num_good: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """First 8 bytes of every key, as numbers."""
        return self.state.keys[self.starts]

    @property
    def num_tokens(self) -> Ints:
        """Tokens of every chunk."""
        return self.state.adds["num_tokens"][self.starts].astype(np.int64)

    @property
    def depths(self) -> Ints:
        """Chunks before every chunk in its prompt."""
        return self.state.adds["depth"][self.starts].astype(np.int64)

    @property
    def parents(self) -> npt.NDArray[np.uint64]:
        """First 8 bytes of the key of every chunk's parent."""
        parents: npt.NDArray[np.uint64] = self.state.adds["parent"][self.starts]
        return parents

    @property
    def size_bytes(self) -> Ints:
        """Bytes of all shards of every chunk."""
        return sum_by_group(self.state.adds["size_bytes"].astype(np.int64), self.starts)

    @property
    def created_ms(self) -> Ints:
        """When the first shard of every chunk was written."""
        created = self.state.adds["created_ms"].astype(np.int64)
        return np.minimum.reduceat(created, self.starts) if len(self.starts) else created[:0]

    def key_of(self, chunk: int) -> bytes:
        """First 16 bytes of the key of a chunk."""
        row = int(self.starts[chunk])
        rest = int(self.state.adds["key_rest"][row])
        return int(self.state.keys[row]).to_bytes(8, "big") + rest.to_bytes(8, "big")

    def rows(self, chunk: int) -> range:
        """Rows of the state that hold a chunk."""
        return range(int(self.starts[chunk]), int(self.stops[chunk]))


def chunk_table(state: State, whole: Part | None, good: Bools | None = None) -> ChunkTable:
    """Group the rows of `state`. `whole` is what a chunk must cover (None: unknown, any shard will do); `good`, where
    given, tells which rows count."""
    adds = state.adds
    usable = np.ones(len(state), np.bool_) if good is None else good
    if not len(state):
        nothing = np.zeros(0, np.int64)
        return ChunkTable(state, nothing, nothing, np.zeros(0, np.bool_), nothing)
    same = (state.keys[1:] == state.keys[:-1]) & (adds["key_rest"][1:] == adds["key_rest"][:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    stops = np.append(starts[1:], len(state))
    num_good = sum_by_group(usable.astype(np.int64), starts)
    if whole is None:
        return ChunkTable(state, starts, stops, num_good > 0, num_good)
    covering = np.array([part.covers(whole) for part in state.parts], np.bool_)
    is_whole = np.logical_or.reduceat(covering[adds["part"]] & usable, starts)
    unsure = np.flatnonzero(~is_whole & (num_good > 1))
    if len(unsure):
        is_whole[unsure] = _covered(state, whole, usable, starts[unsure], stops[unsure])
    return ChunkTable(state, starts, stops, is_whole, num_good)


def sum_by_group(values: Ints, starts: Ints) -> Ints:
    """Sums of the runs of `values` that begin at `starts`."""
    sums: Ints = np.add.reduceat(values, starts) if len(starts) else np.zeros(0, np.int64)
    return sums


def _covered(state: State, whole: Part, usable: Bools, starts: Ints, stops: Ints) -> Bools:
    """Whether the parts of each run together cover `whole`; every combination of parts is decided once."""
    if len(state.parts) > _MASK_BITS:
        return np.array(
            [covers(_parts_in(state, usable, range(a, b)), whole) for a, b in zip(starts, stops, strict=True)], np.bool_
        )
    bits = np.where(usable, np.uint64(1) << state.adds["part"].astype(np.uint64), np.uint64(0))
    edges = np.column_stack([starts, stops]).ravel()
    if edges[-1] == len(state):
        edges = edges[:-1]
    masks = np.bitwise_or.reduceat(bits, edges)[::2]
    combinations, which = np.unique(masks, return_inverse=True)
    answers = [covers(_parts_of_mask(state.parts, int(mask)), whole) for mask in combinations]
    return np.array(answers, np.bool_)[which]


def _parts_of_mask(parts: Sequence[Part], mask: int) -> Iterator[Part]:
    return (part for number, part in enumerate(parts) if mask >> number & 1)


def _parts_in(state: State, usable: Bools, rows: range) -> list[Part]:
    return [state.parts[int(state.adds["part"][row])] for row in rows if usable[row]]


def missing_parts(present: Sequence[Part], known: Sequence[Part], whole: Part) -> list[Part]:
    """What is missing of `whole`, in parts as the namespace's other chunks have them where that works out."""
    chosen: list[Part] = []
    for part in sorted(known, key=lambda part: -part.num_layers * part.num_heads):
        taken = [*present, *chosen]
        if whole.covers(part) and not any(part.intersect(other) for other in taken):
            chosen.append(part)
    return chosen if covers([*present, *chosen], whole) else gaps(present, whole)


def gaps(present: Sequence[Part], whole: Part) -> list[Part]:
    """The layers and heads of `whole` that no part holds, a layer at a time joined where neighbours agree."""
    rows: list[Part] = []
    heads = None if whole.head_start is None else (whole.head_start, whole.head_stop or 0)
    for layer in range(whole.layer_start, whole.layer_stop):
        for start, stop in _open_heads(present, layer, heads):
            if rows and (rows[-1].layer_stop, rows[-1].head_start, rows[-1].head_stop) == (layer, start, stop):
                rows[-1] = Part(rows[-1].layer_start, layer + 1, start, stop)
            else:
                rows.append(Part(layer, layer + 1, start, stop))
    return rows


def _open_heads(
    present: Sequence[Part], layer: int, heads: tuple[int, int] | None
) -> list[tuple[int | None, int | None]]:
    """Runs of heads of one layer that no part holds; one run of None where the layer is a latent."""
    here = [part for part in present if part.layer_start <= layer < part.layer_stop]
    if heads is None:
        return [] if here else [(None, None)]
    runs: list[tuple[int | None, int | None]] = []
    position = heads[0]
    for start, stop in sorted((part.head_start or 0, part.head_stop or 0) for part in here):
        if start > position:
            runs.append((position, start))
        position = max(position, stop)
    if position < heads[1]:
        runs.append((position, heads[1]))
    return runs
