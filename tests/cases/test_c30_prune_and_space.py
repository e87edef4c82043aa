"""C30, prune's side: limits hold for all writers together, usage is what is on disk after every step, a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.backends import NoSpace, open_backend
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, FullAfter
from lmcache_cli.store import Namespace, PutStatus, Store
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.sweep import sweep
from tests.store.pattern import document, hit, put_chunk, put_document, refs, tiny_identity

IDENTITY = tiny_identity(head_dim=1024)  # chunks of some 70 KB
CHUNK_TOKENS = IDENTITY.chunk_tokens
QUOTA_CHUNKS = 10


def files(root: Path) -> list[Path]:
    return list((root / "ns").rglob("*.safetensors"))


def usage(store: Store) -> tuple[int, int]:
    total = store_stats(store).total
    return total.num_shards, total.size_bytes


def on_disk(root: Path) -> tuple[int, int]:
    return len(files(root)), sum(path.stat().st_size for path in files(root))


def prune(store: Store, **limits: int) -> None:
    mark(store, plan_prune(store, PruneRules(**limits)))
    sweep(store, grace_ms=-1_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_the_quota_holds_whoever_writes_and_usage_is_what_is_on_disk(root: Path):
    with Store.create(str(root)) as store:
        writers = [store.namespace(IDENTITY, create=True) for _ in range(2)]
        for number in range(10):
            put_document(writers[number % 2], document(2 * CHUNK_TOKENS, seed=number))
            for writer in writers:
                writer.flush()
            size = on_disk(root)[1] // on_disk(root)[0]
            prune(store, max_bytes=QUOTA_CHUNKS * size)
            assert on_disk(root)[0] == min(2 * number + 2, QUOTA_CHUNKS)
            assert usage(store) == on_disk(root)
        for writer in writers:
            writer.close()


def test_usage_comes_right_after_files_were_deleted_by_hand(root: Path):
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, document(10 * CHUNK_TOKENS))
        for path in files(root)[:5]:
            path.unlink()
        prune(store, max_bytes=0)
        assert usage(store) == on_disk(root) == (0, 0)
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, document(10 * CHUNK_TOKENS))
        assert usage(store) == on_disk(root)
        assert on_disk(root)[0] == 10


def test_a_limit_far_too_large_or_met_takes_nothing(root: Path):
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, document(10 * CHUNK_TOKENS))
        exactly = on_disk(root)[1]
        for limit in (exactly, 2**62):
            assert plan_prune(store, PruneRules(max_bytes=limit)).num_shards == 0
        assert plan_prune(store, PruneRules(max_bytes=exactly - 1)).num_chunks == 1


def test_a_full_disk_takes_nothing_with_it_and_is_pruned_by_what_was_marked(root: Path):
    """No room for a mark: nothing changes. What an earlier run marked is swept first, and makes the room."""
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, document(10 * CHUNK_TOKENS))
        mark(store, plan_prune(store, PruneRules(max_chunks=8)))
        full = Store.open(FaultBackend(open_backend(str(root)), FaultScript(Fault("put", FullAfter(0)))))
        before = {path: path.read_bytes() for path in files(root)}
        with pytest.raises(NoSpace):
            mark(full, plan_prune(full, PruneRules(max_chunks=4)))
        assert {path: path.read_bytes() for path in files(root)} == before
        with pytest.raises(NoSpace):
            sweep(full, grace_ms=-1_000)  # deletes, but finds no room to say so
        assert on_disk(root)[0] == 8
        prune(store, max_chunks=4)
        assert usage(store) == on_disk(root)
        assert on_disk(root)[0] == 4


def test_a_put_without_room_leaves_nothing_and_works_after_a_prune(root: Path):
    tokens = document(11 * CHUNK_TOKENS)
    last = refs(IDENTITY, tokens)[10]
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, tokens[: 10 * CHUNK_TOKENS])
        before = on_disk(root)
        limited = Store.open(FaultBackend(open_backend(str(root)), FaultScript(Fault("put", FullAfter(50_000)))))
        writer: Namespace = limited.namespace(IDENTITY, create=True)
        with pytest.raises(NoSpace):
            put_chunk(writer, last, tokens)
        assert on_disk(root) == before
        prune(store, max_chunks=10)
        with store.namespace(IDENTITY, create=True) as namespace:
            assert hit(namespace, tokens) == 10 * CHUNK_TOKENS
            assert put_chunk(namespace, last, tokens) is PutStatus.STORED
            assert hit(namespace, tokens) == 11 * CHUNK_TOKENS
