"""C22: an abort between lookup and allocation leaks what was held. A pool of 8 chunks, a prompt of which 4 are cached.

A lookup of this connector holds nothing, so that an abort has nothing to give back. What is held, buffers of loads and
saves, comes back by itself: when a read or a write is over, or has taken too long.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_cli.backends import Backend
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, Hold
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.runtime.memory import MemoryPool
from lmcache_cli.store import Store
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.integration.vllm.fakes import FakeEngine, FakeRequest, Status
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

IDENTITY = tiny_identity(layers=1, kv_heads=2, head_dim=2, chunk_tokens=8)
CACHED = document(32, 22)
PROMPT = [*CACHED, *document(9, 23)]
POOL = 8


class Serving(RuleBasedStateMachine):
    """Requests for one prompt, each of which may be given up in whatever state it is. Alloc, load, save and finish are
    what a step does. A read can be held for longer than loads may take."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="lmcache-c22-")) / "kv"
        with Store.create(str(self.root)) as store, store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, CACHED)
        self.go_on = threading.Event()
        self.now = 0.0
        self.seen: dict[str, FakeRequest] = {}

    @initialize(load_async=st.booleans(), policy=st.sampled_from(["recompute", "fail"]), slow=st.integers(0, 3))
    def start(self, load_async: bool, policy: str, slow: int) -> None:
        key = refs(IDENTITY, CACHED)[slow].key.hex()
        held = Fault("open_read", Hold(threading.Event(), self.go_on, timeout_s=5.0), name=key, on_call=2)

        def backend() -> Backend:
            return FaultBackend(LocalBackend(self.root), FaultScript(held))

        self.engine = FakeEngine(
            str(self.root),
            IDENTITY,
            load_async=load_async,
            policy=policy,
            worker_backend=backend,
            load_timeout_s=0.05,
            save_buffers=POOL,
            prefix_caching=False,
            recheck_s=10.0,
            clock=lambda: self.now,
        )

    @rule()
    def arrive(self) -> None:
        name = f"r{len(self.seen)}"
        self.seen[name] = self.engine.add(name, PROMPT, max_tokens=3)

    @rule(number=st.integers(0, 50), times=st.integers(1, 3))
    def look_up(self, number: int, times: int) -> None:
        """And do not allocate."""
        waiting = [one for one in self.engine.waiting if one.status in (Status.WAITING, Status.PREEMPTED)]
        waiting = [one for one in waiting if not one.is_loaded and not one.num_computed]
        if waiting:
            request = waiting[number % len(waiting)]
            assert len({self.engine.scheduler.matched(request, 0) for _ in range(times)}) == 1

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @rule(number=st.integers(0, 50), times=st.integers(1, 2))
    @precondition(lambda self: self.seen)
    def abort(self, number: int, times: int) -> None:
        """In any state; also twice, also when it is over."""
        name = sorted(self.seen)[number % len(self.seen)]
        for _ in range(times):
            self.engine.abort(name)

    @rule(number=st.integers(0, 50))
    def preempt(self, number: int) -> None:
        if self.engine.running:  # no precondition: it depends on when loads end
            self.engine.preempt(self.engine.running[number % len(self.engine.running)])

    @rule()
    def time_out(self) -> None:
        """What was looked up is looked up again, and what could not be loaded may be promised again."""
        self.now += 100.0

    @rule()
    def release_twice(self) -> None:
        """No counter goes below zero, and nobody else's memory is given back."""
        pool = MemoryPool(IDENTITY, whole_part(IDENTITY), 2)
        one, other = pool.lease(IDENTITY, 8), pool.lease(IDENTITY, 8)
        assert one is not None
        assert other is not None
        for _ in range(3):
            one.release()
        assert pool.num_leased == 1
        other.release()
        assert pool.num_leased == 0

    @invariant()
    def nothing_is_read_that_is_not_there(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.undetected == 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.end()
        finally:
            self.go_on.set()
            if hasattr(self, "engine"):
                self.engine.close()
            shutil.rmtree(self.root.parent, ignore_errors=True)

    def end(self) -> None:
        """All requests end, whatever they wait for. Then the pool holds nothing, and has room for eight chunks."""
        self.go_on.set()
        for name in self.seen:
            self.engine.abort(name)
        (rank,) = self.engine.ranks
        assert rank.worker.writer.wait_idle(20.0)
        deadline = time.monotonic() + 10.0  # without any call: a read that was given up gives back when it is over
        while any(pool.num_leased for pool in rank.pools) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [pool.num_leased for pool in rank.pools] == [0, 0, 0]
        self.engine.until_idle()  # the engine hears of loads that ended
        assert (rank.pools[2].num_leased, rank.worker.num_async_loads) == (0, 0)
        assert (self.engine.scheduler.num_requests, self.engine.scheduler.num_loads) == (0, 0)
        assert self.engine.blocks.num_free == self.engine.blocks.num_blocks
        fresh = document(POOL * 8, 24)
        before = rank.worker.counts["save_no_memory"]
        self.engine.run("eight more", fresh)
        assert rank.worker.counts["save_no_memory"] == before
        with Store.open(str(self.root)) as store, store.namespace(IDENTITY) as namespace:
            assert hit(namespace, fresh) == POOL * 8
            assert hit(namespace, CACHED) == 32


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestServingLong(Serving.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_chunks_that_were_looked_up_can_go(engine_of: Callable[..., FakeEngine], store_dir: Path, identity: Identity):
    """Between lookup and allocation all eight chunks can go: what was promised is told as not loaded, and computed."""
    tokens = document(64, 25)
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, tokens)
    engine = engine_of(save=False)
    request = engine.add("a", tokens)
    assert engine.scheduler.matched(request, 0) == (63, False)
    for shard in store_dir.rglob("*.safetensors"):
        shard.unlink()
    assert engine.scheduler.matched(request, 0) == (63, False)
    engine.until_idle()
    assert (request.status, request.promised[0]) == (Status.FINISHED, 63)
    assert len(engine.bad_blocks_seen[0]) == 16
    assert (engine.undetected, engine.poisoned_forwards) == (0, 1)
    engine.assert_at_rest()


def test_a_lookup_is_forgotten_in_time(engine_of: Callable[..., FakeEngine], store_dir: Path, identity: Identity):
    tokens = document(64, 25)
    now = [0.0]
    engine = engine_of(recheck_s=10.0, clock=lambda: now[0], save=False)
    request = engine.add("a", tokens)
    assert engine.scheduler.matched(request, 0) == (0, False)
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, tokens)
    engine.scheduler_namespaces.of(None).refresh()
    assert engine.scheduler.matched(request, 0) == (0, False)
    now[0] = 10.1
    assert engine.scheduler.matched(request, 0) == (63, False)
    engine.until_idle()
    assert request.promised == [63]
    engine.assert_at_rest()
