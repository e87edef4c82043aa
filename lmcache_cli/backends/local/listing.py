"""The walk: every file below a prefix, or an error; symbolic links are listed and never followed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lmcache_cli.backends.local.reading import version_of
from lmcache_cli.backends.local.root import Root
from lmcache_cli.backends.protocol import ObjectInfo


def walk(root: Root, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
    """Raises OSError, RootChanged. What vanishes during the walk is left out; that the root vanished is an error."""
    if not root.exists():
        return
    pending = [prefix]
    while pending:
        directory = pending.pop()
        try:
            fd = root.open_dir(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            found, below = _scan(fd, directory)
        finally:
            os.close(fd)
        yield from found
        if recursive:
            pending.extend(below)
        else:
            yield from (ObjectInfo(f"{name}/", 0, "", 0) for name in below)
    root.exists()  # raises RootChanged: a vanished root would have looked like vanished files


def _scan(fd: int, directory: str) -> tuple[list[ObjectInfo], list[str]]:
    """Files and sub-directories of one directory, with their full names."""
    files: list[ObjectInfo] = []
    below: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            name = f"{directory}/{entry.name}" if directory else entry.name
            if entry.is_dir(follow_symlinks=False):
                below.append(name)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            files.append(info_of(name, status))
    return files, below


def info_of(name: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, status.st_size, version_of(status), status.st_mtime_ns // 1_000_000)
