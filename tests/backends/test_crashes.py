"""C24, C29: whatever fails or dies during a put, the object is absent or complete, and the next put heals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability
from tests.backends import crashes
from tests.backends.contract import ROOT


def run_crashes(*arguments: object) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.crashes", *map(str, arguments)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_c29_two_hundred_schedules_of_eight_writers(tmp_path: Path) -> None:
    results = run_crashes("schedules", tmp_path, 0, 200)
    assert len(results) == 200
    assert [result for result in results if result["wrong"]] == []
    said = Counter(outcome for result in results for outcome in result["said"])  # type: ignore[attr-defined]
    assert set(said) == set(crashes.OUTCOMES.values()), f"the schedules must reach every outcome: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("durability", list(Durability))
def test_c24_killed_at_every_system_call(tmp_path: Path, durability: Durability) -> None:
    (result,) = run_crashes("boundaries", tmp_path, durability.value)
    assert result["wrong"] == []
    assert isinstance(result["kills"], int)
    assert result["kills"] >= 15
