"""One pass over everything below a namespace's `c/`: the listing against the index, and shards against themselves.

Verify and repair are two readers of this pass. The listing is a stream and the index is arrays, so memory does not
grow with the number of shards, only with what the caller keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend, ObjectInfo
from lmcache_format.encodings import is_known_label
from lmcache_format.errors import BadName
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName, chunks_directory
from lmcache_format.segment import AddFlags, key_number

from .checking import Checked, Health, check_shard
from .index import ABSENT_ROW, Index, is_same_shard, rows_of
from .state import Entry, State

T = TypeVar("T")
_BATCH = 4096
_JOBS_AHEAD = 8


class Level(StrEnum):
    """How much of a shard is read. `quick`: nothing, the listing is compared with the index; `headers`: its header;
    `full`: every byte. What the index does not know has its header read at every level."""

    QUICK = "quick"
    HEADERS = "headers"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal shares of the shards, by key, so that every run and machine takes the same; `index` from 1.

    `index` None takes another share every day (UTC), and all of them in `count` days."""

    index: int | None
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or (self.index is not None and not 1 <= self.index <= self.count):
            raise ValueError(f"expected a share from 1/{self.count} to {self.count}/{self.count}, found {self.index}")

    def on(self, day: int) -> Share:
        """The share of a day, counted from 1970."""
        return self if self.index is not None else Share(day % self.count + 1, self.count)

    def holds(self, key: bytes) -> bool:
        """True where the share has the chunk `key`. The share must not be a daily one."""
        assert self.index is not None
        return key_number(key, 8) % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{'auto' if self.index is None else self.index}/{self.count}"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One shard that was read, or that the listing alone told something about.

    `entry` is the index's, None where it lists none; `row` its row of the index as first read, or `ABSENT_ROW`.
    `is_other_write`: the shard is sound, but of another write than the index lists.
    """

    name: ShardName
    info: ObjectInfo
    checked: Checked
    entry: Entry | None = None
    row: int = ABSENT_ROW
    is_other_write: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    name: ShardName
    info: ObjectInfo
    entry: Entry | None
    row: int
    with_data: bool


class Survey:
    """Run `shards` to its end, then ask for the rest. `seen[row]` is 1 for every row of the index that was listed."""

    def __init__(
        self,
        backend: Backend,
        index: Index,
        identity: Identity | None,
        level: Level,
        *,
        share: Share | None = None,
        threads: int = 2,
    ) -> None:
        self._backend = backend
        self._index = index
        self._identity = identity
        self._level = level
        self._share = share
        self._threads = threads
        self._seen = bytearray(len(index.state))
        self.foreign: list[str] = []
        self.num_listed = 0
        self.bytes_listed = 0
        self.num_agreeing = 0

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """For every row of the index: whether the listing had its shard."""
        return np.frombuffer(bytes(self._seen), np.bool_)

    def shards(self) -> Iterator[Surveyed]:
        """Every shard that was read, or disagrees. Those of which the listing says what the index does are counted in
        `num_agreeing` alone. Raises `BackendError` where the listing fails: nothing may then be concluded."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="lmcache-check") as pool:
            yield from _ahead(pool, self._check, self._jobs(), self._threads * _JOBS_AHEAD)

    def _jobs(self) -> Iterator[_Job]:
        listed = self._backend.list(chunks_directory(self._index.fingerprint))
        while batch := list(islice(listed, _BATCH)):
            yield from self._jobs_of(batch)

    def _jobs_of(self, batch: list[ObjectInfo]) -> Iterator[_Job]:
        named: list[tuple[ShardName, ObjectInfo]] = []
        for info in batch:
            try:
                named.append((ShardName.parse(info.name), info))
            except BadName:
                self.foreign.append(info.name)
        names = [name for name, _ in named]
        state = self._index.state
        rows = rows_of(state, names)
        late = self._late_rows(names, rows)
        sizes, flags, checksums = (state.adds[field] for field in ("size_bytes", "flags", "crc32c"))
        for (name, info), row, late_row in zip(named, rows.tolist(), late, strict=True):
            if row != ABSENT_ROW:
                if self._seen[row]:
                    continue  # listed twice
                self._seen[row] = 1
            self.num_listed += 1
            self.bytes_listed += info.size_bytes
            in_share = self._share is None or self._share.holds(name.key)
            agrees = row != ABSENT_ROW and int(sizes[row]) == info.size_bytes and is_known_label(name.encoding)
            is_other_content = False
            if agrees and info.crc32c is not None and int(flags[row]) & AddFlags.HAS_CRC32C:
                is_other_content = int(checksums[row]) != info.crc32c
            if agrees and not is_other_content and (self._level is Level.QUICK or not in_share):
                self.num_agreeing += 1
                continue
            entry = state.entry(row) if row != ABSENT_ROW else None
            if entry is None and late_row != ABSENT_ROW:
                entry = self._index.late.entry(late_row)
            yield _Job(name, info, entry, row, is_other_content or (in_share and self._level is Level.FULL))

    def _late_rows(self, names: list[ShardName], rows: npt.NDArray[np.int64]) -> list[int]:
        """Rows of what was flushed since, for names the index did not list when it was read."""
        if len(names) and bool((rows == ABSENT_ROW).any()):
            self._index.refresh()
            late: list[int] = rows_of(self._index.late, names).tolist()
            return late
        return [ABSENT_ROW] * len(names)

    def _check(self, job: _Job) -> Surveyed:
        checked = check_shard(self._backend, job.name, self._identity, with_data=job.with_data)
        is_other = (
            checked.header is not None
            and checked.health in (Health.SOUND, Health.NEWER)
            and job.entry is not None
            and job.entry.nonce != checked.header.meta.nonce
        )
        return Surveyed(job.name, job.info, checked, job.entry, job.row, is_other)

    def unlisted(self) -> Unlisted:
        """What the index has and the listing had not, looked for once more in each chunk's own directory. Call it when
        `shards` has ended. Raises `BackendError`."""
        self._index.refresh()
        state = self._index.state
        rows = np.flatnonzero(~self.seen)
        if len(rows) and len(self._index.late.removes):
            rows = rows[~np.isin(state.adds["nonce"][rows], self._index.late.removes["nonce"])]
        found = Unlisted([], [], [])
        for directory, members in _by_directory(state, rows, self._index.fingerprint):
            present = list(_names_in(self._backend, directory))
            for row in members:
                entry = state.entry(row)
                match next(((name, is_object) for name, is_object in present if is_same_shard(name, entry)), None):
                    case None:
                        found.missing.append(row)
                    case (name, True):
                        found.left_out.append((row, name))
                    case (name, _):
                        found.obstructed.append((row, name))
        return found


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Rows of the index. `missing`: the shard is surely absent; `left_out`: it is there although the listing of the
    namespace had it not, so that nothing may be concluded from it; `obstructed`: a directory stands in its place."""

    missing: list[int]
    left_out: list[tuple[int, ShardName]]
    obstructed: list[tuple[int, ShardName]]


def _by_directory(state: State, rows: npt.NDArray[np.int64], fingerprint: str) -> Iterator[tuple[str, Iterable[int]]]:
    """Rows by the directory their shards lie in; rows come in key order, so those of one directory are neighbours."""
    if not len(rows):
        return
    directories = state.keys[rows] >> np.uint64(48)
    edges = np.flatnonzero(np.concatenate([[True], directories[1:] != directories[:-1]]))
    for start, stop in zip(edges.tolist(), [*edges[1:].tolist(), len(rows)], strict=True):
        text = f"{int(directories[start]):04x}"
        yield f"ns/{fingerprint}/c/{text[:2]}/{text[2:]}", rows[start:stop].tolist()


def _names_in(backend: Backend, directory: str) -> Iterator[tuple[ShardName, bool]]:
    """Names of shards in a directory, and whether an object stands there rather than a directory."""
    for info in backend.list(directory, recursive=False):
        try:
            yield ShardName.parse(info.name.removesuffix("/")), not info.is_prefix
        except BadName:
            continue


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[_Job], Surveyed], jobs: Iterator[_Job], ahead: int
) -> Iterator[Surveyed]:
    """Results in order, with at most `ahead` jobs begun and not taken. Jobs not begun are dropped when the caller
    stops."""
    running: deque[Future[Surveyed]] = deque()
    try:
        for job in jobs:
            running.append(pool.submit(work, job))
            if len(running) >= ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
