"""Buffers are aligned, used again, bounded, and never somebody else's while a lease on them lasts (C28)."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from lmcache_cli.backends import Durability
from lmcache_cli.backends.buffers import (
    HUGE_PAGE_BYTES,
    AlignedBuffer,
    BufferPool,
    Lease,
    NoBuffer,
    address_of,
)
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, Hold
from lmcache_cli.backends.memory import MemoryBackend

WAIT_S = 30.0


@pytest.mark.parametrize("size_bytes", [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 7 * HUGE_PAGE_BYTES])
def test_buffers_start_on_huge_pages(size_bytes: int) -> None:
    buffer = AlignedBuffer(size_bytes)
    view = buffer.view(size_bytes)
    assert address_of(view) % HUGE_PAGE_BYTES == 0
    assert view.nbytes == size_bytes <= buffer.size_bytes
    view[-1] = 7
    del buffer
    assert view[-1] == 7, "the memory lives as long as its views"


def test_view_beyond_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="asked for"):
        AlignedBuffer(1).view(HUGE_PAGE_BYTES + 1)


def test_released_buffer_is_used_again() -> None:
    pool = BufferPool(4 * HUGE_PAGE_BYTES)
    addresses = set()
    for _ in range(10):
        with pool.lease(1_000_000, timeout_s=0) as lease:
            assert lease.view.nbytes == 1_000_000
            addresses.add(address_of(lease.view))
    assert len(addresses) == 1
    assert pool.use().held_bytes == HUGE_PAGE_BYTES
    assert pool.use().leased_bytes == 0


def test_pool_keeps_its_bound() -> None:
    pool = BufferPool(4 * HUGE_PAGE_BYTES)
    leases = [pool.lease(HUGE_PAGE_BYTES, timeout_s=0) for _ in range(4)]
    with pytest.raises(NoBuffer):
        pool.lease(1, timeout_s=0.01)
    leases[0].release()
    leases[0].release()
    leases[0] = pool.lease(1, timeout_s=0)
    for lease in leases[:3]:
        lease.release()
    big = pool.lease(3 * HUGE_PAGE_BYTES, timeout_s=0)  # the small free ones make room
    assert pool.use().held_bytes == 4 * HUGE_PAGE_BYTES
    big.release()
    with pytest.raises(NoBuffer):
        pool.lease(5 * HUGE_PAGE_BYTES, timeout_s=0.01)


def test_waiting_for_a_buffer_ends_with_its_release() -> None:
    pool = BufferPool(HUGE_PAGE_BYTES)
    first = pool.lease(1, timeout_s=0)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.lease, 1, timeout_s=WAIT_S)
        first.release()
        waiting.result(WAIT_S).release()


def test_released_lease_cannot_be_shared() -> None:
    lease = BufferPool(HUGE_PAGE_BYTES).lease(1, timeout_s=0)
    lease.release()
    with pytest.raises(ValueError, match="released"):
        lease.share()


def test_leases_of_many_threads_never_overlap() -> None:
    pool = BufferPool(3 * HUGE_PAGE_BYTES)

    def work(thread: int) -> None:
        chance = random.Random(thread)
        for turn in range(100):
            with pool.lease(chance.randrange(1, HUGE_PAGE_BYTES), timeout_s=WAIT_S) as lease:
                mark = np.uint8((thread * 100 + turn) % 251)
                array = np.frombuffer(lease.view, dtype=np.uint8)
                array[:: max(1, array.size // 64)] = mark
                assert (array[:: max(1, array.size // 64)] == mark).all()

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(work, range(6)))
    assert pool.use().leased_bytes == 0


class CpuCache:
    """Four buffers; writing to the back-end happens in threads. What `share` gives the writer is what is tested."""

    def __init__(self, backend: FaultBackend, *, share: bool) -> None:
        self.backend, self.share = backend, share
        self.pool = BufferPool(4 * HUGE_PAGE_BYTES)
        self.resident: dict[str, Lease] = {}
        self.threads = ThreadPoolExecutor(4)

    def store(self, key: str) -> None:
        """Fill a buffer with the key's own bytes; evicts the oldest while none is free."""
        while True:
            try:
                lease = self.pool.lease(64, timeout_s=0.001)
                break
            except NoBuffer:
                if self.resident:
                    self.evict(next(iter(self.resident)))
        lease.view[:] = own_bytes(key)
        self.resident[key] = lease

    def write(self, key: str) -> Future[None]:
        view = self.resident[key].view
        held = self.resident[key].share() if self.share else None

        def run() -> None:
            try:
                self.backend.put(key, [view], durability=Durability.NONE)
            finally:
                if held is not None:
                    held.release()

        return self.threads.submit(run)

    def evict(self, key: str) -> None:
        self.resident.pop(key).release()


def own_bytes(key: str) -> bytes:
    return (key.encode() * 64)[:64]


def play(seed: int, *, share: bool) -> bool:
    """Write A, held up; evict it; store others; let go. Whether A's object holds A's bytes."""
    chance = random.Random(seed)
    reached, go_on = threading.Event(), threading.Event()
    backend = FaultBackend(MemoryBackend(), FaultScript(Fault("put", Hold(reached, go_on), on_call=1)))
    cache = CpuCache(backend, share=share)
    try:
        cache.store("a")
        writing = cache.write("a")
        assert reached.wait(WAIT_S)
        assert backend.stat("a") is None, "a key is not there before its write is complete"
        steps = ["b", "c", "d", "e", "evict", "go on"]
        chance.shuffle(steps)
        for step in steps:
            if step == "evict":
                if "a" in cache.resident:
                    cache.evict("a")
            elif step == "go on":
                go_on.set()
            else:
                cache.store(step)
        writing.result(WAIT_S)
        return backend.read("a") == own_bytes("a")
    finally:
        go_on.set()
        cache.threads.shutdown()


def test_c28_buffer_is_not_recycled_while_a_write_is_in_flight() -> None:
    assert all(play(seed, share=True) for seed in range(1000))


def test_c28_control_without_a_lease_of_its_own_the_writer_writes_other_bytes() -> None:
    assert not all(play(seed, share=False) for seed in range(50))


def test_c28_buffer_is_not_recycled_while_a_read_is_in_flight() -> None:
    for seed in range(200):
        reached, go_on = threading.Event(), threading.Event()
        backend = FaultBackend(MemoryBackend(), FaultScript(Fault("read_into", Hold(reached, go_on))))
        backend.put("a", [own_bytes("a")], durability=Durability.NONE)
        pool = BufferPool(2 * HUGE_PAGE_BYTES)
        mine = pool.lease(64, timeout_s=0)
        reader_lease = mine.share()

        def read(lease: Lease = reader_lease, backend: FaultBackend = backend) -> bytes:
            with lease, backend.open_read("a") as handle:
                handle.read_into(0, [lease.view])
                return bytes(lease.view)

        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(read)
            assert reached.wait(WAIT_S)
            mine.release()  # the request was aborted
            other = pool.lease(64, timeout_s=0)
            other.view[:] = own_bytes("b")
            if seed % 2:
                with pytest.raises(NoBuffer):
                    pool.lease(64, timeout_s=0)
            go_on.set()
            assert reading.result(WAIT_S) == own_bytes("a")
        assert other.view == own_bytes("b")
        other.release()
        assert pool.use().leased_bytes == 0
