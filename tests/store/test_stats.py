"""A store in numbers, compared with its files."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.backends import Durability
from lmcache_cli.store import Namespace, NoSuchNamespace, Store
from lmcache_cli.store.manifest import DAY_MS
from lmcache_cli.store.state import State, merge
from lmcache_cli.store.stats import Held, Usage, store_stats, usage_of
from lmcache_format.geometry import Part
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import new_ulid, segment_directory
from lmcache_format.segment import ADD_DTYPE, KEY_DTYPE, TOUCH_DTYPE, Segment, encode_segment
from tests.store.pattern import document, hit, put_document, tiny_identity

DOCUMENT = document(22)  # five chunks of 4 and a tail of 2
CHUNK_BYTES = 2 * 2 * 2 * 4 * 4 * 2  # layers, sides, heads, tokens, head dim, bf16


def test_numbers_are_those_of_the_files(store: Store, namespace: Namespace, root: Path):
    put_document(namespace, DOCUMENT)
    namespace.label("a", namespace.match(DOCUMENT).keys[-1], 22, 5)
    assert hit(namespace, DOCUMENT[:12]) == 12
    assert hit(namespace, DOCUMENT[:4]) == 4
    namespace.flush()
    files = list(root.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    (one,) = (found := store_stats(store)).namespaces
    usage = found.total
    assert (one.identity, one.problem, one.num_damaged_segments) == (namespace.identity, "", 0)
    assert (usage.num_shards, usage.num_chunks, usage.num_complete_chunks, usage.num_tails) == (6, 6, 6, 1)
    assert (usage.num_tokens, usage.num_complete_tokens, usage.num_documents) == (22, 22, 1)
    assert (usage.size_bytes, usage.raw_bytes) == (size, 22 * CHUNK_BYTES // 4)
    assert usage.num_hits == 4
    assert usage.by_encoding == {"raw": Held(6, size, 22 * CHUNK_BYTES // 4)}
    assert usage.by_part == {"l0-2h0-2": Held(6, size, 22 * CHUNK_BYTES // 4)}
    assert usage.chunks_by_last_use == {"today": 6, "1 d": 0, "7 d": 0, "30 d": 0, "90 d": 0, "365 d": 0, "older": 0}
    assert abs(usage.newest_ms - time.time() * 1000) < 60_000
    assert usage.oldest_ms <= usage.newest_ms
    assert usage.last_used_day == int(time.time() * 1000) // DAY_MS


def test_parts_and_incomplete_chunks(store: Store, namespace: Namespace):
    put_document(namespace, DOCUMENT, part=Part(0, 1, 0, 2))
    put_document(namespace, DOCUMENT[:8], part=Part(1, 2, 0, 2))
    namespace.flush()
    usage = store_stats(store).total
    assert (usage.num_shards, usage.num_chunks, usage.num_complete_chunks, usage.num_incomplete_chunks) == (8, 6, 2, 4)
    assert (usage.num_tokens, usage.num_complete_tokens) == (22, 8)
    assert {name: held.num_shards for name, held in usage.by_part.items()} == {"l0-1h0-2": 6, "l1-2h0-2": 2}
    assert usage.raw_bytes == (22 + 8) * CHUNK_BYTES // 8


def test_two_encodings_of_a_chunk_hold_its_kv_once(identity: Identity):
    segment = made_segment(identity, 4, 20_000)
    adds = np.repeat(segment.adds, 2)
    adds["encoding"] = np.arange(8) % 2
    adds["nonce"] = np.arange(8)
    both = replace(segment, encodings=("raw", "bfx"), keys=np.repeat(segment.keys, 2), adds=adds)
    usage = usage_of(merge([both]), identity, 20_000)
    assert (usage.num_shards, usage.num_chunks, usage.num_tokens) == (8, 4, 16)
    assert usage.raw_bytes == 4 * CHUNK_BYTES
    assert usage.by_encoding == {name: Held(4, 4 * 5_902_336, 4 * CHUNK_BYTES) for name in ("bfx", "raw")}


def test_the_sum_of_namespaces(store: Store):
    for name in ("one", "two"):
        with store.namespace(tiny_identity(name=name), create=True) as namespace:
            put_document(namespace, DOCUMENT)
    found = store_stats(store)
    assert found.total == found.namespaces[0].usage + found.namespaces[1].usage
    assert (found.total.num_chunks, found.total.by_encoding["raw"].num_shards) == (12, 12)
    alone = store_stats(store, found.namespaces[0].fingerprint)
    assert alone.total.num_chunks == 6
    with pytest.raises(NoSuchNamespace):
        store_stats(store, Fingerprint("0" * 32))


def test_a_namespace_without_identity_and_a_damaged_segment_are_told(store: Store, namespace: Namespace, root: Path):
    put_document(namespace, DOCUMENT)
    namespace.flush()
    (root / "ns" / namespace.fingerprint / "ns.json").unlink()
    segment = root / segment_directory(namespace.fingerprint) / f"{new_ulid(1)}-w.lmi"
    segment.write_bytes(b"LMKVSEG1 and no more")
    (one,) = store_stats(store).namespaces
    assert (one.identity, one.problem, one.usage.num_chunks) == (None, "ns.json is missing", 6)
    assert (one.num_segments, one.num_damaged_segments) == (1, 1)


def test_an_empty_store(store: Store):
    assert store_stats(store).total == Usage()


def test_last_use_falls_into_classes(identity: Identity):
    today = 20_000
    ages = [0, -3, 1, 2, 7, 8, 30, 31, 90, 91, 365, 366, 5_000]
    state = made_state(identity, len(ages), day=today - 6_000)
    touches = np.zeros(len(ages), TOUCH_DTYPE)
    touches["key"] = state.keys
    touches["day"] = [today - age for age in ages]
    usage = usage_of(replace(state, touches=touches), identity, today)
    assert list(usage.chunks_by_last_use.values()) == [2, 1, 2, 2, 2, 2, 2]


def made_state(identity: Identity, count: int, day: int) -> State:
    return merge([made_segment(identity, count, day)])


def made_segment(identity: Identity, count: int, day: int) -> Segment:
    """An index of `count` chunks that nobody wrote."""
    rng = np.random.default_rng(1)
    adds = np.zeros(count, ADD_DTYPE)
    adds["key_rest"] = rng.integers(0, 2**63, count, np.uint64)
    adds["parent"] = rng.integers(0, 2**63, count, np.uint64)
    adds["nonce"] = np.arange(count)
    adds["size_bytes"] = 5_902_336
    adds["created_ms"] = day * DAY_MS
    adds["num_tokens"] = identity.chunk_tokens
    adds["depth"] = np.arange(count) % 128
    keys = np.sort(rng.integers(0, 2**63, count, np.uint64)).astype(KEY_DTYPE)
    return Segment(identity.fingerprint, 1, "made", ("l0-2h0-2",), ("raw",), keys=keys, adds=adds)


def test_a_million_shards_in_seconds(store: Store, identity: Identity):
    """The bar is 3 s for the whole process; this leaves a slow machine room."""
    with store.namespace(identity, create=True):
        pass
    path = f"{segment_directory(identity.fingerprint)}/{new_ulid(1)}-made.lmi"
    store.backend.put(path, [encode_segment(made_segment(identity, 1_000_000, 20_000))], durability=Durability.NONE)
    started = time.perf_counter()
    usage = store_stats(store).total
    elapsed_s = time.perf_counter() - started
    assert (usage.num_shards, usage.num_complete_chunks) == (1_000_000, 1_000_000)
    assert usage.size_bytes == 5_902_336 * 1_000_000
    assert elapsed_s < 6
