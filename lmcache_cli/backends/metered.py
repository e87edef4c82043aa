"""Counting: calls, errors, bytes and seconds of every operation on a back-end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lmcache_cli.backends.protocol import Backend, Durability, ObjectInfo, ReadHandle
from lmcache_cli.backends.wrapper import BackendWrapper, HandleWrapper


@dataclass(slots=True)
class OperationCount:
    """Sums over the calls of one operation; `size_bytes` counts payload of calls that succeeded."""

    calls: int = 0
    errors: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Meter:
    """Counts by operation name. Thread-safe."""

    _counts: dict[str, OperationCount] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, operation: str, size_bytes: int, seconds: float, *, failed: bool = False) -> None:
        with self._lock:
            count = self._counts.setdefault(operation, OperationCount())
            count.calls += 1
            count.errors += failed
            count.size_bytes += 0 if failed else size_bytes
            count.seconds += seconds

    def snapshot(self) -> dict[str, OperationCount]:
        with self._lock:
            return {operation: replace(count) for operation, count in self._counts.items()}


class MeteredBackend(BackendWrapper):
    """`inner`, counted in `meter`. A listing counts once, with its items not timed."""

    def __init__(self, inner: Backend, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self.meter = Meter()
        self._clock = clock

    @contextmanager
    def _counted(self, operation: str, size_bytes: int = 0) -> Iterator[None]:
        started = self._clock()
        failed = True
        try:
            yield
            failed = False
        finally:
            self.meter.add(operation, size_bytes, self._clock() - started, failed=failed)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        started = self._clock()
        content = b""
        failed = True
        try:
            content = self.inner.read(name, offset=offset, length=length)
            failed = False
        finally:
            self.meter.add("read", len(content), self._clock() - started, failed=failed)
        return content

    def open_read(self, name: str) -> ReadHandle:
        with self._counted("open_read"):
            return MeteredReadHandle(self.inner.open_read(name), self.meter, self._clock)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        with self._counted("put", sum(memoryview(part).nbytes for part in parts)):
            return self.inner.put(name, parts, durability=durability, if_absent=if_absent)

    def stat(self, name: str) -> ObjectInfo | None:
        with self._counted("stat"):
            return self.inner.stat(name)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        self.meter.add("list", 0, 0.0)
        return self.inner.list(prefix, recursive=recursive)

    def delete(self, name: str, *, version: str | None) -> bool:
        with self._counted("delete"):
            return self.inner.delete(name, version=version)

    def move(self, name: str, to: str) -> None:
        with self._counted("move"):
            self.inner.move(name, to)

    def sync_names(self) -> None:
        with self._counted("sync_names"):
            self.inner.sync_names()


class MeteredReadHandle(HandleWrapper):
    """A handle whose reads are counted."""

    __slots__ = ("_clock", "_meter")

    def __init__(self, inner: ReadHandle, meter: Meter, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self._meter, self._clock = meter, clock

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        started = self._clock()
        failed = True
        try:
            self.inner.read_into(offset, buffers)
            failed = False
        finally:
            size_bytes = sum(buffer.nbytes for buffer in buffers)
            self._meter.add("read_into", size_bytes, self._clock() - started, failed=failed)
