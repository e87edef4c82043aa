"""Token → slot: slot = block id · N + position in the block. A negative slot is a hole: its token is left alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.errors import SlotError

HOLE = -1


def slots_of(
    block_ids: Sequence[int], block_size: int, start: int, stop: int, *, null_block: int | None = None
) -> list[int]:
    """The slots of tokens `[start, stop)` of a request whose block table is `block_ids`, in plain integers.

    A negative block id, or `null_block` (the engine's placeholder for blocks that left the window), gives holes.
    Raises `SlotError` if the table ends before `stop`.
    """
    return [int(slot) for slot in _slot_array(block_ids, block_size, start, stop, null_block)]


@dataclass(frozen=True, slots=True)
class Run:
    """`length` tokens from `token` on lie in consecutive slots from `slot` on."""

    token: int
    slot: int
    length: int


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """Where each token of a chunk lives: `slots[t]`, negative for a hole. Analysed once, used for every layer."""

    slots: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def of(cls, slots: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor) -> "SlotMapping":
        """From any 1-D sequence of integers (copied to the host if it lies on a device)."""
        array = np.asarray(slots.cpu().numpy() if isinstance(slots, torch.Tensor) else slots)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise SlotError(
                f"a slot mapping is a 1-D sequence of integers; found shape {array.shape}, dtype {array.dtype}"
            )
        return cls(np.maximum(array.astype(np.int64), HOLE))

    @classmethod
    def of_blocks(
        cls, block_ids: Sequence[int], block_size: int, start: int, stop: int, *, null_block: int | None = None
    ) -> "SlotMapping":
        """As `slots_of`, without the detour over Python integers."""
        return cls(_slot_array(block_ids, block_size, start, stop, null_block))

    def __len__(self) -> int:
        return int(self.slots.size)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The tokens that are no holes, as maximal runs of consecutive slots, in token order."""
        if not len(self):
            return ()
        breaks = (np.diff(self.slots) != 1) | (self.slots[1:] < 0) | (self.slots[:-1] < 0)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        stops = np.append(starts[1:], len(self))
        filled = self.slots[starts] >= 0
        columns = zip(
            starts[filled].tolist(), self.slots[starts[filled]].tolist(), (stops - starts)[filled].tolist(), strict=True
        )
        return tuple(Run(token, slot, length) for token, slot, length in columns)

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens that are no holes."""
        return np.flatnonzero(self.slots >= 0).astype(np.int64)

    @cached_property
    def highest(self) -> int:
        """The highest slot named, -1 if none is."""
        return int(self.slots.max(initial=HOLE))

    @cached_property
    def has_duplicates(self) -> bool:
        """Some slot is named for two tokens."""
        spans = sorted((run.slot, run.slot + run.length) for run in self.runs)
        return any(before[1] > after[0] for before, after in pairwise(spans))

    def require_below(self, num_slots: int) -> None:
        """Raise `SlotError` if a slot lies beyond the pages."""
        if self.highest >= num_slots:
            token = int(self.slots.argmax())
            raise SlotError(
                f"token {token} is mapped to slot {self.highest}, but the pages end before slot {num_slots}"
            )

    def require_distinct(self) -> None:
        """Raise `SlotError` if two tokens would be written to one slot."""
        if self.has_duplicates:
            filled = self.slots[self.tokens]
            values, counts = np.unique(filled, return_counts=True)
            slot = int(values[counts > 1][0])
            tokens = self.tokens[filled == slot].tolist()
            raise SlotError(f"slot {slot} would be written for tokens {tokens}: a slot takes one token")

    def on(self, device: torch.device) -> torch.Tensor:
        """The mapping as an int64 tensor on `device`."""
        return torch.from_numpy(self.slots).to(device)


def _slot_array(
    block_ids: Sequence[int], block_size: int, start: int, stop: int, null_block: int | None
) -> npt.NDArray[np.int64]:
    if block_size < 1 or not 0 <= start <= stop:
        raise SlotError(f"expected block size >= 1 and 0 <= start <= stop; found {block_size}, [{start}, {stop})")
    if stop > len(block_ids) * block_size:
        raise SlotError(
            f"tokens up to {stop} need {-(-stop // block_size)} blocks of {block_size}; the table has {len(block_ids)}"
        )
    table = np.asarray(block_ids, dtype=np.int64)
    if null_block is not None:
        table = np.where(table == null_block, HOLE, table)
    tokens = np.arange(start, stop, dtype=np.int64)
    blocks = table[tokens // block_size]
    return np.where(blocks < 0, HOLE, blocks * block_size + tokens % block_size)
