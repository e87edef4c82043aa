"""Writes chunks off the request path: one thread, a bounded queue, parents before children."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lmcache_cli.backends import BackendError, NoSpace
from lmcache_cli.store import ChunkRef, Namespace, PutStatus, StoreError
from lmcache_format.errors import FormatError

from .memory import MemoryObj
from .threads import settled

_LOG = logging.getLogger("lmcache.runtime")
_FAILED_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A chunk to be written. The writer owns `memory` from the submission on, and releases it when the chunk is
    written, or given up. `is_suspect`: the index may be wrong to call the chunk present; read it before believing."""

    namespace: Namespace
    chunk: ChunkRef
    memory: MemoryObj
    is_suspect: bool = False


class BackgroundWriter:
    """Writes jobs in the order they came. A write that fails is counted, and so are the chunks that follow it in its
    sequence: without their parent they could never be found. A full device stops writing for `pause_s`.

    The index is flushed once nothing was written for `flush_idle_s`. `on_saved` is called for every chunk that is in
    the store now, by the writer's thread, which runs on `cores` if they are given, and gives way to others.
    """

    def __init__(
        self,
        *,
        pause_s: float = 30.0,
        flush_idle_s: float = 2.0,
        on_saved: Callable[[ChunkRef], None] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._on_saved = on_saved
        self._settle = settled(cores=cores, is_background=True)
        self._pause_s = pause_s
        self._flush_idle_s = flush_idle_s
        self._paused_until = -float("inf")
        self._changed = threading.Condition()
        self._jobs: deque[SaveJob] = deque()
        self._is_busy = False
        self._is_closed = False
        self._failed: dict[tuple[str, bytes], None] = {}
        self._unflushed: dict[int, Namespace] = {}
        self._thread = threading.Thread(target=self._run, name="lmcache-save", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Jobs not yet written."""
        with self._changed:
            return len(self._jobs) + self._is_busy

    def submit(self, job: SaveJob) -> None:
        """Take a job over; returns at once. What bounds the queue is the pool that `memory` comes from."""
        with self._changed:
            if not self._is_closed:
                self._jobs.append(job)
                self._changed.notify_all()
                return
        self.counts["save_dropped"] += 1
        job.memory.release()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job so far is written or given up; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is pending, at most for `timeout_s`; what is left then is dropped and counted."""
        self.wait_idle(timeout_s)
        with self._changed:
            self._is_closed = True
            dropped = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        self.counts["save_dropped"] += len(dropped)
        for job in dropped:
            job.memory.release()
        self._thread.join(timeout=max(1.0, timeout_s))

    def _run(self) -> None:
        self._settle()
        while True:
            job = self._next()
            if job is None:
                self._flush()
                if self._is_closed:
                    return
                continue
            try:
                self._write(job)
            finally:
                job.memory.release()
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _next(self) -> SaveJob | None:
        """The next job; None once closed, or when nothing came for a while and the index waits to be flushed."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._jobs) or self._is_closed, self._flush_idle_s if self._unflushed else None
            )
            if not self._jobs:
                return None
            self._is_busy = True
            return self._jobs.popleft()

    def _write(self, job: SaveJob) -> None:
        name, chunk = job.namespace.fingerprint, job.chunk
        if (name, chunk.parent) in self._failed or time.monotonic() < self._paused_until:
            self._note_failed(name, chunk.key)
            self.counts["save_dropped"] += 1
            return
        try:
            if job.is_suspect:  # what cannot be read leaves the index, and is written again
                job.namespace.read([chunk], [job.namespace.buffer(chunk.num_tokens)])
            status = job.namespace.put(job.memory.buffer, key=chunk.key, parent=chunk.parent, depth=chunk.depth)
        except NoSpace as problem:
            self._paused_until = time.monotonic() + self._pause_s
            _LOG.warning("nothing is saved for %.0f s: %s", self._pause_s, problem)
        except (BackendError, StoreError, FormatError) as problem:
            _LOG.warning("chunk %s is not saved: %s", chunk.key.hex()[:16], problem)
        except Exception:  # noqa: BLE001  the serving path: a save may fail, the engine may not
            _LOG.exception("chunk %s is not saved", chunk.key.hex()[:16])
        else:
            self._failed.pop((name, chunk.key), None)
            self._unflushed[id(job.namespace)] = job.namespace
            self.counts["saved" if status in (PutStatus.STORED, PutStatus.REPLACED) else "save_present"] += 1
            if self._on_saved is not None:
                self._on_saved(chunk)
            return
        self.counts["save_failed"] += 1
        self._note_failed(name, chunk.key)

    def _note_failed(self, name: str, key: bytes) -> None:
        self._failed[(name, key)] = None
        while len(self._failed) > _FAILED_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def _flush(self) -> None:
        for number, namespace in list(self._unflushed.items()):
            del self._unflushed[number]
            try:
                namespace.flush()
            except (BackendError, StoreError) as problem:
                _LOG.warning("the index is not flushed, shards are found without it: %s", problem)
