"""Try out what a back-end promises, with small objects below the staging prefix that are removed again.

A back-end that promises less than another is none the worse for it; one that breaks a promise is not to be trusted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from lmcache_cli.backends import AlreadyExists, Backend, BackendError, Capabilities, Durability, VersionChanged
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.place import reads_directly
from lmcache_cli.backends.local.staging import new_staging_component
from lmcache_format.names import STAGING

PROBE_BYTES = 256 * 1024
_RACERS = 4
_REPEATS = 3


class Outcome(StrEnum):
    """What came of a probe. `lacking`: not promised, and not there; `failed`: the back-end did not answer."""

    WORKS = "works"
    LACKING = "lacking"
    BROKEN = "broken"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that was tried, and what was seen."""

    name: str
    outcome: Outcome
    found: str


class _Broken(Exception):
    """What was seen instead of what was promised."""


def probe_backend(backend: Backend) -> Iterator[Probe]:
    """Try one promise after the other. Nothing is left behind; if the first object cannot be written, nothing follows.

    A crash leaves staging files, which `repair` collects like those of any other dead writer.
    """
    prober = _Prober(backend)
    try:
        first = prober.tried("write and read", prober.write_and_read)
        yield first
        if first.outcome is Outcome.WORKS:
            for name, attempt in prober.attempts():
                yield prober.tried(name, attempt)
    finally:
        prober.tidy_up()


class _Prober:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names: list[str] = []

    @property
    def _promised(self) -> Capabilities:
        """Asked for each time: what a service keeps is known once it was written to."""
        return self._backend.capabilities

    def attempts(self) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """Everything but the first one. An attempt returns what it saw, None where nothing is promised."""
        yield "list after write", self.list_after_write
        yield "ranged read", self.ranged_read
        yield "create once", self.create_once
        yield "delete by version", self.delete_by_version
        yield "rename", self.rename
        yield "survive a power cut", self.sync
        yield "direct I/O", self.direct_io

    def tried(self, name: str, attempt: Callable[[], str | None]) -> Probe:
        """Make an attempt."""
        try:
            found = attempt()
        except _Broken as broken:
            return Probe(name, Outcome.BROKEN, str(broken))
        except BackendError as problem:
            return Probe(name, Outcome.FAILED, str(problem))
        return Probe(name, Outcome.LACKING, "not here") if found is None else Probe(name, Outcome.WORKS, found)

    def tidy_up(self) -> None:
        """Remove every object that was or may have been made."""
        for name in self._names:
            try:
                self._backend.delete(name, version=None)
            except BackendError:
                pass  # it is a staging file, and collected as one

    def write_and_read(self) -> str:
        name, content = self._new_name(), _content(0)
        info = self._backend.put(name, [content], durability=Durability.NONE)
        if self._backend.read(name) != content:
            raise _Broken(f"{len(content)} bytes were written, and other ones read back")
        stat = self._backend.stat(name)
        if stat is None or (stat.version, stat.size_bytes) != (info.version, len(content)):
            raise _Broken(f"expected version {info.version} of {len(content)} bytes, found {stat}")
        return f"{len(content)} bytes"

    def list_after_write(self) -> str:
        name = self._written()
        for recursive in (False, True):
            if name not in {info.name for info in self._backend.list(STAGING, recursive=recursive)}:
                raise _Broken("an object that was just written is not listed")
        self._backend.delete(name, version=None)
        if name in {info.name for info in self._backend.list(STAGING)} or self._backend.stat(name) is not None:
            raise _Broken("an object that was just deleted is still there")
        return "at once"

    def ranged_read(self) -> str | None:
        name, content = self._written(), _content(0)
        if self._backend.read(name, offset=4096, length=100) != content[4096:4196]:
            raise _Broken("100 bytes at 4096 are other ones than those that were written")
        return "only the bytes asked for" if self._promised.ranged_read else None

    def create_once(self) -> str | None:
        if not self._promised.conditional_create:
            return None
        for _ in range(_REPEATS):
            winners = self._race(self._new_name())
            if winners != 1:
                raise _Broken(f"{winners} of {_RACERS} writers of one name were told that they made it")
        return f"one of {_RACERS} writers at a time"

    def delete_by_version(self) -> str | None:
        if not self._promised.conditional_delete:
            return None
        name = self._new_name()
        old = self._backend.put(name, [_content(0)], durability=Durability.NONE)
        new = self._backend.put(name, [_content(1)], durability=Durability.NONE, if_absent=False)
        try:
            self._backend.delete(name, version=old.version)
        except VersionChanged:
            pass
        else:
            raise _Broken("a newer object was deleted in place of the one asked for")
        if self._backend.read(name) != _content(1):
            raise _Broken("a refused delete changed the object")
        if not self._backend.delete(name, version=new.version) or self._backend.delete(name, version=new.version):
            raise _Broken("the right version could not be deleted once")
        return "only the version asked for"

    def rename(self) -> str | None:
        name, to, taken = self._written(), self._new_name(), self._written()
        try:
            self._backend.move(name, taken)
        except AlreadyExists:
            pass
        else:
            raise _Broken("an object was replaced by another one that was moved")
        self._backend.move(name, to)
        if self._backend.stat(name) is not None or self._backend.read(to) != _content(0):
            raise _Broken("an object is not what and where it should be after a move")
        return "in one step" if self._promised.rename else None

    def sync(self) -> str | None:
        """That a synced write works and what it costs; whether the device keeps its word only a power cut tells."""
        if not self._promised.durable:
            return None
        seconds = []
        for _ in range(_REPEATS):
            name = self._new_name()
            start = time.perf_counter()
            self._backend.put(name, [_content(0)], durability=Durability.FULL)
            seconds.append(time.perf_counter() - start)
        return f"{sorted(seconds)[_REPEATS // 2] * 1000:.1f} ms to sync an object and its name"

    def direct_io(self) -> str | None:
        if not isinstance(self._backend, LocalBackend):
            return None
        return "reads can pass by the page cache" if reads_directly(self._backend, self._written()) else None

    def _race(self, name: str) -> int:
        start = threading.Barrier(_RACERS)
        won: list[int] = []
        failed: list[BackendError] = []

        def write(number: int) -> None:
            start.wait()
            try:
                self._backend.put(name, [_content(number)], durability=Durability.NONE)
                won.append(number)
            except AlreadyExists:
                pass
            except BackendError as problem:
                failed.append(problem)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        if len(won) == 1 and self._backend.read(name) != _content(won[0]):
            raise _Broken("the object is not that of the writer who was told that he made it")
        return len(won)

    def _written(self) -> str:
        name = self._new_name()
        self._backend.put(name, [_content(0)], durability=Durability.NONE)
        return name

    def _new_name(self) -> str:
        name = f"{STAGING}/{new_staging_component()}"
        self._names.append(name)
        return name


def _content(number: int) -> bytes:
    return bytes((index * 7 + number) % 251 for index in range(256)) * (PROBE_BYTES // 256)
