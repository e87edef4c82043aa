"""The engine's pages as loads and saves see them. Torch-free: `torch_pages` has the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_cli.store import ChunkBuffer

NULL_BLOCK = 0
"""The block an engine puts where there is none (out of a window); never read, never written."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """The blocks that hold a request's tokens from `start` on; `start` is a multiple of the block size."""

    start: int
    block_size: int
    block_ids: tuple[int, ...]

    @classmethod
    def of(cls, table: Sequence[int], block_size: int, start: int, stop: int) -> BlockSpan:
        """The part of a request's whole block table that holds tokens `start` to `stop`. Raises `ValueError` where the
        table ends before `stop`."""
        first, last = start // block_size, -(-stop // block_size)
        if last > len(table):
            raise ValueError(f"tokens up to {stop} need {last} blocks of {block_size}; the table has {len(table)}")
        return cls(first * block_size, block_size, tuple(table[first:last]))

    def blocks(self, start: int, stop: int) -> tuple[int, ...]:
        """Blocks that hold any of the tokens `start` to `stop`."""
        first = (start - self.start) // self.block_size
        return self.block_ids[first : -(-(stop - self.start) // self.block_size)]

    def slots(self, start: int, stop: int) -> list[int]:
        """Slot (block id · block size + position) of each of the tokens; -1 in the null block."""
        size, ids, origin = self.block_size, self.block_ids, self.start
        found = []
        for token in range(start - origin, stop - origin):
            block = ids[token // size]
            found.append(-1 if block == NULL_BLOCK else block * size + token % size)
        return found

    def has_null(self, start: int, stop: int) -> bool:
        """Whether any of the tokens has no block."""
        return NULL_BLOCK in self.blocks(start, stop)


class Pages(Protocol):
    """Moves whole chunks between pages and buffers. Blocking; raises `KernelError` (a `ValueError`) before it writes
    anything."""

    def scatter(self, buffer: ChunkBuffer, slots: Sequence[int]) -> None:
        """Write the buffer's tokens to the slots; a token whose slot is negative is left out."""
        ...

    def gather(self, slots: Sequence[int], buffer: ChunkBuffer) -> None:
        """Fill the buffer from the slots, all of which are real."""
        ...


def block_set(spans: Iterable[tuple[BlockSpan, int, int]]) -> set[int]:
    """All real blocks of some token ranges."""
    return {block for span, start, stop in spans for block in span.blocks(start, stop)} - {NULL_BLOCK}
