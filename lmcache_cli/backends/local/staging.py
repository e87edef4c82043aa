"""Staging files: `tmp/<host>.<pid>.<16 hex digits>`, exclusive to one write, removed by it or collected later."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from functools import cache

from lmcache_cli.backends.local.publishing import remove_quietly
from lmcache_cli.backends.local.syscalls import SystemCalls

FOREIGN_AGE_MS = 24 * 3600 * 1000
"""Staging of another host, or of a living process of the same number, is collected after a day at the earliest."""

_COMPONENT = re.compile(r"([a-z0-9-]{1,64})\.(\d{1,10})\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class StagingName:
    host: str
    pid: int

    def writer_is_dead(self) -> bool:
        """True only if the process was on this host and is gone."""
        if self.host != this_host():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def new_staging_component() -> str:
    """A name nobody else uses, to be created exclusively all the same."""
    return f"{this_host()}.{os.getpid()}.{secrets.token_hex(8)}"


def parse_staging_component(component: str) -> StagingName | None:
    """Who stages under that name; None if the name is none of ours."""
    match = _COMPONENT.fullmatch(component)
    return StagingName(match.group(1), int(match.group(2))) if match else None


def collect_stale(calls: SystemCalls, staging_fd: int, *, now_ms: int, older_than_ms: int) -> int:
    """Remove stale files of the staging directory, ours by name alone; returns how many."""
    removed = 0
    with os.scandir(staging_fd) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                continue
            try:
                changed_ms = entry.stat(follow_symlinks=False).st_ctime_ns // 1_000_000  # set by the move aside, too
            except FileNotFoundError:
                continue
            if is_stale(entry.name, age_ms=now_ms - changed_ms, older_than_ms=older_than_ms):
                remove_quietly(calls, entry.name, staging_fd)
                removed += 1
    return removed


def is_stale(component: str, *, age_ms: int, older_than_ms: int) -> bool:
    """Whether nobody can still be writing it: old enough and its process dead, or very old."""
    staging = parse_staging_component(component)
    if staging is None or age_ms < older_than_ms:
        return False
    return staging.writer_is_dead() or age_ms >= max(older_than_ms, FOREIGN_AGE_MS)


@cache
def this_host() -> str:
    """The host name in the letters names may have."""
    return re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())[:64] or "localhost"
