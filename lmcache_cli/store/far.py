"""A store behind another one: larger and further away, slow or not there at all now and then.

Nothing here waits without a limit. Matching asks what is known of its index, in memory; opening and refreshing happen
behind the scenes. Reading waits for threads of its own that write to memory of their own: whoever gives up leaves
nobody behind that still writes to the buffers he gets back.
"""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from lmcache_cli.backends import Backend, BackendError, Capabilities, CircuitOpen, ReadHandle, open_backend
from lmcache_cli.backends.breaker import CircuitBreaker
from lmcache_cli.backends.buffers import HUGE_PAGE_BYTES, BufferPool, Lease, NoBuffer, round_up
from lmcache_cli.backends.wrapper import BackendWrapper, HandleWrapper
from lmcache_format.errors import FormatError
from lmcache_format.geometry import Part, part_bytes, whole_part
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, KeyList
from lmcache_format.names import identity_path, is_lossless_label
from lmcache_format.shard import ShardHeader, ShardMeta

from .chunk import ChunkBuffer
from .copying import MemoryHandle, check_size, most_shard_bytes
from .coverage import covers, pick
from .errors import StoreError
from .events import Event, Events
from .matching import ChunkRef
from .namespace import Namespace
from .reading import Fault, ReadFault, Wanted, as_fault, read_header, read_part
from .state import Entry
from .store import Store

P = ParamSpec("P")
T = TypeVar("T")
_TRIES = 3
_NEVER = -float("inf")

Takes = Callable[[Mapping[str, Any]], bool]
"""Whether shards of a producer may be read."""


@dataclass(frozen=True, slots=True)
class FarOptions:
    """How a store behind another one is asked. After `timeout_s` a read has failed; after `breaker_failures` of them in
    a row it is left alone for `cooldown_s`. At most `num_readers` shards are fetched at once, into at most
    `memory_bytes` (room for two shards in any case), which they share with what waits to be promoted."""

    timeout_s: float = 5.0
    breaker_failures: int = 3
    cooldown_s: float = 30.0
    num_readers: int = 8
    memory_bytes: int = 256 << 20


class Distant(BackendWrapper):
    """A back-end that is never asked while somebody waits for a match, however near it says that it is."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, cheap_stat=False)


class FarStore:
    """A store that is opened when it answers. Raises `Unsupported` at once for a URL that no back-end is for."""

    def __init__(self, where: str | Backend) -> None:
        self._backend = Distant(open_backend(where) if isinstance(where, str) else where)
        self._lock = threading.Lock()
        self._store: Store | None = None

    @property
    def url(self) -> str:
        """Where it lies; credentials are shown as `***`."""
        return self._backend.url

    def open(self) -> Store:
        """The store; blocks. Raises what `Store.open` does, and is tried again by the next call then."""
        with self._lock:
            if self._store is None:
                self._store = Store.open(self._backend)
            return self._store

    def close(self) -> None:
        """Give back what the back-end holds."""
        self._backend.close()


@dataclass(slots=True)
class Fetched:
    """What came of one shard: `whole` and unchecked as it lies in the far store, or a checked `piece` of it, decoded.

    The bytes are in leased memory; whoever has this gives it back.
    """

    wanted: Wanted
    piece: Part
    lease: Lease
    version: str
    header: ShardHeader | None = None
    buffer: ChunkBuffer | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the shard, or of the decoded piece."""
        return self.lease.view.nbytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory it holds."""
        return round_up(self.size_bytes, HUGE_PAGE_BYTES)

    @property
    def may_be_kept(self) -> bool:
        """Whether it can be written to another store under its right name. A lossy shard is kept as a whole or not at
        all: decoded, its loss would be hidden."""
        return self.buffer is None or is_lossless_label(self.wanted.encoding)

    @property
    def producer(self) -> Mapping[str, Any]:
        """Who computed it, of a shard that was placed."""
        header = self.header or read_header(MemoryHandle(self.wanted.name.path, self.lease.view, self.version))
        return header.meta.producer

    def place(self, backend: Backend, out: ChunkBuffer) -> None:
        """Check it, and fill its piece of `out`. Raises `ReadFault`."""
        if self.buffer is not None:
            _copy_piece(self.buffer, out)
            return
        handle = MemoryHandle(self.wanted.name.path, self.lease.view, self.version)
        read_part(_Open(backend, handle), self.wanted, self.piece, out)


class FarNamespace:
    """One identity's chunks in a far store. `opener` blocks, and raises what `Store.namespace` does.

    `events` counts what this reader gets, and what it does not, once logged. `memory_bytes` bound what is fetched and
    what waits to be promoted.
    """

    def __init__(
        self,
        url: str,
        identity: Identity,
        opener: Callable[[], Namespace],
        events: Events,
        options: FarOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.identity = identity
        self.options = options or FarOptions()
        self._opener = opener
        self._events = events
        self._clock = clock
        most = round_up(most_shard_bytes(identity, whole_part(identity)), HUGE_PAGE_BYTES)
        self.memory_bytes = max(self.options.memory_bytes, 2 * most)
        self._namespace: Namespace | None = None
        self._retry_at = _NEVER
        self._is_closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """Threads and locks of this process, and memory that no thread of another writes to."""
        self._lock = threading.Lock()
        self._memory = BufferPool(self.memory_bytes)
        self.breaker = CircuitBreaker(
            failures=self.options.breaker_failures,
            cooldown_s=self.options.cooldown_s,
            clock=self._clock,
            url=self.url,
        )
        self._opening: Future[Namespace] | None = None
        self._refreshing: Future[bool] | None = None
        self._trying: Future[None] | None = None
        self._index_thread = ThreadPoolExecutor(1, thread_name_prefix="lmcache-far-index")
        self._readers = ThreadPoolExecutor(self.options.num_readers, thread_name_prefix="lmcache-far-read")

    def begin(self) -> Future[Namespace] | None:
        """Begin to open it behind the scenes, or go on; None where it is open, closed, or left alone for a while."""
        with self._lock:
            is_due = self._namespace is None and self._clock() >= self._retry_at
            if self._opening is None and is_due and not self._is_closed:
                self._opening = self._index_thread.submit(self._opener)
            return self._opening

    def ready(self, wait_s: float = 0.0, *, is_strict: bool = False) -> Namespace | None:
        """The namespace, where it is open or opens within `wait_s`; it goes on opening behind the scenes. With
        `is_strict` raises `StoreError` where the far store answers that it cannot be used."""
        if self._namespace is not None:
            return self._namespace
        opening = self.begin()
        if opening is None:
            return self._namespace
        with suppress(FutureTimeout, Exception, CancelledError):  # what it raised is looked at below
            opening.result(timeout=max(wait_s, 0.0))
        if not opening.done() or opening.cancelled():
            return None
        problem = opening.exception()
        with self._lock:
            if self._opening is opening:
                self._opening = None
                self._retry_at = self._clock() + self.options.cooldown_s
                if problem is None:
                    self._namespace = opening.result()
        if problem is not None:
            self._events.problem(Event.FAR_UNAVAILABLE, self.url, problem)
            if is_strict and isinstance(problem, StoreError):
                raise problem
        return self._namespace

    def answering(self) -> Namespace | None:
        """The namespace, unless its store is not open yet, or is left alone: then it is tried behind the scenes when it
        is time to, since one whose turn it is to try would pay for all."""
        if not self.breaker.is_open:
            return self.ready()
        if not self.breaker.is_left_alone:
            self._try_again()
        return None

    def match_keys(self, keys: KeyList) -> int:
        """How many chunks, from the first on, it has as far as is known. Waits for nothing."""
        namespace = self.answering()
        return 0 if namespace is None else namespace.match_keys(keys)

    def hear_of(self, keys: KeyList) -> None:
        """Take in what others wrote there, unless all of `keys` are known. Waits until the deadline."""
        namespace = self.ready(self.options.timeout_s)
        if namespace is None or self.breaker.is_open or namespace.match_keys(keys) == len(keys):
            return
        with self._lock:
            if self._is_closed:
                return
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = self._index_thread.submit(namespace.refresh)
            refreshing = self._refreshing
        try:
            refreshing.result(timeout=self.options.timeout_s)
        except FutureTimeout:
            self.breaker.failed()
            self._events.problem(Event.FAR_UNAVAILABLE, self.url, f"its index took over {self.options.timeout_s:g} s")

    def shards(self, key: ChunkKey) -> list[Entry]:
        """The shards that hold a chunk, as far as is known. Waits for nothing."""
        namespace = self.answering()
        return [] if namespace is None else namespace.shards(key)

    def headers(self, wanted: Sequence[tuple[ChunkRef, Entry]]) -> list[ShardMeta | None]:
        """See `Namespace.headers`. Waits until the deadline; None for what did not come by then."""
        namespace = self.answering()
        if namespace is None:
            return [None] * len(wanted)
        deadline = time.monotonic() + self.options.timeout_s
        asked = [self._submit(namespace.headers, [one]) for one in wanted]
        found: list[ShardMeta | None] = []
        for future in asked:
            if future is None:
                found.append(None)
                continue
            try:
                found += future.result(timeout=max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                future.cancel()
                found.append(None)
            except (Exception, CancelledError) as problem:  # noqa: BLE001  the serving path: any doubt is a miss
                self._events.problem(Event.FAR_UNAVAILABLE, self.url, f"{type(problem).__name__}: {problem}")
                found.append(None)
        if any(future is not None and (future.cancelled() or not future.done()) for future in asked):
            self.breaker.failed()
            self._events.problem(Event.FAR_UNAVAILABLE, self.url, f"headers took over {self.options.timeout_s:g} s")
        return found

    def read(self, chunk: ChunkRef, out: ChunkBuffer, takes: Takes | None = None) -> list[Fetched]:
        """Fill `out` with a chunk, every byte checked; returns what was fetched, for the caller to give back. Shards
        of producers that are not taken count as missing.

        Blocks until the deadline at most. Raises `ReadFault`; `out` then holds unspecified bytes, and nobody writes to
        it.
        """
        namespace = self.answering()
        if namespace is None:
            raise ReadFault(Fault.UNAVAILABLE, self.url, "is not open, or left alone for a while")
        path = namespace._path(chunk.key)
        if not covers([entry.part for entry in namespace.shards(chunk.key)], out.part):
            raise ReadFault(Fault.MISSING, path, f"not in {self.url}")
        try:
            self.breaker.enter(path)
        except CircuitOpen as problem:
            raise ReadFault(Fault.UNAVAILABLE, path, problem) from problem
        try:
            fetched = self._read(namespace, chunk, out, takes)
        except ReadFault as fault:
            if fault.fault is Fault.UNAVAILABLE:
                self.breaker.failed()
                self._events.problem(Event.FAR_UNAVAILABLE, self.url, fault)
            else:
                self.breaker.answered()
            raise
        except NoBuffer as problem:
            self.breaker.abandoned()
            raise ReadFault(Fault.UNAVAILABLE, path, problem) from problem
        except BaseException:
            self.breaker.abandoned()
            raise
        self.breaker.answered()
        namespace._touch([chunk])
        self._events.count(Event.FAR_READ)
        self._events.count(Event.FAR_BYTES_READ, sum(one.size_bytes for one in fetched))
        return fetched

    def close(self) -> None:
        """Let go; what is under way ends by itself, and the memory it writes to is nobody else's."""
        with self._lock:
            self._is_closed = True
            opening, namespace = self._opening, self._namespace
        if opening is not None and not opening.cancel():
            opening.add_done_callback(_close_opened)
        if namespace is not None:
            closing = self._index_thread.submit(namespace.close)
            with suppress(FutureTimeout, Exception):
                closing.result(timeout=self.options.timeout_s)
        self._index_thread.shutdown(wait=False)
        self._readers.shutdown(wait=False, cancel_futures=True)

    # ---- how --------------------------------------------------------------------------------------------------

    def _try_again(self) -> None:
        with self._lock:
            namespace = self._namespace
            is_busy = self._trying is not None and not self._trying.done()
            if namespace is None or is_busy or self._is_closed:
                return
            self._trying = self._index_thread.submit(self._try, namespace)

    def _try(self, namespace: Namespace) -> None:
        with suppress(CircuitOpen):
            self.breaker.enter(self.url)
            try:
                namespace._backend.stat(identity_path(namespace.fingerprint))
            except BackendError:
                self.breaker.failed()
            except BaseException:
                self.breaker.abandoned()
                raise
            else:
                self.breaker.answered()

    def _read(self, namespace: Namespace, chunk: ChunkRef, out: ChunkBuffer, takes: Takes | None) -> list[Fetched]:
        """From whatever shards hold it; a faulty one leaves the view, and the others are tried."""
        deadline = time.monotonic() + self.options.timeout_s
        last: ReadFault | None = None
        for _ in range(_TRIES):
            entries = namespace.shards(chunk.key)
            if not covers([entry.part for entry in entries], out.part):
                break
            pieces = pick([entry.part for entry in entries], out.part)
            try:
                fetched = self._read_pieces(
                    namespace, chunk, [(entries[n], piece) for n, piece in pieces], out, deadline
                )
                _check_producers(fetched, takes)
                return fetched
            except _NotTaken:
                raise
            except ReadFault as fault:
                last = fault
                if fault.fault in (Fault.UNAVAILABLE, Fault.TOO_NEW):
                    break
        raise last or ReadFault(Fault.MISSING, namespace._path(chunk.key), "no shard covers the layers and heads")

    def _read_pieces(
        self,
        namespace: Namespace,
        chunk: ChunkRef,
        pieces: Sequence[tuple[Entry, Part]],
        out: ChunkBuffer,
        deadline: float,
    ) -> list[Fetched]:
        begun = [
            (entry, self._begin(namespace, namespace._wanted(chunk, entry), piece, deadline)) for entry, piece in pieces
        ]
        done: list[Fetched] = []
        try:
            for entry, fetch in begun:
                done.append(self._take(namespace, entry, fetch, out, deadline))
        except BaseException:
            for one in done:
                one.lease.release()
            for _, fetch in begun[len(done) :]:
                fetch.abandon()
            raise
        return done

    def _begin(self, namespace: Namespace, wanted: Wanted, piece: Part, deadline: float) -> _Fetch:
        future = self._submit(self._fetch, namespace, wanted, piece, deadline)
        if future is None:
            raise ReadFault(Fault.UNAVAILABLE, wanted.name.path, "no thread could be started to read it")
        return _Fetch(wanted, piece, future)

    def _submit(self, work: Callable[P, T], *arguments: P.args, **how: P.kwargs) -> Future[T] | None:
        try:
            return self._readers.submit(work, *arguments, **how)
        except RuntimeError:  # closed meanwhile, or the process ends
            return None

    def _take(self, namespace: Namespace, entry: Entry, fetch: _Fetch, out: ChunkBuffer, deadline: float) -> Fetched:
        """Wait for a shard, check it and place it. Damage is believed when it was seen twice."""
        for is_last in (False, True):
            try:
                fetched = fetch.wait(deadline)
                try:
                    fetched.place(namespace._backend, out)
                except BaseException:
                    fetched.lease.release()
                    raise
                return fetched
            except ReadFault as fault:
                if fault.fault is not Fault.DAMAGED or is_last:
                    self._deal_with(namespace, fault, fetch.wanted, entry)
                    raise
            fetch = self._begin(namespace, fetch.wanted, fetch.piece, deadline)
        raise AssertionError

    def _deal_with(self, namespace: Namespace, fault: ReadFault, wanted: Wanted, entry: Entry) -> None:
        """As any reader of that store would; what it changes there, if it may, it changes behind the scenes."""
        if fault.fault in (Fault.DAMAGED, Fault.FOREIGN):
            namespace._forget(entry, None)
            with suppress(RuntimeError):  # closed meanwhile
                self._index_thread.submit(namespace._handle_fault, fault, wanted, entry)
            return
        namespace._handle_fault(fault, wanted, entry)

    def _fetch(self, namespace: Namespace, wanted: Wanted, piece: Part, deadline: float) -> Fetched:
        """In a thread of ours: all of a shard where all is wanted, else a piece of it, by ranges."""
        path = wanted.name.path
        try:
            with namespace._backend.open_read(path) as handle:
                if piece != wanted.part:
                    return self._fetch_piece(namespace, handle, wanted, piece, deadline)
                check_size(handle.size, self.identity, wanted.part)
                lease = self._lease(handle.size, deadline)
                try:
                    handle.read_into(0, [lease.view])
                except BaseException:
                    lease.release()
                    raise
                return Fetched(wanted, piece, lease, handle.version)
        except (BackendError, FormatError) as problem:
            raise as_fault(path, problem) from problem

    def _fetch_piece(
        self, namespace: Namespace, handle: ReadHandle, wanted: Wanted, piece: Part, deadline: float
    ) -> Fetched:
        header = read_header(handle)
        lease = self._lease(part_bytes(self.identity, piece, wanted.num_tokens), deadline)
        try:
            buffer = ChunkBuffer(self.identity, piece, wanted.num_tokens, lease.view)
            read_part(_Open(namespace._backend, handle), wanted, piece, buffer)
        except BaseException:
            lease.release()
            raise
        return Fetched(wanted, piece, lease, handle.version, header, buffer)

    def _lease(self, size_bytes: int, deadline: float) -> Lease:
        return self._memory.lease(size_bytes, timeout_s=max(0.0, deadline - time.monotonic()))


@dataclass(slots=True)
class _Fetch:
    """A shard on its way."""

    wanted: Wanted
    piece: Part
    future: Future[Fetched]

    def wait(self, deadline: float) -> Fetched:
        """Raises `ReadFault`, `NoBuffer`; what comes later is given back unread."""
        path = self.wanted.name.path
        try:
            return self.future.result(timeout=max(0.0, deadline - time.monotonic()))
        except (ReadFault, NoBuffer):
            raise
        except FutureTimeout as problem:
            self.abandon()
            raise ReadFault(Fault.UNAVAILABLE, path, "the read took too long and is given up") from problem
        except (Exception, CancelledError) as problem:  # whatever a back-end does, the reader goes on
            raise ReadFault(Fault.UNAVAILABLE, path, f"{type(problem).__name__}: {problem}") from problem

    def abandon(self) -> None:
        """Nobody waits any more."""
        self.future.cancel()
        self.future.add_done_callback(_release)


class _NotTaken(ReadFault):
    """Sound, and computed by an engine whose KV the reader does not take."""


def _check_producers(fetched: Sequence[Fetched], takes: Takes | None) -> None:
    """Raise `_NotTaken`, with all given back, unless the reader takes every shard."""
    if takes is None or all(takes(one.producer) for one in fetched):
        return
    for one in fetched:
        one.lease.release()
    raise _NotTaken(Fault.MISSING, fetched[0].wanted.name.path, "computed by an engine whose KV is not accepted")


class _Open(BackendWrapper):
    """A back-end on which one object is open already."""

    def __init__(self, inner: Backend, handle: ReadHandle) -> None:
        super().__init__(inner)
        self._handle = handle

    def open_read(self, name: str) -> ReadHandle:
        return _Borrowed(self._handle)


class _Borrowed(HandleWrapper):
    __slots__ = ()

    def close(self) -> None:
        """Left to the one who opened it."""


def _copy_piece(buffer: ChunkBuffer, out: ChunkBuffer) -> None:
    first, to = buffer.part.head_start, out.part.head_start
    for name, here in buffer.tensors.items():
        there = out.tensors[name]
        if first is None or to is None:
            there[...] = here
        else:
            there[first - to : first - to + buffer.part.num_heads] = here


def _release(future: Future[Fetched]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().lease.release()


def _close_opened(future: Future[Namespace]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
