"""C51: what every command prints where nobody looks: whole lines, the same in all surroundings, and no garbage."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lmcache_cli.commands.root import COMMANDS
from tests.cases.every_command import CALLS, Scene, copy_scene
from tests.cases.pattern_engine import ENGINE_IDENTITY
from tests.cli.conftest import Inside, Program
from tests.cli.test_pipes import PLAIN_SURROUNDINGS
from tests.marks import slow_after

MEASURING = ("doctor",)  # prints what it measured, which differs from run to run
GARBAGE = (b"\x1b", b"\r", b"\b")


@pytest.fixture
def long_scene(first_scene: Scene, tmp_path: Path) -> Scene:
    """A store at a path of 200 characters."""
    return copy_scene(first_scene, tmp_path, tmp_path / ("long-name/" * 20) / "kv")


def test_every_command_is_among_the_calls():
    called = {" ".join(words[: name.count(" ") + 1]) for words in CALLS.values() for name in COMMANDS}
    assert set(COMMANDS) <= called, "give the new command a harmless call in every_command.py"


@pytest.mark.parametrize("flags", slow_after(1, [("--json",), ()]))
@pytest.mark.parametrize("name", CALLS)
def test_the_same_whole_lines_everywhere(patterned: Inside, long_scene: Scene, name: str, flags: tuple[str, ...]):
    runs = [patterned(*long_scene.call(name), *flags, env=env) for env in PLAIN_SURROUNDINGS]
    assert {run.code for run in runs} == {0}, runs[0].stderr
    for run in runs:
        assert not any(byte in run.stdout + run.stderr for byte in GARBAGE)
        assert run.stdout == b"" or run.stdout.endswith(b"\n")
    if name not in MEASURING:
        assert len({run.stdout if not flags else b"".join(run.lines[:-1]) for run in runs}) == 1
    assert len({len(run.lines) for run in runs}) == 1
    for line in runs[0].lines if flags else ():
        assert json.loads(line)["schema"].startswith("lmcache.")


def test_keys_and_paths_are_printed_in_full(patterned: Inside, long_scene: Scene):
    env = {"COLUMNS": "40"}
    assert str(long_scene.store).encode() in patterned(*long_scene.call("inspect"), env=env).stdout
    shown = patterned(*long_scene.call("ls namespace"), env=env).stdout
    assert all(path.name[:32].encode() in shown for path in long_scene.shards)
    assert ENGINE_IDENTITY.fingerprint.encode() in patterned(*long_scene.call("ls"), env=env).stdout
    chunk = patterned(*long_scene.call("inspect chunk"), env=env).stdout
    assert long_scene.shards[0].relative_to(long_scene.store).as_posix().encode() in chunk


@pytest.mark.parametrize("name", slow_after(1, ["inspect namespace", "ls", "verify", "doctor", "config show"]))
def test_an_empty_environment_will_do(lmcache: Program, scene: Scene, name: str):
    ran = subprocess.run(
        ["env", "-i", *lmcache.command, *scene.call(name)], cwd=scene.folder, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert not any(byte in ran.stdout + ran.stderr for byte in GARBAGE)


@pytest.mark.parametrize("closed", slow_after(1, [">&-", "2>&-", "<&- >&- 2>&-"]))
def test_closed_streams_change_no_exit_code(lmcache: Program, scene: Scene, closed: str):
    scene.shards[1].write_bytes(b"damaged")
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *lmcache.command, *scene.call("verify")]
    ran = subprocess.run(shell, cwd=scene.folder, env=lmcache.environment(), capture_output=True, check=False)
    assert ran.returncode == 3
    assert b"Traceback" not in ran.stderr


def test_a_reader_who_takes_one_line_ends_it_quietly(lmcache: Program, scene: Scene):
    shell = ["bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "bash", *lmcache.command, *scene.call("inspect")]
    ran = subprocess.run(shell, cwd=scene.folder, env=lmcache.environment(), capture_output=True, check=False)
    assert ran.returncode in (0, 141)  # the first line may be the last that was waited for
    assert ran.stdout.startswith(b"url\t")
    assert b"Traceback" not in ran.stderr
    assert b"Broken pipe" not in ran.stderr
