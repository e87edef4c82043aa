"""Sweep: delete what earlier runs marked (SPEC §12.3), once the grace time is over on the store's own clock.

An object goes only if its own header says that it is the write that was marked, and only in the version whose header
was read. Any process may sweep, several at once; one that dies leaves marks, and the next one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend, BackendError, Durability, NotFound, Unavailable, VersionChanged
from lmcache_format.errors import FormatError
from lmcache_format.geometry import Part
from lmcache_format.identity import Fingerprint
from lmcache_format.names import new_writer_id
from lmcache_format.segment import NO_VERSION, RemoveFlags, RemoveReason
from lmcache_format.superblock import Operation

from .errors import StoreError
from .index import Index
from .manifest import COMPACT_ABOVE_SEGMENTS, DEFAULT_GRACE_MS, Pending, Remove, segment_of_pending
from .objects import chosen_namespaces
from .places import FoundObject, SlotName, find_objects, slot_of
from .reading import read_header
from .state import Entry, State
from .store import Store

Bools = npt.NDArray[np.bool_]
Advance = Callable[[int, int], None]
SWEPT_REASONS = (RemoveReason.PRUNED, RemoveReason.REPLACED, RemoveReason.MISSING)
"""What is deleted where it is still there. Damaged shards are for quarantine, never for a sweep."""
_BATCH = 1024
_AT_ONCE = 32
_MOST_FAILURES = 64


class Fate(Enum):
    """What became of an object that was to be swept. Of an unknown one nothing may be concluded: its mark stays."""

    DELETED = "deleted"
    GONE = "gone"
    CHANGED = "changed"
    KEPT = "kept"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One object of a sweep."""

    fate: Fate
    size_bytes: int = 0
    path: str = ""
    reason: str = ""


@dataclass(slots=True)
class SweepResult:
    """What was done. `num_gone` were deleted before; `num_changed` stood for another write by now, which stays."""

    num_swept: int = 0
    swept_bytes: int = 0
    num_gone: int = 0
    num_changed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Add what became of one marked object."""
        match outcome.fate:
            case Fate.DELETED:
                self.num_swept += 1
                self.swept_bytes += outcome.size_bytes
            case Fate.GONE:
                self.num_gone += 1
            case Fate.CHANGED:
                self.num_changed += 1
            case Fate.KEPT:
                pass
            case Fate.UNKNOWN:
                self.failures.append((outcome.path, outcome.reason))


def sweep(
    store: Store,
    *,
    grace_ms: int = DEFAULT_GRACE_MS,
    namespaces: Sequence[Fingerprint] | None = None,
    threads: int = 4,
    result: SweepResult | None = None,
    advance: Advance = lambda num_shards, num_bytes: None,
) -> SweepResult:
    """Delete what was marked at least `grace_ms` ago. `result` is counted up as it goes.

    An object that cannot be reached is told in `failures` and stays marked. Raises `Unavailable` where that happens to
    many in a row, `IncompleteListing`, `StoreTooNew`, and `BackendError` where an index or a listing cannot be read.
    """
    store.check(Operation.PRUNE)
    done = SweepResult() if result is None else result
    for fingerprint in chosen_namespaces(store, None):
        if namespaces is None or fingerprint in namespaces:
            _Sweep(store.backend, fingerprint, grace_ms, threads, done, advance).run()
    return done


def marked(state: State) -> Bools:
    """Which removes wait for a sweep."""
    removes = state.removes
    waiting: Bools = (removes["flags"] & RemoveFlags.SWEPT) == 0
    return waiting & np.isin(removes["reason"], np.array(SWEPT_REASONS, removes["reason"].dtype))


def due(state: State, before_ms: int) -> Bools:
    """Which removes were marked at that time or earlier and wait for a sweep."""
    since: Bools = state.removes["marked_ms"].astype(np.int64) <= before_ms
    return marked(state) & since


class _Sweep:
    """One namespace."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: Fingerprint,
        grace_ms: int,
        threads: int,
        result: SweepResult,
        advance: Advance,
    ) -> None:
        self._backend, self._fingerprint, self._grace_ms, self._threads = backend, fingerprint, grace_ms, threads
        self._result, self._advance = result, advance

    def run(self) -> None:
        index = Index(self._backend, self._fingerprint)
        before_ms = self._backend.now_ms() - self._grace_ms
        rows = np.flatnonzero(_open(index.state) & (index.state.removes["marked_ms"].astype(np.int64) <= before_ms))
        marks = [_mark_of(index.state, int(row)) for row in rows]
        if marks:
            entries = [mark.entry for mark in marks]
            places = find_objects(self._backend, self._fingerprint, entries, num_listed=len(index.state) + len(marks))
            with ThreadPoolExecutor(max(1, self._threads)) as pool:
                for start in range(0, len(marks), _BATCH):
                    self._delete(pool, places, marks[start : start + _BATCH], index)
        if index.manifest.live_segments > COMPACT_ABOVE_SEGMENTS:
            compact_index(self._backend, self._fingerprint, self._grace_ms)

    def _delete(
        self,
        pool: ThreadPoolExecutor,
        places: Mapping[SlotName, FoundObject],
        marks: Sequence[Remove],
        index: Index,
    ) -> None:
        outcomes: list[Outcome] = []
        try:
            for start in range(0, len(marks), _AT_ONCE):
                for outcome in pool.map(partial(delete_marked, self._backend, places), marks[start : start + _AT_ONCE]):
                    outcomes.append(outcome)
                    self._result.count(outcome)
                    self._advance(1, outcome.size_bytes)
                failed = [outcome for outcome in outcomes if outcome.fate is Fate.UNKNOWN]
                if len(failed) > _MOST_FAILURES:
                    raise Unavailable(
                        f"{failed[-1].path}: {failed[-1].reason}; so are {len(failed) - 1} others; stopped"
                    )
        finally:
            over = (Fate.DELETED, Fate.GONE, Fate.CHANGED)
            swept = [mark for mark, one in zip(marks, outcomes, strict=False) if one.fate in over]
            write_removes(self._backend, index, self._fingerprint, [replace(mark, is_swept=True) for mark in swept])


def compact_index(backend: Backend, fingerprint: Fingerprint, grace_ms: int) -> None:
    """Write an index as one segment; that this fails does no harm, the next run tries again."""
    try:
        index = Index(backend, fingerprint)
        index.manifest.compact(index.state, new_writer_id(), Durability.FULL, grace_ms)
    except (BackendError, StoreError):
        return


def delete_marked(backend: Backend, places: Mapping[SlotName, FoundObject], mark: Remove) -> Outcome:
    """Delete one marked object if it still is the write that was marked: its header decides."""
    place = places.get(slot_of(mark.entry))
    if place is None:
        return Outcome(Fate.GONE)
    try:
        with backend.open_read(place.path) as handle:
            version, size = handle.version, handle.size
            if read_header(handle).meta.nonce != mark.entry.nonce:
                return Outcome(Fate.CHANGED)
        if mark.reason is RemoveReason.DAMAGED:
            return Outcome(Fate.KEPT)
        return Outcome(Fate.DELETED, size) if backend.delete(place.path, version=version) else Outcome(Fate.GONE)
    except (FormatError, VersionChanged):  # damaged, foreign or newer: not provably the one that was marked
        return Outcome(Fate.CHANGED)
    except NotFound:
        return Outcome(Fate.GONE)
    except BackendError as problem:
        return Outcome(Fate.UNKNOWN, path=place.path, reason=str(problem))


def write_removes(backend: Backend, index: Index, fingerprint: Fingerprint, removes: Sequence[Remove]) -> None:
    """Publish removes as one segment. Raises `BackendError`."""
    if removes:
        segment = segment_of_pending(fingerprint, Pending(removes=list(removes)), new_writer_id(), backend.now_ms())
        index.manifest.write(segment, Durability.FULL)


def _open(state: State) -> Bools:
    """Removes of which it is not known that no object of theirs is left; those of reasons unknown here stay alone."""
    removes = state.removes
    known = np.array(list(RemoveReason), removes["reason"].dtype)
    unswept: Bools = (removes["flags"] & RemoveFlags.SWEPT) == 0
    return unswept & np.isin(removes["reason"], known)


def _mark_of(state: State, row: int) -> Remove:
    record = state.removes[row]
    version = int(record["version"])
    entry = Entry(
        key=int(record["key"]).to_bytes(8, "big") + int(record["key_rest"]).to_bytes(8, "big"),
        parent=0,
        depth=0,
        num_tokens=1,
        part=Part.parse(state.remove_parts[int(record["part"])]),
        encoding=state.remove_encodings[int(record["encoding"])],
        nonce=f"{int(record['nonce']):016x}",
        size_bytes=0,
        created_ms=0,
    )
    known = None if version == NO_VERSION else state.remove_versions[version]
    return Remove(entry, RemoveReason(int(record["reason"])), int(record["marked_ms"]), known)
