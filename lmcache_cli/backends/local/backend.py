"""`LocalBackend`: the protocol on a directory. Each method says what happens; the other modules say how."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit

from lmcache_cli.backends.buffers import BufferPool, Lease, NoBuffer
from lmcache_cli.backends.errors import (
    AlreadyExists,
    NotFound,
    Obstructed,
    Unavailable,
    Unsupported,
)
from lmcache_cli.backends.head_last import HeadLast
from lmcache_cli.backends.local.clock import StoreClock
from lmcache_cli.backends.local.durability import NameSync
from lmcache_cli.backends.local.listing import info_of, walk
from lmcache_cli.backends.local.oserrors import translating
from lmcache_cli.backends.local.publishing import move_new, publish_new, refuse_obstruction, remove_quietly
from lmcache_cli.backends.local.reading import LocalReadHandle
from lmcache_cli.backends.local.removing import delete_version
from lmcache_cli.backends.local.root import Root, split
from lmcache_cli.backends.local.staging import collect_stale, new_staging_component
from lmcache_cli.backends.local.syscalls import SystemCalls
from lmcache_cli.backends.local.writing import (
    byte_views,
    preallocate,
    write_buffered,
    write_direct,
    write_head_last,
)
from lmcache_cli.backends.names import check_name, check_prefix
from lmcache_cli.backends.protocol import STAGING_PREFIX, Capabilities, Durability, ObjectInfo
from lmcache_cli.backends.turns import Turns

_DIRECT_MIN_BYTES = 256 * 1024
_BOUNCE_BYTES = 4 * 1024 * 1024
_BOUNCE_POOL_BYTES = 4 * _BOUNCE_BYTES
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # a FIFO in the way must not block the open
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_Content = HeadLast | tuple[memoryview, ...]
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_url(url: str) -> LocalBackend:
    """The back-end of a plain path or a `file://` URL. Raises Unsupported for a URL that names another host."""
    if not url.lower().startswith("file://"):
        return LocalBackend(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise Unsupported(f"{url}: a file URL names no host here, found {parts.netloc!r}; write file:///path")
    return LocalBackend(os.fsdecode(unquote_to_bytes(os.fsencode(parts.path))))


class LocalBackend:
    """Objects as files below one directory, which the first put makes. See `Backend` for what every method promises."""

    capabilities = Capabilities(
        conditional_create=True,
        conditional_delete=True,
        cheap_stat=True,
        rename=True,
        ranged_read=True,
        direct_io=True,
        object_crc32c=False,
        durable=True,
        shared=True,
    )

    def __init__(self, path: str | os.PathLike[str], calls: SystemCalls | None = None) -> None:
        if not os.fspath(path):
            raise Unsupported("the path of the store is empty; give a directory")
        try:
            is_path = b"\0" not in os.fsencode(path)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            raise Unsupported(f"{os.fspath(path)!r} cannot be a path; give a directory")
        self.path = str(Path(path).absolute())
        self.url = f"file://{quote(os.fsencode(self.path))}"
        self._calls = calls or SystemCalls()
        self._root = Root(self.path, self._calls)
        self._names = NameSync(self._root, self._calls)
        self._clock = StoreClock(self._probe_clock_ms)
        self._bounce = BufferPool(_BOUNCE_POOL_BYTES)
        self._heads = Turns()

    def __repr__(self) -> str:
        return f"LocalBackend({self.path!r})"

    # Reading

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        with self.open_read(name) as handle:
            wanted = max(handle.size - offset, 0) if length is None else length
            content = bytearray(wanted)
            handle.read_into(offset, [memoryview(content)])
            return bytes(content)

    def open_read(self, name: str) -> LocalReadHandle:
        with translating("open", check_name(name), self.url):
            fd = self._root.open(name, _READ)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise Obstructed(f"{name}: expected a file, found another kind in {self.url}", name=name)
                handle = LocalReadHandle(fd, name=name, url=self.url, calls=self._calls, status=status)
            except BaseException:
                os.close(fd)
                raise
            handle.choose_way()
            return handle

    def stat(self, name: str) -> ObjectInfo | None:
        try:
            with translating("look at", check_name(name), self.url):
                fd = self._root.open(name, _LOOK)
                try:
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
        except NotFound:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise Obstructed(f"{name}: expected a file, found another kind in {self.url}", name=name)
        return info_of(name, status)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        prefix = check_prefix(prefix)
        with translating("list", prefix or "/", self.url):
            yield from walk(self._root, prefix, recursive=recursive)

    # Writing

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        content = parts if isinstance(parts, HeadLast) else byte_views(parts)
        if if_absent and self.stat(name) is not None:
            raise AlreadyExists(f"{name}: exists in {self.url}", name=name)
        try:
            with translating("write", check_name(name), self.url):
                return self._put(name, content, durability, if_absent)
        except NotFound as error:  # a directory was removed while we worked in it
            raise Unavailable(f"{name}: a directory vanished during the write: {error}", name=name) from error

    def _put(self, name: str, content: _Content, durability: Durability, if_absent: bool) -> ObjectInfo:
        staging_fd, made = self._root.make_dir(STAGING_PREFIX)
        self._names.made(made)
        staged = new_staging_component()
        fd = -1
        try:
            fd = self._calls.create(staged, _CREATE, 0o666, dir_fd=staging_fd)
            self._fill(fd, content, durability)
            self._publish(staged, staging_fd, name, if_absent)
            status = os.fstat(fd)
        except BaseException:
            if fd >= 0:
                remove_quietly(self._calls, staged, staging_fd)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
            os.close(staging_fd)
        directory, _ = split(name)
        if durability is Durability.FULL:
            self._names.now(directory)
        elif durability is Durability.DATA:
            self._names.later(directory)
        return info_of(name, status)

    def _fill(self, fd: int, content: _Content, durability: Durability) -> None:
        size_bytes = content.size_bytes if isinstance(content, HeadLast) else sum(view.nbytes for view in content)
        preallocate(self._calls, fd, size_bytes)
        if durability is not Durability.NONE and size_bytes >= _DIRECT_MIN_BYTES:
            self._fill_direct(fd, self._views(content))
        elif isinstance(content, HeadLast):
            write_head_last(self._calls, fd, content)
        else:
            write_buffered(self._calls, fd, content)
        if durability is not Durability.NONE:
            self._calls.fdatasync(fd)
        found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            raise Unavailable(f"the staging file has {found_bytes} bytes, {size_bytes} were written; try again")

    def _views(self, content: _Content) -> tuple[memoryview, ...]:
        """The head comes first here, in turns: the device starts on one object while the next one's head is made."""
        with self._heads.one():
            return byte_views(content)

    def _fill_direct(self, fd: int, views: tuple[memoryview, ...]) -> None:
        bounce = self._bounce_lease()
        if bounce is None:
            write_buffered(self._calls, fd, views)
            return
        with bounce:
            if not write_direct(self._calls, fd, views, bounce.view):
                write_buffered(self._calls, fd, views)

    def _bounce_lease(self) -> Lease | None:
        try:
            return self._bounce.lease(_BOUNCE_BYTES, timeout_s=0)
        except NoBuffer:
            return None

    def _publish(self, staged: str, staging_fd: int, name: str, if_absent: bool) -> None:
        directory, last = split(name)
        directory_fd, made = self._root.make_dir(directory)
        self._names.made(made)
        try:
            if if_absent:
                publish_new(self._calls, staged, last, source_fd=staging_fd, target_fd=directory_fd)
            else:
                self._calls.rename(staged, last, src_dir_fd=staging_fd, dst_dir_fd=directory_fd)
        except FileExistsError:
            refuse_obstruction(self._calls, last, directory_fd, name)
            raise
        finally:
            os.close(directory_fd)

    def sync_names(self) -> None:
        with translating("sync directories", "/", self.url):
            self._names.all_pending()

    # Removing

    def delete(self, name: str, *, version: str | None) -> bool:
        directory, last = split(check_name(name))
        try:
            with translating("delete", name, self.url):
                directory_fd = self._root.open_dir(directory)
                try:
                    if version is None:
                        self._calls.unlink(last, dir_fd=directory_fd)
                    else:
                        self._delete_version(last, directory_fd, version, name)
                finally:
                    os.close(directory_fd)
        except NotFound:
            return False
        return True

    def _delete_version(self, last: str, directory_fd: int, version: str, name: str) -> None:
        staging_fd, made = self._root.make_dir(STAGING_PREFIX)
        self._names.made(made)
        try:
            delete_version(
                self._calls, last, directory_fd=directory_fd, staging_fd=staging_fd, version=version, name=name
            )
        finally:
            os.close(staging_fd)

    def move(self, name: str, to: str) -> None:
        """Also moves what is no object (a directory in place of a file), so that it can be quarantined."""
        (directory, last), (to_directory, to_last) = split(check_name(name)), split(check_name(to))
        with translating("move", name, self.url):
            source_fd = self._root.open_dir(directory)
            try:
                self._calls.status(last, dir_fd=source_fd, follow_symlinks=False)  # absent: make no directories
                target_fd, made = self._root.make_dir(to_directory)
                self._names.made(made)
                try:
                    move_new(self._calls, last, to_last, source_fd=source_fd, target_fd=target_fd)
                finally:
                    os.close(target_fd)
            finally:
                os.close(source_fd)

    def collect_staging(self, *, older_than_ms: int) -> int:
        now_ms = self.now_ms()
        with translating("collect staging files", STAGING_PREFIX, self.url):
            staging_fd = self._root.open_dir(STAGING_PREFIX)
            try:
                return collect_stale(self._calls, staging_fd, now_ms=now_ms, older_than_ms=older_than_ms)
            finally:
                os.close(staging_fd)

    # Time and end

    def now_ms(self) -> int:
        with translating("read the clock", STAGING_PREFIX, self.url):
            return self._clock.now_ms()

    def _probe_clock_ms(self) -> int:
        self._root.fd()
        staging_fd, made = self._root.make_dir(STAGING_PREFIX)
        self._names.made(made)
        probe = new_staging_component()
        try:
            fd = self._calls.create(probe, _CREATE, 0o666, dir_fd=staging_fd)
            try:
                return os.fstat(fd).st_mtime_ns // 1_000_000
            finally:
                os.close(fd)
                remove_quietly(self._calls, probe, staging_fd)
        finally:
            os.close(staging_fd)

    def close(self) -> None:
        self._root.close()
