"""Changes to the index of one namespace by a maintenance job: unknown means stop, and nothing is flushed quietly."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from lmcache_cli.backends import Backend, Durability
from lmcache_format.identity import Fingerprint
from lmcache_format.names import new_writer_id
from lmcache_format.segment import Label, Pin, RemoveReason, Segment

from . import wall_clock
from .index import Index
from .manifest import COMPACT_ABOVE_SEGMENTS, DEFAULT_GRACE_MS, Pending, Remove, combine, segment_of_pending
from .state import Entry, State

FLUSH_AFTER_ADDS = 512
FLUSH_AFTER_S = 10.0
_CLOCK_AGE_S = 60.0


class Ledger:
    """Buffers adds and removes and publishes them as segments, durably, after the names of all earlier puts.

    `state` is the index as it was when the ledger was made; rows count from it. Not thread-safe.
    """

    def __init__(self, backend: Backend, fingerprint: Fingerprint, index: Index | None = None) -> None:
        """Reads the index unless it is given. Raises `BackendError`."""
        self._backend = backend
        self._fingerprint = fingerprint
        self.index = index or Index(backend, fingerprint)
        self.state: State = self.index.state
        self.writer = new_writer_id()
        self._removed = np.sort(self.state.removes["nonce"])
        self._removed_here: set[str] = set()
        self._pending = Pending()
        self._own: list[Segment] = []
        self._flushed_s = time.monotonic()
        self._asked: tuple[int, float] | None = None

    @property
    def is_due(self) -> bool:
        """True where enough is buffered, or long enough, that a crash should not lose it."""
        is_late = time.monotonic() - self._flushed_s >= FLUSH_AFTER_S
        return len(self._pending.adds) >= FLUSH_AFTER_ADDS or (bool(self._pending) and is_late)

    def is_removed(self, nonce: str) -> bool:
        """True for a write that somebody took out of the index."""
        number = np.uint64(int(nonce, 16))
        at = int(np.searchsorted(self._removed, number))
        return nonce in self._removed_here or (at < len(self._removed) and bool(self._removed[at] == number))

    def refresh(self) -> None:
        """Hear of what others removed since. Raises `BackendError`."""
        self.index.refresh()
        if len(self.index.late.removes):
            self._removed = np.union1d(self._removed, self.index.late.removes["nonce"])

    def lists(self, nonce: str, row: int) -> bool:
        """True where a row of the index lists exactly this write."""
        return int(self.state.adds["nonce"][row]) == int(nonce, 16)

    def add(self, entry: Entry) -> None:
        """List a shard that is there."""
        self._pending.adds.append(entry)

    def remove(self, entry: Entry, reason: RemoveReason, version: str | None = None, *, is_swept: bool = False) -> None:
        """Take one write out of the index. Its object, of that version, is for a sweep to delete unless it is gone."""
        self._removed_here.add(entry.nonce)
        self._pending.removes.append(Remove(entry, reason, self._now_ms(), version, is_swept))

    def note(
        self, labels: Sequence[Label] = (), pins: Sequence[Pin] = (), touches: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Carry over labels, pins, and touches as (first 8 bytes of the key as a number, day, hits)."""
        self._pending.labels += labels
        self._pending.pins += pins
        self._pending.touches.update({key: (day, hits) for key, day, hits in touches})

    def flush(self) -> None:
        """Publish what is buffered. Raises `BackendError`; it then stays buffered."""
        self._flushed_s = time.monotonic()
        if not self._pending:
            return
        self._backend.sync_names()
        segment = segment_of_pending(self._fingerprint, self._pending, self.writer, wall_clock.now_ms())
        self.index.manifest.write(segment, Durability.FULL)
        self._pending = Pending()
        self._own.append(segment)
        if self.index.manifest.live_segments > COMPACT_ABOVE_SEGMENTS:
            self.compact()

    def _now_ms(self) -> int:
        """The store's clock, which may cost a request, asked once a minute."""
        asked_ms, at_s = self._asked or (0, -math.inf)
        passed_s = time.monotonic() - at_s
        if passed_s >= _CLOCK_AGE_S:
            asked_ms, passed_s = self._backend.now_ms(), 0.0
            self._asked = (asked_ms, time.monotonic())
        return asked_ms + int(passed_s * 1000)

    def compact(self) -> None:
        """Write the whole index as one segment. Raises `BackendError`, `StoreError`; the old segments then stay."""
        self.index.refresh()
        state = combine(self.state, self._fingerprint, [*self.index.late_segments, *self._own])
        self.index.manifest.compact(state, self.writer, Durability.FULL, DEFAULT_GRACE_MS)
