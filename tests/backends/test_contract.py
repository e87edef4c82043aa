"""Every back-end, and every wrapper, keeps the contract."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lmcache_cli.backends import Backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, faulty_calls, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local import syscalls as local_syscalls
from lmcache_cli.backends.local.syscalls import SystemCalls
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.metered import MeteredBackend
from lmcache_cli.backends.other import OtherBackend, open_url
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from tests.backends.contract import BackendContract


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FailingFiles(LocalFileSystem):
    """A file system whose server does not answer."""

    def _fail(self, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "injected")

    info = ls = pipe_file = makedirs = rm_file = mv = cat_file = _fail


class TestLocal(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = LocalBackend(tmp_path / "store")
        yield backend
        backend.close()

    @pytest.fixture(params=[errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT])
    def broken(self, tmp_path: Path, request: pytest.FixtureRequest) -> Backend:
        (tmp_path / "store").mkdir()
        script = FaultScript(Fault("open_beneath", Fail(os_error(request.param))))
        return LocalBackend(tmp_path / "store", faulty_calls(script))


class TestLocalWithoutOpenat2(TestLocal):
    many_names = 500

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = LocalBackend(tmp_path / "store", SystemCalls(open_beneath=local_syscalls.open_stepwise))
        yield backend
        backend.close()


class TestLocalWithoutHardLinks(TestLocal):
    many_names = 500

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        script = FaultScript(Fault("link", Fail(os_error(errno.EPERM))))
        backend = LocalBackend(tmp_path / "store", faulty_calls(script))
        yield backend
        backend.close()


class TestLocalWithPlainRenameOnly(TestLocal):
    """The poorest file systems: no hard links, no conditional rename, no fallocate, no direct I/O."""

    atomic_create = False
    many_names = 500

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        script = FaultScript(
            Fault("link", Fail(os_error(errno.EOPNOTSUPP))),
            Fault("rename_new", Fail(os_error(errno.EINVAL))),
            Fault("fallocate", Fail(os_error(errno.EOPNOTSUPP))),
        )
        backend = LocalBackend(tmp_path / "store", faulty_calls(script))
        yield backend
        backend.close()


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend("contract")


class TestRetried(BackendContract):
    many_names = 500

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = RetryBackend(LocalBackend(tmp_path / "store"))
        yield backend
        backend.close()

    @pytest.fixture
    def broken(self) -> Backend:
        inner = FaultBackend(MemoryBackend(), FaultScript(Fault("*", Fail(unavailable()))))
        return RetryBackend(inner, RetryPolicy(pause_s=0.0))


class TestMetered(BackendContract):
    many_names = 500

    @pytest.fixture
    def backend(self) -> Backend:
        return MeteredBackend(MemoryBackend())


class TestFaultless(BackendContract):
    many_names = 500

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = FaultBackend(LocalBackend(tmp_path / "store"), FaultScript())
        yield backend
        backend.close()


class OtherContract(BackendContract):
    """What fsspec file systems have in common decides no race and pins nothing."""

    atomic_create = False
    pins_objects = False
    many_names = 300

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Backend:
        return OtherBackend(lambda: (FailingFiles(), str(tmp_path)), "failing://")


class TestOtherMemory(OtherContract):
    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setattr(MemoryFileSystem, "store", {})
        monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
        backend = OtherBackend(lambda: (MemoryFileSystem(skip_instance_cache=True), "/bucket"), "memory-of-fsspec://")
        backend.capabilities = replace(backend.capabilities, shared=False)
        return backend


class TestOtherFiles(OtherContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return open_url(f"local://{tmp_path}/store")
