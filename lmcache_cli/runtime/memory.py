"""Memory for chunks on their way: leased, counted, used again. A pool that is empty says so; it never grows."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from lmcache_cli.backends.buffers import HUGE_PAGE_BYTES, BufferPool, Lease, NoBuffer, round_up
from lmcache_cli.store import ChunkBuffer
from lmcache_format.geometry import Part, part_bytes
from lmcache_format.identity import Identity


class MemoryObj:
    """The right to use the memory of one chunk. Whoever still reads or writes holds one of its own (`share`)."""

    __slots__ = ("_lease", "buffer")

    def __init__(self, lease: Lease, buffer: ChunkBuffer) -> None:
        self._lease = lease
        self.buffer = buffer

    def share(self) -> MemoryObj:
        """Another claim on the same bytes, released on its own. Raises `ValueError` once this one is released."""
        return MemoryObj(self._lease.share(), self.buffer)

    def release(self) -> None:
        """Give the memory back when no other claim is left. Twice is fine."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class MemoryPool:
    """Room for at most `num_chunks` chunks of one part. Thread-safe; memory is taken as it is needed."""

    def __init__(self, identity: Identity, part: Part, num_chunks: int) -> None:
        self.part = part
        self.num_chunks = num_chunks
        self._chunk_bytes = round_up(part_bytes(identity, part, identity.chunk_tokens), HUGE_PAGE_BYTES)
        self._pool = BufferPool(self._chunk_bytes * num_chunks)

    def lease(self, identity: Identity, num_tokens: int, *, timeout_s: float = 0.0) -> MemoryObj | None:
        """Memory for a chunk; None where all is leased and none came back in time. Old content."""
        size = part_bytes(identity, self.part, num_tokens)
        try:
            lease = self._pool.lease(max(size, self._chunk_bytes), timeout_s=timeout_s)
        except NoBuffer:
            return None
        return MemoryObj(lease, ChunkBuffer(identity, self.part, num_tokens, lease.view[:size]))

    @property
    def num_leased(self) -> int:
        """Chunks that somebody holds now."""
        return self._pool.use().leased_bytes // self._chunk_bytes
