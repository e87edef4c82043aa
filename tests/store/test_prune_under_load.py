"""Prune while others read, write and compact: no wrong byte, no failed read but a miss, and the books right after.

`LMCACHE_TEST_LOAD_SECONDS=60` has them at it for longer.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.store.prune_load import run

SECONDS = float(os.environ.get("LMCACHE_TEST_LOAD_SECONDS", "12"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "s3"])
def test_two_writers_three_readers_two_pruners_and_a_compactor(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
):
    told = run(str(tmp_path / "kv") if place == "local" else request.getfixturevalue("s3_url"), SECONDS)
    assert told["wrong"] == []
    for kind in ("puts stored", "hits", "misses", "marked", "swept", "compactions", "crashes"):
        assert told[kind], f"nothing to be learned: {kind} did not happen in {told}"
