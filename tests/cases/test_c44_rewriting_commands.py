"""C44 for `compress` and `migrate`: how each ends in every state of the store that it works on, whatever the flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cases.every_command import Scene
from tests.cases.test_c44_exit_codes import (
    empty,
    foreign,
    gone,
    index_lost,
    one_corrupt,
    one_missing,
    one_unreadable,
    sound,
    superblock_damaged,
)
from tests.cli.conftest import Inside

COMPRESS, SAMPLE = ("compress",), ("compress", "--dry-run")
COPY, MOVE = ("migrate", "{store}", "other"), ("migrate", "{store}", "other", "--delete-source")
PLAN = (*COPY, "--dry-run")
BACK = ("migrate", "other", "{store}")

# (state of the store, command, exit code)
TABLE: list[tuple[Callable[[Path], None], Sequence[str], int]] = [
    *((sound, command, 0) for command in (COMPRESS, SAMPLE, COPY, MOVE, PLAN, BACK)),
    *((one_corrupt, command, 3) for command in (COMPRESS, COPY, MOVE)),
    *((one_corrupt, command, 0) for command in (PLAN, BACK)),
    *((one_unreadable, command, 3) for command in (COMPRESS, COPY, MOVE)),
    *((one_missing, command, 3) for command in (COMPRESS, COPY, MOVE)),
    *((index_lost, command, 0) for command in (COMPRESS, COPY, MOVE, PLAN)),
    *((foreign, command, 0) for command in (COMPRESS, SAMPLE, COPY, MOVE, PLAN)),
    *((empty, command, 0) for command in (COMPRESS, SAMPLE, COPY, MOVE, PLAN, BACK)),
    *((gone, command, 10) for command in (COMPRESS, SAMPLE, COPY, MOVE, PLAN, BACK)),
    *((superblock_damaged, command, 3) for command in (COMPRESS, SAMPLE, COPY, MOVE, PLAN, BACK)),
]


@pytest.mark.parametrize("flags", [("--json",), ("--quiet", "--json"), ()], ids=lambda flags: "".join(flags) or "plain")
@pytest.mark.parametrize(
    ("state", "command", "code"), TABLE, ids=[f"{state.__name__}-{'-'.join(words)}" for state, words, _ in TABLE]
)
def test_the_exit_code_is_that_of_the_table(
    inside: Inside,
    scene: Scene,
    state: Callable[[Path], None],
    command: Sequence[str],
    code: int,
    flags: Sequence[str],
):
    state(scene.store)
    words = [word.format(store=scene.store) for word in command]
    ran = inside(*words, *(("--store", scene.store) if command[0] == "compress" else ()), *flags)
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    if "--json" in flags:
        told = json.loads(ran.lines[-1])
        assert (told["schema"], told["exit_code"]) == ("lmcache.summary/1", code)
    if code:
        assert ran.stderr.strip(), "a failure without a reason"
