"""C47: clocks that are wrong. Ages are told by the store's clock; what seems to come from the future is new."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_cli.backends import open_backend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.wrapper import BackendWrapper
from lmcache_cli.store import Refused, Store
from lmcache_cli.store.manifest import DAY_MS
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.sweep import sweep
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

HOUR_MS = 3_600_000
GRACE_MS = 900_000
NOW_MS = 1_795_000_000_000
IDENTITY = tiny_identity()
TOKENS = document(12)


@dataclass
class Clock:
    """The store's clock, and how far a writer's is ahead of it."""

    now_ms: int = NOW_MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store.create(MemoryBackend("c47", time_s=lambda: clock.now_ms / 1000))


def write(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, seed: int = 0) -> None:
    """By a host whose clock is that much ahead."""
    with monkeypatch.context() as patch:
        patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: clock.now_ms + ahead_ms)
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, document(12, seed=seed))


def marked(store: Store, clock: Clock, rules: PruneRules, host_ahead_ms: int = 0) -> int:
    host_ms = clock.now_ms + host_ahead_ms
    return mark(store, plan_prune(store, rules, host_ms=host_ms), host_ms=host_ms).num_marked


@pytest.mark.parametrize("ahead_ms", [-2 * HOUR_MS, 0, 2 * HOUR_MS])
@pytest.mark.parametrize("rules", [PruneRules(older_than_ms=HOUR_MS), PruneRules(older_than_ms=GRACE_MS)])
def test_what_was_just_written_by_a_wrong_clock_is_not_old(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead_ms: int, rules: PruneRules
):
    write(store, clock, monkeypatch, ahead_ms)
    assert marked(store, clock, rules) == 0
    clock.now_ms += rules.older_than_ms or 0
    assert marked(store, clock, rules) == 0
    clock.now_ms += max(0, ahead_ms) + 1
    assert marked(store, clock, rules) == 3


@pytest.mark.parametrize("host_ahead_ms", [-2 * HOUR_MS, 2 * HOUR_MS, DAY_MS])
def test_the_clock_of_the_host_that_prunes_decides_nothing(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, host_ahead_ms: int
):
    write(store, clock, monkeypatch, 0)
    clock.now_ms += DAY_MS - 1
    assert marked(store, clock, PruneRules(older_than_ms=DAY_MS), host_ahead_ms) == 0
    clock.now_ms += 2
    assert marked(store, clock, PruneRules(older_than_ms=DAY_MS), host_ahead_ms) == 3


@pytest.mark.parametrize("host_ahead_ms", [-DAY_MS - 1, DAY_MS + 1])
def test_clocks_a_day_apart_are_refused_with_both_times(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, host_ahead_ms: int
):
    write(store, clock, monkeypatch, 0)
    with pytest.raises(Refused) as told:
        plan_prune(store, PruneRules(everything=True), host_ms=clock.now_ms + host_ahead_ms)
    shown = {"2026-11-18T11:06:40Z", "2026-11-17T11:06:39Z" if host_ahead_ms < 0 else "2026-11-19T11:06:40Z"}
    assert all(time in str(told.value) for time in shown), told.value


def test_what_comes_from_the_future_is_new_and_never_expired(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    write(store, clock, monkeypatch, 400 * DAY_MS)
    clock.now_ms += 399 * DAY_MS
    assert marked(store, clock, PruneRules(older_than_ms=0)) == 0
    assert marked(store, clock, PruneRules(unused_for_ms=0)) == 0
    assert marked(store, clock, PruneRules(older_than_ms=0, unused_for_ms=0)) == 0


def test_a_limit_takes_what_is_from_1970_first_and_the_future_last(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    write(store, clock, monkeypatch, 400 * DAY_MS, seed=1)
    write(store, clock, monkeypatch, -clock.now_ms, seed=2)
    write(store, clock, monkeypatch, -2 * DAY_MS, seed=3)
    for num_left, seed in ((6, 2), (3, 3), (0, 1)):
        plan = plan_prune(store, PruneRules(max_chunks=num_left), host_ms=clock.now_ms)
        (one,) = plan.namespaces
        entries = {one.index.state.entry(int(row)).key for row in one.rows}
        assert entries == {ref.key[:16] for ref in refs(IDENTITY, document(12, seed=seed))}
        mark(store, plan, host_ms=clock.now_ms)


def test_a_touch_from_the_future_keeps_for_now_and_not_for_ever(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    write(store, clock, monkeypatch, 0)
    with monkeypatch.context() as patch:
        patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: clock.now_ms + 20 * DAY_MS)
        with store.namespace(IDENTITY, create=True) as namespace:
            assert hit(namespace, TOKENS) == 12
    clock.now_ms += 10 * DAY_MS
    assert marked(store, clock, PruneRules(unused_for_ms=DAY_MS)) == 0
    assert plan_prune(store, PruneRules(max_chunks=0), host_ms=clock.now_ms).num_chunks == 3
    clock.now_ms += 12 * DAY_MS + 1
    assert marked(store, clock, PruneRules(unused_for_ms=DAY_MS)) == 3


@pytest.mark.parametrize("jump_ms", [-2 * HOUR_MS, -40 * DAY_MS])
def test_a_clock_that_jumps_back_between_mark_and_sweep_deletes_nothing_early(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, jump_ms: int
):
    write(store, clock, monkeypatch, 0)
    assert marked(store, clock, PruneRules(everything=True)) == 3
    clock.now_ms += jump_ms
    assert sweep(store, grace_ms=GRACE_MS).num_swept == 0
    clock.now_ms += -jump_ms + GRACE_MS - 1
    assert sweep(store, grace_ms=GRACE_MS).num_swept == 0
    clock.now_ms += 1
    assert sweep(store, grace_ms=GRACE_MS).num_swept == 3


@pytest.mark.parametrize("mtime_s", [0, 4_000_000_000, 1_000_000_000], ids=["1970", "future", "all equal"])
def test_times_of_files_do_not_make_anything_old(tmp_path: Path, mtime_s: int):
    """As after `cp -p`, a restore, or a touch: 1970 makes nothing old, the future hides nothing for good."""
    root = tmp_path / "kv"
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, TOKENS)
        for path in root.rglob("*"):
            os.utime(path, (mtime_s, mtime_s))
        assert plan_prune(store, PruneRules(older_than_ms=60_000)).num_shards == 0
        done = mark(store, plan_prune(store, PruneRules(max_chunks=1)))
        assert done.num_marked == 2
        assert sweep(store, grace_ms=-1_000).num_swept == 2


def test_a_copy_made_today_of_old_shards_is_as_old_as_they_are(monkeypatch: pytest.MonkeyPatch, clock: Clock):
    """A migrated shard is young as an object; its record says how old it is."""
    store = Store.create(MemoryBackend("copy", time_s=lambda: clock.now_ms / 1000))
    write(store, clock, monkeypatch, -40 * DAY_MS)
    assert marked(store, clock, PruneRules(older_than_ms=30 * DAY_MS)) == 3


def test_the_store_is_asked_for_its_time_and_not_the_host(tmp_path: Path):
    """A file server whose clock is two hours behind: what was marked by its time is swept by its time."""
    root = tmp_path / "kv"

    class Behind(BackendWrapper):
        def now_ms(self) -> int:
            return self.inner.now_ms() - 2 * HOUR_MS

    with Store.create(str(root)) as made, made.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
    store = Store.open(Behind(open_backend(str(root))))
    assert mark(store, plan_prune(store, PruneRules(everything=True))).num_marked == 3
    assert sweep(store, grace_ms=60_000).num_swept == 0
    assert sweep(store, grace_ms=-1_000).num_swept == 3
