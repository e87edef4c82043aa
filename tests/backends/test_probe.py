"""`probe` tells what a back-end does, whatever it declares, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.backends import Backend, ObjectInfo, Unavailable, open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.probe import ProbeReport, probe
from lmcache_cli.backends.wrapper import BackendWrapper


def check_clean(backend: Backend) -> ProbeReport:
    report = probe(backend)
    assert report.problems == ()
    assert list(backend.list()) == []
    assert abs(report.clock_difference_ms) < 5000
    assert report.tells_crc32c >= report.capabilities.object_crc32c
    return report


def test_sound_back_ends_have_no_problems(tmp_path: Path) -> None:
    check_clean(LocalBackend(tmp_path / "store"))
    check_clean(MemoryBackend())
    check_clean(open_backend(f"local://{tmp_path}/other"))


@pytest.mark.slow
def test_s3_keeps_its_conditions(s3_url: str) -> None:
    report = check_clean(open_backend(s3_url))
    assert report.capabilities.conditional_create
    assert report.capabilities.conditional_delete
    assert report.tells_crc32c


@pytest.mark.slow
def test_gcs_emulator_does_not_keep_conditional_delete(gcs_url: str) -> None:
    report = check_clean(open_backend(gcs_url))
    assert report.capabilities.conditional_create
    assert not report.capabilities.conditional_delete
    assert report.capabilities.object_crc32c


class Careless(BackendWrapper):
    """Replaces what it should keep, deletes whatever stands there."""

    def put(self, name: str, parts: object, **options: object) -> ObjectInfo:
        return self.inner.put(name, parts, **{**options, "if_absent": False})  # type: ignore[arg-type]

    def delete(self, name: str, *, version: str | None) -> bool:
        return self.inner.delete(name, version=None)


def test_careless_back_end_is_found_out() -> None:
    backend = MemoryBackend()
    with pytest.raises(Unavailable):
        probe(FaultBackend(backend, FaultScript(Fault("put", Fail(unavailable())))))
    report = probe(Careless(backend))
    assert report.problems[:1] == ("a second create replaced the first object",)
    assert list(backend.list()) == []
