"""Cold and warm, aligned and not: the bytes are the same by whatever way they come."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, ShortRead, Unavailable
from lmcache_cli.backends.buffers import AlignedBuffer
from lmcache_cli.backends.fault import CutShort, Fail, Fault, FaultScript, faulty_calls
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.reading import CACHED_BLOCK_BYTES, DEVICE_BLOCK_BYTES, LocalReadHandle
from lmcache_cli.backends.local.syscalls import SystemCalls

SIZE = 3 * 1024 * 1024 + 1000
CONTENT = random.Random(0).randbytes(SIZE)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    LocalBackend(tmp_path).put("a", [CONTENT], durability=Durability.DATA)
    return tmp_path


def open_cold(store: Path, calls: SystemCalls | None = None) -> LocalReadHandle:
    """The object with its pages dropped from the page cache, where this file system lets us."""
    fd = os.open(store / "a", os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return LocalBackend(store, calls).open_read("a")


def is_disk(path: Path) -> bool:
    with open_cold(path) as handle:
        return handle.block_bytes == DEVICE_BLOCK_BYTES


def test_block_size_says_where_the_bytes_come_from(store: Path) -> None:
    if not is_disk(store):
        pytest.skip("this file system keeps everything in memory")
    (store / "a").read_bytes()
    with LocalBackend(store).open_read("a") as handle:
        assert handle.block_bytes == CACHED_BLOCK_BYTES


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("memory_offset", [0, 4096, 512, 1])
@pytest.mark.parametrize("offset", [0, 4096, 512, 1, 1024 * 1024])
def test_reads_are_exact_whatever_the_alignment(store: Path, cold: bool, memory_offset: int, offset: int) -> None:
    memory = AlignedBuffer(SIZE + 8192).view(SIZE + 8192)
    target = memory[memory_offset : memory_offset + SIZE - offset]
    with open_cold(store) if cold else LocalBackend(store).open_read("a") as handle:
        target[:] = bytes(len(target))
        handle.read_into(offset, [target[:8192], target[8192:8192], target[8192:1_000_000], target[1_000_000:]])
        assert target == CONTENT[offset:]
        target[:] = bytes(len(target))
        handle.read_into(offset, [target])
        assert target == CONTENT[offset:]
        with pytest.raises(ShortRead):
            handle.read_into(offset + 4096, [target])


def test_file_system_without_direct_io_is_read_all_the_same(store: Path) -> None:
    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.O_DIRECT & _flags_of(fd):
            raise OSError(errno.EINVAL, "injected")
        return os.preadv(fd, buffers, offset)

    with open_cold(store, SystemCalls(preadv=preadv)) as handle:
        target = AlignedBuffer(SIZE).view(SIZE)
        handle.read_into(0, [target])
        assert target == CONTENT


def _flags_of(fd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)


@pytest.mark.parametrize("at_bytes", [1, 4096, 100_000])
def test_short_answers_are_carried_on(store: Path, at_bytes: int) -> None:
    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        first = next((buffer for buffer in buffers if buffer.nbytes), None)
        return 0 if first is None else os.preadv(fd, [first[:at_bytes]], offset)

    length = 2000 if at_bytes == 1 else SIZE
    with LocalBackend(store, SystemCalls(preadv=preadv)).open_read("a") as handle:
        target = memoryview(bytearray(length))
        handle.read_into(0, [target[:1000], target[1000:]])
        assert target == CONTENT[:length]


def test_failing_device_is_unavailable(store: Path) -> None:
    calls = faulty_calls(FaultScript(Fault("preadv", Fail(OSError(errno.EIO, "injected")))))
    with LocalBackend(store, calls).open_read("a") as handle, pytest.raises(Unavailable):
        handle.read_into(0, [memoryview(bytearray(10))])


def test_closed_handle_is_an_error_and_reads_no_other_file(store: Path) -> None:
    handle = LocalBackend(store).open_read("a")
    handle.close()
    handle.close()
    with (store / "a").open("rb"), pytest.raises(Unavailable):
        handle.read_into(0, [memoryview(bytearray(10))])


def test_direct_writes_of_any_shape_arrive(tmp_path: Path) -> None:
    """Parts aligned and not, before and after each other, longer than the bounce buffer."""
    chance = random.Random(1)
    memory = AlignedBuffer(6 * 1024 * 1024).view(6 * 1024 * 1024)
    memory[:] = chance.randbytes(memory.nbytes)
    backend = LocalBackend(tmp_path)
    for index in range(30):
        parts: list[memoryview | bytes] = []
        for _ in range(chance.randrange(1, 6)):
            start = chance.choice([0, 4096, 8192, chance.randrange(5000)])
            size = chance.choice([4096, 8192, 1_000_000, 1 << 20, 5 << 20, chance.randrange(300_000)])
            part = memory[start : start + size]
            parts.append(part if chance.random() < 0.7 else bytes(part))
        backend.put(f"o/{index}", parts, durability=Durability.DATA)
        assert backend.read(f"o/{index}") == b"".join(parts)


def test_more_aligned_parts_than_one_call_takes(tmp_path: Path) -> None:
    memory = AlignedBuffer(3000 * 4096).view(3000 * 4096)
    memory[:] = random.Random(2).randbytes(memory.nbytes)
    parts = [memory[at : at + 4096] for at in range(0, memory.nbytes, 4096)]
    calls = faulty_calls(FaultScript(Fault("pwritev", CutShort(10_000_000))))
    for durability in Durability:
        backend = LocalBackend(tmp_path / durability.value, calls)
        backend.put("a", parts, durability=durability)
        assert backend.read("a") == memory
