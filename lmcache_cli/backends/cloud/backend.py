"""Objects in a bucket: the promises of `Backend`, kept with the requests of a `CloudService`."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_cli.backends.cloud.body import Body
from lmcache_cli.backends.cloud.bridge import run, run_aside
from lmcache_cli.backends.cloud.conditions import measured_conditions
from lmcache_cli.backends.cloud.reading import FIRST_BYTES, CloudReadHandle, fill, first_bytes
from lmcache_cli.backends.cloud.service import CloudService, Conditions, Remote
from lmcache_cli.backends.errors import (
    AlreadyExists,
    NotFound,
    ShortRead,
    Unavailable,
    Unsupported,
    VersionChanged,
)
from lmcache_cli.backends.local.staging import is_stale
from lmcache_cli.backends.names import check_name, check_prefix
from lmcache_cli.backends.protocol import STAGING_PREFIX, Capabilities, Durability, ObjectInfo

T = TypeVar("T")
_FORGET_S = 2.0
_MISSING_CONDITIONS = Conditions(create=False, delete=False)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may take: `call_s`, and for its bytes what the slowest line that is worth waiting for needs."""

    call_s: float = 30.0
    slowest_bytes_per_s: float = 1 << 20

    def limit_s(self, size_bytes: int) -> float:
        return self.call_s + size_bytes / self.slowest_bytes_per_s


class CloudBackend:
    """See `Backend`. Opening touches nothing; connections are made by the first call and shared by all threads.

    What the service does not keep by itself is kept as well as may be: without conditional create, put looks before it
    writes; without conditional delete, delete looks before it deletes. Which one it is, `capabilities` says once
    something was put.
    """

    def __init__(self, service: CloudService, deadlines: Deadlines | None = None) -> None:
        self.service = service
        self._deadlines = deadlines or Deadlines()
        self._conditions: Conditions | None = None
        self._measuring: asyncio.Lock | None = None
        self._lock = threading.Lock()
        self._open_handles = 0
        self._closing = False
        weakref.finalize(self, _forget, service, os.getpid())

    @property
    def url(self) -> str:
        return self.service.url

    @property
    def capabilities(self) -> Capabilities:
        """Conditions count as missing until they are known: after the first put."""
        conditions = self._conditions or _MISSING_CONDITIONS
        return Capabilities(
            conditional_create=conditions.create,
            conditional_delete=conditions.delete,
            cheap_stat=False,
            rename=False,
            ranged_read=True,
            direct_io=False,
            object_crc32c=self.service.lists_crc32c,
            durable=True,
            shared=True,
            confirmed_put=True,
        )

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._call(self._read(check_name(name), offset, length), name, length or 0)

    def open_read(self, name: str) -> CloudReadHandle:
        size, version, first = self._call(self._open(check_name(name)), name)
        with self._lock:
            self._open_handles += 1

        def read(work: Coroutine[Any, Any, None], size_bytes: int) -> None:
            self._run(work, name, size_bytes)

        return CloudReadHandle(self.service, read, self._handle_closed, name, size, version, first)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        """One request with the whole object and its CRC32C, which the service checks. Objects are always durable."""
        body = Body(parts)
        remote = self._call(self._put(check_name(name), body, if_absent), name, body.size_bytes)
        return _info(name, remote)

    def stat(self, name: str) -> ObjectInfo | None:
        remote = self._call(self.service.head(check_name(name)), name)
        return None if remote is None else _info(name, remote)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Page by page, each fetched when the one before was taken."""
        below = f"{check_prefix(prefix)}/" if prefix else ""
        token: str | None = None
        while True:
            page = self._call(self.service.list_page(below, deep=recursive, token=token), prefix or "/")
            for name, remote in page.objects:
                if name and not name.endswith("/"):  # otherwise an empty object that stands for a folder
                    yield _info(name, remote)
            for name in page.prefixes:
                yield ObjectInfo(name, 0, "", 0)
            if page.next_token is None:
                return
            if page.next_token == token:
                raise Unavailable(f"{prefix or '/'}: the listing of {self.url} does not come to an end", name=prefix)
            token = page.next_token

    def delete(self, name: str, *, version: str | None) -> bool:
        return self._call(self._delete(check_name(name), version), name)

    def move(self, name: str, to: str) -> None:
        """Copy, compare, delete that version: not atomic, but at every moment one of the two names is there."""
        self._call(self._move(check_name(name), check_name(to)), name)

    def now_ms(self) -> int:
        """One request; whole seconds."""
        return self._call(self.service.now_ms(), "the store's clock")

    def sync_names(self) -> None:
        return None

    def collect_staging(self, *, older_than_ms: int) -> int:
        """Objects are put whole, so that only probes of dead processes can be left."""
        now_ms = self.now_ms()
        removed = 0
        for info in self.list(STAGING_PREFIX):
            component = info.name.rpartition("/")[2]
            if is_stale(component, age_ms=now_ms - info.modified_ms, older_than_ms=older_than_ms):
                removed += self.delete(info.name, version=info.version)
        return removed

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._open_handles:
                return
        self._disconnect()

    def _handle_closed(self) -> None:
        with self._lock:
            self._open_handles -= 1
            if self._open_handles or not self._closing:
                return
        self._disconnect()

    def _disconnect(self) -> None:
        self._run(self.service.close(), "the connection")

    def _call(self, work: Coroutine[Any, Any, T], name: str, size_bytes: int = 0) -> T:
        """A call that is none of an open handle's: who makes it after `close` opens the back-end again."""
        self._closing = False
        return self._run(work, name, size_bytes)

    def _run(self, work: Coroutine[Any, Any, T], name: str, size_bytes: int = 0) -> T:
        return run(work, limit_s=self._deadlines.limit_s(size_bytes), what=f"{name} in {self.url}")

    async def _read(self, name: str, offset: int, length: int | None) -> bytes:
        if length == 0:
            return await self._read_nothing(name, offset)
        stop = None if length is None else offset + length
        try:
            fetched = await self.service.fetch(name, offset, stop, None)
        except ShortRead:
            if length is None:
                return await self._read_nothing(name, offset)
            raise
        try:
            size = fetched.total_bytes - offset if length is None else length
            if offset + size > fetched.total_bytes:
                raise _short(name, offset, size, fetched.total_bytes)
            return await first_bytes(fetched, size, name)
        finally:
            fetched.close()

    async def _read_nothing(self, name: str, offset: int) -> bytes:
        remote = await self.service.head(name)
        if remote is None:
            raise NotFound(f"{name}: no such object in {self.url}", name=name)
        if offset > remote.size_bytes:
            raise _short(name, offset, 0, remote.size_bytes)
        return b""

    async def _open(self, name: str) -> tuple[int, str, bytes]:
        """Size and version, and the first bytes."""
        try:
            fetched = await self.service.fetch(name, 0, FIRST_BYTES, None)
        except ShortRead:  # nothing there to have a range of
            remote = await self.service.head(name)
            if remote is None:
                raise NotFound(f"{name}: no such object in {self.url}", name=name) from None
            return remote.size_bytes, remote.version, b""
        try:
            content = bytearray(min(FIRST_BYTES, fetched.total_bytes))
            await fill(fetched, [memoryview(content)], name)
            return fetched.total_bytes, fetched.version, bytes(content)
        finally:
            fetched.close()

    async def _put(self, name: str, body: Body, if_absent: bool) -> Remote:
        create = if_absent and (await self._known_conditions()).create
        if if_absent and not create and await self.service.head(name) is not None:
            raise AlreadyExists(f"{name}: exists in {self.url}", name=name)
        remote = await self.service.put(name, body, create=create)
        if remote.size_bytes != body.size_bytes or remote.crc32c not in (None, body.crc32c):
            raise Unavailable(
                f"{name}: put {body.size_bytes} bytes with CRC32C {body.crc32c:08x} into {self.url}, which has "
                f"{remote.size_bytes} with {remote.crc32c or 0:08x}",
                name=name,
            )
        return remote

    async def _known_conditions(self) -> Conditions:
        if self._conditions is None:
            if self._measuring is None:
                self._measuring = asyncio.Lock()
            async with self._measuring:
                if self._conditions is None:
                    documented = await self.service.documented_conditions()
                    self._conditions = documented or await measured_conditions(self.service)
        return self._conditions

    async def _delete(self, name: str, version: str | None) -> bool:
        remote = await self.service.head(name)
        if remote is None:
            return False
        if version is not None and remote.version != version:
            raise VersionChanged(f"{name}: expected version {version}, found {remote.version} in {self.url}", name=name)
        return await self._delete_if(name, version)

    async def _delete_if(self, name: str, version: str | None) -> bool:
        try:
            return await self.service.delete(name, version)
        except Unsupported:
            return await self.service.delete(name, None)
        except VersionChanged:
            if await self.service.head(name) is None:
                return False
            raise

    async def _move(self, name: str, to: str) -> None:
        source = await self.service.head(name)
        if source is None:
            raise NotFound(f"{name}: no such object in {self.url}", name=name)
        if await self.service.head(to) is not None:
            raise AlreadyExists(f"{to}: exists in {self.url}", name=to)
        await self._copy(name, to, source)
        try:
            await self._delete_if(name, source.version)
        except VersionChanged:
            pass  # what was to be moved is moved; something new has taken its name

    async def _copy(self, name: str, to: str, source: Remote) -> None:
        create = (await self._known_conditions()).create
        try:
            made = await self.service.copy(name, to, source, create=create)
        except AlreadyExists:
            target = await self.service.head(to)
            if target is None or not target.is_copy_of(source):
                raise
            return  # by this very request, which the client library sent twice: nothing was there just now
        if made.size_bytes != source.size_bytes or (made.crc32c or source.crc32c) != source.crc32c:
            raise Unavailable(f"{name}: its copy {to} in {self.url} is not the same", name=name)


def _forget(service: CloudService, pid: int) -> None:
    """Close the connections of a back-end that nobody closed, at the latest when the process ends."""
    if os.getpid() == pid:
        run_aside(service.close(), limit_s=_FORGET_S)


def _info(name: str, remote: Remote) -> ObjectInfo:
    return ObjectInfo(name, remote.size_bytes, remote.version, remote.modified_ms, remote.crc32c)


def _short(name: str, offset: int, length: int, size: int) -> ShortRead:
    return ShortRead(f"{name}: asked for {length} bytes at {offset}, the object has {size}", name=name)
