"""The handle: one pinned file, read straight into the caller's memory by the fastest way there is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from lmcache_cli.backends.buffers import BLOCK_BYTES, address_of
from lmcache_cli.backends.closing import Closing
from lmcache_cli.backends.errors import ShortRead
from lmcache_cli.backends.local.oserrors import translated
from lmcache_cli.backends.local.syscalls import SystemCalls, cached_pages
from lmcache_cli.backends.local.writing import IOV_MAX, remaining

CACHED_BLOCK_BYTES = 1024 * 1024
DEVICE_BLOCK_BYTES = 8 * 1024 * 1024


class LocalReadHandle(Closing):
    """See `ReadHandle`. The descriptor pins the inode, so delete, move and replacement of the name do not matter.

    At open the kernel is asked whether the file is in the page cache. If it is not, the file is read
    with direct I/O wherever offset, addresses and lengths are multiples of 4096, otherwise through the page cache.
    """

    __slots__ = ("_cold", "_direct_fd", "_fd", "_lock", "_preadv", "_url", "block_bytes", "name", "size", "version")

    def __init__(self, fd: int, *, name: str, url: str, calls: SystemCalls, status: os.stat_result) -> None:
        self._url, self._preadv = url, calls.preadv
        self._direct_fd = -1
        self._lock = threading.Lock()
        self.name = name
        self.size = status.st_size
        self.version = version_of(status)
        self._cold = False
        self.block_bytes = CACHED_BLOCK_BYTES
        self._fd = fd  # last: from here on the handle closes it

    def choose_way(self) -> None:
        """Look whether the bytes are in memory; called once, before the first read."""
        self._cold = self._is_cold()
        self.block_bytes = DEVICE_BLOCK_BYTES if self._cold else CACHED_BLOCK_BYTES

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if len(buffers) == 1:
            wanted = buffers[0].nbytes
        else:
            wanted = sum([buffer.nbytes for buffer in buffers])
        try:
            if self._cold:
                got = self._read_direct(offset, buffers)
            elif len(buffers) <= IOV_MAX:
                got = self._preadv(self._fd, buffers, offset)
            else:
                got = 0
            if got != wanted:
                self._read_rest(offset, buffers, got, wanted)
        except OSError as error:
            raise translated(error, doing="read", name=self.name, url=self._url) from error

    def _read_rest(self, offset: int, buffers: Sequence[memoryview], got: int, wanted: int) -> None:
        """What one call left over: many buffers, more than 2 GiB, the unaligned end, or the end of the file."""
        while got < wanted:
            more = self._preadv(self._fd, remaining(buffers, got)[:IOV_MAX], offset + got)
            if more <= 0:
                raise ShortRead(
                    f"{self.name}: asked for {wanted} bytes at {offset}, the object ended after {got} of them;"
                    f" it had {self.size} bytes when it was opened",
                    name=self.name,
                )
            got += more

    def _read_direct(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read the leading aligned buffers past the page cache; how many bytes that were."""
        aligned = _aligned_prefix(offset, buffers)
        if not aligned or not self._has_direct_fd():
            return 0
        try:
            return self._preadv(self._direct_fd, aligned, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._cold = False  # this file system wants more than alignment to 4096
            return 0

    def _has_direct_fd(self) -> bool:
        if self._direct_fd < 0:
            with self._lock:
                if self._direct_fd < 0:
                    try:
                        self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                    except OSError:
                        self._cold = False  # no direct I/O here, or no /proc
                        return False
        return True

    def _is_cold(self) -> bool:
        """Whether a page in the middle is not in the page cache; unknown counts as warm."""
        cached = cached_pages(self._fd, self.size // 2, 1)
        if cached is not None:
            return cached == 0 and self.size > 0
        try:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the look itself would start a readahead
            os.preadv(self._fd, [bytearray(1)], self.size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)
        return False

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def __del__(self) -> None:
        try:
            self.close()
        except AttributeError:  # the constructor did not get as far as owning the descriptor
            pass


def version_of(status: os.stat_result) -> str:
    """`<inode>.<mtime in ns>`: objects never change, so another one under the name differs in it."""
    return f"{status.st_ino}.{status.st_mtime_ns}"


def _aligned_prefix(offset: int, buffers: Sequence[memoryview]) -> list[memoryview]:
    """The leading buffers direct I/O can fill; of the first with an odd length, its whole blocks."""
    aligned: list[memoryview] = []
    if offset % BLOCK_BYTES:
        return aligned
    for buffer in buffers[:IOV_MAX]:
        whole = buffer.nbytes - buffer.nbytes % BLOCK_BYTES
        if not whole or address_of(buffer) % BLOCK_BYTES:
            break
        aligned.append(buffer[:whole])
        if whole < buffer.nbytes:
            break
    return aligned
