"""C22 and more: any order of arrival, step, abort (also twice), preemption, reset, damage and time-out leaves nothing
behind, reports every id once, and stores nothing that is not what the model computes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_cli.store import Store
from tests.store.pattern import document, hit, tiny_identity

from .fakes import FakeEngine, FakeRequest, Status

IDENTITY = tiny_identity(layers=2, kv_heads=2, head_dim=2, chunk_tokens=8)
TEXT = document(64, 3)
_MOST_BLOCKS = 11
"""What the longest request takes: 32 tokens and 12 more, in blocks of 4."""
STEMS = [TEXT[:32], [*TEXT[:19], *document(20, 4)], document(40, 5)]


class Serving(RuleBasedStateMachine):
    """One engine, restarted now and then on the same store; prompts share prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="lmcache-vllm-")) / "kv"
        Store.create(str(self.root)).close()
        self.engine: FakeEngine | None = None
        self.count = 0
        self.seen: dict[str, FakeRequest] = {}
        self.sequences: list[list[int]] = []

    @initialize(
        load_async=st.booleans(),
        overlap=st.booleans(),
        tp=st.sampled_from([1, 2]),
        prefix_caching=st.booleans(),
        budget=st.sampled_from([7, 16, 1 << 20]),
        num_blocks=st.sampled_from([14, 40]),
        save_buffers=st.sampled_from([1, 8]),
        save_decode=st.booleans(),
        partial_chunks=st.booleans(),
        policy=st.sampled_from(["recompute", "fail"]),
    )
    def start(self, **options: object) -> None:
        self.options = options
        self.engine = FakeEngine(str(self.root), IDENTITY, block_size=4, **options)  # type: ignore[arg-type]

    @property
    def live(self) -> FakeEngine:
        assert self.engine is not None
        return self.engine

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 32),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, "a"]),
    )
    def arrive(self, stem: list[int], length: int, max_tokens: int, salt: str | None) -> None:
        if self.options["load_async"]:  # loaded requests that hold all blocks between them stand still, whoever loads
            waiting = sum(not request.status.is_over for request in self.seen.values())
            if (waiting + 1) * _MOST_BLOCKS > self.live.blocks.num_blocks:
                return
        self.count += 1
        request = self.live.add(f"r{self.count}", stem[:length], max_tokens=max_tokens, cache_salt=salt)
        self.seen[request.request_id] = request

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.live.step()

    @rule(number=st.integers(0, 100), twice=st.booleans())
    @precondition(lambda self: self.seen)
    def abort(self, number: int, twice: bool) -> None:
        name = sorted(self.seen)[number % len(self.seen)]
        for _ in range(1 + twice):
            self.live.abort(name)

    @rule(number=st.integers(0, 100))
    def preempt(self, number: int) -> None:
        if self.live.running:  # no precondition: it depends on when loads end
            self.live.preempt(self.live.running[number % len(self.live.running)])

    @rule(number=st.integers(0, 100))
    def ask_without_allocating(self, number: int) -> None:
        waiting = [r for r in self.live.waiting if r.status is Status.WAITING and not r.is_loaded]
        if waiting:
            request = waiting[number % len(waiting)]
            first = self.live.scheduler.matched(request, 0)
            assert self.live.scheduler.matched(request, 0) == first

    @rule(number=st.integers(0, 1000), how=st.sampled_from(["delete", "truncate", "flip"]))
    def damage(self, number: int, how: str) -> None:
        shards = sorted(self.root.glob("ns/*/c/*/*/*.safetensors"))
        if not shards:
            return
        path = shards[number % len(shards)]
        data = path.read_bytes()
        path.unlink()
        if how != "delete":
            bad = data[: len(data) // 2] if how == "truncate" else data[:-2] + bytes([data[-2] ^ 1, data[-1]])
            path.write_bytes(bad)

    @rule()
    def reset(self) -> None:
        self.live.reset()

    @rule()
    def restart(self) -> None:
        self.live.until_idle()
        self.check_end()
        self.live.close()
        self.seen.clear()
        self.engine = FakeEngine(str(self.root), IDENTITY, block_size=4, **self.options)  # type: ignore[arg-type]

    @invariant()
    def garbage_is_always_told(self) -> None:
        if self.engine is not None and not self.engine.overlap:
            assert self.engine.undetected == 0

    def check_end(self) -> None:
        self.live.assert_at_rest()
        for request in self.seen.values():
            assert request.status.is_over
            assert all(token < 100_000 for token in request.output), "an answer rests on garbage"
            if request.cache_salt is None:
                self.sequences.append(list(request.all_token_ids))

    def teardown(self) -> None:
        try:
            if self.engine is None:
                return
            self.live.until_idle()
            self.check_end()
            self.live.close()
            with Store.open(str(self.root)) as store, store.namespace(IDENTITY, missing_ok=True) as namespace:
                for tokens in self.sequences:
                    hit(namespace, tokens)  # whatever is read is compared with the model, element by element
        finally:
            if self.engine is not None:
                self.live.close()
            shutil.rmtree(self.root.parent, ignore_errors=True)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestServingLong(Serving.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
