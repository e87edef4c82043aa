"""The index of one namespace while it is in use: what others flushed, with what this process wrote in front of it.

Asking it never waits for the back-end: `_lock` is over what is in memory and held for moments, `_io` over the manifest
on the back-end, one flush, refresh or compaction at a time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lmcache_cli.backends import Backend, BackendError, Durability, ObjectInfo
from lmcache_format.encodings import is_known_label
from lmcache_format.errors import BadName, FormatError
from lmcache_format.geometry import Part, check_part
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, KeyList
from lmcache_format.names import ShardName, chunk_directory, new_writer_id
from lmcache_format.segment import Label, Pin, RemoveReason, Segment, decode_segment, encode_segment, key_number
from lmcache_format.shard import RAW, ShardHeader

from . import wall_clock
from .errors import Refused, StoreError
from .events import Event, Events
from .manifest import (
    COMPACT_ABOVE_SEGMENTS,
    DAY_MS,
    DEFAULT_GRACE_MS,
    Manifest,
    Pending,
    Remove,
    combine,
    segment_of_pending,
)
from .matching import ChunkRef
from .reading import Wanted, check_wanted, read_header
from .state import Entry, State, empty_state
from .view import View
from .writing import entry_of

_REBUILD_ABOVE_RECENT = 4096


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How a namespace writes. `producer` is recorded in every shard, for people; `encoding` names a codec;
    `flush_after_chunks` and `flush_after_s` bound what of the index a crash can lose (shards it cannot)."""

    durability: Durability = Durability.NONE
    encoding: str = RAW
    producer: Mapping[str, Any] | None = None
    keep_tokens: bool = False
    flush_after_chunks: int = 512
    flush_after_s: float = 10.0
    grace_ms: int = DEFAULT_GRACE_MS


class LiveIndex:
    """Which shards of a namespace there are, as far as this process knows; see `Namespace` for the arguments."""

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        need: Part,
        options: WriterOptions,
        events: Events,
        *,
        allow_lossy: bool,
        may_write: bool,
        refresh_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        check_part(identity, need)
        self.identity = identity
        self.fingerprint = identity.fingerprint
        self.need = need
        self.events = events
        self._backend = backend
        self._options = options
        self._allow_lossy = allow_lossy
        self._may_write = may_write
        self._lock = threading.RLock()
        self._io = threading.RLock()
        self._manifest = Manifest(backend, self.fingerprint, self.events)
        self._state = empty_state()
        self._unmerged: list[Segment] = []
        self._pending = Pending()
        self._in_flight = Pending()  # taken out of `_pending` by a flush that has not ended
        self._hidden: list[Entry] = []  # dropped by this process alone
        self._pending_since = 0.0
        self._writer_id = new_writer_id()
        self._view = View(self._state, self.need, self._can_read, identity.chunk_tokens)
        self._flushed_hits: dict[int, int] = {}
        self._background: ThreadPoolExecutor | None = None
        self._clock = clock
        self._refresh_interval_s = refresh_interval_s
        self._refreshed_at = -float("inf")
        self._can_probe = backend.capabilities.cheap_stat
        _OPEN.add(self)
        self.refresh()

    def _after_fork(self) -> None:
        """In the child, where threads do not exist and locks may be held by some that do not: new ones."""
        self._lock, self._io = threading.RLock(), threading.RLock()
        self._background = None

    def label(self, name: str, key: ChunkKey, num_tokens: int, depth: int) -> None:
        """Give a name (of a document, say) to the sequence that ends with the chunk `key`. Raises `SegmentError`."""
        label = Label(key[:16], name, num_tokens, wall_clock.now_ms(), depth)
        self._refuse_unreadable(Pending(labels=[label]))
        with self._lock:
            self._buffer(labels=[label])

    def pin(self, key: ChunkKey, expires_ms: int | None = None) -> None:
        """Keep a chunk and all before it from being pruned until `expires_ms` (Unix time; None: for good).

        Raises `SegmentError`.
        """
        with self._lock:
            pin = Pin(key[:16], expires_ms, self._after_pins(key))
            self._refuse_unreadable(Pending(pins=[pin]))
            self._buffer(pins=[pin])

    def unpin(self, key: ChunkKey) -> None:
        """Take a pin back. Raises `SegmentError`."""
        self.pin(key, 0)

    def _after_pins(self, key: bytes) -> int:
        """Now, or just after the latest pin of that key, whatever clock it was dated by: the last word counts."""
        known = [pin.created_ms for pin in self.state().pins if pin.key == key[:16]]
        return max([wall_clock.now_ms(), *(created_ms + 1 for created_ms in known)])

    def remove(self, entry: Entry, reason: RemoveReason, version: str | None = None) -> None:
        """Take one shard out of the index. The object is left where it is, for a sweep to delete."""
        now_ms = self._backend.now_ms()
        with self._lock:
            self._view.drop(entry)
            self._buffer(removes=[Remove(entry, reason, now_ms, version)])

    def refresh(self) -> bool:
        """Take in what other writers flushed; True if there was anything. A back-end that does not answer is a no."""
        with self._io:
            self._refreshed_at = self._clock()
            try:
                segments = self._manifest.refresh(leave_out_unavailable=True)
            except BackendError as problem:
                self.events.problem(Event.SEGMENT_LOST, self.fingerprint, problem)
                return False
            if segments:
                self._take_in(segments)
            return bool(segments)

    def flush(self) -> None:
        """Write the buffered index entries as a segment. Raises `BackendError`; the entries then stay buffered.

        Where there are many segments they are compacted; that this fails is counted, and tried again the next time.
        """
        with self._io:
            if not self._may_write:
                with self._lock:
                    self._pending = Pending()
                return
            if self._options.durability is Durability.FULL:
                self._backend.sync_names()
            if self._pending:
                self._write_pending()
            if self._manifest.live_segments > COMPACT_ABOVE_SEGMENTS:
                try:
                    self.compact()
                except (BackendError, StoreError) as problem:
                    self.events.problem(Event.COMPACTION_FAILED, self.fingerprint, problem)

    def _write_pending(self) -> None:
        """Write what is pending, while others go on to match, and to buffer more."""
        with self._lock:
            self._in_flight, self._pending = self._pending, Pending()
        segment = segment_of_pending(self.fingerprint, self._in_flight, self._writer_id, wall_clock.now_ms())
        try:
            self._manifest.write(segment, self._options.durability)
        except BaseException:
            with self._lock:
                self._pending = self._in_flight.joined_by(self._pending)
                self._in_flight = Pending()
            raise
        with self._lock:
            self._unmerged.append(segment)
            self._flushed_hits.update((number, hits) for number, (_, hits) in self._in_flight.touches.items())
            self._in_flight = Pending()

    def compact(self) -> None:
        """Write the whole index as one segment. Raises `BackendError`, `StoreError`; the old segments then stay.

        Segments that cannot be read now are left out and left alone.
        """
        if not self._may_write:
            raise Refused(f"{self._backend.url} may not be written to by this release")
        with self._io:
            self._take_in(self._manifest.refresh(leave_out_unavailable=True), rebuild=True)
            self._manifest.compact(self._state, self._writer_id, self._options.durability, self._options.grace_ms)

    def state(self) -> State:
        """Everything the index knows, unflushed entries included."""
        with self._lock:
            state, unmerged = self._state, list(self._unmerged)
            pending = self._in_flight.joined_by(self._pending)
        latest = segment_of_pending(self.fingerprint, pending, self._writer_id, wall_clock.now_ms())
        return combine(state, self.fingerprint, [*unmerged, latest])

    def _record(self, entry: Entry) -> None:
        with self._lock:
            self._view.add(entry)
            self._buffer(adds=[entry])
            self._note_touch(entry.key)
            is_full = len(self._pending.adds) >= self._options.flush_after_chunks
        if is_full or self._is_flush_due():
            self._flush_quietly()

    def _forget(self, entry: Entry, reason: RemoveReason | None) -> None:
        with self._lock:
            self._view.drop(entry)
            self._pending.adds = [add for add in self._pending.adds if add.nonce != entry.nonce]
            if reason is None:
                self._hidden.append(entry)
            else:
                self._buffer(removes=[Remove(entry, reason, wall_clock.now_ms())])

    def _flush_quietly(self) -> None:
        try:
            self.flush()
        except BackendError as problem:
            self.events.problem(Event.FLUSH_FAILED, self.fingerprint, problem)
            with self._lock:
                self._pending_since = self._clock()

    def _refresh_if_due(self) -> bool:
        """Take in what others wrote, now and then: at once where a look costs little, behind the scenes elsewhere."""
        if self._clock() - self._refreshed_at < self._refresh_interval_s:
            return False
        if not self._can_probe:
            self._refreshed_at = self._clock()
            self._in_background(self.refresh)
            return False
        if not self._io.acquire(blocking=False):  # somebody is at it: the answer does not wait for that
            return False
        try:
            return self.refresh()
        finally:
            self._io.release()

    def _is_flush_due(self) -> bool:
        return bool(self._pending) and self._clock() - self._pending_since >= self._options.flush_after_s

    def _flush_if_due(self) -> None:
        if self._is_flush_due():
            self._pending_since = self._clock()
            self._in_background(self._flush_quietly)

    def _in_background(self, work: Callable[[], object]) -> None:
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="lmcache-index")
            self._background.submit(work)

    def _take_in(self, segments: list[Segment], *, rebuild: bool = False) -> None:
        """Merge segments; the caller holds `_io`. What takes long is done while others go on to match."""
        unmerged = [*self._unmerged, *segments]
        recent = sum(len(segment.keys) for segment in unmerged)
        has_removes = any(len(segment.removes) for segment in segments)
        if rebuild or has_removes or recent > max(_REBUILD_ABOVE_RECENT, len(self._state) // 8):
            state = combine(self._state, self.fingerprint, unmerged)
            view = View(state, self.need, self._can_read, self.identity.chunk_tokens)
            with self._lock:
                self._state, self._unmerged = state, []
                self._flushed_hits.clear()
                self._view = self._caught_up(view)
            return
        with self._lock:
            self._unmerged = unmerged
            for segment in segments:
                for entry in _entries(segment):
                    if not self._is_removed(entry.nonce):
                        self._view.add(entry)

    def _caught_up(self, view: View) -> View:
        """A new view with what is pending in front of it; what this process found gone or damaged stays dropped."""
        pending = self._in_flight.joined_by(self._pending)
        gone = {remove.entry.nonce for remove in pending.removes}
        for entry in pending.adds:
            if entry.nonce not in gone:
                view.add(entry)
        for remove in pending.removes:
            view.drop(remove.entry)
        for entry in self._hidden:
            view.drop(entry)
        return view

    def _is_removed(self, nonce: str) -> bool:
        if self._view.is_dropped(nonce):
            return True
        number = int(nonce, 16)
        return any(
            bool((table["nonce"] == number).any())
            for table in (self._state.removes, *(segment.removes for segment in self._unmerged))
            if len(table)
        )

    def _can_read(self, label: str) -> bool:
        return is_known_label(label) and (self._allow_lossy or "-" not in label)

    def _count_present(self, keys: KeyList) -> int:
        with self._lock:
            return self._view.match(keys)

    def _adopt(self, key: ChunkKey) -> bool:
        """Look for shards of a chunk under their names; True where any was found that the index had not heard of."""
        try:
            names = list(self._shard_names(key))
        except BackendError as problem:
            self.events.problem(Event.READ_UNAVAILABLE, self._path(key), problem)
            return False
        with self._lock:
            known = {(entry.part, entry.encoding) for entry in self._view.entries(key)}
        found = [self._adopt_shard(name) for name in names if (name.part, name.encoding) not in known]
        return any(found)

    def _shard_names(self, key: ChunkKey) -> Iterator[ShardName]:
        prefix = f"{chunk_directory(self.fingerprint, key)}/{key.hex()}."
        for info in self._backend.list(chunk_directory(self.fingerprint, key), recursive=False):
            if info.name.startswith(prefix):
                try:
                    yield ShardName.parse(info.name)
                except BadName:
                    continue

    def _adopt_shard(self, name: ShardName) -> bool:
        if not self._can_read(name.encoding):
            return False
        try:
            with self._backend.open_read(name.path) as handle:
                header = read_header(handle)
                meta = header.meta
                wanted = Wanted(self.identity, name.key, meta.num_tokens, meta.depth, name.part, name.encoding)
                check_wanted(header, wanted)
                entry = entry_of_header(header, handle.size)
        except (BackendError, FormatError):
            return False
        with self._lock:
            if self._is_removed(entry.nonce):
                return False
            self._view.add(entry)
            self._buffer(adds=[entry])
        self.events.count(Event.ADOPTED)
        return True

    def _path(self, key: ChunkKey) -> str:
        return f"{chunk_directory(self.fingerprint, key)}/{key.hex()}"

    def _buffer(
        self,
        *,
        adds: Sequence[Entry] = (),
        removes: Sequence[Remove] = (),
        labels: Sequence[Label] = (),
        pins: Sequence[Pin] = (),
    ) -> None:
        if not self._pending:
            self._pending_since = self._clock()
        self._pending.adds += adds
        self._pending.removes += removes
        self._pending.labels += labels
        self._pending.pins += pins

    def _touch(self, chunks: Sequence[ChunkRef]) -> None:
        with self._lock:
            for chunk in chunks:
                self._note_touch(chunk.key, hits=1)

    def _note_touch(self, key: bytes, hits: int = 0) -> None:
        number = key_number(key)
        if not self._pending:
            self._pending_since = self._clock()
        day, known = self._pending.touches.get(number, (0, self._known_hits(number)))
        self._pending.touches[number] = (max(day, wall_clock.now_ms() // DAY_MS), known + hits)

    def _known_hits(self, number: int) -> int:
        for hits in (self._in_flight.touches.get(number, (0, 0))[1], self._flushed_hits.get(number, 0)):
            if hits:
                return hits
        touches = self._state.touches
        at = int(touches["key"].searchsorted(number)) if len(touches) else 0
        return int(touches["hits"][at]) if at < len(touches) and int(touches["key"][at]) == number else 0

    def _refuse_unreadable(self, pending: Pending) -> None:
        """Raise now rather than at a flush, or when the segment is read: what else it holds would be lost with it."""
        segment = segment_of_pending(self.fingerprint, pending, self._writer_id, wall_clock.now_ms())
        decode_segment(encode_segment(segment), self.fingerprint)


def _entries(segment: Segment) -> Iterator[Entry]:
    state = combine(empty_state(), segment.fingerprint, [segment])
    return (state.entry(row) for row in range(len(state)))


def entry_of_header(header: ShardHeader, size_bytes: int) -> Entry:
    """What the index says of a shard whose header was read."""
    return entry_of(header.meta, ObjectInfo("", size_bytes, "", 0))


_OPEN: weakref.WeakSet[LiveIndex] = weakref.WeakSet()


def _after_fork() -> None:
    for index in list(_OPEN):
        index._after_fork()


os.register_at_fork(after_in_child=_after_fork)
