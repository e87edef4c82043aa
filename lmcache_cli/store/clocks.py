"""The store's clock against this machine's: records are dated by writers, ages are told by the store."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from lmcache_cli.backends import Backend, NoSpace, Unavailable

from .errors import Refused
from .manifest import DAY_MS

MAX_SKEW_MS = DAY_MS


def checked_now_ms(backend: Backend, host_ms: int | None = None) -> int:
    """The time on the store's clock. Raises `Refused` where this machine's differs by more than `MAX_SKEW_MS`: one of
    the two is wrong, and by either of them something could be taken for old that is not."""
    store_ms = backend.now_ms()
    here_ms = time.time_ns() // 1_000_000 if host_ms is None else host_ms
    if abs(store_ms - here_ms) > MAX_SKEW_MS:
        raise Refused(
            f"the clock of {backend.url} says {_shown(store_ms)}, this machine's says {_shown(here_ms)}:"
            f" more than {MAX_SKEW_MS // 3_600_000} hours apart, so that no age can be told; nothing was done",
            next_step="set the clock that is wrong",
        )
    return store_ms


def looked_at_ms(backend: Backend) -> int:
    """The time on the store's clock; this machine's where that cannot be asked, since asking takes a write and a store
    may be mounted read-only. For looking and copying: nothing may be removed by it."""
    try:
        return backend.now_ms()
    except (Unavailable, NoSpace):
        return time.time_ns() // 1_000_000


def _shown(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
