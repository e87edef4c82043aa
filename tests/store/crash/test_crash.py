"""A writer that is killed, at any system call whatever, breaks nothing: SIGKILL at more than a thousand moments.

After each the store opens, every byte it hands out is right, what had returned before is there, a second writer does
the same work to the end, and what the first left half-written is collected. Nothing of that is a step somebody takes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.backends import Durability
from tests.store.crash.judge import judge
from tests.store.crash.tracer import NoTracing, run_traced
from tests.store.crash.workloads import KINDS, make

ROOT = Path(__file__).resolve().parents[3]
RANDOM_RUNS = 4
POINTS_A_RUN = 12
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Victims:
    """The process that forks victims, and where their stores lie."""

    process: subprocess.Popen[str]
    directory: Path

    def run(self, kind: str, seed: int, durability: Durability, *, kill_at: int | None, every: bool) -> dict[str, Any]:
        base = self.directory / f"{kind}-{seed}-{durability.value}".replace(" ", "-")
        job = {
            "kind": kind,
            "seed": seed,
            "durability": durability.value,
            "base": str(base),
            "root": str(self.directory / "victim"),
            "kill_at": kill_at,
            "changes_only": not every,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    """Stores lie in memory where there is such a directory: a kill is no power cut, so the device plays no part."""
    try:
        run_traced(lambda: None, None)
    except NoTracing as problem:
        pytest.skip(f"processes cannot be traced here: {problem}")
    directory = Path(tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else None, prefix="lmcache-crash-"))
    command = [sys.executable, "-m", "tests.store.crash.server"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Victims(process, directory)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    shutil.rmtree(directory)


def kill_and_judge(victims: Victims, kind: str, seed: int, durability: Durability, kill_at: int, every: bool) -> bool:
    """True where the victim was killed, False where it came to its end before the boundary."""
    ran = victims.run(kind, seed, durability, kill_at=kill_at, every=every)
    assert ran["exit_code"] in (None, 0)
    try:
        judge(make(kind, seed, durability), victims.directory / "victim" / "store", ran["returned"])
    except Exception as problem:
        raise AssertionError(
            f"{kind}, seed {seed}, {durability.value}, killed at {kill_at} ({'any' if every else 'changing'} calls)"
            f" after {sum(ran['returned'])} steps: {problem!r}"
        ) from problem
    return ran["exit_code"] is None


@pytest.mark.slow
@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("kind", ["single", "single compaction"])
def test_killed_at_every_call_that_changes_the_disk(victims: Victims, kind: str, durability: Durability) -> None:
    whole = victims.run(kind, 0, durability, kill_at=None, every=False)
    assert whole["exit_code"] == 0
    assert whole["boundaries"] > 40
    killed = sum(
        kill_and_judge(victims, kind, 0, durability, kill_at, every=False)
        for kill_at in range(1, whole["boundaries"] + 1)
    )
    assert killed > whole["boundaries"] - 8  # a directory made or not by chance moves the end a little


@pytest.mark.slow
@pytest.mark.parametrize("durability", Durability)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("single")])
def test_killed_at_any_call_of_random_work(victims: Victims, kind: str, durability: Durability) -> None:
    chance = random.Random(f"{kind}/{durability.value}")
    killed = 0
    for seed in range(1, RANDOM_RUNS + 1):
        whole = victims.run(kind, seed, durability, kill_at=None, every=True)
        assert whole["exit_code"] == 0
        for kill_at in chance.sample(range(1, whole["boundaries"] + 1), POINTS_A_RUN):
            killed += kill_and_judge(victims, kind, seed, durability, kill_at, every=True)
    assert killed > RANDOM_RUNS * POINTS_A_RUN * 0.9


def test_killed_ten_times_in_the_middle_of_a_commit(victims: Victims) -> None:
    """The short form, for every run of the tests."""
    whole = victims.run("single", 7, Durability.NONE, kill_at=None, every=False)
    for kill_at in range(3, whole["boundaries"], whole["boundaries"] // 10):
        assert kill_and_judge(victims, "single", 7, Durability.NONE, kill_at, every=False)
