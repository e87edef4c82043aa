"""`lmcache compress` as cron runs it: one line, the right exit code, nothing done that was not allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_cli.backends import NoSpace
from lmcache_cli.backends.fault import unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from tests.cli.conftest import Inside, Ran
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

TOKENS = document(5 * CHUNK_TOKENS)


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    return tmp_path / "kv"


def shards(root: Path) -> list[Path]:
    return sorted((root / "ns").rglob("*.safetensors"))


def summary(ran: Ran) -> dict[str, object]:
    """The only line."""
    (line,) = ran.lines
    record: dict[str, object] = json.loads(line)
    assert record["schema"] == "lmcache.summary/1"
    assert record["exit_code"] == ran.code
    return record


def test_one_line_for_a_log(inside: Inside, kv: Path) -> None:
    size = sum(path.stat().st_size for path in shards(kv))
    ran = inside("compress", "--store", kv, "-q", "--json")
    assert (ran.code, ran.stderr) == (0, b"")
    found = summary(ran)
    assert (found["num_encoded"], found["num_removed"], found["num_left"]) == (5, 5, 0)
    assert (found["source_bytes"], found["removed_bytes"]) == (size, size)
    new = [path for path in shards(kv) if ".bfx." in path.name]
    assert found["encoded_bytes"] == sum(path.stat().st_size for path in new)
    again = summary(inside("compress", "--store", kv, "-q", "--json"))
    assert (again["exit_code"], again["num_encoded"], again["num_removed"]) == (0, 0, 0)


def test_a_dry_run_tells_the_ratio_and_why(inside: Inside, kv: Path) -> None:
    before = {path: path.read_bytes() for path in kv.rglob("*") if path.is_file()}
    ran = inside("compress", "--store", kv, "--dry-run", "--json")
    plan, end = map(json.loads, ran.lines)
    assert (plan["schema"], plan["encoding"], plan["num_shards"]) == ("lmcache.compress_plan/1", "bfx", 5)
    assert plan["removes_source"] is True
    assert 1.2 < plan["ratio"] < 1.55
    assert plan["reason"].startswith("bfx makes BF16 about 1.50 times smaller, without loss")
    assert end["expected_bytes"] == plan["expected_bytes"] < end["size_bytes"] == plan["size_bytes"]
    assert {path: path.read_bytes() for path in kv.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("rate", "encoding", "why"),
    [
        ("200MB", "bfx", "readers get more: 0.30 GB/s in bfx, 0.20 GB/s raw"),
        ("9GB", "raw", "decoding would be the limit"),
    ],
)
def test_the_rule_of_the_link_decides(inside: Inside, kv: Path, rate: str, encoding: str, why: str) -> None:
    ran = inside("compress", "--store", kv, "--dry-run", "--json", "--threads", "1", "--read-rate", rate)
    plan = json.loads(ran.lines[0])
    assert plan["encoding"] == encoding
    assert why in plan["reason"]


def test_lossy_is_refused_without_leave_and_explained_with_it(inside: Inside, kv: Path) -> None:
    ran = inside("compress", "--store", kv, "--codec", "uq", "-q", "--json")
    assert (ran.code, summary(ran)["exit_code"]) == (2, 2)
    assert b"uq006 is lossy" in ran.stderr
    assert b"--lossy" in ran.stderr
    assert len(shards(kv)) == 5
    ran = inside("compress", "--store", kv, "--codec", "uq", "--lossy")
    assert ran.code == 0
    assert b"the exact shards stay" in ran.stderr
    ran = inside("compress", "--store", kv, "--codec", "int8", "--lossy", "--remove-source")
    assert b"readers that do not allow lossy encodings will miss" in ran.stderr
    with Store.open(str(kv)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--codec", "gzip"), b"there is no codec 'gzip'"),
        (("--filter", "size=3"), b"expected a filter such as model=org/*, found 'size=3'"),
        (("--filter", "model"), b"expected a filter"),
        (("--unused-for", "7"), b"duration"),
        (("--threads", "0"), b"threads"),
    ],
)
def test_wrong_words_are_refused(inside: Inside, kv: Path, words: tuple[str, ...], said: bytes) -> None:
    ran = inside("compress", "--store", kv, *words)
    assert ran.code == 2
    assert said in ran.stderr
    assert len(shards(kv)) == 5


def test_damage_is_exit_3_with_its_path(inside: Inside, kv: Path) -> None:
    path = shards(kv)[2]
    path.write_bytes(path.read_bytes()[:-1])
    ran = inside("compress", "--store", kv, "-q", "--json")
    found = summary(ran)
    assert (found["exit_code"], found["num_damaged"], found["num_encoded"]) == (3, 1, 4)
    assert str(path.relative_to(kv)).encode() in ran.stderr


@pytest.mark.parametrize("error", [unavailable(), NoSpace("the device is full")])
def test_a_place_that_fails_is_exit_1_and_the_summary_tells_how_far_it_came(
    inside: Inside, kv: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    put, num_puts = LocalBackend.put, 0

    def failing(self: LocalBackend, name: str, *parts: object, **how: object) -> object:
        nonlocal num_puts
        num_puts += name.endswith(".safetensors")
        if num_puts == 3:
            raise error
        return put(self, name, *parts, **how)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "put", failing)
        ran = inside("compress", "--store", kv, "--threads", "1", "-q", "--json")
    found = summary(ran)
    assert found["exit_code"] == 1
    assert str(error) in str(found["error"])
    assert (found["num_removed"], found["num_left"]) == (0, 5 - int(str(found["num_encoded"])))
    with Store.open(str(kv)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
    done = summary(inside("compress", "--store", kv, "-q", "--json"))
    assert (done["exit_code"], done["num_removed"]) == (0, 5)


def test_no_store_is_exit_10(inside: Inside, tmp_path: Path) -> None:
    ran = inside("compress", "--store", tmp_path / "nowhere", "-q", "--json")
    assert summary(ran)["exit_code"] == 10
