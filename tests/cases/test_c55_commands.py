"""C55, the command side: what is of a newer format is told as that, is no damage, and is left as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_format.superblock import Operation, Superblock
from tests.cases.every_command import CALLS, Scene
from tests.cli.conftest import Inside
from tests.store.altered_shards import in_format, with_unknown_field

GOLDEN = Path(__file__).resolve().parents[2] / "format" / "golden"
CHANGING = ("compress", "pin", "prune", "repair", "rm", "unpin")  # refused as a whole, their dry runs too
READING = [name for name in CALLS if name not in ("init", "warm", "config show")]


def with_superblock(scene: Scene, **changes: object) -> None:
    """A further generation of the superblock, as another release writes it."""
    with Store.open(str(scene.store)) as store:
        block = store.superblock
    newer = Superblock(block.store_id, block.created_ms, generation=2, **changes)  # type: ignore[arg-type]
    (scene.store / "store.000002.json").write_bytes(newer.to_json())


def in_version(scene: Scene, version: int) -> None:
    """The whole store as one of a later format."""
    with_superblock(scene, version=version)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def codes(patterned: Inside, scene: Scene, names: list[str]) -> Mapping[str, int]:
    found = {}
    for name in names:
        ran = patterned(*scene.call(name), "--json")
        assert b"Traceback" not in ran.stderr
        assert json.loads(ran.lines[-1])["exit_code"] == ran.code
        found[name] = ran.code
    return found


@pytest.mark.parametrize("version", [2, 3, 9])
def test_a_store_of_a_later_format_is_exit_12_for_every_command(patterned: Inside, scene: Scene, version: int):
    in_version(scene, version)
    before = contents(scene.store)
    names = [name for name in CALLS if name not in ("inspect file", "config show")]
    assert codes(patterned, scene, names) == dict.fromkeys(names, 12)
    assert patterned("repair", "--yes", "--store", scene.store).code == 12
    assert contents(scene.store) == before


def test_a_feature_nobody_must_know_changes_nothing(patterned: Inside, scene: Scene):
    with_superblock(scene, compat=("from-a-later-minor",))
    assert set(codes(patterned, scene, list(CALLS)).values()) == {0}


def test_a_feature_that_writers_must_know_leaves_the_store_readable(patterned: Inside, scene: Scene):
    with_superblock(scene, ro_compat=("for-writers",))
    before = contents(scene.store / "ns")
    found = codes(patterned, scene, READING)
    refused = [name for name in READING if CALLS[name][0] in CHANGING]
    assert {name: code for name, code in found.items() if code} == dict.fromkeys(refused, 12)
    assert contents(scene.store / "ns") == before
    for ran in (patterned(*scene.call("warm")), patterned("repair", "--yes", "--deep", "--store", scene.store)):
        assert ran.code == 12
        assert b"for-writers" in ran.stderr
    warnings = [json.loads(line) for line in patterned(*scene.call("doctor"), "--json").lines]
    assert {"may write", "may prune"} <= {one["check"] for one in warnings if one.get("status") == "warning"}
    assert contents(scene.store / "ns") == before


def test_a_requirement_of_verify_stops_verify_alone(patterned: Inside, scene: Scene):
    with_superblock(scene, require={Operation.VERIFY: ("for-checkers",)})
    found = codes(patterned, scene, READING)
    assert {name for name, code in found.items() if code == 12} == {"verify", "verify quick"}
    assert set(found.values()) == {0, 12}


def test_a_shard_of_a_later_major_is_newer_and_no_damage(patterned: Inside, scene: Scene):
    shard = scene.shards[1]
    in_format(shard, "9")
    shutil.copy(shard, scene.folder / "copy.safetensors")
    before = shard.read_bytes()
    verified = patterned(*scene.call("verify"), "--json")
    summary = json.loads(verified.lines[-1])
    assert (verified.code, summary["num_damaged"], summary["num_newer"]) == (0, 0, 1)
    key = shard.name.split(".")[0]
    by_key = patterned("inspect", key, "--store", scene.store)
    assert (by_key.code, b"warning: " in by_key.stderr, b"damaged" in by_key.stderr.split(b"\n")[0]) == (0, True, False)
    by_file = patterned(*scene.call("inspect file"))
    assert by_file.code == 12
    assert b"newer" in by_file.stderr
    assert patterned("repair", "--deep", "--yes", "--store", scene.store).code == 0
    assert shard.read_bytes() == before
    assert not list((scene.store / "quarantine").glob("*"))


@pytest.mark.slow
def test_a_shard_of_a_later_minor_is_like_any_other(patterned: Inside, scene: Scene):
    shard = scene.shards[1]
    with_unknown_field(shard)
    shutil.copy(shard, scene.folder / "copy.safetensors")
    assert set(codes(patterned, scene, READING).values()) == {0}
    assert json.loads(patterned(*scene.call("verify"), "--json").lines[-1])["num_good"] == len(scene.shards)


def test_a_namespace_of_a_later_format_is_listed_as_newer(patterned: Inside, scene: Scene):
    from lmcache_format.identity import fingerprint_of

    text = (scene.namespace / "ns.json").read_bytes()
    newer = text.replace(b'"layout":"htd-1"', b'"layout":"htd-9"')
    assert newer != text
    folder = scene.store / "ns" / fingerprint_of(newer)
    folder.mkdir()
    (folder / "ns.json").write_bytes(newer)
    ran = patterned(*scene.call("ls"), "--json")
    *rows, _ = [json.loads(line) for line in ran.lines]
    assert ran.code == 0
    assert {row["namespace"]: row["status"] for row in rows}[folder.name] == "newer format"
    assert patterned("inspect", folder.name, "--store", scene.store).code == 12
    assert patterned(*scene.call("verify")).code == 0
    assert patterned("repair", "--deep", "--yes", "--store", scene.store).code == 0
    assert (folder / "ns.json").read_bytes() == newer


def test_a_foreign_file_is_untouched_and_no_damage(patterned: Inside, scene: Scene):
    foreign = scene.shards[0].with_name("notes.safetensors")
    foreign.write_bytes(b"not a shard of ours")
    assert patterned(*scene.call("verify")).code == 0
    assert patterned("repair", "--deep", "--yes", "--store", scene.store).code == 0
    assert foreign.read_bytes() == b"not a shard of ours"


@pytest.mark.slow
@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDEN.glob("v*-by-*")))
def test_what_an_earlier_release_wrote_can_be_read_and_is_sound(inside: Inside, tmp_path: Path, golden: str):
    store = tmp_path / "golden"
    shutil.copytree(next((GOLDEN / golden).rglob("store.000001.json")).parent, store)
    for words in (
        ("ls",),
        ("stats",),
        ("inspect",),
        ("doctor",),
        ("repair", "--dry-run"),
        ("repair", "--deep", "--dry-run"),
    ):
        assert inside(*words, "--store", store).code == 0, words
    verified = json.loads(inside("verify", "--store", store, "--json").lines[-1])
    assert verified["exit_code"] == 0
    assert verified["num_good"] + verified["num_awaiting_sweep"] == verified["num_listed"]
    namespaces = [json.loads(line) for line in inside("ls", "--store", store, "--json").lines[:-1]]
    for row in namespaces:
        assert inside("inspect", row["namespace"], "--store", store).code == 0
    for shard in store.rglob("*.safetensors"):
        assert inside("inspect", shard).code == 0
