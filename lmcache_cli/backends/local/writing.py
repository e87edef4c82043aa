"""Bytes into an open staging file: buffered when nothing waits for the device, direct when something does.

Direct I/O wants memory, offset and length in multiples of 4096. Aligned parts go out from where they lie; the others
pass through a bounce buffer on huge pages, which is still faster than the page cache and a sync.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from lmcache_cli.backends.buffers import BLOCK_BYTES, address_of
from lmcache_cli.backends.head_last import HeadLast
from lmcache_cli.backends.local.syscalls import SystemCalls

IOV_MAX = 1024
_SPAN_BYTES = 1 << 20
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def byte_views(parts: Sequence[memoryview | bytes]) -> tuple[memoryview, ...]:
    """The parts as flat views of bytes, empty ones left out. Raises ValueError for memory that is not contiguous."""
    views = []
    for part in parts:
        view = memoryview(part)
        if not view.c_contiguous:
            raise ValueError(f"a part of shape {view.shape}, strides {view.strides} is not contiguous; copy it first")
        if view.nbytes:
            views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return tuple(views)


def preallocate(calls: SystemCalls, fd: int, size_bytes: int) -> None:
    """Reserve the space: ENOSPC comes before the work, and a buffered write is far faster; skipped where impossible."""
    if size_bytes == 0:
        return
    try:
        calls.fallocate(fd, size_bytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise


def write_buffered(calls: SystemCalls, fd: int, views: Sequence[memoryview]) -> None:
    """Write the views from offset 0 on, through the page cache."""
    offset = 0
    for start in range(0, len(views), IOV_MAX):
        offset = _write_run(calls, fd, list(views[start : start + IOV_MAX]), offset)


def write_head_last(calls: SystemCalls, fd: int, content: HeadLast) -> None:
    """Write the body block by block, each while it is in the CPU's cache, then the head before it; buffered.

    Writes end at multiples of 1 MiB, so that the page cache needs few pages, and large ones. Raises ValueError for a
    head that is not as long as it said.
    """
    seen = written = content.head_bytes
    for block in content.blocks():
        seen += block.nbytes
        end = seen if seen >= content.size_bytes else seen - seen % _SPAN_BYTES
        if end > written:
            body = content.body[written - content.head_bytes : end - content.head_bytes]
            written = _write_run(calls, fd, [body], written)
    head = content.head()
    if len(head) != content.head_bytes or written != content.size_bytes:
        raise ValueError(f"head and body have {len(head)} and {seen - content.head_bytes} bytes, not what they said")
    _write_run(calls, fd, [memoryview(head)], 0)


def write_direct(calls: SystemCalls, fd: int, views: Sequence[memoryview], bounce: memoryview) -> bool:
    """Write the views from offset 0 on, past the page cache; False, with the flag off again, where that is impossible.

    `bounce` is an aligned whole number of blocks, the caller's, and free again on return.
    """
    try:
        _set_direct(fd, True)
        writer = _DirectWriter(calls, fd, bounce)
        for view in views:
            writer.add(view)
        writer.finish()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _set_direct(fd, False)
        return False
    return True


class _DirectWriter:
    """Collects aligned runs: views as they are, and blocks copied together in the bounce buffer between them."""

    def __init__(self, calls: SystemCalls, fd: int, bounce: memoryview) -> None:
        self._calls, self._fd, self._bounce = calls, fd, bounce
        self._offset = 0
        self._run: list[memoryview] = []
        self._in_run = self._filled = 0  # bounce[in_run:filled] is copied but not yet part of the run

    def add(self, view: memoryview) -> None:
        while view.nbytes:
            taken = self._take_in_place(view) or self._take_copy(view)
            view = view[taken:]

    def _take_in_place(self, view: memoryview) -> int:
        whole = view.nbytes - view.nbytes % BLOCK_BYTES
        if not whole or self._filled % BLOCK_BYTES or address_of(view) % BLOCK_BYTES:
            return 0
        self._append_bounced(self._filled)
        self._run.append(view[:whole])
        if len(self._run) >= IOV_MAX - 1:
            self._flush()
        return whole

    def _take_copy(self, view: memoryview) -> int:
        taken = min(view.nbytes, self._bounce.nbytes - self._filled)
        self._bounce[self._filled : self._filled + taken] = view[:taken]
        self._filled += taken
        if self._filled == self._bounce.nbytes:
            self._append_bounced(self._filled)
            self._flush()
        return taken

    def _append_bounced(self, end: int) -> None:
        if end > self._in_run:
            self._run.append(self._bounce[self._in_run : end])
            self._in_run = end

    def _flush(self) -> None:
        self._offset = _write_run(self._calls, self._fd, self._run, self._offset)
        self._run = []
        self._in_run = self._filled = 0

    def finish(self) -> None:
        tail = self._bounce[self._filled - self._filled % BLOCK_BYTES : self._filled]
        self._append_bounced(self._filled - tail.nbytes)
        self._flush()
        if tail.nbytes:
            _set_direct(self._fd, False)
            _write_run(self._calls, self._fd, [tail], self._offset)


def _set_direct(fd: int, direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _write_run(calls: SystemCalls, fd: int, run: list[memoryview], offset: int) -> int:
    """Write all of the run at the offset, in as many calls as it takes; returns the offset behind it."""
    while run:
        written = calls.pwritev(fd, run, offset)
        if written <= 0:
            raise OSError(errno.EIO, f"pwritev wrote {written} bytes")
        offset += written
        run = remaining(run, written)
    return offset


def remaining(buffers: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of the buffers after that many bytes."""
    for index, buffer in enumerate(buffers):
        if done_bytes < buffer.nbytes:
            return [buffer[done_bytes:], *buffers[index + 1 :]]
        done_bytes -= buffer.nbytes
    return []
