"""The circuit breaker: a back-end that keeps failing is left alone for a while, then tried by one caller."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmcache_cli.backends.errors import CircuitOpen


class CircuitBreaker:
    """Opens after `failures` in a row; after `cooldown_s` one call may try, and decides. Thread-safe."""

    def __init__(self, *, failures: int, cooldown_s: float, clock: Callable[[], float], url: str) -> None:
        self._limit, self._cooldown_s, self._clock, self._url = failures, cooldown_s, clock, url
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    @property
    def is_left_alone(self) -> bool:
        """Whether `enter` would refuse because the back-end failed a moment ago."""
        opened_at = self._opened_at
        return opened_at is not None and opened_at + self._cooldown_s > self._clock()

    def enter(self, name: str) -> None:
        """Before a call. Raises CircuitOpen while the back-end is left alone."""
        if not self.is_open:
            return
        with self._lock:
            if self._opened_at is None:  # closed by another thread meanwhile
                return
            wait_s = self._opened_at + self._cooldown_s - self._clock()
            if wait_s > 0 or self._probing:
                raise CircuitOpen(
                    f"{name}: {self._url} failed {self._failures} times in a row; not tried for {max(wait_s, 0):.1f} s",
                    name=name,
                )
            self._probing = True

    def answered(self) -> None:
        """The back-end answered, with whatever: it works."""
        if self._failures or self._opened_at is not None:
            with self._lock:
                self._failures, self._opened_at, self._probing = 0, None, False

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            self._probing = False
            if self._failures >= self._limit:
                self._opened_at = self._clock()

    def abandoned(self) -> None:
        """The call ended without saying anything about the back-end."""
        with self._lock:
            self._probing = False
