"""Deleting one version and no other: take the file aside, look at it, then remove it or put it back."""

from __future__ import annotations

import os

from lmcache_cli.backends.errors import VersionChanged
from lmcache_cli.backends.local.publishing import publish_new, remove_quietly
from lmcache_cli.backends.local.reading import version_of
from lmcache_cli.backends.local.staging import new_staging_component
from lmcache_cli.backends.local.syscalls import SystemCalls


def delete_version(
    calls: SystemCalls, last: str, *, directory_fd: int, staging_fd: int, version: str, name: str
) -> None:
    """Raises VersionChanged if another version has the name, FileNotFoundError if none has it.

    Between look and removal the file lies in staging under our name, so no writer can slip another one in its place.
    """
    _require_version(calls, last, directory_fd, version, name)
    aside = new_staging_component()
    calls.rename(last, aside, src_dir_fd=directory_fd, dst_dir_fd=staging_fd)
    try:
        _require_version(calls, aside, staging_fd, version, name)
    except VersionChanged:
        _put_back(calls, aside, last, staging_fd, directory_fd)
        raise
    calls.unlink(aside, dir_fd=staging_fd)


def _put_back(calls: SystemCalls, aside: str, last: str, staging_fd: int, directory_fd: int) -> None:
    try:
        publish_new(calls, aside, last, source_fd=staging_fd, target_fd=directory_fd)
    except FileExistsError:  # somebody published the name again meanwhile; one of the two is enough
        remove_quietly(calls, aside, staging_fd)


def _require_version(calls: SystemCalls, component: str, directory_fd: int, version: str, name: str) -> None:
    status: os.stat_result = calls.status(component, dir_fd=directory_fd, follow_symlinks=False)
    if version_of(status) != version:
        raise VersionChanged(f"{name}: expected version {version}, found {version_of(status)}; it was kept", name=name)
