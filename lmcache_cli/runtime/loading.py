"""From chunks of the store to slots of the engine's pages: nothing is written that was not verified.

Chunks are read ahead: while one is copied to the pages, the next ones are read and checked.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from lmcache_cli.store import ChunkRef, Namespace, ReadResult
from lmcache_format.keys import KeyList

from .memory import MemoryObj, MemoryPool
from .pages import BlockSpan, Pages
from .threads import settled

_LOG = logging.getLogger("lmcache.runtime")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Tokens `start` to `stop` of a sequence, which lie in `chunks` (consecutive; the first holds `start`), are to be
    written to the blocks of `span`. Slots before `start` and from `stop` on stay as they are."""

    chunks: tuple[ChunkRef, ...]
    start: int
    stop: int
    span: BlockSpan


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """Tokens `start` to `good_stop` are in the pages. `reason` tells why not all are, and is empty otherwise.

    `failed_depth` is the number in its sequence of the first chunk that is not.
    """

    good_stop: int
    bytes_read: int
    reason: str = ""
    failed_depth: int | None = None


class Loader:
    """Executes loads one after the other; use one for each thread that loads.

    Up to `depth` chunks (at most as many as `pool` holds) are read at a time. A load that takes longer than `timeout_s`
    has failed; the buffers that are still being read into come back when that is over. Reads run on `cores`, if given.
    """

    def __init__(
        self,
        pages: Pages,
        pool: MemoryPool,
        *,
        depth: int = 8,
        timeout_s: float = 30.0,
        cores: Collection[int] | None = None,
    ) -> None:
        self._pages = pages
        self._pool = pool
        self._depth = min(depth, pool.num_chunks)
        self._timeout_s = timeout_s
        self._reader = ThreadPoolExecutor(4, thread_name_prefix="lmcache-load", initializer=settled(cores=cores))

    def load(self, namespace: Namespace, request: LoadRequest) -> LoadOutcome:
        """Load; blocks, and never raises for what the store or the memory holds. Tokens after a chunk that failed are
        not written, since their keys name a prefix which the engine does not have."""
        deadline = time.monotonic() + self._timeout_s
        namespace.hear_of(KeyList(b"".join(chunk.key for chunk in request.chunks)))
        waiting = deque(request.chunks)
        readings: deque[_Reading] = deque()
        position, size_bytes = request.start, 0
        try:
            for chunk in request.chunks:
                while waiting and len(readings) < self._depth:
                    ahead = self._begin(namespace, waiting[0], deadline, is_needed=not readings)
                    if ahead is None:
                        break
                    readings.append(ahead)
                    waiting.popleft()
                if not readings:
                    return LoadOutcome(position, size_bytes, "no memory for the next chunk", chunk.depth)
                reading = readings.popleft()
                try:
                    result = reading.wait(deadline)
                    if isinstance(result, str):
                        return LoadOutcome(position, size_bytes, result, chunk.depth)
                    size_bytes += result.bytes_read
                    problem = str(result.fault or "") or self._place(namespace, request, chunk, reading.memory)
                    if problem:
                        return LoadOutcome(position, size_bytes, problem, chunk.depth)
                finally:
                    reading.end()
                position = max(position, min(request.stop, _start_of(namespace, chunk) + chunk.num_tokens))
        finally:
            for reading in readings:
                reading.end()
        return LoadOutcome(position, size_bytes)

    def close(self) -> None:
        """Let go of threads; reads under way end by themselves."""
        self._reader.shutdown(wait=False)

    def _begin(self, namespace: Namespace, chunk: ChunkRef, deadline: float, *, is_needed: bool) -> _Reading | None:
        """Begin to read; None where there is no memory, for which only the chunk that is needed next waits."""
        wait_s = max(0.0, deadline - time.monotonic()) if is_needed else 0.0
        memory = self._pool.lease(namespace.identity, chunk.num_tokens, timeout_s=wait_s)
        if memory is None:
            return None
        return _Reading(self._reader.submit(namespace.read, [chunk], [memory.buffer]), memory)

    def _place(self, namespace: Namespace, request: LoadRequest, chunk: ChunkRef, memory: MemoryObj) -> str:
        """Write one chunk; the reason where it cannot be, else nothing."""
        begin = _start_of(namespace, chunk)
        end = begin + chunk.num_tokens
        start, stop = max(begin, request.start), min(end, request.stop)
        if start >= stop:
            return ""
        try:
            slots = [-1] * (start - begin) + request.span.slots(start, stop) + [-1] * (end - stop)
            self._pages.scatter(memory.buffer, slots)
        except (ValueError, RuntimeError, IndexError) as problem:
            _LOG.exception("chunk %d cannot be written to the pages", chunk.depth)
            return f"{type(problem).__name__}: {problem}"
        return ""


@dataclass(slots=True)
class _Reading:
    """A chunk that is being read, and its memory, which is given back once the read is over, whoever waits."""

    future: Future[ReadResult]
    memory: MemoryObj

    def wait(self, deadline: float) -> ReadResult | str:
        """The result, or why there is none."""
        try:
            return self.future.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            return "the read took too long and is given up"
        except (Exception, CancelledError) as problem:  # noqa: BLE001  whatever a back-end does, the engine goes on
            _LOG.exception("a read failed")
            return f"{type(problem).__name__}: {problem}"

    def end(self) -> None:
        self.future.cancel()
        self.future.add_done_callback(lambda _: self.memory.release())


def _start_of(namespace: Namespace, chunk: ChunkRef) -> int:
    return chunk.depth * namespace.identity.chunk_tokens
