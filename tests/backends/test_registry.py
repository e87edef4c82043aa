"""A URL leads to its back-end: the right one, wrapped as it should be, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_cli.backends import Unavailable, Unsupported, open_backend
from lmcache_cli.backends.cloud.backend import CloudBackend
from lmcache_cli.backends.cloud.gcs import GcsService
from lmcache_cli.backends.cloud.s3 import S3Service
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.other import OtherBackend
from lmcache_cli.backends.retry import RetryBackend
from tests.servers import free_ports

ROOT = Path(__file__).resolve().parents[2]


def test_paths_and_memory_are_plain(tmp_path: Path) -> None:
    assert isinstance(open_backend(str(tmp_path)), LocalBackend)
    assert isinstance(open_backend(f"file://{tmp_path}"), LocalBackend)
    assert isinstance(open_backend("memory://registry"), MemoryBackend)


@pytest.mark.parametrize(
    ("url", "service"),
    [("s3://b/p", S3Service), ("S3A://b", S3Service), ("gs://b/p", GcsService), ("gcs://b", GcsService)],
)
def test_object_stores_are_tried_again(url: str, service: type) -> None:
    backend = open_backend(url)
    assert isinstance(backend, RetryBackend)
    assert isinstance(backend.inner, CloudBackend)
    assert isinstance(backend.inner.service, service)
    assert backend.url.lower() == url.lower()
    assert not backend.capabilities.conditional_create, "nothing was asked yet"


def test_whatever_fsspec_knows_is_tried_again(tmp_path: Path) -> None:
    backend = open_backend(f"local://{tmp_path}")
    assert isinstance(backend, RetryBackend)
    assert isinstance(backend.inner, OtherBackend)


def test_opening_touches_nothing_and_a_place_out_of_reach_is_unavailable() -> None:
    (port,) = free_ports(1)
    backend = open_backend(f"ftp://me:hunter22@127.0.0.1:{port}/place")
    with pytest.raises(Unavailable, match="could not reach ftp://") as caught:
        backend.stat("a")
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://a/b", "no file system of fsspec"),
        ("s3://", "expected s3://bucket/prefix"),
        ("s3://b/p//q", "expected s3://bucket/prefix"),
        ("s3://b?endpoint=x", "unknown option 'endpoint'; known are addressing_style, anon, endpoint_url"),
        ("gs://key:secret@b", "keys have no place"),
        ("s3:/b/p", r"expected s3:// at the beginning .* write \./s3:/b/p"),
        ("GS:b/p", "expected gs:// at the beginning"),
    ],
)
def test_urls_that_make_no_sense_are_refused(url: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        open_backend(url)


def test_a_directory_with_the_name_of_a_mistyped_url_can_still_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_backend("./s3:/b/p"), LocalBackend)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules, "lmcache_cli.backends.cloud.s3")
    with pytest.raises(Unsupported, match=r"lmcache-toolkit\[s3\]") as raised:
        open_backend("s3://bucket")
    assert raised.value.next_step == "pip install 'lmcache-toolkit[s3]'"


def test_opening_a_directory_imports_no_cloud_client(tmp_path: Path) -> None:
    program = (
        "import sys; from lmcache_cli.backends import open_backend; open_backend(sys.argv[1]); "
        "print([name for name in ('fsspec', 's3fs', 'gcsfs', 'aiohttp', 'botocore') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
