"""C23: failed load counted as loaded. Four chunks, numbered from 1; the second cannot be read."""

from __future__ import annotations

import errno
import threading
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.backends import Backend
from lmcache_cli.backends.fault import (
    CutShort,
    Effect,
    Fail,
    Fault,
    FaultBackend,
    FaultScript,
    FlipBit,
    Hold,
    unavailable,
)
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from lmcache_format.identity import Identity
from tests.integration.vllm.fakes import FakeEngine, Status
from tests.store.pattern import document, hit, put_document, refs

PROMPT = document(35, 23)
CHUNK, BLOCK = 8, 4
FAILURES = [
    "exception",
    "cancelled",
    "missing",
    "eio",
    "short-read",
    "bad-checksum",
    "truncated",
    "flipped",
    "empty",
    pytest.param("slow", marks=pytest.mark.slow),  # waits until loads are given up
]


class Failure:
    """One way for chunk 2 to be unreadable: on the back-end, or in the file."""

    def __init__(self, name: str, root: Path, identity: Identity) -> None:
        self.name = name
        self.key = refs(identity, PROMPT)[1].key.hex()
        self.root = root
        self.go_on = threading.Event()
        self.is_on = True

    def shard(self) -> Path:
        return next(self.root.rglob(f"{self.key}.*.safetensors"))

    def harm_file(self) -> None:
        if self.name not in ("truncated", "flipped", "empty", "missing"):
            return
        path = self.shard()
        data = path.read_bytes()
        path.unlink()
        if self.name != "missing":
            flipped = data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]
            path.write_bytes({"truncated": data[:-1], "flipped": flipped, "empty": b""}[self.name])

    def effect(self) -> Effect | None:
        return {
            "exception": Fail(RuntimeError("injected")),
            "cancelled": Fail(CancelledError()),  # type: ignore[arg-type]
            "eio": Fail(unavailable(errno.EIO)),
            "short-read": CutShort(4096 + 40),
            "bad-checksum": FlipBit(8 * (4096 + 100)),
            "slow": Hold(threading.Event(), self.go_on, timeout_s=1.5),
        }.get(self.name)

    def backend(self) -> Backend:
        effect = self.effect()
        operation = "read_into" if isinstance(effect, CutShort | FlipBit) else "open_read"
        faults = [Fault(operation, effect, name=self.key)] if effect is not None else []
        return FaultBackend(LocalBackend(self.root), FaultScript(*faults))


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", FAILURES)
def test_what_was_not_loaded_is_told_and_never_read(
    engine_of: Callable[..., FakeEngine],
    store_dir: Path,
    identity: Identity,
    name: str,
    policy: str,
    load_async: bool,
):
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, PROMPT, tail=False)
    other = document(21, 5)
    expected = engine_of(save=False, prefix_caching=False).run("x", [*other], max_tokens=4).output
    sound = engine_of(load=False, save=False).run("y", PROMPT, max_tokens=4).output
    failure = Failure(name, store_dir, identity)
    engine = engine_of(
        worker_backend=failure.backend,
        policy=policy,
        load_async=load_async,
        load_timeout_s=0.4 if name == "slow" else 20.0,
        settles=True,
    )
    failure.harm_file()
    bystander = engine.add("other", other, max_tokens=4)
    request = engine.add("hit", PROMPT, max_tokens=4)
    engine.step()
    table = list(request.blocks) or engine.bad_blocks_seen
    engine.until_idle()

    assert request.promised[0] == 32
    (bad,) = engine.bad_blocks_seen[:1]
    if policy == "recompute":
        assert bad == set(table[CHUNK // BLOCK : 4 * CHUNK // BLOCK])
    assert len(bad) == 3 * CHUNK // BLOCK
    assert engine.ranks[0].worker.counts["tokens_loaded"] >= CHUNK
    assert engine.undetected == 0
    assert (bystander.status, bystander.output) == (Status.FINISHED, expected)
    if policy == "recompute":
        assert (request.status, request.output) == (Status.FINISHED, sound)
    else:
        assert (request.status, request.output) == (Status.ERROR, [])
        engine.blocks.clear()
        following = engine.run("next", PROMPT, max_tokens=4)
        assert (following.status, following.output) == (Status.FINISHED, sound)
        assert sum(following.promised) <= CHUNK  # the engine has ended the request before it told of its load
    failure.go_on.set()
    engine.settle()
    engine.assert_at_rest()
    engine.close()

    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        found = hit(namespace, PROMPT)  # every element compared: nothing was stored that rests on the failed load
    assert found == 32
    if name in ("truncated", "flipped", "empty"):
        assert list((store_dir / "quarantine").rglob("*.safetensors*"))


@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["", "prefix-caching"])
def test_nothing_that_rests_on_a_failed_load_is_stored(
    engine_of: Callable[..., FakeEngine],
    store_dir: Path,
    identity: Identity,
    overlap: bool,
    tp: int,
    prefix_caching: bool,
):
    """The step that fails computes the rest of the prompt on garbage, and so does the one after, planned before the
    failure was heard of; with two ranks one of them loads well and must not store what the other has spoiled."""
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, PROMPT[:32])
    failure = Failure("flipped", store_dir, identity)
    failure.harm_file()
    engine = engine_of(overlap=overlap, tp=tp, prefix_caching=prefix_caching, budget=20, settles=True)
    long = [*PROMPT[:32], *document(60, 9)]
    requests = [engine.add(f"r{n}", [*long, n], max_tokens=3) for n in range(2)]
    engine.until_idle()
    assert engine.poisoned_forwards > 0  # otherwise nothing was tried here
    assert engine.undetected == 0 or overlap
    assert all(request.status is Status.FINISHED for request in requests)
    assert all(token < 100_000 for request in requests for token in request.output)
    engine.assert_at_rest()
    engine.close()
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        assert hit(namespace, long) == 88
