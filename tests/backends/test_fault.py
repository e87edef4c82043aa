"""The faults do what they say: tests that rely on them rely on this."""

from __future__ import annotations

import pytest

from lmcache_cli.backends import Durability, NoSpace, ShortRead, Unavailable
from lmcache_cli.backends.fault import (
    CutShort,
    Delay,
    Fail,
    Fault,
    FaultBackend,
    FaultScript,
    FlipBit,
    FullAfter,
    Kill,
    LoseResponse,
    TruncateListing,
    unavailable,
)
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.metered import MeteredBackend

NONE = Durability.NONE


def faulty(*faults: Fault) -> FaultBackend:
    backend = FaultBackend(MemoryBackend(), FaultScript(*faults))
    for name in ("a", "b", "c"):
        backend.inner.put(name, [bytes(100)], durability=NONE)
    return backend


def test_fault_hits_the_call_and_the_name_it_is_for() -> None:
    backend = faulty(Fault("read", Fail(unavailable()), on_call=2, name="b"))
    assert backend.read("a") == backend.read("b") == backend.read("a") == bytes(100)
    with pytest.raises(Unavailable):
        backend.read("b")
    assert backend.read("b") == bytes(100)


@pytest.mark.parametrize("bit", [0, 7, 8, 799])
def test_one_bit_is_flipped(bit: int) -> None:
    backend = faulty(Fault("read_into", FlipBit(bit)), Fault("read", FlipBit(bit)))
    whole = bytearray(100)
    with backend.open_read("a") as handle:
        handle.read_into(0, [memoryview(whole)[:40], memoryview(whole)[40:]])
        tail = bytearray(50)
        handle.read_into(50, [memoryview(tail)])
    assert int.from_bytes(whole, "little") == 1 << bit
    assert whole[50:] == tail
    assert backend.read("a") == whole


def test_object_seems_cut() -> None:
    backend = faulty(Fault("read_into", CutShort(60)))
    with backend.open_read("a") as handle:
        handle.read_into(10, [memoryview(bytearray(50))])
        with pytest.raises(ShortRead):
            handle.read_into(10, [memoryview(bytearray(51))])


def test_device_is_full_after_so_many_bytes() -> None:
    backend = faulty(Fault("put", FullAfter(150)))
    backend.put("d", [bytes(100)], durability=NONE)
    with pytest.raises(NoSpace):
        backend.put("e", [bytes(100)], durability=NONE)
    assert backend.stat("e") is None


def test_listing_is_cut_quietly() -> None:
    assert len(list(faulty(Fault("list", TruncateListing(2))).list())) == 2


def test_response_is_lost_after_the_work() -> None:
    backend = faulty(Fault("delete", LoseResponse(unavailable())))
    with pytest.raises(Unavailable):
        backend.delete("a", version=None)
    assert backend.stat("a") is None


def test_delay_and_kill_go_through_their_hooks() -> None:
    happened: list[object] = []
    backend = faulty(
        Fault("stat", Delay(1.5, happened.append)),
        Fault("stat", Kill(after=True, hook=lambda: happened.append("killed"))),
    )
    backend.stat("a")
    assert happened == [1.5, "killed"]


def test_meter_counts_calls_bytes_and_errors() -> None:
    backend = MeteredBackend(
        faulty(Fault("read_into", Fail(unavailable()), on_call=2)), clock=iter(range(100)).__next__
    )
    backend.put("d", [bytes(10), bytes(5)], durability=NONE)
    with backend.open_read("a") as handle:
        handle.read_into(0, [memoryview(bytearray(30)), memoryview(bytearray(12))])
        with pytest.raises(Unavailable):
            handle.read_into(0, [memoryview(bytearray(30))])
    counts = backend.meter.snapshot()
    assert (counts["put"].calls, counts["put"].size_bytes, counts["put"].seconds) == (1, 15, 1)
    read = counts["read_into"]
    assert (read.calls, read.errors, read.size_bytes, read.seconds) == (2, 1, 42, 2)
