"""Reading objects of a store into the caller's memory: ranges side by side, no buffer of our own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from lmcache_cli.backends.closing import Closing
from lmcache_cli.backends.cloud.bridge import all_of
from lmcache_cli.backends.cloud.service import CloudService, Fetched
from lmcache_cli.backends.errors import ShortRead, Unavailable, VersionChanged

RANGE_BYTES = 8 << 20
RANGES_AT_ONCE = 8
FIRST_BYTES = 32 * 1024
"""Fetched by `open_read`: the request that pins an object also brings its header."""
_PIECE_BYTES = 256 * 1024

Run = Callable[[Coroutine[Any, Any, None], int], None]
"""Runs a coroutine that moves so many bytes."""


class CloudReadHandle(Closing):
    """See `ReadHandle`. The version is pinned by a condition on every request: a replaced object is an error.

    Small reads one after the other are served from a window that was read ahead and grows: a request costs the more,
    the farther the service is.
    """

    __slots__ = ("_closed", "_next", "_run", "_service", "_window", "block_bytes", "name", "size", "version")

    def __init__(
        self,
        service: CloudService,
        run: Run,
        closed: Callable[[], None],
        name: str,
        size: int,
        version: str,
        first: bytes,
    ) -> None:
        self._service, self._run = service, run
        self._window: tuple[int, bytes | bytearray] = (0, first)  # replaced as a whole: other threads may read
        self._next = 0
        self._closed: Callable[[], None] | None = closed
        self.name, self.size, self.version = name, size, version
        self.block_bytes = RANGE_BYTES * RANGES_AT_ONCE

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Raises NotFound or VersionChanged where the object was deleted or replaced since it was opened."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset + wanted > self.size:
            raise ShortRead(
                f"{self.name}: asked for {wanted} bytes at {offset}, the object has {self.size}", name=self.name
            )
        if wanted == 0:
            return
        start, content = self._window
        if not start <= offset <= offset + wanted <= start + len(content):
            if offset != self._next or wanted > RANGE_BYTES // 2:
                self._next = offset + wanted
                self._run(self._read(offset, buffers), wanted)
                return
            size = min(self.size - offset, max(wanted, min(4 * len(content), RANGE_BYTES)))
            start, content = offset, bytearray(size)
            self._run(self._read(start, [memoryview(content)]), size)
            self._window = start, content
        self._next = offset + wanted
        scatter(memoryview(content)[offset - start : offset - start + wanted], buffers)

    async def _read(self, offset: int, buffers: Sequence[memoryview]) -> None:
        works = []
        for views in cut(buffers, RANGE_BYTES):
            works.append(partial(self._read_range, offset, views))
            offset += sum(view.nbytes for view in views)
        await all_of(works, at_once=RANGES_AT_ONCE)

    async def _read_range(self, offset: int, views: Sequence[memoryview]) -> None:
        stop = offset + sum(view.nbytes for view in views)
        fetched = await self._service.fetch(self.name, offset, stop, self.version)
        try:
            if (fetched.version, fetched.total_bytes) != (self.version, self.size):
                raise VersionChanged(
                    f"{self.name}: replaced since it was opened; expected version {self.version}, found "
                    f"{fetched.version}",
                    name=self.name,
                )
            await fill(fetched, views, self.name)
        finally:
            fetched.close()

    def close(self) -> None:
        if self._closed is not None:
            closed, self._closed = self._closed, None
            closed()


async def fill(fetched: Fetched, views: Sequence[memoryview], name: str) -> None:
    """All views, from the body on. Raises Unavailable where the body is too short."""
    for view in views:
        position = 0
        while position < view.nbytes:
            piece = await fetched.read(min(_PIECE_BYTES, view.nbytes - position))
            if not piece:
                raise Unavailable(f"{name}: the answer broke off {view.nbytes - position} bytes early", name=name)
            view[position : position + len(piece)] = piece
            position += len(piece)
    await fetched.read(1)  # the end of the body, which gives the connection back


async def first_bytes(fetched: Fetched, size: int, name: str) -> bytes:
    """So many bytes of a body, as one object."""
    content = bytearray(size)
    await fill(fetched, [memoryview(content)], name)
    return bytes(content)


def cut(buffers: Sequence[memoryview], size_bytes: int) -> list[list[memoryview]]:
    """The buffers as runs of so many bytes, the last one shorter; empty ones are left out."""
    runs: list[list[memoryview]] = []
    room = 0
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            if room == 0:
                runs.append([])
                room = size_bytes
            taken = buffer[start : start + room]
            runs[-1].append(taken)
            start += taken.nbytes
            room -= taken.nbytes
    return runs


def scatter(content: memoryview, buffers: Sequence[memoryview]) -> None:
    """The content into the buffers, which together are as long."""
    start = 0
    for buffer in buffers:
        buffer[:] = content[start : start + buffer.nbytes]
        start += buffer.nbytes
