"""Shards that no index lists: left by writers that ended before they flushed. They take space that no limit counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_format.identity import Fingerprint
from lmcache_format.segment import key_number

from .index import Index
from .manifest import DEFAULT_GRACE_MS
from .selection import ListedShard, listed_shards
from .store import Store
from .sweep import marked


@dataclass(frozen=True, slots=True)
class Unlisted:
    """How many there are, and their bytes."""

    num_shards: int = 0
    size_bytes: int = 0


def count_unlisted(
    store: Store, namespaces: Sequence[Fingerprint], *, older_than_ms: int = DEFAULT_GRACE_MS
) -> Unlisted:
    """Compare a listing of all shards with the indexes; neither young ones count, which their writer may list
    yet, nor those of chunks of which something waits for a sweep. Raises `BackendError`.
    """
    young_ms = store.backend.now_ms() - older_than_ms
    num_shards = size_bytes = 0
    for fingerprint in namespaces:
        for shard in _unlisted(store, fingerprint):
            if shard.info.modified_ms <= young_ms:
                num_shards += 1
                size_bytes += shard.info.size_bytes
    return Unlisted(num_shards, size_bytes)


def _unlisted(store: Store, fingerprint: Fingerprint) -> Iterator[ListedShard]:
    state = Index(store.backend, fingerprint).state
    waiting = np.unique(state.removes["key"][marked(state)])
    for shard in listed_shards(store.backend, fingerprint, state):
        if shard.is_indexed:
            continue
        number = np.uint64(key_number(shard.name.key))
        at = int(np.searchsorted(waiting, number))
        if at == len(waiting) or waiting[at] != number:
            yield shard
