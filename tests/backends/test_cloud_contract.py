"""The back-ends of object stores keep the contract on real servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_cli.backends import Backend, open_backend
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from tests.backends.contract import BackendContract
from tests.servers import free_ports

pytestmark = pytest.mark.slow


def without_server(scheme: str) -> Backend:
    """Nobody listens there."""
    (port,) = free_ports(1)
    opened = open_backend(f"{scheme}://bucket/place?endpoint_url=http://127.0.0.1:{port}")
    assert isinstance(opened, RetryBackend)
    return RetryBackend(opened.inner, RetryPolicy(retries=1, pause_s=0.0))


class CloudContract(BackendContract):
    pins_objects = False
    many_names = 1_100  # more than a page


class TestS3(CloudContract):
    @pytest.fixture
    def backend(self, s3_url: str) -> Iterator[Backend]:
        backend = open_backend(s3_url)
        yield backend
        backend.close()

    @pytest.fixture
    def broken(self, s3_url: str) -> Backend:
        return without_server("s3")


class TestGcs(CloudContract):
    @pytest.fixture
    def backend(self, gcs_url: str) -> Iterator[Backend]:
        backend = open_backend(gcs_url)
        yield backend
        backend.close()

    @pytest.fixture
    def broken(self) -> Backend:
        return without_server("gs")
