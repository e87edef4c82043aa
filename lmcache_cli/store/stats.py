"""A store in numbers, from its indexes alone: whole arrays at a time, so that a million shards take a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_format.geometry import part_bytes, whole_part
from lmcache_format.identity import Fingerprint, Identity

from .chunk_table import ChunkTable, chunk_table
from .clocks import looked_at_ms
from .index import Index
from .manifest import DAY_MS
from .objects import FoundIdentity, chosen_namespaces, find_identity
from .state import State
from .store import Store

AGES = (("today", 0), ("1 d", 1), ("7 d", 7), ("30 d", 30), ("90 d", 90), ("365 d", 365))
"""Upper bounds, in days, of the classes of last use; what is older is `older`."""
OLDER = "older"


@dataclass(frozen=True, slots=True)
class Held:
    """Shards of one encoding or part. `raw_bytes`: what they are without encoding and headers."""

    num_shards: int
    size_bytes: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Chunks are counted once whatever their parts and encodings, and so are their tokens.

    `size_bytes` is what the files take; `raw_bytes` the KV they hold, each part of a chunk once. Days count from 1970.
    `chunks_by_last_use` has the classes of `AGES`; a chunk never read counts from when it was written.
    """

    num_shards: int = 0
    num_chunks: int = 0
    num_complete_chunks: int = 0
    num_tails: int = 0
    num_tokens: int = 0
    num_complete_tokens: int = 0
    size_bytes: int = 0
    raw_bytes: int = 0
    num_hits: int = 0
    num_documents: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    last_used_day: int | None = None
    by_encoding: Mapping[str, Held] = field(default_factory=dict)
    by_part: Mapping[str, Held] = field(default_factory=dict)
    chunks_by_last_use: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_incomplete_chunks(self) -> int:
        """Chunks of which parts are missing."""
        return self.num_chunks - self.num_complete_chunks

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            num_shards=self.num_shards + other.num_shards,
            num_chunks=self.num_chunks + other.num_chunks,
            num_complete_chunks=self.num_complete_chunks + other.num_complete_chunks,
            num_tails=self.num_tails + other.num_tails,
            num_tokens=self.num_tokens + other.num_tokens,
            num_complete_tokens=self.num_complete_tokens + other.num_complete_tokens,
            size_bytes=self.size_bytes + other.size_bytes,
            raw_bytes=self.raw_bytes + other.raw_bytes,
            num_hits=self.num_hits + other.num_hits,
            num_documents=self.num_documents + other.num_documents,
            oldest_ms=min(filter(None, (self.oldest_ms, other.oldest_ms)), default=None),
            newest_ms=max(filter(None, (self.newest_ms, other.newest_ms)), default=None),
            last_used_day=max(filter(None, (self.last_used_day, other.last_used_day)), default=None),
            by_encoding=_added(self.by_encoding, other.by_encoding),
            by_part=_added(self.by_part, other.by_part),
            chunks_by_last_use={
                name: self.chunks_by_last_use.get(name, 0) + other.chunks_by_last_use.get(name, 0)
                for name in (*(name for name, _ in AGES), OLDER)
            },
        )


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace; `identity` None and `problem` set where its `ns.json` cannot be read. Of its index
    `num_damaged_segments` and `num_newer_segments` could not be read, so that the numbers may be too small."""

    fingerprint: Fingerprint
    identity: Identity | None
    usage: Usage
    num_segments: int
    num_damaged_segments: int = 0
    num_newer_segments: int = 0
    problem: str = ""
    is_newer: bool = False


@dataclass(frozen=True, slots=True)
class StoreStats:
    """All namespaces, and their sum."""

    namespaces: tuple[NamespaceStats, ...]
    total: Usage


def store_stats(store: Store, namespace: Fingerprint | None = None) -> StoreStats:
    """Count what the indexes list; no shard is looked at. Raises `NoSuchNamespace`, `BackendError`."""
    today = looked_at_ms(store.backend) // DAY_MS
    found = tuple(
        _namespace_stats(store, find_identity(store, fingerprint), today)
        for fingerprint in chosen_namespaces(store, namespace)
    )
    return StoreStats(found, sum((one.usage for one in found), start=Usage()))


def _namespace_stats(store: Store, found: FoundIdentity, today: int) -> NamespaceStats:
    index = Index(store.backend, found.fingerprint)
    newer = sum(problem.is_newer for problem in index.problems)
    return NamespaceStats(
        found.fingerprint,
        found.identity,
        usage_of(index.state, found.identity, today),
        index.manifest.live_segments,
        len(index.problems) - newer,
        newer,
        found.problem,
        found.is_newer,
    )


def usage_of(state: State, identity: Identity | None, today: int) -> Usage:
    """Numbers of one namespace. Without its identity every chunk counts as complete, and `raw_bytes` is unknown (0)."""
    if not len(state):
        return Usage()
    table = chunk_table(state, None if identity is None else whole_part(identity))
    tokens = table.num_tokens
    raw = _raw_bytes(state, identity)
    created = state.adds["created_ms"]
    last_used = _last_used_days(table)
    return Usage(
        num_shards=len(state),
        num_chunks=len(table),
        num_complete_chunks=int(table.is_whole.sum()),
        num_tails=0 if identity is None else int((tokens < identity.chunk_tokens).sum()),
        num_tokens=int(tokens.sum()),
        num_complete_tokens=int(tokens[table.is_whole].sum()),
        size_bytes=int(state.adds["size_bytes"].sum()),
        raw_bytes=int(raw[_first_of_part(state)].sum()),
        num_hits=int(state.touches["hits"].sum()),
        num_documents=len({label.name for label in state.labels}),
        oldest_ms=int(created.min()),
        newest_ms=int(created.max()),
        last_used_day=int(last_used.max()),
        by_encoding=_held(state, raw, "encoding", state.encodings),
        by_part=_held(state, raw, "part", list(map(str, state.parts))),
        chunks_by_last_use=_by_age(today - last_used),
    )


def _raw_bytes(state: State, identity: Identity | None) -> npt.NDArray[np.int64]:
    """Raw bytes behind every shard."""
    tokens = state.adds["num_tokens"].astype(np.int64)
    if identity is None:
        return np.zeros(len(state), np.int64)
    per_token = np.array([part_bytes(identity, part, 1) for part in state.parts], np.int64)
    raw: npt.NDArray[np.int64] = tokens * per_token[state.adds["part"]]
    return raw


def _first_of_part(state: State) -> npt.NDArray[np.bool_]:
    """True in the first row of every chunk and part; rows are sorted by key, then part."""
    first = np.ones(len(state), np.bool_)
    adds = state.adds
    first[1:] = (
        (state.keys[1:] != state.keys[:-1])
        | (adds["key_rest"][1:] != adds["key_rest"][:-1])
        | (adds["part"][1:] != adds["part"][:-1])
    )
    return first


def _last_used_days(table: ChunkTable) -> npt.NDArray[np.int64]:
    """The day every chunk was read last, or written where it never was."""
    days = table.created_ms // DAY_MS
    touches = table.state.touches
    if len(touches):
        at = np.searchsorted(touches["key"], table.keys)
        at[at == len(touches)] = 0
        known = touches["key"][at] == table.keys
        days[known] = np.maximum(days[known], touches["day"][at[known]].astype(np.int64))
    return days


def _by_age(ages: npt.NDArray[np.int64]) -> dict[str, int]:
    """How many chunks fall in each class; what lies in the future is of today."""
    bounds = np.array([bound for _, bound in AGES], np.int64)
    counts = np.bincount(np.searchsorted(bounds, np.maximum(ages, 0), side="left"), minlength=len(AGES) + 1)
    return dict(zip((*(name for name, _ in AGES), OLDER), counts.tolist(), strict=True))


def _held(state: State, raw: npt.NDArray[np.int64], name: str, names: Iterable[str]) -> dict[str, Held]:
    numbers = state.adds[name].astype(np.int64)
    labels = list(names)
    shards = np.bincount(numbers, minlength=len(labels))
    sizes, raws = (_sums(numbers, values, len(labels)) for values in (state.adds["size_bytes"], raw))
    held = {
        label: Held(int(shards[number]), int(sizes[number]), int(raws[number])) for number, label in enumerate(labels)
    }
    return {label: held[label] for label in sorted(held) if held[label].num_shards}


def _sums(numbers: npt.NDArray[np.int64], values: npt.NDArray[np.integer[Any]], count: int) -> npt.NDArray[np.int64]:
    """Exact sums by number; `bincount` with weights would add floats."""
    sums = np.zeros(count, np.int64)
    for number in range(count):
        sums[number] = values[numbers == number].astype(np.int64).sum()
    return sums


def _added(one: Mapping[str, Held], other: Mapping[str, Held]) -> dict[str, Held]:
    none = Held(0, 0, 0)
    pairs = {name: (one.get(name, none), other.get(name, none)) for name in sorted({*one, *other})}
    return {
        name: Held(a.num_shards + b.num_shards, a.size_bytes + b.size_bytes, a.raw_bytes + b.raw_bytes)
        for name, (a, b) in pairs.items()
    }
