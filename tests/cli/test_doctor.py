"""`doctor`: what it tells, that it leaves nothing behind, and its exit codes."""

import json
import os
import shutil
import time

import pytest

from tests.cli.test_store_commands import _damage_identity, _damage_superblock, _newer_superblock, _remove_identity


def _doctor(inside, *arguments, env=None):
    ran = inside("doctor", *arguments, "--json", env=env)
    *checks, summary = [json.loads(line) for line in ran.lines]
    assert {check["schema"] for check in checks} == {"lmcache.check/1"}
    assert summary["num_checks"] == len(checks)
    assert summary["num_problems"] == sum(check["status"] == "problem" for check in checks)
    assert summary["exit_code"] == ran.code
    assert bool(summary["num_problems"]) == (ran.code != 0)
    return ran, {(check["area"], check["check"]): check for check in checks}


def _files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_without_a_store_it_tells_of_the_environment_and_settings(inside):
    ran, checks = _doctor(inside)
    assert ran.code == 0
    for name in ("python", "lmcache-toolkit", "numpy", "typer"):
        assert checks["environment", name]["status"] == "ok"
    assert checks["settings", "store"]["found"] == "- (default)"
    assert checks["store", "store"]["status"] == "note"
    assert not list(inside.folder.iterdir())


def test_a_sound_store_has_no_problem_and_is_left_as_it_was(inside, made_store):
    before = _files(made_store)
    ran, checks = _doctor(inside, "--store", made_store)
    assert ran.code == 0
    assert _files(made_store) == before
    assert {check["status"] for (area, _), check in checks.items() if area == "back-end"} <= {"ok", "note"}
    assert checks["store", "superblock"]["found"] == "generation 1, format 1"
    assert checks["store", "namespaces"]["found"] == "1 of 1 as they should be"
    assert ("place", "free space") in checks
    assert ("place", "clock") in checks


def test_no_probe_writes_nothing(inside, made_store):
    shutil.rmtree(made_store / "tmp")
    _, checks = _doctor(inside, "--store", made_store, "--no-probe")
    assert not any(area == "back-end" for area, _ in checks)
    assert not (made_store / "tmp").exists()


def _damage_segment(store):
    (path,) = store.rglob("*.lmi")
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (shutil.rmtree, 10, b"there is no store at"),
        (_damage_superblock, 3, b"store.000001.json"),
        (_newer_superblock, 12, b"from-the-future"),
        (_damage_identity, 3, b"does not hash to its name"),
        (_remove_identity, 3, b"ns.json is missing"),
        (_damage_segment, 3, b".lmi"),
        (lambda store: (shutil.rmtree(store), store.write_text("x")), 1, b"expected a directory"),
    ],
    ids=["no store", "damaged superblock", "newer", "damaged identity", "no identity", "damaged segment", "a file"],
)
def test_exit_code(inside, made_store, change, code, said):
    """C44, C55."""
    change(made_store)
    ran, _ = _doctor(inside, "--store", made_store)
    assert ran.code == code
    assert said in ran.stderr
    assert b"Traceback" not in ran.stderr
    assert made_store.exists() == (code != 10)


def test_a_back_end_of_another_release_is_exit_13(inside):
    ran, _ = _doctor(inside, "--store", "redis://user:secret@host/kv")
    assert ran.code == 13
    assert b"redis://***@host/kv: no file system" in ran.stderr
    assert b"secret" not in ran.stdout + ran.stderr


def test_leftovers_of_dead_writers_are_a_warning(inside, made_store):
    from lmcache_cli.backends.local.staging import this_host

    path = made_store / "tmp" / f"{this_host()}.4194309.{0:016x}"
    path.write_bytes(b"half a shard")
    os.utime(path, (time.time() - 7200,) * 2)
    (made_store / "notes.txt").write_text("mine")
    ran, checks = _doctor(inside, "--store", made_store)
    assert ran.code == 0
    assert checks["store", "staging"]["status"] == "warning"
    assert checks["store", "foreign files"]["status"] == "note"
    assert path.exists()


def test_another_distribution_with_our_script_is_a_warning(lmcache):
    others = lmcache.folder / "others"
    metadata = others / "lmcache_cli-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache-cli\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nlmcache = other:main\n")
    script = others / "lmcache"
    script.write_text("#!/usr/bin/env python3\nimport other\n")
    script.chmod(0o755)
    ran = lmcache("doctor", "--json", env={"PYTHONPATH": str(others), "PATH": f"{others}:{os.environ['PATH']}"})
    assert ran.code == 0
    checks = [json.loads(line) for line in ran.lines]
    found = [
        check["found"] for check in checks if check.get("check") == "script lmcache" and check["status"] == "warning"
    ]
    assert len(found) == 2
    assert "installed by lmcache-toolkit and by lmcache-cli" in found[0]
    assert found[1] == f"{script} is of lmcache-cli"


def test_a_misspelt_variable_is_a_warning(inside):
    ran, checks = _doctor(inside, env={"LMCACHE_STOER": "x"})
    assert checks["settings", "LMCACHE_STOER"]["next_step"] == "did you mean LMCACHE_STORE?"
    assert ran.code == 0


def test_people_get_a_table(lmcache, made_store):
    ran = lmcache.on_terminal("doctor", "--store", made_store, env={"NO_COLOR": "1", "COLUMNS": "200"})
    assert ran.code == 0
    assert b"0 problems" in ran.stdout
