"""The base of back-ends that stand in front of another one: passes every call on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lmcache_cli.backends.closing import Closing
from lmcache_cli.backends.protocol import Backend, Capabilities, Durability, ObjectInfo, ReadHandle


class BackendWrapper:
    """A `Backend` that does what `inner` does. Subclasses override what they change."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self.inner.read(name, offset=offset, length=length)

    def open_read(self, name: str) -> ReadHandle:
        return self.inner.open_read(name)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        return self.inner.put(name, parts, durability=durability, if_absent=if_absent)

    def stat(self, name: str) -> ObjectInfo | None:
        return self.inner.stat(name)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, recursive=recursive)

    def delete(self, name: str, *, version: str | None) -> bool:
        return self.inner.delete(name, version=version)

    def move(self, name: str, to: str) -> None:
        self.inner.move(name, to)

    def now_ms(self) -> int:
        return self.inner.now_ms()

    def sync_names(self) -> None:
        self.inner.sync_names()

    def collect_staging(self, *, older_than_ms: int) -> int:
        return self.inner.collect_staging(older_than_ms=older_than_ms)

    def close(self) -> None:
        self.inner.close()


class HandleWrapper(Closing):
    """A `ReadHandle` that does what `inner` does; copies its description, so that looking at it costs no detour."""

    __slots__ = ("block_bytes", "inner", "name", "size", "version")

    def __init__(self, inner: ReadHandle) -> None:
        self.inner = inner
        self.name = inner.name
        self.size = inner.size
        self.version = inner.version
        self.block_bytes = inner.block_bytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self.inner.read_into(offset, buffers)

    def close(self) -> None:
        self.inner.close()
