"""C45, prune's side: 200 chunks, of which a listing shows 120, or ends on page 2, or shows everything twice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import Backend, ObjectInfo, Unavailable, open_backend
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, LoseResponse, TruncateListing, unavailable
from lmcache_cli.backends.wrapper import BackendWrapper
from lmcache_cli.store import IncompleteListing, Store
from lmcache_cli.store.index import Index
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.sweep import sweep
from tests.store.pattern import document, put_document, refs, tiny_identity

NUM_CHUNKS = 200
IDENTITY = tiny_identity()
ALL = PruneRules(everything=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    with Store.create(str(path)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, document(NUM_CHUNKS * 4))
    for shard in path.rglob("*.safetensors"):
        os.utime(shard, (time.time() - 60,) * 2)  # so that none of them can have come while a listing ran
    return path


def num_shards(root: Path) -> int:
    return len(list(root.rglob("*.safetensors")))


def num_listed(root: Path) -> int:
    with Store.open(str(root)) as store:
        return len(Index(store.backend, IDENTITY.fingerprint).state)


class Short(BackendWrapper):
    """Leaves the last ones out of every long listing, always the same."""

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        found = sorted(self.inner.list(prefix, recursive=recursive), key=lambda info: info.name)
        return iter(found[:120])


class Duplicates(BackendWrapper):
    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix, recursive=recursive):
            yield info
            yield info


def once_short(root: Path) -> Backend:
    return FaultBackend(open_backend(str(root)), FaultScript(Fault("list", TruncateListing(120), on_call=1, name="/c")))


@pytest.mark.parametrize("make", [once_short, lambda root: Short(open_backend(str(root)))], ids=["once", "always"])
def test_a_short_listing_aborts_the_mark(root: Path, make):
    store = Store.open(make(root))
    with pytest.raises(IncompleteListing, match="left out 80 of 200 shards"):
        mark(store, plan_prune(store, ALL))
    assert (num_listed(root), num_shards(root)) == (NUM_CHUNKS, NUM_CHUNKS)


@pytest.mark.parametrize("make", [once_short, lambda root: Short(open_backend(str(root)))], ids=["once", "always"])
def test_a_short_listing_aborts_the_sweep(root: Path, make):
    with Store.open(str(root)) as store:
        mark(store, plan_prune(store, ALL))
        with pytest.raises(IncompleteListing, match="left out 80 of 200 shards"):
            sweep(Store.open(make(root)), grace_ms=-1_000)
        assert num_shards(root) == NUM_CHUNKS
        assert sweep(store, grace_ms=-1_000).num_swept == NUM_CHUNKS


def test_a_listing_that_ends_on_the_way_aborts_both(root: Path):
    broken = Store.open(
        FaultBackend(open_backend(str(root)), FaultScript(Fault("list", LoseResponse(unavailable()), name="/c")))
    )
    with pytest.raises(Unavailable):
        mark(broken, plan_prune(broken, ALL))
    assert num_listed(root) == NUM_CHUNKS
    with Store.open(str(root)) as store:
        mark(store, plan_prune(store, ALL))
    with pytest.raises(Unavailable):
        sweep(broken, grace_ms=-1_000)
    assert num_shards(root) == NUM_CHUNKS


def test_most_shards_gone_aborts_the_mark(root: Path):
    for path in sorted(root.rglob("*.safetensors"))[:101]:
        path.unlink()
    with Store.open(str(root)) as store, pytest.raises(IncompleteListing, match="101 of 200 shards"):
        mark(store, plan_prune(store, ALL))
    assert (num_listed(root), num_shards(root)) == (NUM_CHUNKS, 99)


def test_some_shards_gone_do_not(root: Path):
    for path in sorted(root.rglob("*.safetensors"))[:100]:
        path.unlink()
    with Store.open(str(root)) as store:
        assert mark(store, plan_prune(store, ALL)).num_marked == NUM_CHUNKS
        swept = sweep(store, grace_ms=-1_000)
    assert (swept.num_swept, swept.num_gone, num_shards(root)) == (100, 100, 0)


def test_duplicates_change_nothing(root: Path):
    store = Store.open(Duplicates(open_backend(str(root))))
    assert mark(store, plan_prune(store, PruneRules(max_chunks=50))).num_marked == 150
    swept = sweep(store, grace_ms=-1_000)
    assert (swept.num_swept, swept.failures) == (150, [])
    kept = {ref.key.hex() for ref in refs(IDENTITY, document(NUM_CHUNKS * 4))[:50]}
    assert {path.name.split(".")[0] for path in root.rglob("*.safetensors")} == kept


def test_a_shard_written_while_the_listing_ran_is_no_sign_of_a_short_one(root: Path):
    """It was absent when the directory was listed, and is there when it is looked for again."""
    victim = sorted(root.rglob("*.safetensors"))[0]
    content = victim.read_bytes()
    victim.unlink()

    class Returns(BackendWrapper):
        def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
            found = list(self.inner.list(prefix, recursive=recursive))
            if prefix.endswith("/c"):
                victim.write_bytes(content)
            return iter(found)

    store = Store.open(Returns(open_backend(str(root))))
    assert mark(store, plan_prune(store, ALL)).num_marked == NUM_CHUNKS
