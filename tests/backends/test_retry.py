"""C36: unknown is tried again and never becomes absent; what failed too often is left alone for a while."""

from __future__ import annotations

import pytest

from lmcache_cli.backends import (
    AlreadyExists,
    BackendError,
    CircuitOpen,
    Durability,
    NoSpace,
    NotFound,
    Obstructed,
    Unavailable,
    VersionChanged,
)
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, LoseResponse, unavailable
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy

NONE = Durability.NONE


class Bench:
    """A retrying back-end over a faulty one, with a clock that only sleeping moves."""

    def __init__(self, *faults: Fault, policy: RetryPolicy | None = None, chance: float = 1.0) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.script = FaultScript(*faults)
        self.plain = MemoryBackend()
        self.backend = RetryBackend(
            FaultBackend(self.plain, self.script),
            policy or RetryPolicy(),
            clock=lambda: self.now_s,
            sleep=self.sleep,
            chance=lambda: chance,
        )

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


def failing(operation: str, times: int, error: Exception | None = None) -> list[Fault]:
    return [Fault(operation, Fail(error or unavailable()), on_call=call) for call in range(1, times + 1)]


def test_transient_failures_are_tried_again_three_times() -> None:
    bench = Bench(*failing("stat", 3))
    assert bench.backend.stat("a") is None
    assert bench.script.calls["stat"] == 4
    assert bench.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_the_fourth_failure_is_raised() -> None:
    bench = Bench(*failing("stat", 4))
    with pytest.raises(Unavailable):
        bench.backend.stat("a")
    assert bench.script.calls["stat"] == 4


@pytest.mark.parametrize(
    "error",
    [NotFound("x"), AlreadyExists("x"), NoSpace("x"), VersionChanged("x"), Obstructed("x"), BackendError("x")],
    ids=lambda error: type(error).__name__,
)
def test_answers_are_not_tried_again(error: BackendError) -> None:
    bench = Bench(*failing("stat", 9, error))
    with pytest.raises(type(error)):
        bench.backend.stat("a")
    assert bench.script.calls["stat"] == 1
    assert bench.pauses == []


def test_pauses_are_jittered_over_their_whole_range() -> None:
    bench = Bench(*failing("stat", 3), chance=0.25)
    bench.backend.stat("a")
    assert bench.pauses == pytest.approx([0.025, 0.05, 0.1])


def test_no_try_starts_after_the_deadline() -> None:
    bench = Bench(*failing("stat", 9), policy=RetryPolicy(deadline_s=0.25))
    with pytest.raises(Unavailable):
        bench.backend.stat("a")
    assert bench.script.calls["stat"] == 2
    assert bench.now_s < 0.25


def test_breaker_opens_and_closes_again_after_one_good_try() -> None:
    policy = RetryPolicy(retries=0, breaker_failures=3, breaker_cooldown_s=10)
    bench = Bench(*failing("stat", 4), policy=policy)
    for _ in range(3):
        with pytest.raises(Unavailable):
            bench.backend.stat("a")
    for _ in range(5):
        with pytest.raises(CircuitOpen):
            bench.backend.stat("a")
    assert bench.script.calls["stat"] == 3, "an open breaker does not try"
    bench.now_s += 10
    with pytest.raises(Unavailable):
        bench.backend.stat("a")  # the one try fails: open for another while
    with pytest.raises(CircuitOpen):
        bench.backend.stat("a")
    bench.now_s += 10
    assert bench.backend.stat("a") is None
    assert bench.backend.stat("a") is None
    assert not bench.backend.breaker.is_open


def test_lasting_failures_do_not_open_the_breaker() -> None:
    bench = Bench(*failing("stat", 50, Obstructed("a directory")), policy=RetryPolicy(breaker_failures=2))
    for _ in range(10):
        with pytest.raises(Obstructed):
            bench.backend.stat("a")
    assert not bench.backend.breaker.is_open


def test_put_with_a_lost_answer_reports_that_the_object_is_there() -> None:
    bench = Bench(Fault("put", LoseResponse(unavailable()), on_call=1))
    with pytest.raises(AlreadyExists):
        bench.backend.put("a", [b"content"], durability=NONE)
    assert bench.plain.read("a") == b"content"


def test_move_with_a_lost_answer_succeeded() -> None:
    bench = Bench(Fault("move", LoseResponse(unavailable()), on_call=1))
    bench.plain.put("a", [b"content"], durability=NONE)
    bench.backend.move("a", "b")
    assert bench.plain.read("b") == b"content"
    with pytest.raises(NotFound):
        bench.backend.move("a", "c")


def test_reads_of_a_handle_are_tried_again() -> None:
    bench = Bench(*failing("read_into", 3))
    bench.plain.put("a", [b"content"], durability=NONE)
    with bench.backend.open_read("a") as handle:
        target = bytearray(7)
        handle.read_into(0, [memoryview(target)])
    assert target == b"content"
    assert bench.script.calls["read_into"] == 4
    bench = Bench(*failing("read_into", 4))
    bench.plain.put("a", [b"content"], durability=NONE)
    with bench.backend.open_read("a") as handle, pytest.raises(Unavailable):
        handle.read_into(0, [memoryview(target)])
    assert bench.script.calls["read_into"] == 4


def test_listing_is_tried_again_before_its_first_item_and_never_cut() -> None:
    bench = Bench(*failing("list", 2))
    for name in ("a", "b", "c"):
        bench.plain.put(name, [b"1"], durability=NONE)
    assert sorted(info.name for info in bench.backend.list()) == ["a", "b", "c"]
    bench = Bench(Fault("list", LoseResponse(unavailable())))
    bench.plain.put("a", [b"1"], durability=NONE)
    with pytest.raises(Unavailable):
        list(bench.backend.list())
