"""What a back-end can really do, found by trying it on small objects in staging; for `init` and `doctor`.

Nothing of the store is touched, and what was made is removed. A finding that contradicts `capabilities` is a fault of
the service, or of the back-end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from lmcache_cli.backends.errors import AlreadyExists, BackendError, NotFound, ShortRead, VersionChanged
from lmcache_cli.backends.local.staging import new_staging_component
from lmcache_cli.backends.protocol import STAGING_PREFIX, Backend, Capabilities, Durability

T = TypeVar("T")
_CONTENT = bytes(range(256)) * 32


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found. Times are of single small operations, milliseconds."""

    url: str
    capabilities: Capabilities
    """As the back-end declares them after the probe, which settles those that must be measured."""
    second_create_refused: bool
    wrong_version_kept: bool
    listed_after_put: bool
    absent_after_delete: bool
    ranges_exact: bool
    moves: bool
    tells_crc32c: bool
    put_ms: float
    synced_put_ms: float
    read_ms: float
    stat_ms: float
    clock_difference_ms: int
    """The store's clock minus this machine's; whole seconds on object stores."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What a store needs and did not find, in words; empty is good."""
        needed = {
            "a second create replaced the first object": self.second_create_refused,
            "deleting a version that is not there deleted the one that is": self.wrong_version_kept,
            "an object is not listed right after it was put": self.listed_after_put,
            "an object is still there after it was deleted": self.absent_after_delete,
            "a range came back otherwise than it was written": self.ranges_exact,
            "an object cannot be moved": self.moves,
        }
        return tuple(problem for problem, holds in needed.items() if not holds)


def probe(backend: Backend) -> ProbeReport:
    """Try everything. Raises `BackendError` where not even an object can be put and read."""
    names = [f"{STAGING_PREFIX}/{new_staging_component()}" for _ in range(3)]
    with _removed(backend, names):
        first, second, moved = names
        _, put_ms = _timed(lambda: backend.put(first, [_CONTENT], durability=Durability.NONE))
        _, synced_put_ms = _timed(lambda: backend.put(second, [_CONTENT], durability=Durability.FULL))
        content, read_ms = _timed(lambda: backend.read(first))
        known, stat_ms = _timed(lambda: backend.stat(first))
        ranges_exact = content == _CONTENT and _ranges_are_exact(backend, first)  # before anything can replace it
        return ProbeReport(
            second_create_refused=_raises(
                AlreadyExists, lambda: backend.put(first, [b"other"], durability=Durability.NONE)
            ),
            listed_after_put=first in {info.name for info in backend.list(STAGING_PREFIX)},
            ranges_exact=ranges_exact,
            wrong_version_kept=_keeps_other_version(backend, second),
            moves=_moves(backend, first, moved),
            absent_after_delete=backend.delete(moved, version=None) and backend.stat(moved) is None,
            tells_crc32c=known is not None and known.crc32c is not None,
            put_ms=put_ms,
            synced_put_ms=synced_put_ms,
            read_ms=read_ms,
            stat_ms=stat_ms,
            clock_difference_ms=backend.now_ms() - time.time_ns() // 1_000_000,
            url=backend.url,
            capabilities=backend.capabilities,
        )


@contextmanager
def _removed(backend: Backend, names: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for name in names:
            try:
                backend.delete(name, version=None)
            except BackendError:
                pass  # left to `collect_staging`


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - started) * 1000


def _raises(kind: type[BackendError], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def _ranges_are_exact(backend: Backend, name: str) -> bool:
    part = backend.read(name, offset=100, length=300) == _CONTENT[100:400]
    return part and _raises(ShortRead, lambda: backend.read(name, offset=len(_CONTENT) - 1, length=2))


def _keeps_other_version(backend: Backend, name: str) -> bool:
    """Replace it, then ask for the first version's deletion."""
    old = backend.stat(name)
    backend.put(name, [b"newer"], durability=Durability.NONE, if_absent=False)
    if old is None:
        return False
    refused = _raises(VersionChanged, lambda: backend.delete(name, version=old.version))
    return refused and backend.read(name) == b"newer"


def _moves(backend: Backend, name: str, to: str) -> bool:
    backend.move(name, to)
    return _raises(NotFound, lambda: backend.read(name)) and backend.read(to) == _CONTENT
