"""C44 for `prune`, `rm`, `pin` and `unpin`: how each ends in every state of a store, and prompts as their targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cases.every_command import DOCUMENT, SECOND, Scene
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY
from tests.cases.test_c44_exit_codes import (
    empty,
    foreign,
    gone,
    index_lost,
    one_missing,
    one_unreadable,
    sound,
    superblock_damaged,
)
from tests.cli.conftest import Inside
from tests.store.pattern import refs

MARK = ("prune", "--max-count", "0", "--yes")
NOW = ("prune", "--max-count", "0", "--yes", "--wait", "--grace", "0s")
REFUSED = ("prune", "--max-count", "0")
DRY = ("prune", "--max-count", "0", "--dry-run")
SWEEP = ("prune", "--sweep-only", "--grace", "0s")
NOTHING = ("prune", "--older-than", "30d")
RM = ("rm", ENGINE_IDENTITY.fingerprint, "--yes", "--wait", "--grace", "0s")
PIN, UNPIN = ("pin", "--document", "first"), ("unpin", "--document", "first")


def half_an_index(root: Path) -> None:
    segment = next(root.rglob("*.lmi"))
    segment.write_bytes(segment.read_bytes()[:-1])


def one_corrupt_header(root: Path) -> None:
    shard = sorted((root / "ns").rglob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)


# (state of the store, command, exit code). Nothing is pinned.
TABLE: list[tuple[Callable[[Path], None], Sequence[str], int]] = [
    *((sound, command, 0) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM, PIN, UNPIN)),
    (sound, REFUSED, 2),
    *((one_missing, command, 0) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM)),
    *((one_corrupt_header, command, 0) for command in (MARK, NOW, DRY, NOTHING, RM)),
    *((one_unreadable, command, 0) for command in (MARK, DRY, SWEEP, NOTHING)),
    *((foreign, command, 0) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM)),
    *((index_lost, command, 0) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM)),
    (index_lost, PIN, 2),
    *((half_an_index, command, 3) for command in (MARK, NOW, DRY, NOTHING, RM)),
    *((empty, command, 0) for command in (MARK, NOW, DRY, SWEEP, NOTHING, REFUSED)),
    *((empty, command, 2) for command in (RM, PIN)),
    *((gone, command, 10) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM, PIN, UNPIN, REFUSED)),
    *((superblock_damaged, command, 3) for command in (MARK, NOW, DRY, SWEEP, NOTHING, RM, PIN, UNPIN)),
]


@pytest.fixture
def unpinned(patterned: Inside, scene: Scene) -> Scene:
    assert patterned("unpin", "--document", "second [2007]", "--store", scene.store).code == 0
    return scene


@pytest.mark.parametrize(
    ("state", "command", "code"), TABLE, ids=[f"{state.__name__}-{'-'.join(words)[:40]}" for state, words, _ in TABLE]
)
def test_the_exit_code_is_that_of_the_table(
    patterned: Inside, unpinned: Scene, state: Callable[[Path], None], command: Sequence[str], code: int
):
    state(unpinned.store)
    ran = patterned(*command, "--store", unpinned.store, "-q", "--json")
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    (told,) = map(json.loads, ran.lines)
    assert (told["schema"], told["exit_code"]) == ("lmcache.summary/1", code)
    if code:
        assert ran.stderr.strip(), "a failure without a reason"


def test_a_shard_that_cannot_be_deleted_is_exit_3_and_named(
    patterned: Inside, unpinned: Scene, monkeypatch: pytest.MonkeyPatch
):
    from lmcache_cli.backends import Unavailable
    from lmcache_cli.backends.local.backend import LocalBackend

    def refuse(self: LocalBackend, name: str, *, version: str | None) -> bool:
        raise Unavailable(f"{name}: the device does not answer", name=name)

    monkeypatch.setattr(LocalBackend, "delete", refuse)
    ran = patterned(*NOW, "--store", unpinned.store, "-q", "--json")
    told = json.loads(ran.lines[-1])
    assert (ran.code, told["num_failures"], told["num_swept"], told["num_waiting"]) == (3, 6, 0, 6)
    assert ran.stderr.count(b"the device does not answer") == 6
    monkeypatch.undo()


@pytest.mark.parametrize("flags", [("--json",), ("--quiet",), ("--json", "--quiet"), ()])
def test_the_summary_says_what_the_sentence_says(patterned: Inside, unpinned: Scene, flags: Sequence[str]):
    ran = patterned(*NOW, "--store", unpinned.store, *flags)
    assert ran.code == 0
    if "--json" in flags:
        told = json.loads(ran.lines[-1])
        assert (told["num_marked"], told["num_swept"], told["num_failures"]) == (6, 6, 0)
        assert len(ran.lines) == (1 if "--quiet" in flags else 2)
    else:
        assert (b"6 of 6 shards marked" in ran.stderr) == (not flags)
        assert (ran.stdout == b"") == bool(flags)


# ---- prompts as targets ----------------------------------------------------------------------------------------------


def left(scene: Scene) -> set[str]:
    return {path.name.split(".")[0] for path in (scene.store / "ns").rglob("*.safetensors")}


def keys(*prompts: Sequence[int]) -> set[str]:
    return {ref.key.hex() for tokens in prompts for ref in refs(ENGINE_IDENTITY, list(tokens))}


PROMPT = ("--model", ".", "--tokens", "ids.json", "--chunk-tokens", str(CHUNK_TOKENS))
DELETE = ("--yes", "--wait", "--grace", "0s")


def test_rm_of_a_prompt_leaves_what_another_shares(patterned: Inside, unpinned: Scene):
    assert patterned("rm", *PROMPT, *DELETE, "--store", unpinned.store).code == 0
    assert left(unpinned) == keys(SECOND)


def test_rm_of_a_prompt_under_another_salt_takes_nothing(patterned: Inside, unpinned: Scene):
    assert patterned("rm", *PROMPT, "--salt", "s", *DELETE, "--store", unpinned.store).code == 0
    assert left(unpinned) == keys(DOCUMENT, SECOND)


def test_a_pinned_prompt_stays_until_it_is_let_go(patterned: Inside, unpinned: Scene):
    assert patterned("pin", *PROMPT, "--store", unpinned.store).code == 0
    assert patterned(*NOW, "--store", unpinned.store).code == 3
    assert left(unpinned) == keys(DOCUMENT)
    assert patterned("unpin", *PROMPT, "--store", unpinned.store).code == 0
    assert patterned(*NOW, "--store", unpinned.store).code == 0
    assert left(unpinned) == set()


def test_a_prompt_that_is_there_in_part_is_pinned_in_part_and_exit_3(patterned: Inside, unpinned: Scene):
    assert patterned("rm", refs(ENGINE_IDENTITY, DOCUMENT)[3].key.hex(), *DELETE, "--store", unpinned.store).code == 0
    ran = patterned("pin", *PROMPT, "--store", unpinned.store, "--json")
    assert (ran.code, json.loads(ran.lines[0])["num_chunks"]) == (3, 3)
    assert f"{3 * CHUNK_TOKENS} of {len(DOCUMENT)} tokens".encode() in ran.stderr


def test_a_prompt_of_which_nothing_is_there_cannot_be_pinned(patterned: Inside, unpinned: Scene):
    ran = patterned("pin", *PROMPT, "--salt", "s", "--store", unpinned.store)
    assert (ran.code, b"warm it first" in ran.stderr) == (2, True)


def test_what_is_warmed_with_a_pin_stays(patterned: Inside, unpinned: Scene):
    warm = ("warm", "--model", ".", "--chunk-tokens", str(CHUNK_TOKENS), "--prompts", "prompts.jsonl")
    assert patterned(*warm, "--ttl", "7d", "--store", unpinned.store).code == 2
    assert patterned(*warm, "--pin", "--ttl", "7d", "--store", unpinned.store).code == 0
    ran = patterned("inspect", ENGINE_IDENTITY.fingerprint, "--store", unpinned.store, "--json")
    pins = [record for record in map(json.loads, ran.lines) if record["schema"] == "lmcache.pin/1"]
    assert sorted(tuple(pin["labels"]) for pin in pins) == [("first",), ("second [2007]",)]
    assert all(pin["expires"] for pin in pins)
    assert patterned(*RM, "--store", unpinned.store).code == 0
    assert left(unpinned) == keys(DOCUMENT, SECOND)
