"""An engine whose store has an archive behind it: it answers, or is a miss; it never holds the engine up."""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.backends.fault import Effect, Fail, Fault, FaultBackend, FaultScript, FlipBit, Hold, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from lmcache_cli.store.chain import ChainOptions, StoreChain
from lmcache_cli.store.events import Event
from lmcache_cli.store.far import FarOptions
from lmcache_cli.store.promotion import PromotionOptions
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, put_document

from .fakes import FakeEngine

Build = Callable[..., FakeEngine]
MODES = pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
PROMPT = document(50, 1)


class Archive:
    """A store in a directory of its own, on which faults can be brought, behind the engine's."""

    def __init__(self, root: Path, identity: Identity) -> None:
        self.script = FaultScript()
        self.backend = FaultBackend(LocalBackend(str(root)), self.script)
        with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
            put_document(namespace, PROMPT, tail=False)

    def fail(self, effect: Effect) -> None:
        self.script.faults = (Fault("read_into", effect, name="/c/"),)
        self.script._matched = [0]

    def open(self, url: str) -> StoreChain:
        options = ChainOptions(FarOptions(timeout_s=0.3), PromotionOptions(min_free_bytes=0))
        return StoreChain(Store.open(url), [self.backend], options)


@pytest.fixture
def archive(tmp_path: Path, identity: Identity) -> Archive:
    return Archive(tmp_path / "archive", identity)


def events_of(engine: FakeEngine, event: Event) -> int:
    return sum(rank.namespaces.archive_counts().get(event.value, 0) for rank in engine.ranks)


def promoted(engine: FakeEngine) -> None:
    for rank in engine.ranks:
        namespace: Any = rank.namespaces.of(None)
        assert namespace.wait_promoted(10)


@MODES
@pytest.mark.parametrize("tp", [1, 2])
def test_an_archived_prompt_is_loaded_and_the_second_time_from_the_store(
    engine_of: Build, store_dir: Path, identity: Identity, archive: Archive, load_async: bool, tp: int
):
    engine = engine_of(open_store=archive.open, load_async=load_async, tp=tp, prefix_caching=False)
    first = engine.run("a", PROMPT, max_tokens=3)
    assert first.promised == [48]
    promoted(engine)
    assert events_of(engine, Event.FAR_READ) == events_of(engine, Event.PROMOTED) == 6 * tp
    again = engine.run("b", PROMPT, max_tokens=3)
    assert (again.promised, again.output) == ([48], first.output)
    assert events_of(engine, Event.FAR_READ) == 6 * tp
    assert (engine.poisoned_forwards, engine.undetected) == (0, 0)
    engine.assert_at_rest()
    engine.close()
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        assert hit(namespace, PROMPT) == 48


@MODES
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fault", ["eio", "surprise", "cancelled", "flipped", "slow"])
def test_whatever_the_archive_does_is_a_miss_and_is_computed(
    engine_of: Build, store_dir: Path, identity: Identity, archive: Archive, load_async: bool, tp: int, fault: str
):
    go_on = threading.Event()
    effects: dict[str, Effect] = {
        "eio": Fail(unavailable()),
        "surprise": Fail(RuntimeError("injected")),
        "cancelled": Fail(CancelledError()),  # type: ignore[arg-type]
        "flipped": FlipBit(8 * (4096 + 100)),
        "slow": Hold(threading.Event(), go_on),
    }
    archive.fail(effects[fault])
    engine = engine_of(open_store=archive.open, load_async=load_async, tp=tp)
    started = time.monotonic()
    request = engine.run("a", PROMPT, max_tokens=3)
    assert time.monotonic() - started < 15
    assert len(request.output) == 3
    assert max(request.output) < 1000, "a token was taken from a forward on a failed load"
    assert engine.undetected == 0
    go_on.set()
    engine.assert_at_rest()
    engine.close()
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        assert hit(namespace, PROMPT) == 48  # saved, since it was computed


def test_a_lookup_asks_nothing_of_the_archive(engine_of: Build, archive: Archive):
    engine = engine_of(open_store=archive.open)
    archive.script.faults = (Fault("*", Hold(threading.Event(), threading.Event(), timeout_s=5)),)
    archive.script._matched = [0]
    calls, started = sum(archive.script.calls.values()), time.monotonic()
    for number in range(20):
        request = engine.add(str(number), PROMPT)
        assert engine.scheduler.matched(request, 0) == (48, False)  # type: ignore[arg-type]
    assert sum(archive.script.calls.values()) == calls
    assert time.monotonic() - started < 4


def test_an_archive_that_is_away_from_the_start_is_no_error(engine_of: Build, archive: Archive):
    archive.script.faults = (Fault("*", Fail(unavailable())),)
    archive.script._matched = [0]
    engine = engine_of(open_store=archive.open)
    request = engine.run("a", PROMPT, max_tokens=3)
    assert (request.promised, len(request.output)) == ([], 3)
    engine.assert_at_rest()
