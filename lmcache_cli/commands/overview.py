"""What a store holds, as `ls` and `stats` show it: a row for every namespace, and their sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from lmcache_cli.rendering import utc_day, utc_time

if TYPE_CHECKING:
    from lmcache_cli.store import Namespace, Store
    from lmcache_cli.store.stats import NamespaceStats, Usage
    from lmcache_format import Identity


class NamespaceStatus(StrEnum):
    """Whether this release can read a namespace; `index damaged`: it can, but some of it may be left out."""

    OK = "ok"
    TOO_NEW = "newer format"
    DAMAGED = "damaged"
    INDEX_DAMAGED = "index damaged"


@dataclass(frozen=True, slots=True)
class NamespaceOverview:
    """One namespace. `problem` says why it cannot be read, or not all of it; None where all is well."""

    stats: NamespaceStats
    status: NamespaceStatus
    problem: str | None = None

    @property
    def is_damaged(self) -> bool:
        """True where something should be repaired."""
        return self.status in (NamespaceStatus.DAMAGED, NamespaceStatus.INDEX_DAMAGED)

    def row(self) -> dict[str, object]:
        """As `lmcache ls` shows it."""
        identity = self.stats.identity
        return {
            "namespace": self.stats.fingerprint,
            "model": None if identity is None else identity.model,
            "dtype": None if identity is None else identity.dtype,
            "weights": None if identity is None else identity.weights,
            "adapter": None if identity is None else identity.adapter,
            "chunk_tokens": None if identity is None else identity.chunk_tokens,
            "status": self.status,
            "problem": self.problem,
            "num_segments": self.stats.num_segments,
            **shown_usage(self.stats.usage),
        }


def namespace_overviews(store: Store) -> list[NamespaceOverview]:
    """Every namespace of the store, one that cannot be read included. Raises `BackendError`."""
    from lmcache_cli.store.stats import store_stats

    return [_overview(store, stats) for stats in store_stats(store).namespaces]


def total_usage(overviews: list[NamespaceOverview]) -> Usage:
    """The sum over namespaces."""
    from lmcache_cli.store.stats import Usage

    return sum((overview.stats.usage for overview in overviews), start=Usage())


def shown_usage(usage: Usage) -> dict[str, object]:
    """Usage with times as people read them. Bytes are those of files; `raw_bytes` of the KV they hold."""
    return {
        "num_chunks": usage.num_chunks,
        "num_complete_chunks": usage.num_complete_chunks,
        "num_incomplete_chunks": usage.num_incomplete_chunks,
        "num_tails": usage.num_tails,
        "num_shards": usage.num_shards,
        "num_tokens": usage.num_tokens,
        "num_documents": usage.num_documents,
        "size_bytes": usage.size_bytes,
        "raw_bytes": usage.raw_bytes,
        "bytes_by_encoding": {name: held.size_bytes for name, held in usage.by_encoding.items()},
        "bytes_by_part": {name: held.size_bytes for name, held in usage.by_part.items()},
        "num_hits": usage.num_hits,
        "first_added": None if usage.oldest_ms is None else utc_time(usage.oldest_ms),
        "last_added": None if usage.newest_ms is None else utc_time(usage.newest_ms),
        "last_used": None if usage.last_used_day is None else utc_day(usage.last_used_day),
        "chunks_by_last_use": dict(usage.chunks_by_last_use),
    }


def _overview(store: Store, stats: NamespaceStats) -> NamespaceOverview:
    where = f"{store.url}/ns/{stats.fingerprint}"
    if stats.is_newer:
        return NamespaceOverview(stats, NamespaceStatus.TOO_NEW, stats.problem)
    if stats.identity is None:
        return NamespaceOverview(stats, NamespaceStatus.DAMAGED, f"{where}: {stats.problem}")
    if stats.num_damaged_segments:
        problem = f"{where}: {stats.num_damaged_segments} segments of the index are damaged; run 'lmcache repair'"
        return NamespaceOverview(stats, NamespaceStatus.INDEX_DAMAGED, problem)
    return NamespaceOverview(stats, NamespaceStatus.OK)


def open_for_reading(store: Store, identity: Identity) -> Namespace:
    """A namespace to look at: of whatever weights, in whatever encodings."""
    return store.namespace(identity, allow_lossy=True, allow_unverified=True)
