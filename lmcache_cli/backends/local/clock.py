"""The clock of the file system: what time it writes on a new file, asked rarely and carried on in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_AGE_S = 60.0


class StoreClock:
    """Milliseconds since 1970 by the probe, plus the monotonic time since it was asked; asked again after a minute."""

    def __init__(self, probe_ms: Callable[[], int], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._probe_ms, self._monotonic = probe_ms, monotonic
        self._lock = threading.Lock()
        self._asked: tuple[int, float] | None = None

    def now_ms(self) -> int:
        with self._lock:
            now = self._monotonic()
            if self._asked is None or now - self._asked[1] >= MAX_AGE_S:
                self._asked = (self._probe_ms(), now)
            then_ms, then = self._asked
            return then_ms + int((now - then) * 1000)
