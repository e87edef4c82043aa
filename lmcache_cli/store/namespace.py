"""A namespace of a store: match prompts, read chunks, write chunks.

Any doubt on read is a miss, counted and logged once; `match` changes nothing in the store; a shard counts as present
when it lies under its name with a sound header, whether or not the index has heard of it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import Enum
from types import TracebackType
from typing import Any, Self

from lmcache_cli.backends import (
    AlreadyExists,
    Backend,
    BackendError,
    Durability,
    NotFound,
    ObjectInfo,
    Obstructed,
    ShortRead,
)
from lmcache_format.encodings import get_encoding, is_known_label
from lmcache_format.errors import BadName, FormatError, KeyInputError, UnsupportedVersion
from lmcache_format.geometry import Part, check_part, whole_part
from lmcache_format.identity import Identity
from lmcache_format.keys import (
    ChunkKey,
    KeyList,
    MultimodalItem,
    Tokens,
    chunk_extras,
    chunk_keys,
    next_key,
    root_key,
    token_words,
)
from lmcache_format.names import ShardName, chunk_directory, new_nonce, new_writer_id
from lmcache_format.segment import Label, Pin, RemoveReason, Segment, decode_segment, encode_segment, key_number
from lmcache_format.shard import RAW, EncodingInfo, ShardHeader, ShardMeta

from .chunk import ChunkBuffer
from .coverage import pick
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
from .reading import Fault, ReadFault, Wanted, as_fault, check_wanted, read_header, read_part, verify_data
from .state import Entry, State, empty_state
from .view import View
from .writing import build_shard, entry_of, put_shard

_REBUILD_ABOVE_RECENT = 4096
_ADOPTION_TRIES = 3
LARGE_CHUNK_BYTES = 16 << 20
"""Chunks this large are worth more readers than there are cores while they wait for a device."""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of a match: enough to find it, and to know it when it is found."""

    key: ChunkKey
    parent: ChunkKey
    depth: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest present prefix of a prompt: `num_tokens` tokens in full chunks (`keys`) and perhaps a tail.

    `parent` is the root key. A match is a promise of nothing: a chunk may be gone, or found damaged, when it is read.
    """

    num_tokens: int
    keys: KeyList
    parent: ChunkKey
    chunk_tokens: int
    tail: ChunkRef | None = None

    def chunks(self) -> list[ChunkRef]:
        """All chunks in order."""
        refs = []
        parent = self.parent
        for depth, key in enumerate(self.keys):
            refs.append(ChunkRef(key, parent, depth, self.chunk_tokens))
            parent = key
        return refs if self.tail is None else [*refs, self.tail]

    def up_to(self, num_tokens: int) -> Match:
        """The match without the chunks that reach beyond `num_tokens` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        full = min(len(self.keys), num_tokens // self.chunk_tokens)
        return replace(self, num_tokens=full * self.chunk_tokens, keys=self.keys.first(full), tail=None)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`num_tokens` and `num_chunks` were read and verified, from the first on; `fault` tells why not all."""

    num_tokens: int
    num_chunks: int
    bytes_read: int
    fault: ReadFault | None = None


class PutStatus(Enum):
    """What became of a chunk that was to be written."""

    STORED = "stored"
    PRESENT = "present"
    ADOPTED = "adopted"
    REPLACED = "replaced"


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


class Namespace:
    """One identity's chunks in a store. Methods may be called from several threads; close it, or use `with`.

    `need` is the part this reader wants (all layers and heads by default); a chunk is present when the readable shards
    cover it. Lossy encodings are readable only with `allow_lossy`. `producer` goes into every shard that is written.
    Without `may_write` nothing in the store changes: puts are refused, what is learned of the index is forgotten.
    """

    def __init__(
        self,
        backend: Backend,
        identity: Identity,
        *,
        need: Part | None = None,
        allow_lossy: bool = False,
        writer: WriterOptions | None = None,
        events: Events | None = None,
        reader_threads: int = 6,
        refresh_interval_s: float = 1.0,
        may_write: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.fingerprint = identity.fingerprint
        self.need = need or whole_part(identity)
        check_part(identity, self.need)
        self.events = events or Events()
        self._backend = backend
        self._options = writer or WriterOptions()
        self.producer: Mapping[str, Any] = self._options.producer or {}
        self._allow_lossy = allow_lossy
        self._may_write = may_write
        self._lock = threading.RLock()  # over what is in memory; never held while the back-end is asked
        self._io = threading.RLock()  # over the manifest on the back-end: one flush, refresh or compaction at a time
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
        self._reader_threads = reader_threads
        self._waits_for_device = False
        self._readers = ThreadPoolExecutor(reader_threads, thread_name_prefix="lmcache-read")
        _OPEN.add(self)
        self._can_probe = backend.capabilities.cheap_stat
        is_full = self._options.durability is Durability.FULL
        self._shard_durability = Durability.DATA if is_full else self._options.durability  # names are synced by flush
        self.refresh()

    # ---- match ------------------------------------------------------------------------------------------------

    def root(self, salt: str | bytes | None = None) -> ChunkKey:
        """Parent of every first chunk of a tenant (`salt`); None and the empty salt are the same."""
        return root_key(self.fingerprint, salt)

    def match(
        self,
        tokens: Tokens,
        *,
        salt: str | bytes | None = None,
        items: Sequence[MultimodalItem] = (),
        tails: bool = True,
    ) -> Match:
        """The longest present prefix of `tokens` (ids, 0 … 2^32-1). Changes nothing in the store.

        `items` are the images and the like whose placeholders are among the tokens. Raises `KeyInputError` for ids that
        are none. A back-end that does not answer makes the match shorter, never an exception.
        """
        words = token_words(tokens)
        chunk_tokens = self.identity.chunk_tokens
        root = self.root(salt)
        extras = None
        if items:
            starts = range(0, len(words) - chunk_tokens + 1, chunk_tokens)
            extras = [chunk_extras(items, start, chunk_tokens) for start in starts]
        keys = chunk_keys(root, words, chunk_tokens, extras)
        count = self.match_keys(keys)
        keys = keys.first(count)
        start = count * chunk_tokens
        tail = self._match_tail(keys[-1] if count else root, count, words[start:], items, start) if tails else None
        num_tokens = start + (tail.num_tokens if tail else 0)
        self.events.count(Event.HIT if num_tokens else Event.MISS)
        return Match(num_tokens, keys, root, chunk_tokens, tail)

    def match_keys(self, keys: KeyList) -> int:
        """How many chunks, from the first on, are present."""
        count = self._count_present(keys)
        if count < len(keys) and self._refresh_if_due():
            count = self._count_present(keys)
        while self._can_probe and count < len(keys) and self._adopt(keys[count]):
            count = self._count_present(keys)
        self._flush_if_due()
        return count

    def _count_present(self, keys: KeyList) -> int:
        with self._lock:
            return self._view.match(keys)

    def _match_tail(
        self, parent: ChunkKey, depth: int, words: Any, items: Sequence[MultimodalItem], start: int
    ) -> ChunkRef | None:
        if not len(words):
            return None

        def key_of(count: int) -> ChunkKey:
            return next_key(parent, words[:count], chunk_extras(items, start, count))

        with self._lock:
            for key, count in self._view.tails(parent, depth, len(words), key_of):
                return ChunkRef(key, parent, depth, count)
        return None

    # ---- read -------------------------------------------------------------------------------------------------

    def buffer(self, num_tokens: int | None = None, part: Part | None = None) -> ChunkBuffer:
        """A new buffer for a chunk of `num_tokens` tokens (a full one by default). Reuse it where you can."""
        return ChunkBuffer(self.identity, part or self.need, num_tokens or self.identity.chunk_tokens)

    def read(self, chunks: Sequence[ChunkRef], out: Sequence[ChunkBuffer]) -> ReadResult:
        """Read chunks into buffers (one each, of this namespace's part, the caller's), several at a time.

        Blocks. Every byte counted in the result was verified; buffers beyond `num_chunks` hold unspecified bytes. Never
        raises for what is found in the store: a chunk that cannot be read ends the result, and is handled by its kind:
        missing ones leave the index, damaged ones go to quarantine, unreachable ones stay.
        """
        if len(out) < len(chunks):
            raise Refused(f"{len(chunks)} chunks need as many buffers, got {len(out)}")
        for chunk, buffer in zip(chunks, out, strict=False):
            is_ours = buffer.identity is self.identity or buffer.identity == self.identity
            if buffer.num_tokens != chunk.num_tokens or not is_ours:
                raise Refused(f"buffer is for {buffer.num_tokens} tokens, the chunk has {chunk.num_tokens}")
        outcomes = self._read_all(chunks, out)
        good = 0
        while good < len(chunks) and not isinstance(outcomes[good], ReadFault):
            good += 1
        fault = outcomes[good] if good < len(chunks) else None
        done = [size for size in outcomes[:good] if isinstance(size, int)]
        self.events.count(Event.BYTES_READ, sum(done))
        self._touch(chunks[:good])
        num_tokens = sum(chunk.num_tokens for chunk in chunks[:good])
        return ReadResult(num_tokens, good, sum(done), fault if isinstance(fault, ReadFault) else None)

    def load(self, match: Match) -> tuple[list[ChunkBuffer], ReadResult]:
        """Read a whole match into new buffers; those that were read and verified are returned."""
        chunks = match.chunks()
        buffers = [self.buffer(chunk.num_tokens) for chunk in chunks]
        result = self.read(chunks, buffers)
        return buffers[: result.num_chunks], result

    def _read_all(self, chunks: Sequence[ChunkRef], out: Sequence[ChunkBuffer]) -> list[int | ReadFault]:
        """Returns or raises (KeyboardInterrupt) only when no thread writes to the buffers any more.

        Every thread takes the next chunk when it is done with one: a future a chunk would wake this thread each time.
        Where the bytes are in memory few threads do best; those that wait for a device get help.
        """
        outcomes: list[int | ReadFault | None] = [None] * len(chunks)
        waiting = deque(range(len(chunks)))

        def work() -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another thread was quicker
                    return
                outcomes[number] = self._read_guarded(chunks[number], out[number])
                if self._waits_for_device and spare:
                    try:
                        spare.pop()
                    except IndexError:  # another thread was quicker
                        continue
                    workers.append(self._readers.submit(work))

        is_large = out[0].size_bytes >= LARGE_CHUNK_BYTES if chunks else False
        at_once = min(self._reader_threads, max(2, min(4, os.cpu_count() or 1)))
        spare = deque(range(self._reader_threads - at_once if is_large else 0))
        self._waits_for_device = False
        workers: list[Future[None]] = []
        try:
            for _ in range(min(at_once, len(chunks))):
                workers.append(self._readers.submit(work))  # noqa: PERF401  those that started are waited for
            for worker in workers:
                worker.result()
        except RuntimeError as problem:  # closed meanwhile, or the process ends: nothing starts any more
            waiting.clear()
            wait(workers)
            self.events.problem(Event.READ_UNAVAILABLE, self.fingerprint, problem)
        except BaseException:
            waiting.clear()
            wait(workers)
            raise
        return [
            self._unread(chunk) if outcome is None else outcome for chunk, outcome in zip(chunks, outcomes, strict=True)
        ]

    def _unread(self, chunk: ChunkRef) -> ReadFault:
        return ReadFault(Fault.UNAVAILABLE, self._path(chunk.key), "no thread could be started to read it")

    def _read_guarded(self, chunk: ChunkRef, out: ChunkBuffer) -> int | ReadFault:
        try:
            return self._read_chunk(chunk, out)
        except ReadFault as fault:
            return fault
        except (Exception, CancelledError) as problem:  # noqa: BLE001  the serving path: any doubt is a miss
            path = self._path(chunk.key)
            self.events.problem(Event.READ_UNAVAILABLE, path, problem)
            return ReadFault(Fault.UNAVAILABLE, path, f"{type(problem).__name__}: {problem}")

    def _read_chunk(self, chunk: ChunkRef, out: ChunkBuffer) -> int:
        """One chunk from whatever shards hold it; a faulty shard is dealt with and the others are tried."""
        last: ReadFault | None = None
        for _ in range(_ADOPTION_TRIES):
            with self._lock:
                entries = self._view.entries(chunk.key)
            pieces = pick([entry.part for entry in entries], out.part)
            if not _is_whole(pieces, out.part):
                break
            try:
                return sum(self._read_piece(chunk, entries[number], piece, out) for number, piece in pieces)
            except ReadFault as fault:
                last = fault
                if fault.fault in (Fault.UNAVAILABLE, Fault.TOO_NEW):
                    break
        raise last or ReadFault(Fault.MISSING, self._path(chunk.key), "no shard covers the layers and heads needed")

    def _read_piece(self, chunk: ChunkRef, entry: Entry, piece: Part, out: ChunkBuffer) -> int:
        wanted = self._wanted(chunk, entry)
        try:
            return read_part(self._backend, wanted, piece, out, on_wait=self._note_wait)
        except ReadFault as fault:
            if fault.fault is not Fault.DAMAGED:
                self._handle_fault(fault, wanted, entry)
                raise
        try:  # once more: a fault on the way from the device must not condemn what lies on it
            return read_part(self._backend, wanted, piece, out)
        except ReadFault as fault:
            self._handle_fault(fault, wanted, entry)
            raise

    def _note_wait(self) -> None:
        self._waits_for_device = True

    def _wanted(self, chunk: ChunkRef, entry: Entry) -> Wanted:
        return Wanted(
            self.identity,
            chunk.key,
            chunk.num_tokens,
            chunk.depth,
            entry.part,
            entry.encoding,
            parent=chunk.parent,
            fingerprint=self.fingerprint,
        )

    def _handle_fault(self, fault: ReadFault, wanted: Wanted, entry: Entry) -> None:
        match fault.fault:
            case Fault.UNAVAILABLE:
                self.events.problem(Event.READ_UNAVAILABLE, fault.path, fault.reason)
            case Fault.TOO_NEW:
                self.events.problem(Event.READ_TOO_NEW, fault.path, fault.reason)
                self._forget(entry, None)
            case Fault.MISSING:
                self.events.problem(Event.READ_MISSING, fault.path, fault.reason)
                self._forget(entry, RemoveReason.MISSING)
            case Fault.FOREIGN:
                self.events.problem(Event.READ_FOREIGN, fault.path, fault.reason)
                self._condemn(wanted, entry)
            case Fault.DAMAGED:
                self.events.problem(Event.READ_DAMAGED, fault.path, fault.reason)
                self._condemn(wanted, entry)

    def _condemn(self, wanted: Wanted, entry: Entry) -> None:
        """Out of the index, and the object out of the way: kept in quarantine, never deleted here."""
        self._forget(entry, RemoveReason.DAMAGED)
        self._quarantine(wanted)

    def _quarantine(self, wanted: Wanted) -> None:
        """Move what lies damaged under a name aside. What another writer put there meanwhile stays, or comes back."""
        if not self._may_write:
            return
        path, aside = wanted.name.path, wanted.name.quarantine_path
        try:
            damaged = damaged_version(self._backend, wanted)
            if damaged is None:
                return
            try:
                self._backend.move(path, aside)
            except AlreadyExists:
                aside += f".{new_nonce()}"
                self._backend.move(path, aside)
            if self._is_other_version(aside, damaged):
                self._backend.move(aside, path)
                return
        except NotFound:
            return
        except BackendError as problem:
            self.events.problem(Event.READ_UNAVAILABLE, path, f"cannot be moved to quarantine: {problem}")
            return
        self.events.count(Event.QUARANTINED)

    def _is_other_version(self, path: str, version: str) -> bool:
        """True where an object that was just moved is surely not of that version ("" stands for any)."""
        info = self._backend.stat(path) if version and self._backend.capabilities.rename else None
        return info is not None and info.version != version

    def _forget(self, entry: Entry, reason: RemoveReason | None) -> None:
        with self._lock:
            self._view.drop(entry)
            self._pending.adds = [add for add in self._pending.adds if add.nonce != entry.nonce]
            if reason is None:
                self._hidden.append(entry)
            else:
                self._buffer(removes=[Remove(entry, reason, _wall_ms())])

    # ---- write ------------------------------------------------------------------------------------------------

    def put(
        self,
        chunk: ChunkBuffer,
        *,
        key: ChunkKey,
        parent: ChunkKey,
        depth: int,
        tokens: Tokens | None = None,
        extras_free: bool = True,
    ) -> PutStatus:
        """Commit one chunk: the shard first, the index entry buffered after. Blocks; the buffer is free on return.

        With durability `full` the bytes are on the device on return, and their name once `flush` returned.

        `tokens`, where given, are checked against `key` (unless the chunk has extras: `extras_free=False`) and stored
        if the options say so. Raises `BackendError` (`NoSpace`, `Unavailable`: nothing of the chunk is visible then),
        `KeyInputError`, `GeometryError`.
        """
        if tokens is not None and extras_free and next_key(parent, tokens) != key:
            raise KeyInputError(
                "key is not that of the tokens", expected=next_key(parent, tokens).hex(), found=key.hex()
            )
        if not self._may_write:
            raise Refused(
                f"{self._backend.url} may not be written to by this release",
                next_step="open it with a newer release, or use another store",
            )
        if chunk.identity is not self.identity and chunk.identity != self.identity:
            raise Refused(
                f"the buffer holds KV of {chunk.identity.fingerprint}, the namespace that of {self.fingerprint}",
                next_step="make the buffer with the namespace it is for",
            )
        encoding = get_encoding(self._options.encoding)
        info = EncodingInfo(encoding.name, encoding.parameters(), encoding.quality, encoding.must_understand)
        with self._lock:
            for known in self._view.entries(key):
                is_as_good = known.encoding == info.label or (info.is_lossless and is_lossless_label(known.encoding))
                if known.part.covers(chunk.part) and is_as_good:
                    self._note_touch(key)
                    self.events.count(Event.ALREADY_PRESENT)
                    return PutStatus.PRESENT
        meta = ShardMeta(
            fingerprint=self.fingerprint,
            key=key,
            parent=parent,
            depth=depth,
            num_tokens=chunk.num_tokens,
            chunk_tokens=self.identity.chunk_tokens,
            part=chunk.part,
            dtype=self.identity.dtype,
            head_dim_k=self.identity.head_dim_k,
            head_dim_v=self.identity.head_dim_v,
            nonce=new_nonce(),
            created_ms=_wall_ms(),
            writer=self._writer_id,
            encoding=info,
            producer=self.producer,
            tokens=tuple(map(int, token_words(tokens))) if tokens is not None and self._options.keep_tokens else None,
        )
        try:
            return self._commit(meta, chunk)
        except BackendError as problem:
            self.events.problem(Event.STORE_FAILED, type(problem).__name__, problem)
            raise

    def _commit(self, meta: ShardMeta, chunk: ChunkBuffer) -> PutStatus:
        parts = build_shard(meta, chunk)
        size = sum(len(part) for part in parts)
        status = PutStatus.STORED
        for _ in range(_ADOPTION_TRIES):
            entry = put_shard(self._backend, meta, parts, self._shard_durability, replace=status is PutStatus.REPLACED)
            if entry is not None:
                self._record(entry)
                self.events.count(Event.REPLACED if status is PutStatus.REPLACED else Event.STORED)
                self.events.count(Event.BYTES_WRITTEN, size)
                return status
            found = self._inspect_existing(meta)
            if isinstance(found, Entry):
                self._record(found)
                self.events.count(Event.ADOPTED)
                return PutStatus.ADOPTED
            status = found
        raise BackendUnsettled(
            f"{ShardName(meta.fingerprint, meta.key, meta.part, meta.encoding.label).path} keeps changing"
        )

    def _inspect_existing(self, meta: ShardMeta) -> Entry | PutStatus:
        """What stands under the name of a shard that was to be written: to be adopted, replaced, or gone by now."""
        wanted = Wanted(
            self.identity, meta.key, meta.num_tokens, meta.depth, meta.part, meta.encoding.label, parent=meta.parent
        )
        try:
            found = self._read_entry(wanted)
        except ReadFault as fault:
            if fault.fault is Fault.MISSING:
                return PutStatus.STORED
            if fault.fault in (Fault.UNAVAILABLE, Fault.TOO_NEW):
                raise BackendUnsettled(f"{fault.path} stands in the way: {fault.reason}") from fault
            self.events.problem(Event.READ_DAMAGED, fault.path, fault.reason)
            self._quarantine(wanted)
            return PutStatus.STORED
        self.refresh()  # somebody may have marked it: then it goes when its grace time is over
        with self._lock:
            is_removed = self._is_removed(found.nonce)
        return PutStatus.REPLACED if is_removed else found

    def _read_entry(self, wanted: Wanted) -> Entry:
        path = wanted.name.path
        try:
            with self._backend.open_read(path) as handle:
                header = read_header(handle)
                check_wanted(header, wanted)
                return _entry_of_header(header, handle.size)
        except (BackendError, FormatError) as problem:
            raise as_fault(path, problem) from problem

    def _record(self, entry: Entry) -> None:
        with self._lock:
            self._view.add(entry)
            self._buffer(adds=[entry])
            self._note_touch(entry.key)
            is_full = len(self._pending.adds) >= self._options.flush_after_chunks
        if is_full or self._is_flush_due():
            self._flush_quietly()

    def label(self, name: str, key: ChunkKey, num_tokens: int, depth: int) -> None:
        """Give a name (of a document, say) to the sequence that ends with the chunk `key`. Raises `SegmentError`."""
        label = Label(key[:16], name, num_tokens, _wall_ms(), depth)
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

    def _refuse_unreadable(self, pending: Pending) -> None:
        """Raise now rather than at a flush, or when the segment is read: what else it holds would be lost with it."""
        segment = segment_of_pending(self.fingerprint, pending, self._writer_id, _wall_ms())
        decode_segment(encode_segment(segment), self.fingerprint)

    def _after_pins(self, key: bytes) -> int:
        """Now, or just after the latest pin of that key, whatever clock it was dated by: the last word counts."""
        known = [pin.created_ms for pin in self.state().pins if pin.key == key[:16]]
        return max([_wall_ms(), *(created_ms + 1 for created_ms in known)])

    def remove(self, entry: Entry, reason: RemoveReason, version: str | None = None) -> None:
        """Take one shard out of the index. The object is left where it is, for a sweep to delete."""
        now_ms = self._backend.now_ms()
        with self._lock:
            self._view.drop(entry)
            self._buffer(removes=[Remove(entry, reason, now_ms, version)])

    # ---- index ------------------------------------------------------------------------------------------------

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
        segment = segment_of_pending(self.fingerprint, self._in_flight, self._writer_id, _wall_ms())
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
        latest = segment_of_pending(self.fingerprint, pending, self._writer_id, _wall_ms())
        return combine(state, self.fingerprint, [*unmerged, latest])

    def close(self) -> None:
        """Flush and let go of threads. A flush that fails is counted; shards are found without it."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.shutdown(wait=True)
        self._flush_quietly()
        self._readers.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
                entry = _entry_of_header(header, handle.size)
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

    # ---- pending ----------------------------------------------------------------------------------------------

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
        self._pending.touches[number] = (max(day, _wall_ms() // DAY_MS), known + hits)

    def _known_hits(self, number: int) -> int:
        for hits in (self._in_flight.touches.get(number, (0, 0))[1], self._flushed_hits.get(number, 0)):
            if hits:
                return hits
        touches = self._state.touches
        at = int(touches["key"].searchsorted(number)) if len(touches) else 0
        return int(touches["hits"][at]) if at < len(touches) and int(touches["key"][at]) == number else 0

    def _after_fork(self) -> None:
        """In the child, where threads do not exist and locks may be held by some that do not: new ones."""
        self._lock, self._io = threading.RLock(), threading.RLock()
        self._readers = ThreadPoolExecutor(self._reader_threads, thread_name_prefix="lmcache-read")
        self._background = None


_OPEN: weakref.WeakSet[Namespace] = weakref.WeakSet()


def _after_fork() -> None:
    for namespace in list(_OPEN):
        namespace._after_fork()


os.register_at_fork(after_in_child=_after_fork)


class BackendUnsettled(BackendError):
    """What stands under a shard's name can be neither used nor put out of the way."""


def is_lossless_label(label: str) -> bool:
    """True for `raw` and `bfx`; the label of a lossy encoding names a class of quality, too."""
    return "-" not in label


def damaged_version(backend: Backend, wanted: Wanted) -> str | None:
    """The version of the object that lies damaged or foreign under a shard's name, after reading all of it.

    None where it is sound, or newer than this release; "" where what lies there is no object at all. Raises
    `NotFound`, `Unavailable`.
    """
    try:
        with backend.open_read(wanted.name.path) as handle:
            try:
                header = read_header(handle)
                check_wanted(header, wanted)
                verify_data(handle, header)
            except UnsupportedVersion:
                return None
            except (FormatError, ShortRead):
                return handle.version
            return None
    except Obstructed:
        return ""


def _entry_of_header(header: ShardHeader, size_bytes: int) -> Entry:
    return entry_of(header.meta, ObjectInfo("", size_bytes, "", 0))


def _entries(segment: Segment) -> Iterator[Entry]:
    state = combine(empty_state(), segment.fingerprint, [segment])
    return (state.entry(row) for row in range(len(state)))


def _is_whole(pieces: Sequence[tuple[int, Part]], need: Part) -> bool:
    area = sum(piece.num_layers * piece.num_heads for _, piece in pieces)
    return area == need.num_layers * need.num_heads


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
