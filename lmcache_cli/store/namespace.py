"""A namespace of a store: match prompts, read chunks, write chunks.

Any doubt on read is a miss, counted and logged once; `match` changes nothing in the store; a shard counts as present
when it lies under its name with a sound header, whether or not the index has heard of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from lmcache_cli.backends import Backend, BackendError, Durability
from lmcache_cli.backends.closing import Closing
from lmcache_format.encodings import get_encoding
from lmcache_format.errors import FormatError, KeyInputError
from lmcache_format.geometry import Part, whole_part
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
from lmcache_format.names import ShardName, is_lossless_label, new_nonce
from lmcache_format.shard import EncodingInfo, ShardMeta

from . import wall_clock
from .chunk import ChunkBuffer
from .errors import Refused
from .events import Event, Events
from .live_index import WriterOptions, entry_of_header
from .matching import ChunkRef, Match
from .reading import Fault, ReadFault, Wanted, as_fault, check_wanted, read_header
from .retrieval import Retrieval
from .state import Entry
from .writing import build_shard, put_shard

_COMMIT_TRIES = 3


class PutStatus(Enum):
    """What became of a chunk that was to be written."""

    STORED = "stored"
    PRESENT = "present"
    ADOPTED = "adopted"
    REPLACED = "replaced"


class Namespace(Retrieval, Closing):
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
        options = writer or WriterOptions()
        super().__init__(
            backend,
            identity,
            need or whole_part(identity),
            options,
            events or Events(),
            allow_lossy=allow_lossy,
            may_write=may_write,
            refresh_interval_s=refresh_interval_s,
            clock=clock,
        )
        self.producer: Mapping[str, Any] = options.producer or {}
        is_full = options.durability is Durability.FULL
        self._shard_durability = Durability.DATA if is_full else options.durability  # names are synced by flush
        self._start_readers(reader_threads)

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

    def num_kept(self, keys: KeyList) -> int:
        """How many chunks, from the first on, need not be written: they are present where `put` would put them."""
        return self.match_keys(keys)

    def hear_of(self, keys: KeyList) -> None:
        """Make sure that this process knows chunks which another one found: its own view may be the older one."""
        if self.match_keys(keys) < len(keys):
            self.refresh()

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
            created_ms=wall_clock.now_ms(),
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
        status = PutStatus.STORED
        for _ in range(_COMMIT_TRIES):
            entry = put_shard(self._backend, meta, parts, self._shard_durability, replace=status is PutStatus.REPLACED)
            if entry is not None:
                self._record(entry)
                self.events.count(Event.REPLACED if status is PutStatus.REPLACED else Event.STORED)
                self.events.count(Event.BYTES_WRITTEN, entry.size_bytes)
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
                return entry_of_header(header, handle.size)
        except (BackendError, FormatError) as problem:
            raise as_fault(path, problem) from problem

    def is_removed(self, nonce: str) -> bool:
        """True for a write that somebody took out of the index, as far as this process knows."""
        with self._lock:
            return self._is_removed(nonce)

    def record(self, entry: Entry) -> None:
        """List a shard that was put there by other means than `put`."""
        self._record(entry)

    @property
    def writer_id(self) -> str:
        """By which this process is known in what it writes."""
        return self._writer_id

    def close(self) -> None:
        """Flush and let go of threads. A flush that fails is counted; shards are found without it."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.shutdown(wait=True)
        self._flush_quietly()
        self._readers.shutdown(wait=True)


class BackendUnsettled(BackendError):
    """What stands under a shard's name can be neither used nor put out of the way."""
