"""How far a long command is: done, total, rate and time left. Counting only; output.py shows it."""

import threading
from collections.abc import Callable
from enum import StrEnum

from lmcache_cli.quantities import show_count, show_duration, show_size

PLAIN_INTERVAL_S = 10.0


class ProgressStyle(StrEnum):
    """`auto` is a bar on a terminal and plain lines elsewhere; a bar is never drawn into a file."""

    AUTO = "auto"
    PLAIN = "plain"
    BAR = "bar"
    NONE = "none"


class Meter:
    """Counts what is done. Safe to advance from several threads; `show` is called with this meter's lock held."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        *,
        clock: Callable[[], float],
        show: Callable[["Meter"], None],
        interval_s: float,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self._clock = clock
        self._show = show
        self._interval_s = interval_s
        self._started_s = self._shown_s = clock()
        self._lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        """Counts `amount` more units (bytes when the unit is `bytes`)."""
        with self._lock:
            self.done += amount
            now_s = self._clock()
            if now_s - self._shown_s >= self._interval_s:
                self._shown_s = now_s
                self._show(self)

    def counts(self) -> str:
        """`12 of 40 chunks (30%), 3.1 chunks/s, 9.0 s left`."""
        elapsed_s = self._clock() - self._started_s
        rate = self.done / elapsed_s if elapsed_s > 0 else 0.0
        parts = [self._amount()]
        if rate > 0:
            parts.append(f"{show_size(rate)}/s" if self.unit == "bytes" else f"{rate:,.1f} {self.unit}/s")
            if self.total is not None and self.total > self.done:
                parts.append(f"{show_duration((self.total - self.done) / rate)} left")
        return ", ".join(parts)

    def _amount(self) -> str:
        show = show_size if self.unit == "bytes" else show_count
        unit = "" if self.unit == "bytes" else f" {self.unit}"
        if self.total is None:
            return f"{show(self.done)}{unit}"
        percent = 100 * self.done // self.total if self.total else 100
        return f"{show(self.done)} of {show(self.total)}{unit} ({percent}%)"
