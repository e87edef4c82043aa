"""A slow back-end under the index does not make anybody wait who only asks, reads or buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.backends import Unavailable
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, Hold
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Namespace, PutStatus, Store
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, put_document, read_match

TOKENS, OTHER = document(14, 6), document(9, 7)


class Slow:
    """A store whose next segment write, or listing, hangs until it is let go."""

    def __init__(self, root: Path, operation: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.script = FaultScript()
        self.store = Store.open(FaultBackend(LocalBackend(root), self.script))
        self.fault = Fault(operation, Hold(self.reached, self.go_on), name="/m", on_call=1)

    def arm(self, *faults: Fault) -> None:
        """From now on these faults, and no others."""
        self.script._matched = [0] * len(faults)
        self.script.faults = faults

    def during(self, work: Callable[[], object], check: Callable[[], object]) -> None:
        """Run `work` in a thread until it hangs, run `check`, let go."""
        self.arm(self.fault, *self.script.faults)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert self.reached.wait(20)
            check()
            assert thread.is_alive(), "the work was over before the check"
        finally:
            self.go_on.set()
            thread.join(20)


@pytest.fixture
def filled_root(root: Path, identity: Identity) -> Path:
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    return root


def use(namespace: Namespace) -> None:
    """Everything that must not wait for the index on the back-end."""
    assert hit(namespace, TOKENS) == len(TOKENS)
    match = namespace.match(TOKENS)
    assert read_match(namespace, match, TOKENS) == len(TOKENS)
    assert hit(namespace, document(14, 99)) == 0
    assert set(put_document(namespace, OTHER)) == {PutStatus.STORED}
    assert hit(namespace, OTHER) == len(OTHER)


@pytest.mark.parametrize("operation", ["put", "list"])
def test_match_read_and_put_go_on_while_the_index_is_written_or_listed(
    filled_root: Path, identity: Identity, operation: str
) -> None:
    slow = Slow(filled_root, operation)
    with slow.store.namespace(identity, create=True) as namespace:
        assert hit(namespace, TOKENS) == len(TOKENS)
        namespace.label("x", namespace.match(TOKENS).keys[0], 4, 0)
        slow.during(namespace.flush if operation == "put" else namespace.refresh, lambda: use(namespace))
        assert hit(namespace, OTHER) == len(OTHER)
    with Store.open(str(filled_root)) as store, store.namespace(identity) as later:
        assert len(later.state()) == len(set(later.match(TOKENS).chunks() + later.match(OTHER).chunks()))
        assert [label.name for label in later.state().labels] == ["x"]


def test_what_was_buffered_during_a_flush_that_fails_is_all_written_by_the_next(
    filled_root: Path, identity: Identity
) -> None:
    slow = Slow(filled_root, "put")
    with slow.store.namespace(identity, create=True) as namespace:
        put_document(namespace, document(5, 8))
        failed: list[BaseException] = []

        def flush() -> None:
            try:
                namespace.flush()
            except Unavailable as problem:
                failed.append(problem)

        slow.arm(Fault("put", Fail(Unavailable("injected")), name="/m/", on_call=1))
        slow.during(flush, lambda: put_document(namespace, OTHER))
        assert len(failed) == 1
        namespace.flush()
    with Store.open(str(filled_root)) as store, store.namespace(identity) as later:
        for tokens in (TOKENS, OTHER, document(5, 8)):
            assert hit(later, tokens) == len(tokens)


def test_hits_of_one_process_add_up_over_flushes(filled_root: Path, identity: Identity) -> None:
    with Store.open(str(filled_root)) as store, store.namespace(identity) as namespace:
        for _ in range(3):
            read_match(namespace, namespace.match(TOKENS), TOKENS)
            namespace.flush()
        assert {int(touch["hits"]) for touch in namespace.state().touches} == {3}
