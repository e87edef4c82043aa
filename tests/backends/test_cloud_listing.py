"""A listing of any length is streamed: page by page, in memory that does not grow with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.listing_server import listing_server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NUM_OBJECTS = int(os.environ.get("LMCACHE_TEST_LISTED", "100000"))
PEAK_BYTES = 500_000_000


@pytest.mark.parametrize(("scheme", "options"), [("s3", ""), ("gs", "&token=anon")])
def test_long_listing_is_streamed(scheme: str, options: str) -> None:
    peaks = []
    for num_objects in (NUM_OBJECTS // 10, NUM_OBJECTS):
        with listing_server(num_objects) as endpoint:
            listed = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.backends.listing_memory",
                    f"{scheme}://bucket/place?endpoint_url={endpoint}{options}",
                ],
                cwd=ROOT,
                env={**os.environ, "AWS_ACCESS_KEY_ID": "some", "AWS_SECRET_ACCESS_KEY": "some"},
                capture_output=True,
                text=True,
                check=True,
                timeout=500,
            )
        seen, peak_bytes, _ = listed.stdout.split()
        assert int(seen) == num_objects
        peaks.append(int(peak_bytes))
    assert peaks[1] < PEAK_BYTES
    assert peaks[1] < peaks[0] + 30_000_000
