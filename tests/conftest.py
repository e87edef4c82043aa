"""What every test may use: the small real model, object stores, hypothesis profiles, repeatable torch."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import servers

ROOT = Path(__file__).resolve().parent.parent

# Run in the background, a shell makes its children ignore these, and they theirs: then no test could send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
"""What must be free there; the fast part needs about a tenth of it."""


for profile, num_examples in (("fast", 20), ("whole", 50), ("thorough", 2000)):
    settings.register_profile(
        profile, max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.register_profile("ci", settings.get_profile("whole"), max_examples=100, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """The fast part (`-m "not slow"`) tries fewer examples, and keeps its files in memory, where syncing is quick."""
    is_fast = config.option.markexpr == "not slow"
    chosen = "ci" if os.environ.get("CI") else "fast" if is_fast else "whole"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", chosen))
    is_worker = hasattr(config, "workerinput")  # its controller has chosen a folder
    if is_fast and not is_worker and config.option.basetemp is None and _has_memory():
        folder = tempfile.mkdtemp(prefix="lmcache-tests-", dir=MEMORY)
        config.option.basetemp = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays to the end: the garbage collector need not look at it again and again.

    Of torch, where a test module imported it, one thread is to compute: two that wait for each other on a busy machine
    take a hundred times as long.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)


def _has_memory() -> bool:
    return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct (bf16, tokenizer, chat template); made on first use, about 20 s."""
    made = subprocess.run(
        [ROOT / "scripts" / "get_model"], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def s3_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Bucket]:
    """A bucket of SeaweedFS, and the environment in which AWS programs may use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", servers.S3_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", servers.S3_SECRET)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with servers.running(servers.s3_server, tmp_path_factory.mktemp("s3")) as server:
            yield servers.Bucket("s3", server, servers.make_s3_bucket(server.endpoint))


@pytest.fixture(scope="session")
def gcs_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Bucket]:
    """A bucket of fake-gcs-server."""
    with servers.running(servers.gcs_server, tmp_path_factory.mktemp("gcs")) as server:
        yield servers.Bucket("gs", server, servers.make_gcs_bucket(server.endpoint), "&token=anon")


@pytest.fixture
def s3_url(s3_bucket: servers.Bucket) -> str:
    """An empty place on S3."""
    return s3_bucket.url(f"test-{secrets.token_hex(6)}")


@pytest.fixture
def gcs_url(gcs_bucket: servers.Bucket) -> str:
    """An empty place on GCS."""
    return gcs_bucket.url(f"test-{secrets.token_hex(6)}")
