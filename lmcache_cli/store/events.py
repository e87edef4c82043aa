"""Counters of what happened to a store in this process; what deserves a line in the log gets it once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from enum import StrEnum

_LOG = logging.getLogger("lmcache.store")
MOST_TOLD = 10_000  # lines of the log; beyond that problems are counted only


class Event(StrEnum):
    """What is counted."""

    HIT = "hit"
    MISS = "miss"
    STORED = "stored"
    ALREADY_PRESENT = "already_present"
    ADOPTED = "adopted"
    REPLACED = "replaced"
    STORE_FAILED = "store_failed"
    READ_UNAVAILABLE = "read_unavailable"
    READ_MISSING = "read_missing"
    READ_DAMAGED = "read_damaged"
    READ_FOREIGN = "read_foreign"
    READ_TOO_NEW = "read_too_new"
    QUARANTINED = "quarantined"
    SEGMENT_DAMAGED = "segment_damaged"
    SEGMENT_TOO_NEW = "segment_too_new"
    SEGMENT_LOST = "segment_lost"
    FLUSH_FAILED = "flush_failed"
    COMPACTION_FAILED = "compaction_failed"
    BYTES_READ = "bytes_read"
    BYTES_WRITTEN = "bytes_written"
    FAR_READ = "far_read"
    FAR_BYTES_READ = "far_bytes_read"
    FAR_UNAVAILABLE = "far_unavailable"
    PROMOTED = "promoted"
    PROMOTION_SKIPPED = "promotion_skipped"
    PROMOTION_FAILED = "promotion_failed"


FAR_EVENTS = (
    Event.FAR_READ,
    Event.FAR_BYTES_READ,
    Event.FAR_UNAVAILABLE,
    Event.PROMOTED,
    Event.PROMOTION_SKIPPED,
    Event.PROMOTION_FAILED,
)
"""Of stores behind another one, and of what was copied from them."""


class Events:
    """Thread-safe counters. `problem` also logs, the first time it is told about a thing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Event] = Counter()
        self._told: set[tuple[Event, str]] = set()

    def count(self, event: Event, by: int = 1) -> None:
        """Add `by` to a counter."""
        with self._lock:
            self._counts[event] += by

    def problem(self, event: Event, where: str, reason: object) -> None:
        """Count `event` and log it, once for each `where`."""
        with self._lock:
            self._counts[event] += 1
            is_new = len(self._told) < MOST_TOLD and (event, where) not in self._told
            if is_new:
                self._told.add((event, where))
        if is_new:
            _LOG.warning("%s: %s: %s", event.value, where, reason)

    def snapshot(self) -> dict[str, int]:
        """Counts so far, by name."""
        with self._lock:
            return {event.value: count for event, count in self._counts.items()}

    def __getitem__(self, event: Event) -> int:
        with self._lock:
            return self._counts[event]
