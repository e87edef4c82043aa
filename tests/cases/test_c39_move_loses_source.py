"""C39: a move deletes the source although the copy failed. 20 chunks, a place that fails in four ways, and kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, NoSpace, ObjectInfo, Unavailable
from lmcache_cli.backends.fault import unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, MigrateResult, apply_migrate, plan_migrate
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from tests.cli.conftest import Inside
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document, refs

NUM_CHUNKS = 20
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS)
KEYS = [ref.key.hex() for ref in refs(KV_IDENTITY, TOKENS)]
ROOT = Path(__file__).resolve().parents[2]


class Unreliable(LocalBackend):
    """Fails for chunk 7, keeps half of chunk 9, is full from chunk 12 on; each as long as it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.faults = {"fails", "truncates", "is full"}

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        number = next((number for number, key in enumerate(KEYS) if key in name), -1)
        if number == 7 and "fails" in self.faults:
            raise unavailable()
        if number >= 12 and "is full" in self.faults:
            raise NoSpace("the device is full", name=name)
        if number == 9 and "truncates" in self.faults:
            content = b"".join(map(bytes, parts))
            info = super().put(name, [content[: len(content) // 2]], durability=durability, if_absent=if_absent)
            return ObjectInfo(name, len(content), info.version, info.modified_ms)
        return super().put(name, parts, durability=durability, if_absent=if_absent)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    with Store.create(str(tmp_path / "src")) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
        namespace.label("twenty", refs(KV_IDENTITY, TOKENS)[-1].key, len(TOKENS), NUM_CHUNKS - 1)
    return tmp_path / "src"


@pytest.fixture(params=["same device", "another device"])
def dst(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """With another write of chunk 3, and nothing else."""
    if request.param == "same device":
        yield _with_chunk_3(tmp_path / "dst")
        return
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other device")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield _with_chunk_3(Path(folder) / "dst")


def _with_chunk_3(root: Path) -> Path:
    with Store.create(str(root)) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    for path in root.rglob("*.safetensors"):
        if not path.name.startswith(KEYS[3]):
            path.unlink()
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    return root


def chunks(root: Path) -> set[int]:
    return {KEYS.index(path.name[:64]) for path in (root / "ns").rglob("*.safetensors")}


def sound_chunks(root: Path) -> set[int]:
    with Store.open(str(root)) as store:
        bad = {finding.path.rpartition("/")[2][:64] for finding in verify(store).findings if finding.is_problem}
    return {number for number in chunks(root) if KEYS[number] not in bad}


def move(src: Path, target: LocalBackend, result: MigrateResult | None = None) -> MigrateResult:
    """In key order, one at a time, so that what comes before a fault is known."""
    options = MigrateOptions(delete_source=True, concurrency=1)
    with Store.open(str(src)) as here, Store.open(target) as there:
        return apply_migrate(here, there, plan_migrate(here, there, options), result)


def check_all_is_held(src: Path, dst: Path) -> None:
    assert sound_chunks(src) | sound_chunks(dst) == set(range(NUM_CHUNKS))


def test_four_faults_one_after_the_other(src: Path, dst: Path) -> None:
    target = Unreliable(dst)
    chunk_3 = next(dst.rglob(f"{KEYS[3]}.*")).read_bytes()

    first = MigrateResult()
    with pytest.raises((Unavailable, NoSpace)):
        move(src, target, first)
    assert first.num_deleted == 0  # what is unknown stops it, and nothing is deleted any more
    assert chunks(src) == set(range(NUM_CHUNKS))
    check_all_is_held(src, dst)

    target.faults.discard("fails")
    with pytest.raises(NoSpace):
        move(src, target)
    check_all_is_held(src, dst)

    target.faults.discard("is full")
    third = move(src, target)
    assert (third.num_failed, third.is_whole) == (1, False)
    assert [notice.kind for notice in third.notices if notice.is_problem] == ["failed"]
    (failed,) = [notice for notice in third.notices if notice.is_problem]
    assert KEYS[9] in failed.path
    assert "bytes after" in failed.reason
    assert chunks(src) == {9}
    check_all_is_held(src, dst)
    assert [one.path.rpartition("/")[2][:64] for one in third.notices if one.kind == "conflict"] == [KEYS[3]]
    assert next(dst.rglob(f"ns/**/{KEYS[3]}.*")).read_bytes() == chunk_3

    target.faults.discard("truncates")
    fourth = move(src, target)
    assert (fourth.num_copied, fourth.num_deleted, fourth.is_whole) == (1, 1, True)
    assert (chunks(src), chunks(dst)) == (set(), set(range(NUM_CHUNKS)))

    before = {path: path.read_bytes() for root in (src, dst) for path in root.rglob("*") if path.is_file()}
    assert move(src, target) == MigrateResult()
    assert {path: path.read_bytes() for root in (src, dst) for path in root.rglob("*") if path.is_file()} == before
    check_result(src, dst)


def check_result(src: Path, dst: Path) -> None:
    with Store.open(str(dst)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert [label.name for label in namespace.state().labels] == ["twenty"]
    with Store.open(str(src)) as store:
        assert verify(store).is_sound


KILLED = """
import sys
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, Kill
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
src, dst, side, operation, call, after = sys.argv[1:]
script = FaultScript(Fault(operation, Kill(after=after == "True"), on_call=int(call)))
sides = {"src": LocalBackend(src), "dst": LocalBackend(dst)}
sides[side] = FaultBackend(sides[side], script)
with Store.open(sides["src"]) as here, Store.open(sides["dst"]) as there:
    apply_migrate(here, there, plan_migrate(here, there, MigrateOptions(delete_source=True)))
"""


KILLS = [
    ("dst", "put", 9, False),
    ("dst", "put", 12, True),
    ("dst", "read_into", 9, True),
    ("dst", "sync_names", 1, True),
    ("src", "put", 1, False),
    ("src", "put", 1, True),
    ("src", "delete", 7, False),
    ("src", "delete", 11, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_points_and_run_again(src: Path, tmp_path: Path, seed: int) -> None:
    dst = _with_chunk_3(tmp_path / "dst")
    chance = random.Random(seed)
    kills = [*chance.sample(KILLS, 3), *((side, "*", chance.randint(1, 150), False) for side in ("src", "dst"))]
    num_killed = 0
    for kill in kills:
        command = [sys.executable, "-c", KILLED, str(src), str(dst), *map(str, kill)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        assert ran.returncode in (0, -9), ran.stderr
        num_killed += ran.returncode == -9
        check_all_is_held(src, dst)
    assert num_killed
    assert move(src, LocalBackend(str(dst))).is_whole
    with Store.open(str(src)) as store:
        sweep(store, grace_ms=0)  # what was marked when a process died
    assert (chunks(src), chunks(dst)) == (set(), set(range(NUM_CHUNKS)))
    assert move(src, LocalBackend(str(dst))) == MigrateResult()
    check_result(src, dst)


def summary(lines: list[bytes]) -> dict[str, object]:
    assert len(lines) == 1, "one line for a log"
    record: dict[str, object] = json.loads(lines[0])
    return record


def test_the_command_says_what_is_left_and_ends_with_3(inside: Inside, src: Path, tmp_path: Path) -> None:
    dst = _with_chunk_3(tmp_path / "other")
    path = next(src.rglob(f"{KEYS[5]}.*"))
    path.write_bytes(path.read_bytes()[:-1])
    ran = inside("migrate", src, dst, "--delete-source", "-q", "--json")
    assert ran.code == 3
    found = summary(ran.lines)
    assert (found["exit_code"], found["num_copied"], found["num_conflict"], found["num_damaged"]) == (3, 18, 1, 1)
    assert found["num_deleted"] == 19
    assert KEYS[5].encode() in ran.stderr
    again = inside("migrate", src, dst, "--delete-source", "-q", "--json")
    assert (again.code, summary(again.lines)["num_copied"]) == (3, 0)
    path.unlink()
    lost = inside("migrate", src, dst, "--delete-source", "-q", "--json")
    assert (lost.code, summary(lost.lines)["num_left"]) == (3, 1)
    assert b"not in the listing" in lost.stderr
    assert inside("repair", "--store", src, "--yes").code == 0
    with Store.open(str(src)) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS[: 6 * CHUNK_TOKENS])
    done = inside("migrate", src, dst, "--delete-source", "-q", "--json")
    assert done.code == 0
    with Store.open(str(dst)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)


def test_the_same_and_nested_places_are_refused(inside: Inside, src: Path) -> None:
    before = {path: path.read_bytes() for path in src.rglob("*") if path.is_file()}
    (src.parent / "alias").symlink_to(src)
    assert inside("init", "--store", src / "inner").code == 0
    for pair in ((src, src), (src, src.parent / "alias"), (src, f"file://{src}"), (src, src / "inner")):
        for words in (pair, pair[::-1]):
            ran = inside("migrate", *words, "--delete-source", "--json", "-q")
            assert (ran.code, summary(ran.lines)["exit_code"]) == (2, 2)
    assert {path: path.read_bytes() for path in before} == before


def test_a_place_without_a_store_is_no_target(inside: Inside, src: Path, tmp_path: Path) -> None:
    ran = inside("migrate", src, tmp_path / "nowhere", "--json", "-q")
    assert (ran.code, summary(ran.lines)["exit_code"]) == (10, 10)
    assert not (tmp_path / "nowhere").exists()
