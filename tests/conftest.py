"""What every test may use: the small real model, object stores, hypothesis profiles, repeatable torch."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import servers

ROOT = Path(__file__).resolve().parent.parent

# Run in the background, a shell makes its children ignore these, and they theirs: then no test could send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "fast"))


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
