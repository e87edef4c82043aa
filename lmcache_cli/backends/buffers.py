"""Memory for bytes on their way: aligned, on huge pages, faulted in once and used again and again.

A fresh page costs more than the copy into it, and direct I/O is about twice as fast on huge pages as on small ones. So
the hot path takes its buffers from a `BufferPool` and gives them back.
"""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

BLOCK_BYTES = 4096
"""What direct I/O wants memory, offsets and lengths to be multiples of."""
HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module


def address_of(view: memoryview | bytes) -> int:
    """Where in memory a non-empty, contiguous view starts."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


class NoBuffer(Exception):
    """The pool's bound is reached and nobody gave a buffer back in time."""


class AlignedBuffer:
    """Anonymous memory that starts at a multiple of 2 MiB, on huge pages where the kernel grants them, faulted in."""

    __slots__ = ("_memory", "_start", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(max(size_bytes, 1), HUGE_PAGE_BYTES)
        reserved = self.size_bytes + HUGE_PAGE_BYTES
        self._memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._start = -address_of(memoryview(self._memory)) % HUGE_PAGE_BYTES
        _advise(self._memory, mmap.MADV_HUGEPAGE, self._start, self.size_bytes)
        if not _advise(self._memory, _MADV_POPULATE_WRITE, self._start, self.size_bytes):
            np.frombuffer(self.view(self.size_bytes), dtype=np.uint8)[::BLOCK_BYTES] = 0

    def view(self, size_bytes: int) -> memoryview:
        """The first bytes, writable; the memory lives as long as any view of it."""
        if not 0 <= size_bytes <= self.size_bytes:
            raise ValueError(f"asked for {size_bytes} bytes of a buffer of {self.size_bytes}")
        return memoryview(self._memory)[self._start : self._start + size_bytes]


class Lease:
    """The right to use a buffer until `release`. Share it with whoever still reads or writes when you are done.

    A buffer is used again only when all leases on it are released. Releasing twice is fine, forgetting is not: the pool
    does not guess whether a view is still in use. After the release no slice of the view may be touched.
    """

    __slots__ = ("_pool", "_slot", "view")

    def __init__(self, pool: BufferPool, slot: _Slot, view: memoryview) -> None:
        self._pool = pool
        self._slot: _Slot | None = slot
        self.view = view

    def share(self) -> Lease:
        """Another lease on the same bytes, released on its own. Raises ValueError once this one is released."""
        return self._pool.share(self)

    def release(self) -> None:
        self._pool.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Slot:
    buffer: AlignedBuffer
    leases: int = 0


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Bytes of a pool: its bound, what it holds, what of that is leased."""

    limit_bytes: int
    held_bytes: int
    leased_bytes: int


class BufferPool:
    """At most `limit_bytes` of `AlignedBuffer`s, leased, given back and leased again. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._held_bytes = 0
        self._free: list[_Slot] = []

    def lease(self, size_bytes: int, *, timeout_s: float) -> Lease:
        """A buffer of at least that many bytes with old content; the view is exactly as long.

        Blocks up to `timeout_s` for somebody to give one back, then raises NoBuffer.
        """
        wanted = round_up(max(size_bytes, 1), HUGE_PAGE_BYTES)
        slot = self._reserve(wanted, timeout_s)
        if slot is None:
            try:
                slot = _Slot(AlignedBuffer(wanted))
            except BaseException:
                self._forget(wanted)
                raise
        slot.leases = 1
        return Lease(self, slot, slot.buffer.view(size_bytes))

    def use(self) -> PoolUse:
        with self._changed:
            free = sum(slot.buffer.size_bytes for slot in self._free)
            return PoolUse(self.limit_bytes, self._held_bytes, self._held_bytes - free)

    def share(self, lease: Lease) -> Lease:
        """See `Lease.share`."""
        with self._changed:
            slot = lease._slot
            if slot is None:
                raise ValueError("the lease was released; share it before")
            slot.leases += 1
            return Lease(self, slot, lease.view)

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        with self._changed:
            slot, lease._slot = lease._slot, None
            if slot is None:
                return
            slot.leases -= 1
            if slot.leases == 0:
                self._free.append(slot)
                self._changed.notify_all()

    def _reserve(self, wanted: int, timeout_s: float) -> _Slot | None:
        """A free buffer, or None: there is now room set aside for a new one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                slot = self._pop_free(wanted, at_most=2 * wanted)
                if slot is not None:
                    return slot
                if self._make_room(wanted):
                    self._held_bytes += wanted
                    return None
                slot = self._pop_free(wanted, at_most=self.limit_bytes)
                if slot is not None:
                    return slot
                if not self._changed.wait(timeout=deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise NoBuffer(f"no {wanted} bytes free of {self.limit_bytes} within {timeout_s} s; all is leased")

    def _pop_free(self, wanted: int, *, at_most: int) -> _Slot | None:
        fitting = [slot for slot in self._free if wanted <= slot.buffer.size_bytes <= at_most]
        if not fitting:
            return None
        best = min(fitting, key=lambda slot: slot.buffer.size_bytes)
        self._free.remove(best)
        return best

    def _make_room(self, wanted: int) -> bool:
        """Whether a new buffer fits under the bound, after dropping free ones that are too small to serve."""
        small = [slot for slot in self._free if slot.buffer.size_bytes < wanted]
        while small and self._held_bytes + wanted > self.limit_bytes:
            self._free.remove(dropped := small.pop())
            self._held_bytes -= dropped.buffer.size_bytes
        return self._held_bytes + wanted <= self.limit_bytes

    def _forget(self, size_bytes: int) -> None:
        with self._changed:
            self._held_bytes -= size_bytes
            self._changed.notify_all()


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _advise(memory: mmap.mmap, advice: int, start: int, size_bytes: int) -> bool:
    try:
        memory.madvise(advice, start, size_bytes)
    except OSError:
        return False
    return True
