"""Reading chunks: from whatever shards hold them, and what a fault that is met means for the store."""

from __future__ import annotations

import os
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lmcache_cli.backends import AlreadyExists, Backend, BackendError, NotFound, Obstructed, ShortRead
from lmcache_format.errors import FormatError, UnsupportedVersion
from lmcache_format.geometry import Part
from lmcache_format.keys import ChunkKey
from lmcache_format.names import new_nonce
from lmcache_format.segment import RemoveReason
from lmcache_format.shard import ShardMeta

from .chunk import ChunkBuffer
from .coverage import pick
from .errors import Refused
from .events import Event
from .live_index import LiveIndex
from .matching import ChunkRef, Match, ReadResult
from .reading import Fault, ReadFault, Wanted, check_wanted, read_header, read_part, verify_data
from .state import Entry

_TRIES = 3
LEAST_READERS = 2


class Retrieval(LiveIndex):
    """Chunks of a namespace into buffers, every byte verified; see `Namespace` for the arguments."""

    def _start_readers(self, reader_threads: int) -> None:
        self._reader_threads = reader_threads
        self._waits_for_device = False
        self._readers = ThreadPoolExecutor(reader_threads, thread_name_prefix="lmcache-read")

    def _after_fork(self) -> None:
        super()._after_fork()
        self._readers = ThreadPoolExecutor(self._reader_threads, thread_name_prefix="lmcache-read")

    def buffer(self, num_tokens: int | None = None, part: Part | None = None) -> ChunkBuffer:
        """A new buffer for a chunk of `num_tokens` tokens (a full one by default). Reuse it where you can."""
        return ChunkBuffer(self.identity, part or self.need, num_tokens or self.identity.chunk_tokens)

    def read(self, chunks: Sequence[ChunkRef], out: Sequence[ChunkBuffer]) -> ReadResult:
        """Read chunks into buffers (one each, of this namespace's part, the caller's), several at a time.

        Blocks. Every byte counted in the result was verified; buffers beyond `num_chunks` hold unspecified bytes. Never
        raises for what is found in the store: a chunk that cannot be read ends the result, and is handled by its kind:
        missing ones leave this process's view, damaged ones go to quarantine, unreachable ones stay.
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

    def shards(self, key: ChunkKey) -> list[Entry]:
        """The shards from which `read` takes a chunk, as the index lists them."""
        with self._lock:
            return self._view.entries(key)

    def headers(self, wanted: Sequence[tuple[ChunkRef, Entry]]) -> list[ShardMeta | None]:
        """What shards say of themselves; None for those that cannot be read, or are not what the index lists. Of the
        latter this process forgets that they are listed: the next match looks for what is there instead."""
        if self._can_probe or len(wanted) < LEAST_READERS:
            return [self._header(*one) for one in wanted]
        return list(self._readers.map(lambda one: self._header(*one), wanted))

    def _header(self, chunk: ChunkRef, entry: Entry) -> ShardMeta | None:
        expected = self._wanted(chunk, entry)
        for _ in range(2):  # once more: what is wrong may have come about on the way from the device
            try:
                with self._backend.open_read(expected.name.path) as handle:
                    header = read_header(handle)
                check_wanted(header, expected)
            except NotFound:
                break
            except FormatError:
                continue
            except BackendError:
                return None
            except (Exception, CancelledError) as problem:  # noqa: BLE001  the serving path: any doubt is a no
                self.events.problem(Event.READ_UNAVAILABLE, expected.name.path, problem)
                return None
            if header.meta.nonce == entry.nonce:
                return header.meta
            break
        self._forget(entry, None)
        return None

    def _read_all(self, chunks: Sequence[ChunkRef], out: Sequence[ChunkBuffer]) -> list[int | ReadFault]:
        """Returns or raises (KeyboardInterrupt) only when no thread writes to the buffers any more.

        Every thread takes the next chunk when it is done with one: a future a chunk would wake this thread each time.
        There are few threads at first, and more where that pays.
        """
        outcomes: list[int | ReadFault | None] = [None] * len(chunks)
        waiting = deque(range(len(chunks)))
        at_work: list[threading.Event] = []  # set when a thread is done; a thread is in here before it takes a chunk

        def work() -> None:
            done = threading.Event()
            at_work.append(done)
            try:
                while (number := _taken(waiting)) is not None:
                    outcomes[number] = self._read_guarded(chunks[number], out[number])
                    pays = waiting and len(workers) < self._most_readers()
                    if pays and _taken(spare) is not None:
                        workers.append(self._readers.submit(work))
            finally:
                done.set()

        def stop() -> None:
            """Nobody takes a chunk any more; wait for those who are at one."""
            waiting.clear()
            for done in at_work:
                done.wait()

        at_once = min(self._reader_threads, LEAST_READERS)
        spare = deque(range(self._reader_threads - at_once))
        self._waits_for_device = False
        workers: list[Future[None]] = []
        try:
            for _ in range(min(at_once, len(chunks))):
                workers.append(self._readers.submit(work))  # noqa: PERF401  one may start while the next is not there
            for worker in workers:
                worker.result()
        except RuntimeError as problem:  # closed meanwhile, or the process ends: nothing starts any more
            stop()
            self.events.problem(Event.READ_UNAVAILABLE, self.fingerprint, problem)
        except BaseException:
            stop()
            raise
        return [
            self._unread(chunk) if outcome is None else outcome for chunk, outcome in zip(chunks, outcomes, strict=True)
        ]

    def _most_readers(self) -> int:
        """From memory one more than there are cores keeps them busy. A device wants all: while some threads prepare a
        chunk or check one, in turns, the others keep it busy."""
        if self._waits_for_device:
            return self._reader_threads
        return min(self._reader_threads, max(3, min(4, os.cpu_count() or 1)))

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
        for _ in range(_TRIES):
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
                self._forget(entry, None)  # by this process: what is away for a moment is not gone for good
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

    def _unread(self, chunk: ChunkRef) -> ReadFault:
        return ReadFault(Fault.UNAVAILABLE, self._path(chunk.key), "no thread could be started to read it")


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


def _is_whole(pieces: Sequence[tuple[int, Part]], need: Part) -> bool:
    area = sum(piece.num_layers * piece.num_heads for _, piece in pieces)
    return area == need.num_layers * need.num_heads


def _taken(numbers: deque[int]) -> int | None:
    """The first of what is left, for this thread alone; None where nothing is."""
    try:
        return numbers.popleft()
    except IndexError:
        return None
