"""A chain that ends in a bucket, behind a network that fails: whatever happens there is a miss, in good time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import open_backend
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from lmcache_cli.store import Store
from lmcache_cli.store.chain import ChainedNamespace, ChainOptions, StoreChain
from lmcache_cli.store.events import Event
from lmcache_cli.store.far import FarOptions
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_cli.store.promotion import PromotionOptions
from lmcache_cli.store.verify import verify
from tests.flaky_proxy import Answer, BreakOff, Effect, FlakyProxy, Hang, Reset, flaky_proxy
from tests.servers import Bucket
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

pytestmark = pytest.mark.slow
TOKENS = document(5 * CHUNK_TOKENS + 3)
NUM_SHARDS = 6


@pytest.fixture(params=["s3", "gcs"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return found


@pytest.fixture
def prefix(bucket: Bucket, tmp_path: Path) -> str:
    """Where in the bucket the document lies; it was moved there from the store `near`."""
    made = f"store-{os.urandom(6).hex()}"
    with Store.create(str(tmp_path / "near")) as near, Store.create(bucket.url(made)) as far:
        with near.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
        moved = apply_migrate(near, far, plan_migrate(near, far, MigrateOptions(delete_source=True)))
        assert moved.num_deleted == NUM_SHARDS
    return made


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FlakyProxy]:
    with flaky_proxy(bucket.server.endpoint) as made:
        yield made


@pytest.fixture
def namespace(bucket: Bucket, prefix: str, proxy: FlakyProxy, tmp_path: Path) -> Iterator[ChainedNamespace]:
    opened = open_backend(bucket.url(prefix, proxy.endpoint))
    assert isinstance(opened, RetryBackend)
    quick = RetryBackend(opened.inner, RetryPolicy(pause_s=0.01, breaker_cooldown_s=0.1))
    options = ChainOptions(FarOptions(timeout_s=1.0, cooldown_s=0.2), PromotionOptions(min_free_bytes=0))
    with StoreChain.open([str(tmp_path / "near"), quick], options) as chain:
        with chain.namespace(KV_IDENTITY) as made:
            yield made


def found_in_the_end(namespace: ChainedNamespace) -> int:
    """What of a prompt is found once the store behind is not left alone any more."""
    deadline = time.monotonic() + 20
    while namespace.match(TOKENS).num_tokens < len(TOKENS) and time.monotonic() < deadline:
        time.sleep(0.05)
    return namespace.match(TOKENS).num_tokens


def test_faults_are_misses_in_time_and_pass(namespace: ChainedNamespace, proxy: FlakyProxy, tmp_path: Path) -> None:
    effects: list[Effect] = [Answer(503), Answer(403), Reset(), Hang(2.0), BreakOff(3000)]
    for effect in effects:
        assert found_in_the_end(namespace) == len(TOKENS)
        match = namespace.match(TOKENS)
        proxy.rule = lambda request, effect=effect: effect if request.method == "GET" else None  # type: ignore[misc]
        started = time.monotonic()
        _, result = namespace.load(match)
        assert result.num_tokens == 0, effect
        assert time.monotonic() - started < 10, effect
        proxy.forget()
    assert list((tmp_path / "near" / "ns").rglob("*.safetensors")) == []
    assert found_in_the_end(namespace) == len(TOKENS)
    assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert namespace.wait_promoted(10)
    assert namespace.events[Event.PROMOTED] == NUM_SHARDS
    proxy.rule = lambda request: Answer(503)
    proxy.counts.clear()
    assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert proxy.counts["GET"] == 0
    with Store.open(str(tmp_path / "near")) as near:
        assert verify(near).is_sound
