"""C44: exit code 0 although work was left undone. Every reporting command in every state of a store, in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from tests.cli.conftest import Inside, Program
from tests.marks import slow_after
from tests.store.pattern import document, put_document, tiny_identity

NUM_CHUNKS = 10


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c44") / "kv"
    with Store.create(str(path)) as store, store.namespace(tiny_identity(), create=True) as namespace:
        put_document(namespace, document(NUM_CHUNKS * 4))
    return path


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "kv"))


def shards(root: Path) -> list[Path]:
    return sorted((root / "ns").rglob("*.safetensors"))


def sound(root: Path) -> None: ...


def one_corrupt(root: Path) -> None:
    """A flipped bit in the data: only reading it shows it."""
    data = bytearray(shards(root)[3].read_bytes())
    data[4100] ^= 1
    shards(root)[3].write_bytes(data)


def one_unreadable(root: Path) -> None:
    """A link that leads nowhere cannot be opened by anybody, root included."""
    path = shards(root)[3]
    path.unlink()
    path.symlink_to("nowhere")


def one_missing(root: Path) -> None:
    shards(root)[3].unlink()


def index_lost(root: Path) -> None:
    for segment in root.rglob("*.lmi"):
        segment.unlink()


def foreign(root: Path) -> None:
    (root / "notes.txt").write_text("mine")


def empty(root: Path) -> None:
    shutil.rmtree(root / "ns")


def gone(root: Path) -> None:
    shutil.rmtree(root)


def superblock_damaged(root: Path) -> None:
    path = root / "store.000001.json"
    path.write_bytes(path.read_bytes()[:-1])


VERIFY, QUICK, HEADERS = ("verify",), ("verify", "--quick"), ("verify", "--headers")
PLAN, DRY, DO, DEEP = ("repair",), ("repair", "--dry-run"), ("repair", "--yes"), ("repair", "--deep", "--yes")
LS, STATS, INSPECT = ("ls",), ("stats",), ("inspect",)
NAMED = ("verify", "0123"), ("repair", "--namespace", "0123"), ("ls", "0123"), ("inspect", "0123")

# (state of the store, command, exit code)
TABLE: list[tuple[Callable[[Path], None], tuple[str, ...], int]] = [
    *((sound, command, 0) for command in (VERIFY, QUICK, HEADERS, PLAN, DRY, DO, DEEP, LS, STATS, INSPECT)),
    *((sound, command, 2) for command in NAMED),
    (one_corrupt, VERIFY, 3),
    *((one_corrupt, command, 0) for command in (QUICK, HEADERS, DRY, DO, LS, STATS, INSPECT)),
    *((one_unreadable, command, 3) for command in (VERIFY, QUICK, HEADERS)),
    *((one_unreadable, command, code) for command, code in ((PLAN, 2), (DRY, 0), (DO, 0))),
    *((one_missing, command, 3) for command in (VERIFY, QUICK, HEADERS)),
    *((one_missing, command, code) for command, code in ((PLAN, 2), (DRY, 0), (DO, 0), (DEEP, 0))),
    *((index_lost, command, code) for command, code in ((VERIFY, 0), (QUICK, 0), (PLAN, 2), (DO, 0), (STATS, 0))),
    *((foreign, command, 0) for command in (VERIFY, QUICK, PLAN, DO, LS, STATS, INSPECT)),
    *((empty, command, 0) for command in (VERIFY, QUICK, PLAN, DO, DEEP, LS, STATS, INSPECT)),
    *((gone, command, 10) for command in (VERIFY, QUICK, PLAN, DRY, DO, LS, STATS, INSPECT)),
    *((superblock_damaged, command, 3) for command in (VERIFY, QUICK, PLAN, DO, LS, STATS, INSPECT)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "command", "code"), TABLE, ids=[f"{state.__name__}-{'-'.join(command)}" for state, command, _ in TABLE]
)
def test_the_exit_code_is_that_of_the_table(
    inside: Inside, root: Path, state: Callable[[Path], None], command: tuple[str, ...], code: int
):
    state(root)
    ran = inside(*command, "--store", root)
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    if code in (1, 2, 10):
        assert ran.stderr.strip(), "a failure without a reason"


@pytest.mark.parametrize("state", slow_after(1, [one_corrupt, sound, one_missing, foreign]))
@pytest.mark.parametrize("flags", slow_after(1, [("--json",), ("--quiet",), ("--json", "--quiet")]))
def test_flags_change_what_is_printed_and_not_the_code(
    inside: Inside, root: Path, state: Callable[[Path], None], flags: tuple[str, ...]
):
    state(root)
    plain, flagged = inside("verify", "--store", root), inside("verify", "--store", root, *flags)
    assert plain.code == flagged.code
    if "--json" not in flags:
        assert flagged.stdout == b""
        return
    records = [json.loads(line) for line in flagged.lines]
    summary = records[-1]
    assert (summary["schema"], summary["exit_code"]) == ("lmcache.summary/1", plain.code)
    text = plain.stderr.decode().splitlines()
    sentence = next(line for line in text if "shards checked" in line)
    for name, word in (("num_good", "good"), ("num_damaged", "damaged"), ("num_missing", "missing")):
        assert f"{summary[name]} {word}" in sentence
    assert len(records) == (1 if "--quiet" in flags else len(plain.lines))


def test_reasons_are_told_for_each_problem(lmcache: Program, root: Path):
    one_corrupt(root)
    shards(root)[7].unlink()
    ran = lmcache("verify", "--store", root)
    assert ran.code == 3
    rows = [line.decode().split("\t") for line in ran.lines[1:]]
    assert [row[0] for row in rows] == ["damaged", "missing"]
    assert rows[0][1] == str(shards(root)[3].relative_to(root))
    assert "checksum" in rows[0][2]
