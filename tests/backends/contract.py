"""What every back-end promises. A new one subclasses `BackendContract` with its `backend` fixture, and passes.

Other processes open `backend.url`, where `capabilities.shared` says that they see the same objects.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import (
    STAGING_PREFIX,
    AlreadyExists,
    Backend,
    BadName,
    Durability,
    NotFound,
    ObjectInfo,
    ShortRead,
    Unavailable,
    VersionChanged,
)

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0
BAD_NAMES = [
    "",
    "/absolute",
    "..",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    "Upper",
    "a b",
    "a\\b",
    "a\n",
    "naïve",
    "a/" + "x" * 256,
    "x/" * 600 + "x",
    "c:d",
    "a\0b",
    "CACHEDIR.TAG/x",
]
GOOD_NAMES = ["a", "a/b/c", "..a", "a..", "-", "_", "a/" + "x" * 255, "store.000001.json", "CACHEDIR.TAG"]


class BackendContract:
    """Subclass as `TestX`; override the fixtures that differ."""

    atomic_create = True
    """False where the back-end cannot decide a race between two creators."""
    pins_objects = True
    """False where an open handle cannot keep what was deleted or replaced, and says so."""
    many_names = 10_000
    """How long the long listing is; shorter where the walk is one that another class tests already."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        raise NotImplementedError

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Backend | None:
        """The same kind of back-end with its device or network failing; None where it cannot fail."""
        return None

    # Writing and reading back

    @pytest.mark.parametrize(
        ("sizes", "durability"),
        [
            *(
                (sizes, Durability.NONE)
                for sizes in ([], [0], [1], [4096], [10, 0, 5000], [4096, 1 << 20, 3], [300_001], [7] * 1500)
            ),
            *((sizes, each) for each in (Durability.DATA, Durability.FULL) for sizes in ([], [4096, 1 << 20, 3])),
        ],
    )
    def test_put_then_read_is_exact(self, backend: Backend, sizes: list[int], durability: Durability) -> None:
        parts = [pattern(size, seed) for seed, size in enumerate(sizes)]
        whole = b"".join(parts)
        info = backend.put("ns/a/object", parts, durability=durability)
        assert (info.name, info.size_bytes) == ("ns/a/object", len(whole))
        assert backend.read("ns/a/object") == whole
        assert backend.stat("ns/a/object") == info

    def test_parts_may_be_any_contiguous_memory(self, backend: Backend) -> None:
        import numpy as np

        array = np.arange(6000, dtype=np.uint16).reshape(60, 100)
        backend.put("a", [memoryview(array), memoryview(bytearray(b"tail"))], durability=Durability.NONE)  # type: ignore[arg-type]
        assert backend.read("a") == array.tobytes() + b"tail"

    def test_second_put_is_refused_and_the_first_stays(self, backend: Backend) -> None:
        first = backend.put("a/b", [b"first"], durability=Durability.NONE)
        with pytest.raises(AlreadyExists):
            backend.put("a/b", [b"second, longer"], durability=Durability.NONE)
        assert backend.read("a/b") == b"first"
        assert backend.stat("a/b") == first

    def test_put_can_replace(self, backend: Backend) -> None:
        first = backend.put("a/b", [b"first"], durability=Durability.NONE)
        second = backend.put("a/b", [b"second"], durability=Durability.NONE, if_absent=False)
        assert backend.read("a/b") == b"second"
        assert second.version != first.version
        assert names(backend) == ["a/b"]

    def test_open_handle_reads_what_it_opened_or_nothing(self, backend: Backend) -> None:
        info = backend.put("a", [pattern(3_000_000, 1)], durability=Durability.NONE)
        content = memoryview(bytearray(1_000_000))
        with backend.open_read("a") as handle:
            backend.put("a", [pattern(3_000_000, 2)], durability=Durability.NONE, if_absent=False)
            assert handle.version == info.version
            for _ in range(2):
                try:
                    handle.read_into(1_000_000, [content])
                except (NotFound, VersionChanged):
                    assert not self.pins_objects
                else:
                    assert content == pattern(3_000_000, 1)[1_000_000:2_000_000]
                    assert self.pins_objects
                backend.delete("a", version=None)

    def test_open_handle_keeps_the_object_it_opened(self, backend: Backend) -> None:
        if not self.pins_objects:
            pytest.skip("this back-end cannot keep what is deleted")
        info = backend.put("a", [b"first!"], durability=Durability.NONE)
        with backend.open_read("a") as handle:
            backend.put("a", [b"second"], durability=Durability.NONE, if_absent=False)
            content = bytearray(6)
            handle.read_into(0, [memoryview(content)])
            assert (bytes(content), handle.version, handle.size) == (b"first!", info.version, 6)
            assert backend.delete("a", version=None)
            handle.read_into(0, [memoryview(content)])
            assert bytes(content) == b"first!"

    def test_read_into_fills_scattered_buffers(self, backend: Backend) -> None:
        whole = pattern(700_001, 3)
        backend.put("a", [whole], durability=Durability.NONE)
        with backend.open_read("a") as handle:
            assert handle.size == len(whole)
            assert handle.block_bytes >= 4096
            for offset in (0, 1, 4096, 123_457, 700_000, 700_001):
                target = bytearray(min(200_000, len(whole) - offset))
                view = memoryview(target)
                handle.read_into(offset, [view[:10], view[10:10], view[10:5000], view[5000:]])
                assert target == whole[offset : offset + len(target)]
            many = bytearray(3000)
            handle.read_into(5, [memoryview(many)[at : at + 1] for at in range(3000)])
            assert many == whole[5:3005]
            handle.read_into(0, [])

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (50, 51), (5000, 1), (1 << 40, 10)])
    def test_range_past_the_end_is_a_short_read(self, backend: Backend, offset: int, length: int) -> None:
        backend.put("a", [pattern(100, 0)], durability=Durability.NONE)
        with pytest.raises(ShortRead), backend.open_read("a") as handle:
            handle.read_into(offset, [memoryview(bytearray(length))])
        with pytest.raises(ShortRead):
            backend.read("a", offset=offset, length=length)

    def test_read_takes_ranges(self, backend: Backend) -> None:
        whole = pattern(10_000, 1)
        backend.put("a", [whole], durability=Durability.NONE)
        assert backend.read("a", offset=9_990) == whole[9_990:]
        assert backend.read("a", offset=17, length=4096) == whole[17 : 17 + 4096]
        assert backend.read("a", offset=10_000) == b""
        assert backend.read("a", length=0) == b""

    # Absence

    def test_absent_is_not_found(self, backend: Backend) -> None:
        assert backend.stat("no/such/object") is None
        assert backend.delete("no/such/object", version=None) is False
        assert backend.delete("no/such/object", version="1.1") is False
        for missing in (
            lambda: backend.read("no/such/object"),
            lambda: backend.open_read("no/such/object"),
            lambda: backend.move("no/such/object", "quarantine/x"),
        ):
            with pytest.raises(NotFound):
                missing()
        assert list(backend.list()) == []
        assert list(backend.list("no/such")) == []

    def test_below_an_object_there_is_nothing(self, backend: Backend) -> None:
        backend.put("a", [b"1"], durability=Durability.NONE)
        assert backend.stat("a/b") is None
        with pytest.raises(NotFound):
            backend.read("a/b")
        assert list(backend.list("a/b")) == []

    def test_unavailable_is_not_absent(self, broken: Backend | None) -> None:
        if broken is None:
            pytest.skip("this back-end has nothing that could fail")
        for call in (
            lambda: broken.stat("a"),
            lambda: broken.read("a"),
            lambda: broken.open_read("a"),
            lambda: list(broken.list()),
            lambda: broken.delete("a", version=None),
            lambda: broken.delete("a", version="1.1"),
            lambda: broken.move("a", "b"),
            lambda: broken.put("a", [b"1"], durability=Durability.NONE),
            lambda: broken.now_ms(),
            lambda: broken.collect_staging(older_than_ms=0),
        ):
            with pytest.raises(Unavailable):
                call()

    # Names

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_name_is_refused_everywhere(self, backend: Backend, name: str) -> None:
        backend.put("x", [b"1"], durability=Durability.NONE)
        calls: list[Callable[[], object]] = [
            lambda: backend.put(name, [b"1"], durability=Durability.NONE),
            lambda: backend.read(name),
            lambda: backend.open_read(name),
            lambda: backend.stat(name),
            lambda: backend.delete(name, version=None),
            lambda: backend.move(name, "y"),
            lambda: backend.move("x", name),
        ]
        if name and not name.endswith("/"):
            calls.append(lambda: list(backend.list(name)))
        for call in calls:
            with pytest.raises(BadName):
                call()
        assert names(backend) == ["x"]

    @pytest.mark.parametrize("name", GOOD_NAMES)
    def test_good_name_is_taken(self, backend: Backend, name: str) -> None:
        backend.put(name, [b"1"], durability=Durability.NONE)
        assert names(backend) == [name]
        assert backend.read(name) == b"1"

    # Listing

    def test_listing_by_prefix_and_level(self, backend: Backend) -> None:
        for name in ("top", "ns/1/a", "ns/1/b", "ns/1/deep/c", "ns/12/d", "nsx/e"):
            backend.put(name, [name.encode()], durability=Durability.NONE)
        assert names(backend) == ["ns/1/a", "ns/1/b", "ns/1/deep/c", "ns/12/d", "nsx/e", "top"]
        assert names(backend, "ns/1") == names(backend, "ns/1/") == ["ns/1/a", "ns/1/b", "ns/1/deep/c"]
        assert names(backend, "n") == []
        flat = {info.name: info for info in backend.list("ns/1", recursive=False)}
        assert sorted(flat) == ["ns/1/a", "ns/1/b", "ns/1/deep/"]
        assert flat["ns/1/deep/"].is_prefix
        assert not flat["ns/1/a"].is_prefix
        level = {info.name for info in backend.list("ns", recursive=False)}
        assert level == {"ns/1/", "ns/12/"}

    def test_listing_says_what_stat_says(self, backend: Backend) -> None:
        for size in (0, 1, 5000):
            backend.put(f"a/{size}", [bytes(size)], durability=Durability.NONE)
        for info in backend.list("a"):
            known = backend.stat(info.name)
            assert known is not None
            assert info == (known if backend.capabilities.object_crc32c else replace(known, crc32c=None))

    @pytest.mark.slow
    def test_many_names_are_all_listed(self, backend: Backend) -> None:
        wanted = {f"c/{index % 97:02x}/{index:05d}" for index in range(self.many_names)}
        for name in wanted:
            backend.put(name, [b"x"], durability=Durability.NONE)
        listed = [info.name for info in backend.list("c")]
        assert len(listed) == len(wanted)
        assert set(listed) == wanted

    # Removing

    def test_delete_takes_only_the_version_named(self, backend: Backend) -> None:
        first = backend.put("a/b", [b"first"], durability=Durability.NONE)
        second = backend.put("a/b", [b"second"], durability=Durability.NONE, if_absent=False)
        with pytest.raises(VersionChanged):
            backend.delete("a/b", version=first.version)
        assert backend.read("a/b") == b"second"
        assert backend.stat("a/b") == second
        assert backend.delete("a/b", version=second.version) is True
        assert backend.delete("a/b", version=second.version) is False
        assert names(backend) == []

    def test_name_can_be_used_again_after_delete(self, backend: Backend) -> None:
        first = backend.put("a", [b"1"], durability=Durability.NONE)
        assert backend.delete("a", version=None)
        assert backend.put("a", [b"2"], durability=Durability.NONE).version != first.version
        assert backend.read("a") == b"2"

    def test_move_keeps_bytes_and_never_replaces(self, backend: Backend) -> None:
        backend.put("a", [b"one"], durability=Durability.NONE)
        backend.put("b", [b"two"], durability=Durability.NONE)
        with pytest.raises(AlreadyExists):
            backend.move("a", "b")
        assert (backend.read("a"), backend.read("b")) == (b"one", b"two")
        backend.move("a", "quarantine/deep/a")
        assert backend.stat("a") is None
        assert backend.read("quarantine/deep/a") == b"one"

    # Time, staging, end

    def test_clock_is_the_one_of_modified_times(self, backend: Backend) -> None:
        before_ms = backend.put("a", [b"1"], durability=Durability.NONE).modified_ms
        now_ms = backend.now_ms()
        after_ms = backend.put("b", [b"1"], durability=Durability.NONE).modified_ms
        assert before_ms - 50 <= now_ms <= after_ms + 50
        assert names(backend) == ["a", "b"]

    def test_nothing_stays_in_staging(self, backend: Backend) -> None:
        backend.put("a", [b"1"], durability=Durability.FULL)
        with pytest.raises(AlreadyExists):
            backend.put("a", [b"1"], durability=Durability.FULL)
        backend.sync_names()
        assert list(backend.list(STAGING_PREFIX)) == []
        assert backend.collect_staging(older_than_ms=0) == 0

    # Races

    def test_objects_appear_whole(self, backend: Backend) -> None:
        size = 300_000
        stop = threading.Event()
        seen = [threading.Event(), threading.Event()]

        def watch(has_seen: threading.Event) -> None:
            while not stop.is_set():
                for info in backend.list("ns"):
                    assert info.size_bytes == size, f"a partial object was listed: {info}"
                    content = backend.read(info.name)
                    assert content == bytes([content[0]]) * size
                    has_seen.set()

        with ThreadPoolExecutor(2) as pool:
            watchers = [pool.submit(watch, has_seen) for has_seen in seen]
            try:
                for index in range(30):
                    parts = [bytes([index]) * (size // 3)] * 3
                    backend.put(f"ns/{index % 7}/{index}", parts, durability=list(Durability)[index % 3])
                for has_seen in seen:
                    has_seen.wait(WAIT_S)
            finally:
                stop.set()
            for watcher in watchers:
                watcher.result(WAIT_S)
            assert all(has_seen.is_set() for has_seen in seen)

    def test_eight_threads_one_winner(self, backend: Backend) -> None:
        for attempt in range(10):
            start = threading.Barrier(8)

            def write(writer: int, start: threading.Barrier = start, attempt: int = attempt) -> ObjectInfo | None:
                start.wait(WAIT_S)
                return put_or_none(backend, f"race/{attempt}/object", bytes([writer]) * 100_000)

            with ThreadPoolExecutor(8) as pool:
                infos = list(pool.map(write, range(8)))
            winners = [writer for writer, info in enumerate(infos) if info is not None]
            content = backend.read(f"race/{attempt}/object")
            assert content in [bytes([writer]) * 100_000 for writer in winners]
            assert len(winners) == 1 or not self.atomic_create
        assert list(backend.list(STAGING_PREFIX)) == []

    @pytest.mark.slow
    def test_eight_processes_one_winner(self, backend: Backend) -> None:
        if not backend.capabilities.shared:
            pytest.skip("other processes do not see this back-end")
        outputs = race_of_processes(backend.url, writers=8, rounds=10)
        for attempt in range(10):
            winners = [writer for writer, output in enumerate(outputs) if output[attempt] == "put"]
            content = backend.read(f"race/{attempt}")
            assert content in [bytes([writer]) * 200_000 for writer in winners]
            assert len(winners) == 1 or not self.atomic_create
        assert list(backend.list(STAGING_PREFIX)) == []


_RACER = """
import sys
from lmcache_cli.backends import AlreadyExists, Durability, open_backend
url, writer, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
backend = open_backend(url)
for attempt in range(rounds):
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        backend.put(f"race/{attempt}", [bytes([writer]) * 100_000] * 2, durability=Durability.NONE)
        print("put", flush=True)
    except AlreadyExists:
        print("exists", flush=True)
"""


def race_of_processes(url: str, *, writers: int, rounds: int) -> list[list[str]]:
    """What each writer says for each round; all of them start a round together."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, url, str(writer), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for writer in range(writers)
    ]
    said: list[list[str]] = [[] for _ in racers]
    try:
        for _ in range(rounds):
            for racer in racers:
                assert racer.stdout is not None
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
                racer.stdin.flush()
            for racer, lines in zip(racers, said, strict=True):
                assert racer.stdout is not None
                lines.append(racer.stdout.readline().strip())
        return said
    finally:
        for racer in racers:
            racer.communicate(timeout=WAIT_S)


def pattern(size: int, seed: int) -> bytes:
    """Bytes that differ by position and seed."""
    block = bytes((index * 7 + index // 251 + seed * 31) % 256 for index in range(1009))
    return (block * (size // len(block) + 1))[:size]


def names(backend: Backend, prefix: str = "") -> list[str]:
    """All objects, without the back-end's staging files."""
    return sorted(info.name for info in backend.list(prefix) if not info.name.startswith(f"{STAGING_PREFIX}/"))


def put_or_none(backend: Backend, name: str, content: bytes) -> ObjectInfo | None:
    try:
        return backend.put(name, [content], durability=Durability.NONE)
    except AlreadyExists:
        return None
