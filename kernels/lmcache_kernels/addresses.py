"""Where elements lie, in one form for every layout: an element's address is a sum of digit × stride.

    address(layer, head, slot, dim) = offset + layer·l + head·h + block·b + Σ position digits + Σ dim digits

Token-major pages have one digit for the position in a block and one for the dim; permuted pages have a few (see
`codec`). All addresses count elements from the start of the storage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.codec import Digit, RunDigits, SideOrder
from lmcache_kernels.slots import Run


@dataclass(frozen=True, slots=True)
class SideAddresses:
    """One layer's K or V: strides of heads and blocks, and the order within a block as digits, or as a table if it
    has none.
    """

    offset: int
    head: Digit
    block: Digit
    digits: RunDigits | None
    order: SideOrder | None

    @classmethod
    def of_strides(cls, offset: int, *, head: Digit, block: Digit, token: Digit, dim: Digit) -> "SideAddresses":
        """Pages in token order."""
        return cls(offset, head, block, RunDigits(0, (token,), (dim,)), None)

    @classmethod
    def of_order(cls, offset: int, head: Digit, block: Digit, order: SideOrder) -> "SideAddresses":
        """Permuted pages."""
        return cls(offset, head, block, order.digits, order)

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """Offsets `[N, D]` within a block."""
        if self.order is not None:
            return self.order.table
        assert self.digits is not None
        return self.digits.offset + _spread(self.digits.tokens)[:, None] + _spread(self.digits.dims)[None, :]

    def joins(self, other: "SideAddresses") -> bool:
        """Whether two layers differ in their offset alone."""
        same_order = self.order is other.order or (
            self.order is not None and other.order is not None and np.array_equal(self.order.table, other.order.table)
        )
        return same_order and (self.head, self.block, self.digits) == (other.head, other.block, other.digits)


@dataclass(frozen=True, slots=True)
class Slab:
    """Layers `[first, first + layer.size)` of one storage, `layer.stride` elements apart. `memory` is any integer
    tensor of that storage.
    """

    memory: torch.Tensor
    first: int
    layer: Digit
    addresses: SideAddresses


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens from `token` on, at `offset`, spread over `tokens` digits (innermost first)."""

    token: int
    num_tokens: int
    offset: int
    tokens: tuple[Digit, ...]


def join_layers(memories: Sequence[torch.Tensor], addresses: Sequence[SideAddresses]) -> tuple[Slab, ...]:
    """Join neighbouring layers that lie at one distance from each other in one storage."""
    slabs: list[Slab] = []
    for index, (memory, at) in enumerate(zip(memories, addresses, strict=True)):
        joined = _extend(slabs[-1], memory, at) if slabs else None
        if joined is None:
            slabs.append(Slab(memory, index, Digit(1, 0), at))
        else:
            slabs[-1] = joined
    return tuple(slabs)


def _extend(slab: Slab, memory: torch.Tensor, at: SideAddresses) -> Slab | None:
    distance = at.offset - slab.addresses.offset
    same_storage = memory.untyped_storage().data_ptr() == slab.memory.untyped_storage().data_ptr()
    if not same_storage or not slab.addresses.joins(at) or distance <= 0 or distance % slab.layer.size:
        return None
    stride = distance // slab.layer.size
    if slab.layer.size > 1 and stride != slab.layer.stride:
        return None
    return replace(slab, layer=Digit(slab.layer.size + 1, stride))


def pieces_of(run: Run, digits: Sequence[Digit]) -> Iterator[Piece]:
    """Cut a run of consecutive slots into strided pieces, as few as the digits allow; the last digit counts blocks."""
    units = [prod(digit.size for digit in digits[:level]) for level in range(len(digits))]
    slot, stop = run.slot, run.slot + run.length
    while slot < stop:
        level = max(level for level, unit in enumerate(units) if slot % unit == 0 and slot + unit <= stop)
        unit, digit = units[level], digits[level]
        count = min((stop - slot) // unit, digit.size - slot // unit % digit.size)
        offset = sum(slot // below % each.size * each.stride for below, each in zip(units, digits, strict=True))
        yield Piece(run.token + slot - run.slot, count * unit, offset, (*digits[:level], Digit(count, digit.stride)))
        slot += count * unit


def _spread(digits: Sequence[Digit]) -> npt.NDArray[np.int64]:
    """The offsets that digits make, in index order."""
    offsets = np.zeros(1, dtype=np.int64)
    for digit in digits:
        offsets = (np.arange(digit.size, dtype=np.int64)[:, None] * digit.stride + offsets[None, :]).reshape(-1)
    return offsets
