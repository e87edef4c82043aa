"""A limit on how many threads do a piece of work at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WAIT_S = 0.1


class Turns:
    """Lets as many threads at once through as half the cores: for checksums while others wait for a device.

    More of them would take the interpreter and the caches from each other, and keep no device busier. Nobody waits
    longer than 0.1 s: a turn is for speed alone, and one that was taken when the process forked never ends.
    """

    def __init__(self) -> None:
        self._free = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))

    @contextmanager
    def one(self) -> Iterator[None]:
        is_ours = self._free.acquire(timeout=_WAIT_S)
        try:
            yield
        finally:
            if is_ours:
                self._free.release()
