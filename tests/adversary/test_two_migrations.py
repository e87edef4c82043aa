"""Two migrations into one store at once, where both replace the same removed shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_cli.backends import Durability, ObjectInfo
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, MigrateResult, apply_migrate, plan_migrate
from lmcache_format.segment import RemoveReason
from tests.store.pattern import document, hit, put_document, tiny_identity

IDENTITY = tiny_identity()
TOKENS = document(4)
MOVE = MigrateOptions(delete_source=True)


class Watched(LocalBackend):
    """Calls back before and after a put over another object."""

    before: Callable[[], object] = int
    after: Callable[[], object] = int

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        if if_absent:
            return super().put(name, parts, durability=durability)
        self.before()
        info = super().put(name, parts, durability=durability, if_absent=False)
        self.after()
        return info


def _hand_over(done: threading.Event, awaited: threading.Event) -> None:
    done.set()
    assert awaited.wait(20)


def test_the_copy_of_another_run_is_not_taken_for_a_bad_copy_of_our_own(tmp_path: Path) -> None:
    """The slower run found "another write" where its own should be, and moved it to quarantine: by then the faster
    one had read it back and deleted the source, so that the chunk was in neither store."""
    here, there = tmp_path / "here", tmp_path / "there"
    with Store.create(str(here)) as source, Store.create(str(there)) as target:
        with source.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, TOKENS)
        apply_migrate(source, target, plan_migrate(source, target))
        with target.namespace(IDENTITY) as namespace:  # the very write is pruned there, and not swept so far
            namespace.remove(namespace.state().entry(0), RemoveReason.PRUNED)

    slow_has_put, fast_may_put, fast_is_done = (threading.Event() for _ in range(3))
    slow_target, fast_target = Watched(there), Watched(there)
    slow_target.after = lambda: _hand_over(slow_has_put, fast_is_done)
    fast_target.before = lambda: _hand_over(fast_may_put, slow_has_put)  # it has seen the removed one by now
    results: dict[str, MigrateResult] = {}

    def migrate(name: str, backend: LocalBackend) -> None:
        with Store.open(str(here)) as source, Store.open(backend) as target:
            results[name] = apply_migrate(source, target, plan_migrate(source, target, MOVE))

    fast = threading.Thread(target=migrate, args=("fast", fast_target))
    slow = threading.Thread(target=migrate, args=("slow", slow_target))
    fast.start()
    assert fast_may_put.wait(20)
    slow.start()
    fast.join(40)
    fast_is_done.set()
    slow.join(40)

    assert results["fast"].num_deleted == 1
    with Store.open(str(there)) as target, target.namespace(IDENTITY) as namespace:
        assert hit(namespace, TOKENS) == len(TOKENS)
    assert not (there / "quarantine").exists()
    assert results["slow"].is_whole
