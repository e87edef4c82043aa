"""C36, C39, C45 on real object stores: `migrate` and `prune` while a service refuses, loses answers, breaks off, dies.

Whatever happens, source and target together hold every chunk; what is unknown is never taken for absent; the next run
finishes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_cli.backends import Unavailable, open_backend
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, MigrateResult, apply_migrate, plan_migrate
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.names import chunks_directory
from tests.flaky_proxy import Answer, BreakOff, Effect, FlakyProxy, HalfUpload, Request, Reset, Rule, flaky_proxy
from tests.servers import Bucket
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, read_kv, store_of_kv
from tests.store.pattern import document

pytestmark = pytest.mark.slow
NUM_CHUNKS = 8
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS)
QUICK = RetryPolicy(retries=2, pause_s=0.01, pause_max_s=0.02, breaker_failures=1000)
MOVE = MigrateOptions(delete_source=True, concurrency=2)


@dataclass
class Cloud:
    """A store on a service, directly and through a proxy that plays tricks."""

    bucket: Bucket
    proxy: FlakyProxy
    direct: Store
    prefix: str

    def through(self) -> Store:
        opened = open_backend(self.bucket.url(self.prefix, self.proxy.endpoint))
        assert isinstance(opened, RetryBackend)
        return Store.open(RetryBackend(opened.inner, QUICK))

    def shards(self) -> set[str]:
        return names(self.direct)


@pytest.fixture(params=["s3", "gcs"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    bucket: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    prefix = f"store-{os.urandom(6).hex()}"
    with flaky_proxy(bucket.server.endpoint) as proxy, Store.create(bucket.url(prefix)) as direct:
        yield Cloud(bucket, proxy, direct, prefix)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with store_of_kv(tmp_path / "src", TOKENS) as made:
        yield made


def names(store: Store) -> set[str]:
    return {info.name for info in store.backend.list(chunks_directory(KV_IDENTITY.fingerprint))}


def move(source: Store, target: Store) -> MigrateResult:
    return apply_migrate(source, target, plan_migrate(source, target, MOVE))


def sound(store: Store) -> set[str]:
    bad = {finding.path for finding in verify(store).findings if finding.is_problem}
    return names(store) - bad


def check_finished(source: Store, cloud: Cloud) -> None:
    """A run without faults does the rest, a third one nothing."""
    cloud.proxy.forget()
    with cloud.through() as target:
        assert move(source, target).is_whole
        sweep(source, grace_ms=0)  # what was marked when a run broke off
        assert (names(source), len(cloud.shards())) == (set(), NUM_CHUNKS)
        assert move(source, target) == MigrateResult()
    with cloud.direct.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert verify(cloud.direct).is_sound


def from_the(number: int, method: str, effect: Effect) -> Rule:
    """That request for a shard and all after it."""
    seen: list[Request] = []

    def rule(request: Request) -> Effect | None:
        if request.method in method.split("/") and ("safetensors" in request.path or "/upload/" in request.path):
            seen.append(request)
        return effect if len(seen) >= number else None

    return rule


STORMS: dict[str, tuple[int, str, Effect]] = {
    "503 to uploads": (4, "PUT/POST", Answer(503)),
    "half of uploads": (4, "PUT/POST", HalfUpload()),
    "no connection": (3, "GET", Reset()),
    "answers to reads cut short": (2, "GET", BreakOff(100)),
}


@pytest.mark.parametrize("storm", STORMS)
def test_a_storm_in_the_middle_of_a_move_deletes_nothing(source: Store, cloud: Cloud, storm: str) -> None:
    before = names(source)
    with cloud.through() as target:
        plan = plan_migrate(source, target, MOVE)
        cloud.proxy.rule = from_the(*STORMS[storm])
        with pytest.raises(Unavailable):
            apply_migrate(source, target, plan)
    cloud.proxy.forget()
    assert names(source) == before
    assert sound(cloud.direct) == cloud.shards()  # absent or whole
    check_finished(source, cloud)


@pytest.mark.parametrize("method", ["PUT/POST", "HEAD/GET/PUT/POST"])
def test_every_third_answer_is_lost_and_no_chunk(source: Store, cloud: Cloud, method: str) -> None:
    def rule(request: Request) -> Effect | None:
        return Reset(after_asking=True) if request.method in method.split("/") and request.number % 3 == 0 else None

    with cloud.through() as target:
        cloud.proxy.rule = rule
        moved = move(source, target)
    assert moved.is_whole
    assert moved.num_deleted == NUM_CHUNKS
    check_finished(source, cloud)


def test_answers_that_break_off_now_and_then_are_asked_for_again(source: Store, cloud: Cloud) -> None:
    def rule(request: Request) -> Effect | None:
        return BreakOff(200) if request.method == "GET" and request.number % 3 == 0 else None

    with cloud.through() as target:
        cloud.proxy.rule = rule
        moved = move(source, target)
    assert (moved.num_copied, moved.num_deleted, moved.is_whole) == (NUM_CHUNKS, NUM_CHUNKS, True)
    check_finished(source, cloud)


def test_a_server_killed_in_the_middle_of_a_move(source: Store, cloud: Cloud) -> None:
    if cloud.bucket.scheme != "s3":
        pytest.skip("the other one keeps its objects in memory")
    puts: list[Request] = []

    def rule(request: Request) -> Effect | None:
        if request.method == "PUT" and "safetensors" in request.path:
            puts.append(request)
            if len(puts) == 4:
                cloud.bucket.server.kill()
        return None

    before = names(source)
    try:
        with cloud.through() as target:
            cloud.proxy.rule = rule
            with pytest.raises(Unavailable):
                move(source, target)
    finally:
        if cloud.bucket.server.process is None:
            cloud.bucket.server.start()
    assert len(puts) >= 4
    assert names(source) == before
    assert sound(cloud.direct) | sound(source) == before
    check_finished(source, cloud)


@pytest.mark.parametrize("effect", [Answer(503), Answer(403)], ids=["503", "403"])
def test_a_storm_lets_prune_delete_nothing(source: Store, cloud: Cloud, effect: Effect) -> None:
    apply_migrate(source, cloud.direct, plan_migrate(source, cloud.direct))
    with cloud.through() as store:
        plan = plan_prune(store, PruneRules(everything=True))
        cloud.proxy.rule = lambda request: effect
        with pytest.raises(Unavailable):
            plan_prune(store, PruneRules(everything=True))
        with pytest.raises(Unavailable):
            mark(store, plan)
        cloud.proxy.forget()
        assert mark(store, plan).num_marked == NUM_CHUNKS
        cloud.proxy.rule = lambda request: effect
        with pytest.raises(Unavailable):
            sweep(store, grace_ms=-10_000)
        cloud.proxy.forget()
        assert len(cloud.shards()) == NUM_CHUNKS
        cloud.proxy.rule = lambda request: effect if request.method == "DELETE" else None
        failed = sweep(store, grace_ms=-10_000)
        assert (failed.num_swept, len(failed.failures)) == (0, NUM_CHUNKS)
        cloud.proxy.forget()
        assert len(cloud.shards()) == NUM_CHUNKS
        assert sweep(store, grace_ms=-10_000).num_swept == NUM_CHUNKS
        assert cloud.shards() == set()


def test_lost_answers_to_deletions_leave_no_mark_and_no_shard(source: Store, cloud: Cloud) -> None:
    apply_migrate(source, cloud.direct, plan_migrate(source, cloud.direct))
    with cloud.through() as store:
        mark(store, plan_prune(store, PruneRules(everything=True)))
        cloud.proxy.rule = lambda request: Reset(after_asking=True) if request.method == "DELETE" else None
        swept = sweep(store, grace_ms=-10_000)
        cloud.proxy.forget()
        assert (swept.num_swept + swept.num_gone, swept.failures) == (NUM_CHUNKS, [])
        assert cloud.shards() == set()
        assert plan_prune(store, PruneRules()).num_marked == 0
