"""What an errno means for an object: absent, full, in the way, or unknown."""

from __future__ import annotations

import errno
from types import TracebackType

from lmcache_cli.backends.errors import (
    AlreadyExists,
    BackendError,
    NoSpace,
    NotFound,
    Obstructed,
    Unavailable,
    Unsupported,
)

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_OBSTRUCTED = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBADF, errno.EFBIG, errno.ENAMETOOLONG})

_READ_ONLY = "mount it writable, or use another place"
_DENIED = "run it as the account that owns the store, or give this account the right"
_NEXT_STEPS = {errno.EROFS: _READ_ONLY, errno.EACCES: _DENIED, errno.EPERM: _DENIED}


def translated(error: OSError, *, doing: str, name: str, url: str) -> BackendError:
    """The error of `errors.py` for a failed system call on `name`."""
    code = error.errno or 0
    symbol = errno.errorcode.get(code, str(code))
    text = f"{name}: could not {doing} in {url}: {error.strerror or error} ({symbol})"
    if code in _ABSENT:
        return NotFound(f"{name}: no such object in {url} ({symbol} on {doing})", name=name)
    if code == errno.EEXIST:
        return AlreadyExists(f"{name}: exists in {url}", name=name)
    if code in _FULL:
        return NoSpace(f"{text}; free some space or raise the quota", name=name)
    if code in _OBSTRUCTED:
        return Obstructed(f"{text}; a directory, a link or a device stands there: move it away", name=name)
    if code == errno.EXDEV:
        return Unsupported(f"{text}; the directories of one store must lie on one file system", name=name)
    return Unavailable(text, name=name, transient=code not in _LASTING, next_step=_NEXT_STEPS.get(code, ""))


class translating:  # noqa: N801 - reads as a statement: `with translating("read", name, url):`
    """Turns OSError raised inside into the errors of `errors.py`."""

    __slots__ = ("_doing", "_name", "_url")

    def __init__(self, doing: str, name: str, url: str) -> None:
        self._doing, self._name, self._url = doing, name, url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise translated(error, doing=self._doing, name=self._name, url=self._url) from error
