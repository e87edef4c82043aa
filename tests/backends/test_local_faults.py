"""C29, C30: errors of single system calls during a put: nothing half-written, nothing left, and the right class."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import AlreadyExists, BackendError, Durability, NoSpace, Unavailable
from lmcache_cli.backends.buffers import AlignedBuffer
from lmcache_cli.backends.fault import CutShort, Fail, Fault, FaultScript, FullAfter, Hold, LoseResponse, faulty_calls
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.staging import new_staging_component, this_host
from tests.backends.contract import names, pattern

NAME = "ns/c/ab/key"
PARTS = [pattern(4096, 1), pattern(600_001, 2)]
WHOLE = b"".join(PARTS)
OUTCOMES = {
    errno.EIO: Unavailable,
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EACCES: Unavailable,
    errno.ESTALE: Unavailable,
    errno.ETIMEDOUT: Unavailable,
    errno.EROFS: Unavailable,
    errno.ENOENT: Unavailable,
}


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def staging(root: Path) -> list[str]:
    return sorted(os.listdir(root / "tmp")) if (root / "tmp").exists() else []


PUT_FAULTS = [
    (call, code, durability)
    for call in ("open_beneath", "create", "mkdir", "fallocate", "pwritev", "fdatasync", "link")
    for code in OUTCOMES
    for durability in (Durability.NONE, Durability.DATA)
    if not (call == "fdatasync" and durability is Durability.NONE)  # nothing is synced then
    if not (call == "open_beneath" and code == errno.ENOENT)  # an answer, no failure
]


@pytest.mark.parametrize(("call", "code", "durability"), PUT_FAULTS)
def test_failed_put_leaves_nothing_and_works_again(
    tmp_path: Path, call: str, code: int, durability: Durability
) -> None:
    script = FaultScript(Fault(call, Fail(os_error(code)), on_call=1))
    (tmp_path / "store").mkdir()
    backend = LocalBackend(tmp_path / "store", faulty_calls(script))
    with pytest.raises(BackendError) as raised:
        backend.put(NAME, PARTS, durability=durability)
    assert type(raised.value) is OUTCOMES[code]
    assert NAME in str(raised.value)
    assert names(backend) == []
    assert staging(tmp_path / "store") == []
    backend.put(NAME, PARTS, durability=durability)
    assert backend.read(NAME) == WHOLE


@pytest.mark.parametrize(("code", "said"), [(errno.EROFS, "mount it writable"), (errno.EACCES, "the account")])
def test_refused_permissions_come_with_a_next_step(tmp_path: Path, code: int, said: str) -> None:
    backend = LocalBackend(tmp_path / "store", faulty_calls(FaultScript(Fault("create", Fail(os_error(code))))))
    with pytest.raises(Unavailable) as raised:
        backend.put(NAME, PARTS, durability=Durability.NONE)
    assert said in raised.value.next_step
    assert not raised.value.transient


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("room", [0, 1, 4095, 4096, 50_000, 600_000])
def test_c30_device_that_fills_up_midway(tmp_path: Path, durability: Durability, room: int) -> None:
    backend = LocalBackend(tmp_path / "store")
    backend.put("ns/other", [b"intact"], durability=Durability.NONE)
    script = FaultScript(Fault("pwritev", FullAfter(room)))
    full = LocalBackend(tmp_path / "store", faulty_calls(script))
    with pytest.raises(NoSpace):
        full.put(NAME, PARTS, durability=durability)
    assert names(backend) == ["ns/other"]
    assert staging(tmp_path / "store") == []
    assert backend.read("ns/other") == b"intact"
    backend.put(NAME, PARTS, durability=durability)
    assert backend.read(NAME) == WHOLE


@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("at_bytes", [1, 511, 4096, 100_000])
def test_short_writes_are_carried_on(tmp_path: Path, durability: Durability, at_bytes: int) -> None:
    script = FaultScript(Fault("pwritev", CutShort(at_bytes)))
    parts = PARTS if at_bytes > 500 else [pattern(1500, 1), pattern(77, 2)]
    backend = LocalBackend(tmp_path / "store", faulty_calls(script))
    backend.put(NAME, parts, durability=durability)
    assert backend.read(NAME) == b"".join(parts)


def test_lost_answer_of_the_link_is_our_own_success(tmp_path: Path) -> None:
    script = FaultScript(Fault("link", LoseResponse(FileExistsError(errno.EEXIST, "injected"))))
    backend = LocalBackend(tmp_path / "store", faulty_calls(script))
    backend.put(NAME, PARTS, durability=Durability.NONE)
    assert backend.read(NAME) == WHOLE
    assert staging(tmp_path / "store") == []


def test_failed_directory_sync_is_reported_though_the_object_is_there(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store", faulty_calls(FaultScript(Fault("fsync", Fail(os_error(errno.EIO))))))
    (tmp_path / "store").mkdir()
    with pytest.raises(Unavailable):
        backend.put(NAME, PARTS, durability=Durability.FULL)
    assert backend.read(NAME) == WHOLE
    with pytest.raises(AlreadyExists):
        backend.put(NAME, PARTS, durability=Durability.FULL)


def test_full_syncs_bytes_then_name_then_every_new_directory(tmp_path: Path) -> None:
    script = FaultScript()
    backend = LocalBackend(tmp_path / "store", faulty_calls(script))
    backend.put(NAME, PARTS, durability=Durability.FULL)
    assert script.calls["fdatasync"] == 1
    assert script.calls["fsync"] == 5  # above the root, root, ns, ns/c, ns/c/ab
    backend.put("ns/c/ab/second", PARTS, durability=Durability.FULL)
    assert script.calls["fsync"] == 6
    for index in range(10):
        backend.put(f"ns/c/ab/{index}", PARTS, durability=Durability.DATA)
        backend.put(f"ns/c/cd/{index}", PARTS, durability=Durability.DATA)
    assert script.calls["fsync"] == 6
    backend.sync_names()
    assert script.calls["fsync"] == 9  # both directories, and the one the new one lies in
    backend.sync_names()
    assert script.calls["fsync"] == 9


def test_names_to_sync_survive_a_failed_sync(tmp_path: Path) -> None:
    script = FaultScript(Fault("fsync", Fail(os_error(errno.EIO)), on_call=2))  # the first is above the root
    backend = LocalBackend(tmp_path / "store", faulty_calls(script))
    backend.put(NAME, PARTS, durability=Durability.DATA)
    with pytest.raises(Unavailable):
        backend.sync_names()
    tried = script.calls["fsync"]
    backend.sync_names()
    assert script.calls["fsync"] == tried + 4


def test_list_error_midway_is_never_a_short_listing(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    for index in range(5):
        backend.put(f"ns/{index}/key", [b"1"], durability=Durability.NONE)
    for at in range(1, 7):
        script = FaultScript(Fault("open_beneath", Fail(os_error(errno.EIO)), on_call=at))
        with pytest.raises(Unavailable):
            list(LocalBackend(tmp_path / "store", faulty_calls(script)).list("ns"))


def test_delete_race_puts_the_other_version_back(tmp_path: Path) -> None:
    """Between the first look and the move aside another writer replaces the object."""
    import threading

    reached, go_on = threading.Event(), threading.Event()
    script = FaultScript(Fault("rename", Hold(reached, go_on), on_call=1))
    slow, other = LocalBackend(tmp_path / "store", faulty_calls(script)), LocalBackend(tmp_path / "store")
    old = other.put(NAME, [b"old"], durability=Durability.NONE)
    outcome: list[BaseException] = []

    def delete() -> None:
        try:
            slow.delete(NAME, version=old.version)
        except BackendError as error:
            outcome.append(error)

    deleter = threading.Thread(target=delete)
    deleter.start()
    assert reached.wait(30)
    new = other.put(NAME, [b"new"], durability=Durability.NONE, if_absent=False)
    go_on.set()
    deleter.join(30)
    assert [type(error).__name__ for error in outcome] == ["VersionChanged"]
    assert other.stat(NAME) == new
    assert other.read(NAME) == b"new"
    assert staging(tmp_path / "store") == []


# Staging of others


def dead_pid() -> int:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    return child.pid


def test_only_stale_staging_is_collected(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "store")
    backend.put("a", [b"1"], durability=Durability.NONE)
    tmp = tmp_path / "store" / "tmp"
    ours = new_staging_component()
    dead = f"{this_host()}.{dead_pid()}.0123456789abcdef"
    foreign = "another-host.1.0123456789abcdef"
    for name in (ours, dead, foreign, "unknown.txt"):
        (tmp / name).write_bytes(b"x")
    (tmp / "directory").mkdir()
    assert backend.collect_staging(older_than_ms=3_600_000) == 0
    assert backend.collect_staging(older_than_ms=0) == 1
    assert staging(tmp_path / "store") == sorted([ours, foreign, "unknown.txt", "directory"])
    assert backend.collect_staging(older_than_ms=0) == 0


def test_staging_of_other_hosts_is_collected_after_a_day() -> None:
    from lmcache_cli.backends.local.staging import FOREIGN_AGE_MS, is_stale

    for component in ("another-host.1.0123456789abcdef", new_staging_component()):
        assert not is_stale(component, age_ms=FOREIGN_AGE_MS - 1, older_than_ms=0)
        assert is_stale(component, age_ms=FOREIGN_AGE_MS, older_than_ms=0)
        assert not is_stale(component, age_ms=FOREIGN_AGE_MS, older_than_ms=FOREIGN_AGE_MS + 1)
    assert not is_stale("unknown.txt", age_ms=1 << 60, older_than_ms=0)


# A device that is really full


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "device"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("durability", list(Durability))
def test_c30_device_that_is_really_full(small_device: Path, durability: Durability) -> None:
    backend = LocalBackend(small_device / "store")
    backend.put("first", [pattern(400_000, 1)], durability=durability)
    with pytest.raises(NoSpace):
        backend.put("second", [pattern(900_000, 2)], durability=durability)
    assert names(backend) == ["first"]
    assert staging(small_device / "store") == []
    assert backend.read("first") == pattern(400_000, 1)
    assert backend.delete("first", version=None)
    aligned = AlignedBuffer(900_000).view(900_000)
    aligned[:] = pattern(900_000, 2)
    backend.put("second", [aligned], durability=durability)
    assert backend.read("second") == aligned
    backend.close()
