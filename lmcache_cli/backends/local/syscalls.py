"""The system calls that touch stored bytes, as one replaceable value: tests put faults in their place.

Four of them Python does not offer: fallocate without glibc's slow emulation, renameat2, openat2 and cachestat.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

_SYS_OPENAT2 = 437  # the same numbers on every architecture
_SYS_CACHESTAT = 451
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RENAME_NOREPLACE = 1
_INTERRUPTED = -1


def fallocate(fd: int, size_bytes: int) -> None:
    """Reserve and set the size; OSError(EOPNOTSUPP) where the file system cannot, rather than writing zeros."""
    while _checked(_libc().fallocate(fd, 0, 0, size_bytes), "fallocate") == _INTERRUPTED:
        pass


def rename_new(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Rename unless the target exists (FileExistsError); EINVAL or ENOSYS where the file system cannot."""
    names = source.encode(), target.encode()
    call = _libc().renameat2
    while _checked(call(src_dir_fd, names[0], dst_dir_fd, names[1], _RENAME_NOREPLACE), target) == _INTERRUPTED:
        pass


def open_beneath(root_fd: int, name: str, flags: int) -> int:
    """Open a relative name without following any symbolic link (ELOOP) and without leaving the root."""
    if _has_openat2():
        path = os.fsencode(name)
        how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
        fd = _INTERRUPTED
        while fd == _INTERRUPTED:
            fd = _checked(_libc().syscall(_SYS_OPENAT2, root_fd, path, ctypes.byref(how), ctypes.sizeof(how)), name)
        return fd
    return open_stepwise(root_fd, name, flags)


def open_stepwise(root_fd: int, name: str, flags: int) -> int:
    """`open_beneath` for kernels and sandboxes without openat2: one component at a time."""
    *parents, last = name.split("/")
    current = root_fd
    try:
        for parent in parents:
            below = _open_component(parent, os.O_PATH | os.O_DIRECTORY, current)
            if current != root_fd:
                os.close(current)
            current = below
        return _open_component(last, flags, current)
    finally:
        if current != root_fd:
            os.close(current)


def _open_component(component: str, flags: int, directory_fd: int) -> int:
    try:
        return os.open(component, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(component, dir_fd=directory_fd).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), component) from None
        raise


def cached_pages(fd: int, offset: int, size_bytes: int) -> int | None:
    """How many pages of a range are in the page cache; None where the kernel (before 6.5) cannot tell.

    Asking by a read that may not wait would start a readahead, which the device then does twice.
    """
    found = (ctypes.c_uint64 * 5)()
    wanted = struct.pack("=QQ", offset, size_bytes)
    if _libc().syscall(_SYS_CACHESTAT, fd, wanted, ctypes.byref(found), 0) < 0:
        return None
    return int(found[0])


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    libc.syscall.restype = ctypes.c_long
    return libc


@cache
def _has_openat2() -> bool:
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_BENEATH)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        found = _libc().syscall(_SYS_OPENAT2, root, b".", ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            os.close(found)
        return bool(found >= 0)
    finally:
        os.close(root)


def _checked(result: int, name: str) -> int:
    if result >= 0:
        return int(result)
    code = ctypes.get_errno()
    if code == errno.EINTR:
        return _INTERRUPTED  # Python runs the signal handlers now, then the caller tries again
    raise OSError(code, os.strerror(code), name)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls a `LocalBackend` makes; `dataclasses.replace` puts another in place."""

    open_beneath: Callable[[int, str, int], int] = open_beneath
    create: Callable[..., int] = os.open
    mkdir: Callable[..., None] = os.mkdir
    fallocate: Callable[[int, int], None] = fallocate
    pwritev: Callable[..., int] = os.pwritev
    preadv: Callable[..., int] = os.preadv
    fdatasync: Callable[[int], None] = os.fdatasync
    fsync: Callable[[int], None] = os.fsync
    link: Callable[..., None] = os.link
    rename: Callable[..., None] = os.rename
    rename_new: Callable[..., None] = rename_new
    unlink: Callable[..., None] = os.unlink
    status: Callable[..., os.stat_result] = os.stat
