"""C32 and its kind: what stands, vanishes or changes on disk behind an open `LocalBackend`."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from lmcache_cli.backends import (
    AlreadyExists,
    Backend,
    Durability,
    NotFound,
    Obstructed,
    RootChanged,
    ShortRead,
    Unavailable,
    Unsupported,
    VersionChanged,
    open_backend,
)
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local import syscalls as local_syscalls
from lmcache_cli.backends.local.syscalls import SystemCalls
from tests.backends.contract import pattern

NAME = "ns/c/ab/key"
NONE = Durability.NONE


@pytest.fixture(params=["openat2", "stepwise"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> LocalBackend:
    calls = SystemCalls() if request.param == "openat2" else SystemCalls(open_beneath=local_syscalls.open_stepwise)
    return LocalBackend(tmp_path / "store", calls)


def fill(backend: Backend, count: int = 10) -> list[str]:
    names = [f"ns/c/{index:02d}/key" for index in range(count)]
    for index, name in enumerate(names):
        backend.put(name, [pattern(5000, index)], durability=NONE)
    return names


def test_root_that_never_existed_is_an_empty_store(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path / "a" / "store"))
    assert backend.stat(NAME) is None
    assert list(backend.list()) == []
    with pytest.raises(NotFound):
        backend.now_ms()
    assert not (tmp_path / "a").exists(), "looking must not create anything"
    backend.put(NAME, [b"1"], durability=Durability.FULL)
    assert backend.read(NAME) == b"1"


@pytest.mark.parametrize("replacement", [False, True])
def test_vanished_or_replaced_root_is_unknown_and_not_refilled(
    backend: LocalBackend, tmp_path: Path, replacement: bool
) -> None:
    fill(backend)
    with backend.open_read("ns/c/03/key") as handle:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        if replacement:
            (tmp_path / "store").mkdir()
        for call in (
            lambda: backend.stat("ns/c/03/key"),
            lambda: backend.read("ns/c/03/key"),
            lambda: list(backend.list()),
            lambda: backend.put("ns/new", [b"1"], durability=NONE),
            lambda: backend.delete("ns/c/03/key", version=None),
            lambda: backend.now_ms(),
        ):
            with pytest.raises(RootChanged):
                call()
        content = bytearray(5000)
        handle.read_into(0, [memoryview(content)])
        assert content == pattern(5000, 3), "an open handle outlives the name of the root"
    assert not replacement or list((tmp_path / "store").iterdir()) == []
    (tmp_path / "elsewhere" / "ns" / "extra").write_bytes(b"x")
    reopened = open_backend(str(tmp_path / "elsewhere"))
    assert reopened.read("ns/c/03/key") == pattern(5000, 3)


def test_root_that_vanishes_during_a_listing_is_an_error(backend: LocalBackend, tmp_path: Path) -> None:
    fill(backend)
    listing = backend.list()
    next(listing)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(RootChanged):
        list(listing)


def test_root_that_is_a_file_is_obstructed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    backend = open_backend(str(tmp_path / "file"))
    with pytest.raises(Obstructed):
        backend.stat(NAME)
    with pytest.raises(Obstructed):
        backend.put(NAME, [b"1"], durability=NONE)


def test_removed_files_and_directories_are_misses_and_can_be_put_again(backend: LocalBackend, tmp_path: Path) -> None:
    names = fill(backend)
    (tmp_path / "store" / names[0]).unlink()
    shutil.rmtree(tmp_path / "store" / "ns/c/01")
    for name in names[:2]:
        assert backend.stat(name) is None
        with pytest.raises(NotFound):
            backend.read(name)
        backend.put(name, [b"again"], durability=Durability.FULL)
        assert backend.read(name) == b"again"
    shutil.rmtree(tmp_path / "store" / "ns")
    shutil.rmtree(tmp_path / "store" / "tmp")
    assert list(backend.list()) == []
    backend.put(names[0], [b"again"], durability=Durability.FULL)
    assert backend.read(names[0]) == b"again"


def test_replaced_content_has_another_version(backend: LocalBackend, tmp_path: Path) -> None:
    info = backend.put(NAME, [b"ours"], durability=NONE)
    path = tmp_path / "store" / NAME
    path.unlink()
    path.write_bytes(b"theirs")
    with backend.open_read(NAME) as handle:
        assert handle.version != info.version
    with pytest.raises(VersionChanged):
        backend.delete(NAME, version=info.version)
    assert path.read_bytes() == b"theirs"


def test_c43_file_cut_under_an_open_handle_is_a_short_read(backend: LocalBackend, tmp_path: Path) -> None:
    backend.put(NAME, [pattern(100_000, 1)], durability=NONE)
    with backend.open_read(NAME) as handle:
        os.truncate(tmp_path / "store" / NAME, 50_000)
        head = bytearray(50_000)
        handle.read_into(0, [memoryview(head)])
        with pytest.raises(ShortRead):
            handle.read_into(40_000, [memoryview(bytearray(20_000))])
        with pytest.raises(ShortRead):
            handle.read_into(60_000, [memoryview(bytearray(20_000))])


def test_deleter_in_a_loop_causes_misses_only(backend: LocalBackend, tmp_path: Path) -> None:
    content = pattern(5000, 1)
    stop = threading.Event()

    def delete() -> None:
        while not stop.is_set():
            shutil.rmtree(tmp_path / "store" / "ns", ignore_errors=True)
            shutil.rmtree(tmp_path / "store" / "tmp", ignore_errors=True)

    backend.put(NAME, [content], durability=NONE)
    deleter = threading.Thread(target=delete)
    deleter.start()
    outcomes = {"hit": 0, "miss": 0, "put": 0, "not put": 0}
    try:
        end = time.monotonic() + 60
        while sum(outcomes.values()) < 1000 or (min(outcomes.values()) == 0 and time.monotonic() < end):
            try:
                assert backend.read(NAME) == content
                outcomes["hit"] += 1
            except NotFound:
                outcomes["miss"] += 1
            try:
                backend.put(NAME, [content], durability=NONE)
                outcomes["put"] += 1
            except (Unavailable, AlreadyExists):
                outcomes["not put"] += 1
    finally:
        stop.set()
        deleter.join(30)
    assert min(outcomes.values()) > 0, f"every outcome is to be seen: {outcomes}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_unknown(backend: LocalBackend, tmp_path: Path) -> None:
    backend.put(NAME, [b"1"], durability=NONE)
    (tmp_path / "store" / NAME).chmod(0)
    with pytest.raises(Unavailable):
        backend.read(NAME)
    assert backend.stat(NAME) is not None


@pytest.mark.parametrize("kind", ["directory", "symlink", "dangling symlink", "fifo"])
def test_what_is_no_file_obstructs_and_can_be_moved_away(backend: LocalBackend, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    path = tmp_path / "store" / NAME
    path.parent.mkdir(parents=True)
    if kind == "directory":
        path.mkdir()
        (path / "inside").write_bytes(b"1")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(secret if kind == "symlink" else tmp_path / "nowhere")
    for call in (
        lambda: backend.stat(NAME),
        lambda: backend.read(NAME),
        lambda: backend.put(NAME, [b"1"], durability=NONE),
    ):
        with pytest.raises(Obstructed):
            call()
    backend.move(NAME, "quarantine/thing")
    backend.put(NAME, [b"healed"], durability=NONE)
    assert backend.read(NAME) == b"healed"
    assert secret.read_bytes() == b"secret"
    assert not (tmp_path / "nowhere").exists()


def test_symlinked_directory_leads_nowhere(backend: LocalBackend, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_bytes(b"outside")
    (tmp_path / "store" / "ns").mkdir(parents=True)
    (tmp_path / "store" / "ns" / "c").symlink_to(outside)
    for call in (
        lambda: backend.read("ns/c/key"),
        lambda: backend.put("ns/c/new", [b"1"], durability=NONE),
        lambda: backend.put("ns/c/deep/new", [b"1"], durability=NONE),
        lambda: backend.delete("ns/c/key", version=None),
        lambda: backend.move("ns/c/key", "quarantine/key"),
    ):
        with pytest.raises(Unavailable):
            call()
    assert sorted(entry.name for entry in outside.iterdir()) == ["key"]
    assert [info.name for info in backend.list("ns")] == ["ns/c"], "listed as a foreign entry, not followed"


def test_file_in_place_of_a_directory_obstructs_puts_below(backend: LocalBackend, tmp_path: Path) -> None:
    backend.put("ns", [b"a file"], durability=NONE)
    for name in ("ns/key", "ns/deep/key"):
        assert backend.stat(name) is None
        with pytest.raises(Obstructed):
            backend.put(name, [b"1"], durability=NONE)
    assert backend.read("ns") == b"a file"
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_foreign_files_are_listed_under_their_own_names(backend: LocalBackend, tmp_path: Path) -> None:
    fill(backend, 1)
    odd = tmp_path / "store" / "Odd [name]"
    odd.mkdir()
    (odd / "naïve 文.txt").write_bytes(b"12")
    Path(os.fsdecode(os.fsencode(str(odd)) + b"/not-utf8-\xff")).write_bytes(b"")
    found = {info.name: info.size_bytes for info in backend.list() if not info.name.startswith("tmp/")}
    assert found == {"ns/c/00/key": 5000, "Odd [name]/naïve 文.txt": 2, "Odd [name]/not-utf8-\udcff": 0}


def test_file_urls(tmp_path: Path) -> None:
    odd = tmp_path / "a b%41"
    backend = open_backend(str(odd))
    backend.put("x", [b"1"], durability=NONE)
    assert open_backend(backend.url).read("x") == b"1"
    assert open_backend(f"file://localhost{backend.url.removeprefix('file://')}").read("x") == b"1"
    for url in ("file://otherhost/x", "nosuch://host/x", ""):
        with pytest.raises(Unsupported):
            open_backend(url)


def test_memory_urls_share_a_store() -> None:
    open_backend("memory://shared-by-name").put("x", [b"1"], durability=NONE)
    assert open_backend("memory://shared-by-name").read("x") == b"1"
    assert open_backend("memory://another").stat("x") is None


def test_no_descriptor_is_left_open(backend: LocalBackend, tmp_path: Path) -> None:
    names = fill(backend)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for name in names:
        with backend.open_read(name) as handle:
            handle.read_into(0, [memoryview(bytearray(100))])
        with pytest.raises(AlreadyExists):
            backend.put(name, [b"1"], durability=Durability.FULL)
        backend.stat(name)
        with pytest.raises(NotFound):
            backend.read(name + "x")
        backend.move(name, f"quarantine/{name}")
    list(backend.list())
    with pytest.raises(VersionChanged):
        backend.delete(f"quarantine/{names[0]}", version="1.1")
    backend.now_ms()
    backend.collect_staging(older_than_ms=0)
    assert len(os.listdir("/proc/self/fd")) == before
    backend.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
