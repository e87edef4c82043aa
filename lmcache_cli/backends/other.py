"""Any other file system of fsspec: `sftp://`, `abfs://`, `webdav://`, … by what all of them have in common, no more.

An object is written under a staging name, its size compared, and moved to its own name: on file systems that is a
rename, on object stores a copy within the service. Whether a name is free is looked up before, so that of two racing
writers the later one wins; whether a version is still there is looked up before a delete. `capabilities` says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.utils import get_protocol

from lmcache_cli.backends.closing import Closing
from lmcache_cli.backends.errors import (
    AlreadyExists,
    BackendError,
    NoSpace,
    NotFound,
    ShortRead,
    Unavailable,
    Unsupported,
    VersionChanged,
)
from lmcache_cli.backends.local.oserrors import translated
from lmcache_cli.backends.local.staging import is_stale, new_staging_component
from lmcache_cli.backends.names import check_name, check_prefix
from lmcache_cli.backends.protocol import STAGING_PREFIX, Capabilities, Durability, ObjectInfo

MASK = "***"
_BLOCK_BYTES = 8 << 20
_VERSION_KEYS = ("generation", "etag", "ETag", "content_md5", "version_id")
_TIME_KEYS = ("mtime", "modified", "last_modified", "LastModified", "updated", "created")


class OtherBackend:
    """See `Backend`. `connect` gives a file system, which must not cache listings, and a path in it; called on first
    use, since some connect at once."""

    capabilities = Capabilities(
        conditional_create=False,
        conditional_delete=False,
        cheap_stat=False,
        rename=False,
        ranged_read=True,
        direct_io=False,
        object_crc32c=False,
        durable=False,
        shared=True,
    )

    def __init__(self, connect: Callable[[], tuple[Any, str]], url: str) -> None:
        self._connect = connect
        self._connected: tuple[Any, str] | None = None
        self._lock = threading.Lock()
        self.url = url

    @property
    def _files(self) -> Any:
        return self._place()[0]

    @property
    def _root(self) -> str:
        return self._place()[1]

    def _place(self) -> tuple[Any, str]:
        if self._connected is None:
            with self._lock:
                if self._connected is None:
                    self._connected = self._connect_now()
        return self._connected

    def _connect_now(self) -> tuple[Any, str]:
        try:
            file_system, root = self._connect()
        except (OSError, EOFError) as error:
            raise Unavailable(f"could not reach {self.url}: {type(error).__name__}") from error
        except (ImportError, ValueError, TypeError) as error:
            raise Unsupported(f"{self.url}: fsspec cannot use this URL: {type(error).__name__}") from error
        return file_system, root.rstrip("/")

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self.open_read(name) as handle:
            content = bytearray(max(handle.size - offset, 0) if length is None else length)
            handle.read_into(offset, [memoryview(content)])
            return bytes(content)

    def open_read(self, name: str) -> OtherReadHandle:
        info = self.stat(name)
        if info is None:
            raise NotFound(f"{name}: no such object in {self.url}", name=name)
        return OtherReadHandle(self, info)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        content = b"".join(parts)
        if self.stat(name) is not None:
            if if_absent:
                raise AlreadyExists(f"{name}: exists in {self.url}", name=name)
            self.delete(name, version=None)  # not every file system renames over what is there
        staged = f"{STAGING_PREFIX}/{new_staging_component()}"
        with self._staging(staged):
            with self._translating("put", name):
                self._make_parents(staged)
                self._files.pipe_file(self._path(staged), content)
            found = self.stat(staged)
            if found is None or found.size_bytes != len(content):
                size = None if found is None else found.size_bytes
                raise Unavailable(f"{name}: wrote {len(content)} bytes to {self.url}, which has {size}", name=name)
            self._rename(staged, name)
        made = self.stat(name)
        if made is None:
            raise Unavailable(f"{name}: put into {self.url}, but not there", name=name)
        return made

    def stat(self, name: str) -> ObjectInfo | None:
        path = self._path(check_name(name))
        try:
            with self._translating("look up", name):
                info = self._files.info(path)
        except NotFound:
            return None
        return None if info["type"] == "directory" else self._described(name, info)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Directory by directory."""
        pending = [check_prefix(prefix)]
        while pending:
            directory = pending.pop()
            try:
                with self._translating("list", directory or "/"):
                    items = self._files.ls(self._path(directory), detail=True)
            except NotFound:
                continue
            for item in items:
                name = self._name(item["name"])
                if name in ("", directory):
                    continue  # the directory itself, or the file that was asked for as one
                if item["type"] != "directory":
                    yield self._described(name, item)
                elif recursive:
                    pending.append(name)
                else:
                    yield ObjectInfo(f"{name}/", 0, "", 0)

    def delete(self, name: str, *, version: str | None) -> bool:
        found = self.stat(name)
        if found is None:
            return False
        if version is not None and found.version != version:
            raise VersionChanged(f"{name}: expected version {version}, found {found.version}", name=name)
        try:
            with self._translating("delete", name):
                self._files.rm_file(self._path(name))
        except NotFound:
            return False
        return True

    def move(self, name: str, to: str) -> None:
        if self.stat(name) is None:
            raise NotFound(f"{name}: no such object in {self.url}", name=name)
        if self.stat(to) is not None:
            raise AlreadyExists(f"{to}: exists in {self.url}", name=to)
        self._rename(name, to)

    def now_ms(self) -> int:
        """By writing an object and looking at its time."""
        probe = f"{STAGING_PREFIX}/{new_staging_component()}"
        with self._staging(probe), self._translating("ask for the time", "the store's clock"):
            self._make_parents(probe)
            self._files.pipe_file(self._path(probe), b"1")
            return _modified_ms(self._files.info(self._path(probe)))

    def sync_names(self) -> None:
        return None

    def collect_staging(self, *, older_than_ms: int) -> int:
        now_ms = self.now_ms()
        removed = 0
        for info in list(self.list(STAGING_PREFIX)):
            component = info.name.rpartition("/")[2]
            if is_stale(component, age_ms=now_ms - info.modified_ms, older_than_ms=older_than_ms):
                removed += self.delete(info.name, version=None)
        return removed

    def close(self) -> None:
        return None

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """The bytes of a range. Raises NotFound, ShortRead, Unavailable."""
        with self._translating("read", name):
            content: bytes = self._files.cat_file(self._path(name), start=start, end=stop)
        if len(content) != stop - start:
            raise ShortRead(f"{name}: asked for {stop - start} bytes at {start}, got {len(content)}", name=name)
        return content

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _name(self, path: str) -> str:
        return path.rstrip("/").removeprefix(self._root).lstrip("/")

    def _described(self, name: str, info: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(name, int(info["size"]), _version(info), _modified_ms(info))

    def _make_parents(self, name: str) -> None:
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _rename(self, name: str, to: str) -> None:
        with self._translating("move", name):
            self._make_parents(to)
            self._files.mv(self._path(name), self._path(to))

    @contextmanager
    def _staging(self, name: str) -> Iterator[None]:
        try:
            yield
        finally:
            try:
                self._files.rm_file(self._path(name))
            except (OSError, NotImplementedError):
                pass  # moved to its own name, or left to be collected

    @contextmanager
    def _translating(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except (FSTimeoutError, TimeoutError) as error:
            raise Unavailable(f"{name}: could not {doing} in {self.url}: no answer in time", name=name) from error
        except NotImplementedError as error:
            raise Unsupported(f"{name}: could not {doing}: {self.url} cannot do that", name=name) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{name}: no such object in {self.url}", name=name) from error
        except FileExistsError as error:
            raise AlreadyExists(f"{name}: exists in {self.url}", name=name) from error
        except PermissionError as error:
            raise Unavailable(
                f"{name}: could not {doing} in {self.url}: permission denied", name=name, transient=False
            ) from error
        except OSError as error:
            known = translated(error, doing=doing, name=name, url=self.url)
            if isinstance(known, NoSpace | Unavailable):
                raise known from error
            raise Unavailable(str(known), name=name) from error
        except BackendError:
            raise
        except Exception as error:  # every file system of fsspec may have errors of its own
            said = type(error).__name__  # its text may hold a password
            raise Unavailable(f"{name}: could not {doing} in {self.url}: {said}", name=name) from error


class OtherReadHandle(Closing):
    """See `ReadHandle`. Nothing is pinned: after every read the version is looked up again."""

    def __init__(self, backend: OtherBackend, info: ObjectInfo) -> None:
        self._backend = backend
        self.name, self.size, self.version = info.name, info.size_bytes, info.version
        self.block_bytes = _BLOCK_BYTES

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Raises NotFound or VersionChanged where the object was deleted or replaced since it was opened."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset + wanted > self.size:
            raise ShortRead(
                f"{self.name}: asked for {wanted} bytes at {offset}, the object has {self.size}", name=self.name
            )
        if wanted == 0:
            return
        content = self._backend.fetch(self.name, offset, offset + wanted)
        self._check_version()
        start = 0
        for buffer in buffers:
            buffer[:] = content[start : start + buffer.nbytes]
            start += buffer.nbytes

    def _check_version(self) -> None:
        found = self._backend.stat(self.name)
        if found is None:
            raise NotFound(f"{self.name}: deleted since it was opened", name=self.name)
        if (found.version, found.size_bytes) != (self.version, self.size):
            raise VersionChanged(f"{self.name}: replaced since it was opened", name=self.name)

    def close(self) -> None:
        return None


def open_url(url: str) -> OtherBackend:
    """The place the URL names; what it takes to reach it is fsspec's affair. Touches nothing yet.

    Raises `Unsupported` for a scheme that fsspec does not know, or whose package is not installed.
    """
    shown = shown_url(url)
    try:
        get_filesystem_class(get_protocol(url))
    except (ImportError, ValueError) as error:
        known = isinstance(error, ImportError)
        raise Unsupported(f"{shown}: {error if known else 'no file system of fsspec has this scheme'}") from None
    return OtherBackend(partial(url_to_fs, url, use_listings_cache=False, skip_instance_cache=True), shown)


def shown_url(url: str) -> str:
    """The URL with user, password and the values of its query hidden."""
    scheme, _, rest = url.partition("://")
    rest, question, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    if "@" in host:
        host = f"{MASK}@{host.rpartition('@')[2]}"
    names = "&".join(f"{item.partition('=')[0]}={MASK}" for item in query.split("&")) if question else ""
    return f"{scheme}://{host}{slash}{path}{question}{names}"


def _version(info: Mapping[str, Any]) -> str:
    """What changes when the object does: what the file system calls so, or else its time, number and size."""
    for key in _VERSION_KEYS:
        if info.get(key):
            return str(info[key])
    return f"{_seconds(info) or 0:.6f}.{info.get('ino', '')}.{info['size']}"


def _modified_ms(info: Mapping[str, Any]) -> int:
    """When it was made; where the file system does not tell: now, so that nothing is ever thought to be old."""
    seconds = _seconds(info)
    return int((time.time() if seconds is None else seconds) * 1000)


def _seconds(info: Mapping[str, Any]) -> float | None:
    for key in _TIME_KEYS:
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
