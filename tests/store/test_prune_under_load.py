"""Prune while others read, write and compact: no wrong byte, no failed read but a miss, and the books right after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.prune_load import run

SECONDS = 20.0


@pytest.mark.slow
def test_two_writers_three_readers_two_pruners_and_a_compactor(tmp_path: Path):
    told = run(str(tmp_path / "kv"), SECONDS)
    assert told["wrong"] == []
    for kind in ("puts stored", "hits", "misses", "marked", "swept", "compactions", "crashes"):
        assert told[kind], f"nothing to be learned: {kind} did not happen in {told}"
