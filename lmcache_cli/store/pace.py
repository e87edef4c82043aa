"""How fast and how long a job may run, and how many of its pieces are under way at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")


class Abandoned(Exception):
    """The job was given up while this piece of it waited for its turn."""


class Pace:
    """Keeps the average rate of all threads together at `bytes_per_s` or below; None: as fast as it goes."""

    def __init__(
        self,
        bytes_per_s: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._over = threading.Event()
        self._clock, self._wait = clock, wait or self._over.wait
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent. Blocks. Raises `Abandoned` once `abandon` was called."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = self._clock()
            start_s = max(now_s, self._free_at_s)
            self._free_at_s = start_s + size_bytes / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        self._wait(wait_s)
        if self._over.is_set():
            raise Abandoned

    def abandon(self) -> None:
        """End all waiting, now and later."""
        self._over.set()


class Deadline:
    """The end of the time a job may take; None: it may take any."""

    def __init__(self, duration_s: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = float("inf") if duration_s is None else clock() + duration_s

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return self._clock() >= self._end_s


def in_parallel(
    work: Callable[[J], R], jobs: Iterator[J], threads: int, abandon: Callable[[], None] = lambda: None
) -> Generator[R, None, None]:
    """Results of `work`, in order, with `threads` of them under way at once, and few taken from `jobs` beforehand.

    The first error that `work` raises ends it, as does closing; what is under way then is waited for, after `abandon`
    was called, and what was not begun is dropped.
    """
    running: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="lmcache-job") as pool:
        try:
            for job in jobs:
                running.append(pool.submit(work, job))
                if len(running) >= 2 * threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BaseException:
            abandon()
            for future in running:
                future.cancel()
            raise
