"""The store's directory, pinned by a descriptor, and names resolved strictly below it."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path

from lmcache_cli.backends.errors import NotFound, Obstructed, RootChanged
from lmcache_cli.backends.local.syscalls import SystemCalls

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Root:
    """One directory. It may not exist yet; once seen it must stay the same one, otherwise RootChanged.

    An unmounted disk or a removed store thus reads as "unknown", not as "empty", and nothing is written in its place.
    """

    def __init__(self, path: str, calls: SystemCalls) -> None:
        self.path = path
        self._calls = calls
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._identity = (0, 0)
        self._closer: weakref.finalize[[int], Root] | None = None

    def fd(self) -> int:
        """The descriptor. Raises NotFound while there never was a directory, RootChanged, OSError."""
        found = self._seen()
        if found is None:
            raise NotFound(f"{self.path}: no such directory")
        return found

    def exists(self) -> bool:
        return self._seen() is not None

    def _seen(self) -> int | None:
        pinned = self._fd  # before the look: another thread may make and pin the directory right after it
        try:
            status: os.stat_result = self._calls.status(self.path)
        except FileNotFoundError:
            if pinned is None:
                return None
            raise RootChanged(
                f"{self.path}: the store's directory is gone; mount or restore it, then open it again"
            ) from None
        except NotADirectoryError:
            raise Obstructed(f"{self.path}: expected a directory, found a file on the way to it") from None
        if pinned is not None and self._identity == (status.st_dev, status.st_ino):
            return pinned
        return self._pin(status)

    def _pin(self, status: os.stat_result) -> int:
        if not stat.S_ISDIR(status.st_mode):
            raise Obstructed(f"{self.path}: expected a directory, found another kind of file")
        with self._lock:
            if self._fd is None:
                fd = os.open(self.path, _DIRECTORY)
                pinned = os.fstat(fd)
                self._closer = weakref.finalize(self, os.close, fd)
                self._identity, self._fd = (pinned.st_dev, pinned.st_ino), fd
            elif self._identity != (status.st_dev, status.st_ino):
                raise RootChanged(f"{self.path}: another directory stands where the store was opened; open it again")
            return self._fd

    def ensure(self) -> int:
        """The descriptor, after making the directory if there never was one."""
        found = self._seen()
        if found is None:
            try:
                Path(self.path).mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise Obstructed(f"{self.path}: a link to nothing stands there; give another store path") from error
            found = self.fd()
            self._sync_path(str(Path(self.path).parent))
        return found

    def _sync_path(self, path: str) -> None:
        fd = os.open(path, _DIRECTORY)
        try:
            self._calls.fsync(fd)
        finally:
            os.close(fd)

    def open(self, name: str, flags: int) -> int:
        return self._calls.open_beneath(self.fd(), name, flags)

    def open_dir(self, name: str) -> int:
        """A readable descriptor of the directory (the caller closes it); "" is the root itself."""
        return self._calls.open_beneath(self.fd(), name or ".", _DIRECTORY)

    def make_dir(self, name: str) -> tuple[int, tuple[str, ...]]:
        """Like `open_dir`, making what is missing; also the names of the directories made, outermost first.

        Raises Obstructed where a file stands in the way.
        """
        self.ensure()
        try:
            return self.open_dir(name), ()
        except FileNotFoundError:
            pass
        except NotADirectoryError as error:
            raise Obstructed(f"{name}: a file stands where a directory belongs; move it away", name=name) from error
        return self._make_missing(name)

    def _make_missing(self, name: str) -> tuple[int, tuple[str, ...]]:
        parent, last = split(name)
        made: tuple[str, ...] = ()
        try:
            parent_fd = self.open_dir(parent)
        except FileNotFoundError:
            if not parent:  # the root itself is gone
                raise
            parent_fd, made = self._make_missing(parent)
        try:
            self._calls.mkdir(last, dir_fd=parent_fd)
            made += (name,)
        except FileExistsError:
            pass
        finally:
            os.close(parent_fd)
        try:
            return self.open_dir(name), made
        except NotADirectoryError as error:
            raise Obstructed(f"{name}: a file stands where a directory belongs; move it away", name=name) from error

    def close(self) -> None:
        """Unpin; a later use pins what is there then."""
        with self._lock:
            if self._closer is not None:
                self._closer()
            self._closer, self._fd = None, None


def split(name: str) -> tuple[str, str]:
    """Directory ("" for the root) and last component."""
    directory, _, last = name.rpartition("/")
    return directory, last
