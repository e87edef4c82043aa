"""From a complete staging file to an object: one call that gives it its name, never over another object."""

from __future__ import annotations

import errno
import os
import stat

from lmcache_cli.backends.errors import Obstructed
from lmcache_cli.backends.local.syscalls import SystemCalls

_NO_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_RENAME_NEW = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def publish_new(calls: SystemCalls, source: str, target: str, *, source_fd: int, target_fd: int) -> None:
    """Give the file its name unless that is taken (FileExistsError); the staging name goes.

    `source_fd` and `target_fd` are the directories. Hard links decide the race; where they are not supported
    renameat2(NOREPLACE) does; where neither is, a look before the rename, so that two racing writers may both win.
    """
    try:
        calls.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    except FileExistsError:
        if not _same_file(calls, source, target, source_fd, target_fd):
            raise
        # The link was made, only its answer was lost (network file systems).
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        move_new(calls, source, target, source_fd=source_fd, target_fd=target_fd)
        return
    remove_quietly(calls, source, source_fd)


def move_new(calls: SystemCalls, source: str, target: str, *, source_fd: int, target_fd: int) -> None:
    """Rename, also a directory, unless the target exists (FileExistsError)."""
    try:
        calls.rename_new(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    except OSError as error:
        if error.errno not in _NO_RENAME_NEW:
            raise
        if _status(calls, target, target_fd) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        calls.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def refuse_obstruction(calls: SystemCalls, last: str, directory_fd: int, name: str) -> None:
    """Raises Obstructed if what has the name is no regular file: then "exists" does not mean an object exists."""
    status = _status(calls, last, directory_fd)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise Obstructed(f"{name}: a directory, a link or a device has this name; move it away", name=name)


def remove_quietly(calls: SystemCalls, component: str, directory_fd: int) -> None:
    """Remove a staging name; a failure leaves it to the collection of stale ones."""
    try:
        calls.unlink(component, dir_fd=directory_fd)
    except OSError:
        pass


def _same_file(calls: SystemCalls, source: str, target: str, source_fd: int, target_fd: int) -> bool:
    ours, theirs = _status(calls, source, source_fd), _status(calls, target, target_fd)
    return ours is not None and theirs is not None and os.path.samestat(ours, theirs)


def _status(calls: SystemCalls, component: str, directory_fd: int) -> os.stat_result | None:
    try:
        return calls.status(component, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
