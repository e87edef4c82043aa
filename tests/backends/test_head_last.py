"""Objects whose head is made from the body: put like any two parts, by the local back-end block by block, head last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import AlreadyExists, Backend, Durability, HeadLast, NoSpace
from lmcache_cli.backends.fault import Fault, FaultScript, FullAfter, faulty_calls
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.syscalls import SystemCalls
from lmcache_cli.backends.memory import MemoryBackend
from tests.backends.contract import pattern

NAME = "ns/c/ab/key"
BLOCK = 100_000
HEAD_BYTES = 8


class Summed(HeadLast):
    """The head is the sum of all bytes, known only when the last block went by."""

    def __init__(self, body: bytes, head_bytes: int = HEAD_BYTES) -> None:
        super().__init__(head_bytes, memoryview(body))
        self.made: bytes | None = None
        self.passes = 0

    def blocks(self) -> Iterator[memoryview]:
        self.passes += 1
        total = 0
        for start in range(0, len(self.body), BLOCK):
            block = self.body[start : start + BLOCK]
            total += sum(block)
            yield block
        self.made = total.to_bytes(HEAD_BYTES, "little")

    def head(self) -> bytes:
        if self.made is None:
            for _ in self.blocks():
                pass
        assert self.made is not None
        return self.made


BODY = pattern(450_001, 3)
WHOLE = sum(BODY).to_bytes(HEAD_BYTES, "little") + BODY


@pytest.mark.parametrize(
    "make", [lambda path: LocalBackend(path), lambda path: MemoryBackend()], ids=["local", "memory"]
)
@pytest.mark.parametrize("durability", Durability)
def test_head_stands_before_the_body(tmp_path: Path, make: Callable[[Path], Backend], durability: Durability) -> None:
    backend = make(tmp_path / "store")
    content = Summed(BODY)
    info = backend.put(NAME, content, durability=durability)
    assert backend.read(NAME) == WHOLE
    assert info.size_bytes == content.size_bytes == len(WHOLE)
    assert content.passes == 1


def test_it_is_a_sequence_of_two_parts() -> None:
    content = Summed(BODY)
    assert len(content) == 2
    assert b"".join(content) == WHOLE
    assert [bytes(part) for part in content[:]] == [WHOLE[:HEAD_BYTES], BODY]
    assert bytes(content[-1]) == BODY
    with pytest.raises(IndexError):
        content[2]


def test_body_is_not_read_where_the_object_exists(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    backend.put(NAME, [b"first"], durability=Durability.NONE)
    content = Summed(BODY)
    with pytest.raises(AlreadyExists):
        backend.put(NAME, content, durability=Durability.NONE)
    assert content.passes == 0


def test_nothing_is_visible_before_the_head_is_written(tmp_path: Path) -> None:
    """The head is the last write, and the name comes after it; the body goes in whole MiB of the file."""
    done: list[tuple[str, int]] = []
    calls = SystemCalls()

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done.append(("write", offset))
        return os.pwritev(fd, buffers, offset)

    def link(*names: str, **directories: int) -> None:
        done.append(("link", 0))
        os.link(*names, **directories)

    backend = LocalBackend(tmp_path / "store", replace(calls, pwritev=pwritev, link=link))
    backend.put(NAME, Summed(bytes(2_500_000)), durability=Durability.NONE)
    assert done == [("write", HEAD_BYTES), ("write", 1 << 20), ("write", 2 << 20), ("write", 0), ("link", 0)]


@pytest.mark.parametrize("room", [0, 150_000, 450_001, 450_003])
@pytest.mark.parametrize("durability", [Durability.NONE, Durability.DATA])
def test_full_device_leaves_nothing_and_the_next_put_starts_again(
    tmp_path: Path, room: int, durability: Durability
) -> None:
    script = FaultScript(Fault("pwritev", FullAfter(room)))
    content = Summed(BODY)
    with pytest.raises(NoSpace):
        LocalBackend(tmp_path / "store", faulty_calls(script)).put(NAME, content, durability=durability)
    assert os.listdir(tmp_path / "store" / "tmp") == []
    backend = LocalBackend(tmp_path / "store")
    assert backend.stat(NAME) is None
    backend.put(NAME, content, durability=durability)
    assert backend.read(NAME) == WHOLE


def test_head_of_another_length_is_refused(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    with pytest.raises(ValueError, match="not what they said"):
        backend.put(NAME, Summed(BODY, head_bytes=16), durability=Durability.NONE)
    assert backend.stat(NAME) is None
    assert os.listdir(tmp_path / "store" / "tmp") == []
