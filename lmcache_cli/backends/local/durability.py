"""Making names durable: fsync of directories, each once for many puts."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from lmcache_cli.backends.local.root import Root, split
from lmcache_cli.backends.local.syscalls import SystemCalls

SYNC_THREADS = 16
"""Every fsync waits for a flush of the device; those that wait together share one."""

_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class NameSync:
    """Knows which directories hold names that a power cut could still take."""

    def __init__(self, root: Root, calls: SystemCalls) -> None:
        self._root, self._calls = root, calls
        self._lock = threading.Lock()
        self._anchored: set[str] = {""}  # directories whose own name is durable
        self._pending: set[str] = set()

    def made(self, directories: tuple[str, ...]) -> None:
        """These directories are new: their own names are not durable yet."""
        if directories:
            with self._lock:
                self._anchored.difference_update(directories)

    def later(self, directory: str) -> None:
        with self._lock:
            self._pending.add(directory)

    def now(self, directory: str) -> None:
        """Blocks until every name in the directory, and the path to it, is on the device."""
        self._sync({directory})

    def all_pending(self) -> None:
        with self._lock:
            directories, self._pending = self._pending, set()
        try:
            self._sync(directories)
        except BaseException:
            with self._lock:
                self._pending |= directories
            raise

    def _sync(self, directories: set[str]) -> None:
        path_steps: set[str] = set()
        with self._lock:
            for directory in directories:
                while directory not in self._anchored and directory not in path_steps:
                    path_steps.add(directory)
                    directory, _ = split(directory)
        targets = sorted(directories | {split(step)[0] for step in path_steps})
        if len(targets) <= 2:
            for directory in targets:
                self._sync_one(directory)
        else:
            with ThreadPoolExecutor(min(len(targets), SYNC_THREADS), thread_name_prefix="lmcache-sync") as pool:
                list(pool.map(self._sync_one, targets))
        with self._lock:
            self._anchored |= path_steps

    def _sync_one(self, directory: str) -> None:
        try:
            fd = self._root.open_dir(directory)
        except FileNotFoundError:
            return  # removed meanwhile, and its names with it
        try:
            self._calls.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)
