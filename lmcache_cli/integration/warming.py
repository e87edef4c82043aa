"""Warm a store: compute the KV of documents and keep it, without computing anything twice.

What is present is loaded, not computed; a prefix that several documents share is computed with the first of them.
Chunks are written by a thread of their own while the engine computes the next ones.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmcache_cli.store import ChunkBuffer, Match, Namespace, PutStatus
from lmcache_format.geometry import part_bytes, whole_part
from lmcache_format.keys import ChunkKey, chunk_keys, next_key

from .errors import ModelError
from .producer import ChunkData, Document, KnownChunk, ProducedChunk, Producer, TokenIds

WRITE_BUFFERS = 4
PROBE_TOKENS = 512
LABEL_EVERY_S = 10.0
"""How often a long document's name is given to what there is of it: a run that is killed cannot do so at its end."""


@dataclass(frozen=True, slots=True)
class WarmDocument:
    """A named sequence of token ids to be kept; `salt` is its tenant's."""

    name: str
    tokens: TokenIds
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """What there is to do for one document. `shared_tokens` will be computed with an earlier one of the same plan."""

    name: str
    num_tokens: int
    present_tokens: int
    shared_tokens: int
    tokens_to_compute: int
    bytes_to_write: int


@dataclass(slots=True)
class WarmReport:
    """What was done. `failures` pairs the name of a document with the reason."""

    num_documents: int = 0
    num_complete: int = 0
    num_present_before: int = 0
    num_tokens: int = 0
    tokens_computed: int = 0
    tokens_present: int = 0
    chunks_stored: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)


def document_keys(namespace: Namespace, document: WarmDocument) -> list[ChunkKey]:
    """The root key, then the keys of all chunks, the tail included: `keys[i]` is the parent of chunk i."""
    chunk_tokens = namespace.identity.chunk_tokens
    root = namespace.root(document.salt)
    keys = [root, *chunk_keys(root, document.tokens, chunk_tokens)]
    rest = document.tokens[(len(keys) - 1) * chunk_tokens :]
    if len(rest):
        keys.append(next_key(keys[-1], rest))
    return keys


def plan(namespace: Namespace, documents: Sequence[WarmDocument]) -> Iterator[PlannedDocument]:
    """What warming would compute and write, document by document. Computes and writes nothing."""
    identity = namespace.identity
    whole = whole_part(identity)
    planned: set[ChunkKey] = set()
    for document in documents:
        keys = document_keys(namespace, document)[1:]
        present = namespace.match(document.tokens, salt=document.salt).num_tokens
        starts = range(0, len(document.tokens), identity.chunk_tokens)
        sizes = [min(identity.chunk_tokens, len(document.tokens) - start) for start in starts]
        missing = [(key, size) for key, size, start in zip(keys, sizes, starts, strict=True) if start + size > present]
        fresh = [(key, size) for key, size in missing if key not in planned]
        planned.update(key for key, _ in fresh)
        to_compute = sum(size for _, size in fresh)
        yield PlannedDocument(
            name=document.name,
            num_tokens=len(document.tokens),
            present_tokens=present,
            shared_tokens=sum(size for _, size in missing) - to_compute,
            tokens_to_compute=to_compute,
            bytes_to_write=sum(part_bytes(identity, whole, size) for _, size in fresh),
        )


def measure_tokens_per_s(producer: Producer, tokens: TokenIds) -> float:
    """Prefill speed of an engine on the beginning of a prompt; what it computes is thrown away."""
    probe = Document(tokens[:PROBE_TOKENS])
    start = time.perf_counter()
    for _ in producer.prefill([probe], lambda size: np.empty(size, np.uint8)):
        pass
    return len(probe.tokens) / (time.perf_counter() - start)


def warm(
    namespace: Namespace,
    load_producer: Callable[[], Producer],
    documents: Sequence[WarmDocument],
    *,
    batch_size: int = 1,
    keep_tokens: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> WarmReport:
    """Compute and store what is missing of the documents; `progress` is told how many tokens are newly done.

    The names of all documents are recorded first, so that an interrupted run can be seen for what it is; whatever stops
    it, what was computed until then is kept. A document that cannot be computed is reported and the others go on.
    `load_producer` is called once something has to be computed, which takes seconds that a second run does not need.
    Raises `BackendError` where the store does not take what it is given.
    """
    started = time.perf_counter()
    report = WarmReport(num_documents=len(documents), num_tokens=sum(len(one.tokens) for one in documents))
    usable = list(_usable(documents, report))
    label_documents(namespace, usable)
    writer = _Writer(namespace, keep_tokens=keep_tokens)
    try:
        producer: Producer | None = None
        for batch in _batches(namespace, usable, batch_size, report, progress, writer):
            if producer is None:
                producer = load_producer()
                namespace.producer = producer.provenance
            _compute(namespace, producer, batch, writer, report, progress)
    finally:
        writer.close()
        if report.num_complete < len(usable):
            label_progress(namespace, usable)
        namespace.flush()
        report.chunks_stored, report.bytes_written = writer.chunks_stored, writer.bytes_written
        report.seconds = time.perf_counter() - started
    return report


def label_documents(namespace: Namespace, documents: Sequence[WarmDocument]) -> None:
    """Record names before anything is computed: of every document's end, and of its first chunk, by which a run that is
    killed can be told from one that never began. Raises `BackendError`."""
    for document in documents:
        keys = document_keys(namespace, document)
        namespace.label(document.name, keys[-1], len(document.tokens), len(keys) - 2)
        if len(keys) > 2:
            namespace.label(document.name, keys[1], namespace.identity.chunk_tokens, 0)
    namespace.flush()


def label_progress(namespace: Namespace, documents: Sequence[WarmDocument]) -> None:
    """Give a document's name to what there is of it as well, or nobody could tell how far it has come."""
    for document in documents:
        match = namespace.match(document.tokens, salt=document.salt)
        if match.keys and match.num_tokens < len(document.tokens):
            num_full = len(match.keys)
            namespace.label(document.name, match.keys[-1], num_full * match.chunk_tokens, num_full - 1)


@dataclass(frozen=True, slots=True)
class _Job:
    document: WarmDocument
    keys: list[ChunkKey]
    match: Match


def _usable(documents: Sequence[WarmDocument], report: WarmReport) -> Iterator[WarmDocument]:
    for document in documents:
        if len(document.tokens) == 0:
            report.failures.append((document.name, "the document is empty: there is nothing to compute"))
        else:
            yield document


def _within_reach(producer: Producer, jobs: Sequence[_Job], report: WarmReport) -> list[_Job]:
    limit = producer.max_tokens
    fitting = []
    for job in jobs:
        count = len(job.document.tokens)
        if limit is not None and count > limit:
            reason = f"{count} tokens are more than the {limit} the model can attend to; split the document"
            report.failures.append((job.document.name, reason))
        else:
            fitting.append(job)
    return fitting


def _batches(
    namespace: Namespace,
    documents: Sequence[WarmDocument],
    batch_size: int,
    report: WarmReport,
    progress: Callable[[int], None],
    writer: _Writer,
) -> Iterator[list[_Job]]:
    """Documents to compute together: as much is known of each, and no two are about to compute the same chunk."""
    waiting = list(documents)
    while waiting:
        writer.drain()  # what was computed last must be found
        batch: list[_Job] = []
        left: list[WarmDocument] = []
        for document in waiting:
            if len(batch) >= batch_size:
                left.append(document)
                continue
            match = namespace.match(document.tokens, salt=document.salt)
            if match.num_tokens == len(document.tokens):
                report.num_complete += 1
                report.num_present_before += match.num_tokens > 0
                report.tokens_present += match.num_tokens
                progress(match.num_tokens)
                continue
            job = _Job(document, document_keys(namespace, document), match)
            if batch and not _fits(job, batch):
                left.append(document)
                continue
            batch.append(job)
        waiting = left
        if batch:
            yield batch


def _fits(job: _Job, batch: Sequence[_Job]) -> bool:
    known = len(job.match.keys)
    return all(len(other.match.keys) == known and other.keys[known + 1] != job.keys[known + 1] for other in batch)


def _compute(
    namespace: Namespace,
    producer: Producer,
    jobs: list[_Job],
    writer: _Writer,
    report: WarmReport,
    progress: Callable[[int], None],
) -> None:
    chunk_tokens = namespace.identity.chunk_tokens
    jobs = _within_reach(producer, jobs, report)
    if not jobs:
        return
    known = [_load_known(namespace, job) for job in jobs]
    shortest = min(map(len, known))
    documents = [Document(job.document.tokens, found[:shortest]) for job, found in zip(jobs, known, strict=True)]
    report.tokens_present += shortest * chunk_tokens * len(jobs)
    progress(shortest * chunk_tokens * len(jobs))
    try:
        for chunk in producer.prefill(documents, writer.take):
            writer.submit(chunk, jobs[chunk.document])
            report.tokens_computed += chunk.num_tokens
            progress(chunk.num_tokens)
    except ModelError as problem:
        report.failures += [(job.document.name, str(problem)) for job in jobs]
        return
    writer.drain()
    report.num_complete += len(jobs)


def _load_known(namespace: Namespace, job: _Job) -> list[KnownChunk]:
    """The full chunks of a document that are present; fewer where some cannot be read."""
    full = job.match.up_to(len(job.match.keys) * job.match.chunk_tokens)
    buffers, _ = namespace.load(full)
    return [KnownChunk(buffer.num_tokens, np.frombuffer(buffer.memory, np.uint8)) for buffer in buffers]


@dataclass(frozen=True, slots=True)
class _Write:
    buffer: ChunkBuffer
    num_tokens: int
    key: ChunkKey
    parent: ChunkKey
    depth: int
    tokens: TokenIds | None
    job: _Job


class _Writer:
    """A thread that commits chunks, and the buffers they travel in. The first error stops it and comes out of the next
    call; buffers keep going round, so that nobody waits for one in vain."""

    def __init__(self, namespace: Namespace, *, keep_tokens: bool) -> None:
        self._namespace = namespace
        self._keep_tokens = keep_tokens
        self._free: queue.SimpleQueue[ChunkBuffer] = queue.SimpleQueue()
        self._lent: dict[int, ChunkBuffer] = {}
        self._queue: queue.Queue[_Write | None] = queue.Queue()
        self._error: Exception | None = None
        self._labelled_at = time.monotonic()
        self.chunks_stored = 0
        self.bytes_written = 0
        for _ in range(WRITE_BUFFERS):
            self._free.put(
                ChunkBuffer(namespace.identity, whole_part(namespace.identity), namespace.identity.chunk_tokens)
            )
        self._thread = threading.Thread(target=self._run, name="lmcache-warm-write", daemon=True)
        self._thread.start()

    def take(self, size_bytes: int) -> ChunkData:
        """Memory for one chunk; waits until a buffer is free."""
        self._raise()
        buffer = self._free.get()
        data = np.frombuffer(buffer.memory[:size_bytes], np.uint8)
        self._lent[_address(data)] = buffer
        return data

    def submit(self, chunk: ProducedChunk, job: _Job) -> None:
        """Hand over a chunk whose data lies in memory from `take`."""
        self._raise()
        buffer = self._lent.pop(_address(chunk.data))
        depth = chunk.start // self._namespace.identity.chunk_tokens
        tokens = job.document.tokens[chunk.start : chunk.start + chunk.num_tokens] if self._keep_tokens else None
        self._queue.put(_Write(buffer, chunk.num_tokens, job.keys[depth + 1], job.keys[depth], depth, tokens, job))

    def drain(self) -> None:
        """Wait until everything handed over is committed."""
        self._queue.join()
        self._raise()

    def close(self) -> None:
        """Commit what was handed over and end the thread, even when a signal comes meanwhile."""
        self._queue.put(None)
        try:
            self._thread.join()
        finally:
            self._thread.join()  # not left to write while the process ends

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._commit(write)
            except Exception as problem:  # noqa: BLE001 — carried over to the thread that waits for the result
                self._error = problem
            finally:
                self._free.put(write.buffer)
                self._queue.task_done()
        self._queue.task_done()

    def _commit(self, write: _Write) -> None:
        buffer = write.buffer.for_tokens(write.num_tokens)
        status = self._namespace.put(buffer, key=write.key, parent=write.parent, depth=write.depth, tokens=write.tokens)
        if status in (PutStatus.STORED, PutStatus.REPLACED):
            self.chunks_stored += 1
            self.bytes_written += buffer.size_bytes
        now = time.monotonic()
        if now - self._labelled_at > LABEL_EVERY_S:
            self._labelled_at = now
            stop = write.depth * self._namespace.identity.chunk_tokens + write.num_tokens
            self._namespace.label(write.job.document.name, write.key, stop, write.depth)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _address(data: ChunkData) -> int:
    address: int = data.__array_interface__["data"][0]
    return address
