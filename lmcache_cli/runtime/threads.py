"""Where the threads of loads and saves run, and that saves give way. On Linux; elsewhere the engine decides.

An engine on the CPU binds its main thread to a core of OpenMP's, and whatever thread is started from there inherits
that: loads and saves would all share one core with the computation, while others are idle.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection

_LOG = logging.getLogger("lmcache.runtime")
BACKGROUND_NICENESS = 10
"""A tenth of a thread that computes. Not less: a thread that never runs may hold the interpreter's lock."""


def parent_cores() -> frozenset[int] | None:
    """The cores that the process which started this one may use; None where that cannot be told."""
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):
        return None


def settled(*, cores: Collection[int] | None = None, is_background: bool = False) -> Callable[[], None]:
    """What a new thread calls first: it may run on `cores` from then on, and gives way to others if `is_background`."""

    def settle() -> None:
        if sys.platform != "linux":
            return
        try:
            if cores:
                os.sched_setaffinity(0, cores)  # of the calling thread alone
            if is_background:
                number = threading.get_native_id()
                niceness = max(os.getpriority(os.PRIO_PROCESS, number), BACKGROUND_NICENESS)
                os.setpriority(os.PRIO_PROCESS, number, niceness)
        except OSError as problem:  # a sandbox may forbid it; then things take longer
            _LOG.info("thread %s stays as it was: %s", threading.current_thread().name, problem)

    return settle
