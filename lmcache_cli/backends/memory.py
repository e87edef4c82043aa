"""Objects in this process's memory, for tests and for trying things out; `memory://name` is one store a process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_cli.backends.closing import Closing
from lmcache_cli.backends.errors import AlreadyExists, NotFound, ShortRead, VersionChanged
from lmcache_cli.backends.names import check_name, check_prefix
from lmcache_cli.backends.protocol import Capabilities, Durability, ObjectInfo

_BLOCK_BYTES = 256 * 1024
_stores: dict[str, MemoryBackend] = {}
_stores_lock = threading.Lock()


def open_url(url: str) -> MemoryBackend:
    """The store of that name; the same one for every caller until `discard`."""
    name = url.split("://", 1)[1]
    with _stores_lock:
        return _stores.setdefault(name, MemoryBackend(name))


def discard(name: str) -> None:
    """Forget the store of that name and what it holds."""
    with _stores_lock:
        _stores.pop(name, None)


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes
    version: str
    modified_ms: int

    def info(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, len(self.content), self.version, self.modified_ms)


class MemoryReadHandle(Closing):
    """See `ReadHandle`; holds the bytes themselves."""

    __slots__ = ("_content", "block_bytes", "name", "size", "version")

    def __init__(self, name: str, found: _Object) -> None:
        self._content = memoryview(found.content)
        self.name = name
        self.size = len(found.content)
        self.version = found.version
        self.block_bytes = _BLOCK_BYTES

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset + wanted > self.size:
            raise ShortRead(
                f"{self.name}: asked for {wanted} bytes at {offset}, the object has {self.size}", name=self.name
            )
        for buffer in buffers:
            buffer[:] = self._content[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self) -> None:
        return None


class MemoryBackend:
    """A dictionary behind a lock. `time_s` is its clock."""

    capabilities = Capabilities(
        conditional_create=True,
        conditional_delete=True,
        cheap_stat=True,
        rename=True,
        ranged_read=True,
        direct_io=False,
        object_crc32c=False,
        durable=False,
        shared=False,
    )

    def __init__(self, name: str = "", time_s: Callable[[], float] = time.time) -> None:
        self.url = f"memory://{name}"
        self._time_s = time_s
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._versions = itertools.count(1)

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self.open_read(name) as handle:
            content = bytearray(max(handle.size - offset, 0) if length is None else length)
            handle.read_into(offset, [memoryview(content)])
            return bytes(content)

    def open_read(self, name: str) -> MemoryReadHandle:
        return MemoryReadHandle(name, self._get(name))

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        check_name(name)
        content = b"".join(parts)
        with self._lock:
            if if_absent and name in self._objects:
                raise AlreadyExists(f"{name}: exists in {self.url}", name=name)
            made = _Object(content, str(next(self._versions)), self.now_ms())
            self._objects[name] = made
        return made.info(name)

    def stat(self, name: str) -> ObjectInfo | None:
        try:
            return self._get(name).info(name)
        except NotFound:
            return None

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        start = f"{check_prefix(prefix)}/" if prefix else ""
        with self._lock:
            found = [(name, item) for name, item in self._objects.items() if name.startswith(start)]
        below: set[str] = set()
        for name, item in found:
            head, slash, _ = name[len(start) :].partition("/")
            if recursive or not slash:
                yield item.info(name)
            else:
                below.add(f"{start}{head}/")
        yield from (ObjectInfo(name, 0, "", 0) for name in below)

    def delete(self, name: str, *, version: str | None) -> bool:
        check_name(name)
        with self._lock:
            found = self._objects.get(name)
            if found is None:
                return False
            if version is not None and found.version != version:
                raise VersionChanged(f"{name}: expected version {version}, found {found.version}", name=name)
            del self._objects[name]
        return True

    def move(self, name: str, to: str) -> None:
        check_name(to)
        with self._lock:
            found = self._objects.get(check_name(name))
            if found is None:
                raise NotFound(f"{name}: no such object in {self.url}", name=name)
            if to in self._objects:
                raise AlreadyExists(f"{to}: exists in {self.url}", name=to)
            self._objects[to] = self._objects.pop(name)

    def now_ms(self) -> int:
        return int(self._time_s() * 1000)

    def sync_names(self) -> None:
        return None

    def collect_staging(self, *, older_than_ms: int) -> int:
        return 0

    def close(self) -> None:
        return None

    def _get(self, name: str) -> _Object:
        with self._lock:
            found = self._objects.get(check_name(name))
        if found is None:
            raise NotFound(f"{name}: no such object in {self.url}", name=name)
        return found
