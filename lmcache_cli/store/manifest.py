"""The manifest of one namespace on a back-end: segments are listed, read, written and compacted here (SPEC §11).

Everything it holds can be rebuilt from the shards, so a segment that cannot be read is left out with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmcache_cli.backends import (
    AlreadyExists,
    Backend,
    Durability,
    NotFound,
    Obstructed,
    Unavailable,
    VersionChanged,
)
from lmcache_format.errors import BadName, FormatError, UnsupportedVersion
from lmcache_format.identity import Fingerprint
from lmcache_format.names import SegmentName, new_ulid, segment_directory
from lmcache_format.segment import (
    ADD_DTYPE,
    KEY_DTYPE,
    NO_VERSION,
    REMOVE_DTYPE,
    TOUCH_DTYPE,
    AddFlags,
    Label,
    Pin,
    Records,
    RemoveFlags,
    RemoveReason,
    Segment,
    check_length,
    decode_segment,
    encode_segment,
    key_number,
)

from . import wall_clock
from .errors import StoreError
from .events import Event, Events
from .state import Entry, State, merge

COMPACT_ABOVE_SEGMENTS = 16
DAY_MS = 86_400_000
DEFAULT_GRACE_MS = 900_000
_LISTING_TRIES = 3
_LONG_BYTES = 16 << 20
_HEADER_BYTES = 4096  # more than the longest table of sections needs
_MOST_LEFT_OUT = 3  # segments; beyond that the back-end is at fault, not one of them


@dataclass(frozen=True, slots=True)
class Remove:
    """One shard to be taken out of the manifest. `version` is the object's, where it is to be swept."""

    entry: Entry
    reason: RemoveReason
    marked_ms: int
    version: str | None = None
    is_swept: bool = False


@dataclass(slots=True)
class Pending:
    """What a writer has not yet flushed."""

    adds: list[Entry] = field(default_factory=list)
    removes: list[Remove] = field(default_factory=list)
    touches: dict[int, tuple[int, int]] = field(default_factory=dict)
    labels: list[Label] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.adds or self.removes or self.touches or self.labels or self.pins)

    def joined_by(self, later: Pending) -> Pending:
        """This and what was buffered after it."""
        touches = dict(self.touches)
        for key, (day, hits) in later.touches.items():
            known_day, known_hits = touches.get(key, (0, 0))
            touches[key] = (max(day, known_day), max(hits, known_hits))
        return Pending(
            self.adds + later.adds,
            self.removes + later.removes,
            touches,
            self.labels + later.labels,
            self.pins + later.pins,
        )


class Manifest:
    """Segments of one namespace, as far as they were read. Not thread-safe; the namespace that owns it holds a lock."""

    def __init__(self, backend: Backend, fingerprint: Fingerprint, events: Events) -> None:
        self._backend = backend
        self._fingerprint = fingerprint
        self._events = events
        self._seen: set[str] = set()
        self._superseded: dict[str, str] = {}
        self._unread: set[str] = set()
        self._present: set[str] = set()
        self._live: set[str] = set()

    @property
    def live_segments(self) -> int:
        """Segments that were read and are not superseded by another, as of the last refresh."""
        return len(self._live)

    def refresh(self, *, leave_out_unavailable: bool = False) -> list[Segment]:
        """Read the segments that appeared since the last time, newest first, but none that a newer one supersedes.

        Raises `BackendError` where listing or reading fails; nothing is then taken as read. With
        `leave_out_unavailable` single segments that cannot be read now are counted, and tried again the next time.
        """
        for _ in range(_LISTING_TRIES - 1):
            try:
                return self._read_new(leave_out_unavailable)
            except NotFound:  # compacted away between listing and reading: what replaced it is in the next listing
                continue
        return self._read_new(leave_out_unavailable, leave_out_missing=leave_out_unavailable)

    def write(self, segment: Segment, durability: Durability) -> str:
        """Publish a segment; returns its file name. Raises `BackendError`."""
        name = SegmentName(self._fingerprint, new_ulid(wall_clock.now_ms()), segment.writer)
        self._put(name, encode_segment(segment), durability)
        self._seen.add(name.file_name)
        self._live.add(name.file_name)
        return name.file_name

    def compact(self, state: State, writer: str, durability: Durability, grace_ms: int) -> str:
        """Write the whole state as one segment that supersedes all that were read; read it back before it counts.

        What could not be read (damage, a newer version, no answer) is not superseded, and so never deleted. Old
        segments are deleted by a later compaction, once what superseded them is older than `grace_ms` on the store's
        clock. Raises `BackendError`, or `StoreError` where the segment does not come back as written.
        """
        gone_soon = self._present & set(self._superseded)  # named again, or who reads only this one would take them in
        superseded = tuple(sorted(self._live | gone_soon))
        segment = segment_of_state(self._fingerprint, state, writer, wall_clock.now_ms(), superseded, grace_ms=grace_ms)
        data = encode_segment(segment)
        name = SegmentName(self._fingerprint, new_ulid(wall_clock.now_ms()), writer)
        self._put(name, data, durability)
        if self._backend.read(name.path) != data:
            raise StoreError(f"{name.path} came back otherwise than it was written", next_step="check the device")
        self._seen.add(name.file_name)
        self._live = {name.file_name}
        for old in superseded:
            self._superseded.setdefault(old, name.file_name)
        self._delete_superseded(grace_ms)
        return name.file_name

    def _put(self, name: SegmentName, data: bytes, durability: Durability) -> None:
        try:
            self._backend.put(name.path, [data], durability=durability)
        except AlreadyExists:  # nobody else makes this name: an earlier try of ours, whose answer was lost
            pass

    def _delete_superseded(self, grace_ms: int) -> None:
        objects = {info.name.rpartition("/")[2]: info for info in self._list()}
        now = self._backend.now_ms()
        for old in self._superseded:
            if old not in objects:
                continue
            newer = self._superseder(old, objects)
            if newer is None or max(0, now - newer.modified_ms) < grace_ms:  # its clock may be a moment behind
                continue
            try:
                self._backend.delete(objects[old].name, version=objects[old].version)
            except VersionChanged:
                continue

    def _superseder(self, old: str, objects: Mapping[str, _Listed]) -> _Listed | None:
        """The segment that replaced `old`, or what replaced that one if it is gone already."""
        new = self._superseded.get(old)
        for _ in self._superseded:
            if new is None or new in objects:
                break
            new = self._superseded.get(new)
        return None if new is None else objects.get(new)

    def _list(self) -> list[_Listed]:
        listed = []
        for info in self._backend.list(segment_directory(self._fingerprint), recursive=False):
            try:
                SegmentName.parse(info.name)
            except BadName:
                continue
            listed.append(_Listed(info.name, info.version, info.modified_ms, info.size_bytes))
        return listed

    def _read_new(self, leave_out_unavailable: bool, *, leave_out_missing: bool = False) -> list[Segment]:
        sizes = {SegmentName.parse(info.name): info.size_bytes for info in self._list()}
        names = sorted(sizes, key=lambda name: name.ulid, reverse=True)
        seen, superseded, unread = set(self._seen), dict(self._superseded), set(self._unread)
        left_out: set[str] = set()
        new: list[Segment] = []
        for name in names:
            if name.file_name in seen or name.file_name in superseded:
                continue
            try:
                segment = self._read(name, sizes[name])
            except (Unavailable, NotFound) as problem:
                is_allowed = leave_out_missing if isinstance(problem, NotFound) else leave_out_unavailable
                if not is_allowed or len(left_out) == _MOST_LEFT_OUT:
                    raise
                self._events.problem(Event.SEGMENT_LOST, name.path, problem)
                left_out.add(name.file_name)
                continue
            seen.add(name.file_name)
            if segment is None:
                unread.add(name.file_name)
                continue
            new.append(segment)
            for old in segment.supersedes:
                if old != name.file_name:
                    superseded.setdefault(old, name.file_name)
        self._present = {name.file_name for name in names}
        self._seen, self._superseded, self._unread = seen, superseded, unread
        self._live = self._present - set(superseded) - unread - left_out  # what is unread is not superseded
        return new

    def _read(self, name: SegmentName, size_bytes: int) -> Segment | None:
        try:
            if size_bytes > _LONG_BYTES:  # memory is spent once the header says that the file is so long
                check_length(self._backend.read(name.path, length=_HEADER_BYTES), size_bytes)
            return decode_segment(self._backend.read(name.path), self._fingerprint)
        except UnsupportedVersion as problem:
            self._events.problem(Event.SEGMENT_TOO_NEW, name.path, problem)
        except (FormatError, Obstructed) as problem:
            self._events.problem(Event.SEGMENT_DAMAGED, name.path, problem)
        return None


@dataclass(frozen=True, slots=True)
class _Listed:
    name: str
    version: str
    modified_ms: int
    size_bytes: int


def segment_of_pending(fingerprint: Fingerprint, pending: Pending, writer: str, created_ms: int) -> Segment:
    """What a writer buffered, as a segment."""
    entries = sorted(pending.adds, key=lambda entry: (entry.key, str(entry.part), entry.encoding, entry.nonce))
    parts = _numbers([str(entry.part) for entry in entries] + [str(gone.entry.part) for gone in pending.removes])
    encodings = _numbers([entry.encoding for entry in entries] + [gone.entry.encoding for gone in pending.removes])
    versions = _numbers([gone.version for gone in pending.removes if gone.version is not None])
    touches = np.array([(key, day, hits) for key, (day, hits) in sorted(pending.touches.items())], TOUCH_DTYPE)
    return Segment(
        fingerprint=fingerprint,
        created_ms=created_ms,
        writer=writer,
        parts=tuple(parts),
        encodings=tuple(encodings),
        versions=tuple(versions),
        keys=np.array([key_number(entry.key) for entry in entries], KEY_DTYPE),
        adds=_add_records(entries, parts, encodings),
        removes=_remove_records(pending.removes, parts, encodings, versions),
        touches=touches,
        labels=tuple(pending.labels),
        pins=tuple(pending.pins),
    )


def segment_of_state(
    fingerprint: Fingerprint,
    state: State,
    writer: str,
    created_ms: int,
    supersedes: Sequence[str],
    *,
    grace_ms: int = DEFAULT_GRACE_MS,
    keep_all_touches: bool = False,
) -> Segment:
    """A whole state as one segment. Removes that were swept, and are older than a day and than twice the grace time,
    and touches of chunks that are gone (or not heard of so far, hence `keep_all_touches`), are left out."""
    removes = state.removes
    forget_before = max(0, created_ms - max(DAY_MS, 2 * grace_ms))
    done = ((removes["flags"] & RemoveFlags.SWEPT) != 0) & (removes["marked_ms"] < forget_before)
    touches = state.touches
    if not keep_all_touches:
        touches = touches[np.isin(touches["key"], state.keys)]
    keys, adds = state.keys, state.adds
    if len(state.shadowed_keys):
        keys = np.concatenate([keys, state.shadowed_keys])
        order = np.argsort(keys, kind="stable")
        keys, adds = keys[order], np.concatenate([adds, state.shadowed_adds])[order]
    return Segment(
        fingerprint=fingerprint,
        created_ms=created_ms,
        writer=writer,
        parts=tuple(map(str, state.parts)),
        encodings=state.encodings,
        versions=state.remove_versions,
        keys=keys,
        adds=adds,
        removes=removes[~done],
        touches=touches,
        supersedes=tuple(supersedes),
        labels=state.labels,
        pins=state.pins,
    )


def combine(state: State, fingerprint: Fingerprint, segments: Iterable[Segment]) -> State:
    """The state with further segments merged in."""
    return merge([segment_of_state(fingerprint, state, "", 0, (), keep_all_touches=True), *segments])


def _numbers(names: Iterable[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name in names:
        numbers.setdefault(name, len(numbers))
    return numbers


def _add_records(entries: Sequence[Entry], parts: Mapping[str, int], encodings: Mapping[str, int]) -> Records:
    records = np.zeros(len(entries), ADD_DTYPE)
    for row, entry in enumerate(entries):
        records[row] = (
            key_number(entry.key, 8),
            entry.parent,
            int(entry.nonce, 16),
            entry.size_bytes,
            entry.created_ms,
            entry.crc32c or 0,
            entry.num_tokens,
            entry.depth,
            0 if entry.crc32c is None else int(AddFlags.HAS_CRC32C),
            parts[str(entry.part)],
            encodings[entry.encoding],
            0,
        )
    return records


def _remove_records(
    removes: Sequence[Remove], parts: Mapping[str, int], encodings: Mapping[str, int], versions: Mapping[str, int]
) -> Records:
    records = np.zeros(len(removes), REMOVE_DTYPE)
    for row, gone in enumerate(removes):
        entry = gone.entry
        records[row] = (
            key_number(entry.key),
            key_number(entry.key, 8),
            int(entry.nonce, 16),
            gone.marked_ms,
            NO_VERSION if gone.version is None else versions[gone.version],
            parts[str(entry.part)],
            encodings[entry.encoding],
            int(gone.reason),
            int(RemoveFlags.SWEPT) if gone.is_swept else 0,
            0,
        )
    return records
