"""Which shards of a namespace a job is about: by model, namespace, encoding, age and last use; and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice

import numpy as np

from lmcache_cli.backends import Backend, ObjectInfo
from lmcache_format.errors import BadName
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import ShardName, chunks_directory

from .chunk_table import Bools, chunk_table
from .index import ABSENT_ROW, rows_of
from .state import State
from .victims import Candidates

_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns are shell globs; of one kind any may match, of the kinds that are given all must.

    `older_than_ms`: written that long ago; `unused_for_ms`: neither written nor used since. What counts of a chunk is
    the latest of its own and of all chunks after it, so that what is chosen never leaves an orphan.
    """

    models: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()
    older_than_ms: int | None = None
    unused_for_ms: int | None = None

    @property
    def has_age(self) -> bool:
        """True where age or last use decide."""
        return self.older_than_ms is not None or self.unused_for_ms is not None

    def has_namespace(self, fingerprint: Fingerprint) -> bool:
        """Whether a namespace is chosen by its name; its model is not known yet."""
        return _matches(fingerprint, self.namespaces)

    def has_model(self, identity: Identity) -> bool:
        """Whether a model is chosen."""
        return _matches(identity.model, self.models)

    def has_encoding(self, label: str) -> bool:
        """Whether shards of an encoding are chosen."""
        return _matches(label, self.encodings)

    def rows(self, state: State, now_ms: int) -> Bools:
        """Which shards of an index are chosen. `now_ms` is the store's clock; what is from the future is new."""
        if not len(state):
            return np.zeros(0, np.bool_)
        wanted = np.array([self.has_encoding(label) for label in state.encodings], np.bool_)
        rows: Bools = wanted[state.adds["encoding"]]
        if not self.has_age:
            return rows
        table = chunk_table(state, None)
        candidates = Candidates.of(table, now_ms)
        chunks = np.ones(len(table), np.bool_)
        if self.older_than_ms is not None:
            chunks &= candidates.created_ms < now_ms - self.older_than_ms
        if self.unused_for_ms is not None:
            chunks &= candidates.last_used_ms < now_ms - self.unused_for_ms
        return rows & np.repeat(chunks, table.stops - table.starts)


ALL = Selection()


@dataclass(frozen=True, slots=True)
class ListedShard:
    """One object of a listing, and the row of the index that lists it (`ABSENT_ROW`: none does)."""

    name: ShardName
    info: ObjectInfo
    row: int

    @property
    def is_indexed(self) -> bool:
        """True where the index lists a shard of this name."""
        return self.row != ABSENT_ROW


def listed_shards(backend: Backend, fingerprint: Fingerprint, state: State) -> Iterator[ListedShard]:
    """Every shard of a namespace that a listing shows, as a stream. Foreign files are passed over.

    Raises `BackendError` where the listing fails, possibly after some shards.
    """
    listing = backend.list(chunks_directory(fingerprint))
    while batch := list(islice(listing, _BATCH)):
        yield from _with_rows(batch, state)


def chunk_groups(backend: Backend, fingerprint: Fingerprint, state: State) -> Iterator[list[ListedShard]]:
    """The same, all shards of a chunk together; a 256th of the namespace is held at a time."""
    for first in backend.list(chunks_directory(fingerprint), recursive=False):
        if not first.is_prefix:
            continue
        groups: dict[bytes, list[ListedShard]] = {}
        for shard in _with_rows(list(backend.list(first.name.removesuffix("/"))), state):
            groups.setdefault(shard.name.key, []).append(shard)
        yield from groups.values()


def _with_rows(batch: Sequence[ObjectInfo], state: State) -> Iterator[ListedShard]:
    named: list[tuple[ShardName, ObjectInfo]] = []
    for info in batch:
        try:
            named.append((ShardName.parse(info.name), info))
        except BadName:
            continue
    rows = rows_of(state, [name for name, _ in named]).tolist()
    for (name, info), row in zip(named, rows, strict=True):
        yield ListedShard(name, info, row)


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)
