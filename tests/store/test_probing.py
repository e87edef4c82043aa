"""Probes tell back-ends that keep their promises from those that break them, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_cli.backends import AlreadyExists, Backend, Durability, ObjectInfo, Unavailable, VersionChanged
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, TruncateListing
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.wrapper import BackendWrapper
from lmcache_cli.store.probing import Outcome, probe_backend


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "store")


def outcomes(backend: Backend) -> dict[str, Outcome]:
    return {probe.name: probe.outcome for probe in probe_backend(backend)}


def left_behind(backend: Backend) -> list[str]:
    return [info.name for info in backend.list()]


def test_a_local_directory_keeps_every_promise(local: LocalBackend):
    found = outcomes(local)
    assert {name: outcome for name, outcome in found.items() if outcome is not Outcome.WORKS} in (
        {},
        {"direct I/O": Outcome.LACKING},
    )
    assert set(found) == {
        "write and read", "list after write", "ranged read", "create once", "delete by version", "rename",
        "survive a power cut", "direct I/O",
    }  # fmt: skip
    assert left_behind(local) == []


def test_memory_promises_less_and_breaks_nothing():
    backend = MemoryBackend("probed")
    found = outcomes(backend)
    assert set(found.values()) == {Outcome.WORKS, Outcome.LACKING}
    assert found["survive a power cut"] is Outcome.LACKING
    assert left_behind(backend) == []


class Overwriting(BackendWrapper):
    """Says that it creates once, and lets the last writer win."""

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        return self.inner.put(name, parts, durability=durability, if_absent=False)


class DeletingAnything(BackendWrapper):
    """Says that it looks at the version, and does not."""

    def delete(self, name: str, *, version: str | None) -> bool:
        return self.inner.delete(name, version=None)


class Replacing(BackendWrapper):
    """Moves onto whatever stands there."""

    def move(self, name: str, to: str) -> None:
        self.inner.delete(to, version=None)
        self.inner.move(name, to)


class Eventual(BackendWrapper):
    """Lists what was there a while ago."""

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        return iter(())


class Garbling(BackendWrapper):
    """Gives back other bytes than it got."""

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self.inner.read(name, offset=offset, length=length)[::-1]


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Overwriting, {"create once"}),
        (DeletingAnything, {"delete by version"}),
        (Replacing, {"rename"}),
        (Eventual, {"list after write"}),
        (Garbling, {"write and read"}),
    ],
)
def test_a_broken_promise_is_told_by_its_name(local: LocalBackend, kind: type[BackendWrapper], broken: set[str]):
    found = outcomes(kind(local))
    assert {name for name, outcome in found.items() if outcome is Outcome.BROKEN} == broken
    assert left_behind(local) == []


def test_where_nothing_can_be_written_nothing_else_is_tried(local: LocalBackend):
    refused = FaultBackend(local, FaultScript(Fault("put", Fail(Unavailable("read-only file system")))))
    (probe,) = probe_backend(refused)
    assert (probe.name, probe.outcome, probe.found) == ("write and read", Outcome.FAILED, "read-only file system")


def test_a_back_end_that_stops_answering_fails_the_rest_and_is_tidied_up(local: LocalBackend):
    flaky = FaultBackend(local, FaultScript(Fault("move", Fail(Unavailable("timeout")))))
    found = outcomes(flaky)
    assert [name for name, outcome in found.items() if outcome is Outcome.FAILED] == ["rename"]
    assert left_behind(local) == []


def test_a_lossy_listing_is_noticed(local: LocalBackend):
    lossy = FaultBackend(local, FaultScript(Fault("list", TruncateListing(0))))
    assert outcomes(lossy)["list after write"] is Outcome.BROKEN


def test_a_caller_who_stops_early_leaves_nothing_behind(local: LocalBackend):
    probes = probe_backend(local)
    next(probes)
    probes.close()  # type: ignore[attr-defined]
    assert left_behind(local) == []


def test_the_errors_that_probes_expect_are_the_ones_of_the_protocol(local: LocalBackend):
    old = local.put("a", [b"1"], durability=Durability.NONE)
    with pytest.raises(AlreadyExists):
        local.put("a", [b"2"], durability=Durability.NONE)
    local.put("a", [b"2"], durability=Durability.NONE, if_absent=False)
    with pytest.raises(VersionChanged):
        local.delete("a", version=old.version)
