"""`lmcache migrate` as cron runs it: one line, the right exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lmcache_cli.backends.fault import unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Store
from tests.cli.conftest import Inside
from tests.cli.test_compress_command import TOKENS, kv, shards, summary
from tests.store.made_kv import KV_IDENTITY, read_kv

__all__ = ["kv"]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    Store.create(str(tmp_path / "other")).close()
    return tmp_path / "other"


def hit(root: Path) -> int:
    with Store.open(str(root)) as store, store.namespace(KV_IDENTITY, missing_ok=True) as namespace:
        return read_kv(namespace, TOKENS)


def test_one_line_for_a_log(inside: Inside, kv: Path, other: Path) -> None:
    size = sum(path.stat().st_size for path in shards(kv))
    ran = inside("migrate", kv, other, "--delete-source", "-q", "--json")
    assert (ran.code, ran.stderr) == (0, b"")
    found = summary(ran)
    assert (found["num_copied"], found["num_deleted"], found["num_left"]) == (5, 5, 0)
    assert (found["copied_bytes"], found["deleted_bytes"]) == (size, size)
    assert (shards(kv), hit(other)) == ([], len(TOKENS))
    third = summary(inside("migrate", kv, other, "--delete-source", "-q", "--json"))
    assert (third["exit_code"], third["num_copied"], third["num_present"], third["num_deleted"]) == (0, 0, 0, 0)


def test_a_dry_run_tells_what_is_missing_and_writes_nothing(inside: Inside, kv: Path, other: Path) -> None:
    ran = inside("migrate", kv, other, "--dry-run", "--json")
    plan, end = map(json.loads, ran.lines)
    assert (plan["schema"], plan["num_shards"], plan["num_present"]) == ("lmcache.migrate_plan/1", 5, 0)
    assert (end["num_shards"], end["size_bytes"]) == (5, sum(path.stat().st_size for path in shards(kv)))
    assert not (other / "ns").exists()
    assert inside("migrate", kv, other).code == 0
    assert json.loads(inside("migrate", kv, other, "--dry-run", "--json").lines[-1])["num_present"] == 5


def test_encode_and_cut_on_the_way(inside: Inside, kv: Path, other: Path) -> None:
    ran = inside("migrate", kv, other, "--codec", "bfx", "--reshard", "tp=2", "-q", "--json")
    found = summary(ran)
    assert (found["exit_code"], found["num_copied"]) == (0, 5)
    assert {path.name.split(".", 1)[1] for path in shards(other)} == {
        "l0-2h0-2.bfx.safetensors",
        "l0-2h2-4.bfx.safetensors",
    }
    assert hit(other) == len(TOKENS)


def test_the_format_that_everything_is_in_changes_nothing(inside: Inside, kv: Path, other: Path) -> None:
    found = summary(inside("migrate", kv, other, "--to-format", "1", "-q", "--json"))
    assert (found["exit_code"], found["num_copied"]) == (0, 5)
    copies = {path.name: path.read_bytes() for path in shards(other)}
    assert copies == {path.name: path.read_bytes() for path in shards(kv)}
    assert hit(other) == len(TOKENS)


def test_a_damaged_shard_is_in_no_format(inside: Inside, kv: Path, other: Path) -> None:
    path = shards(kv)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = summary(inside("migrate", kv, other, "--to-format", "1", "--delete-source", "-q", "--json"))
    assert (found["exit_code"], found["num_copied"], found["num_damaged"]) == (3, 4, 1)
    assert shards(kv) == [path]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--codec", "int8"), b"int8 is lossy"),
        (("--reshard", "3"), b"expected --reshard tp=N, found '3'"),
        (("--reshard", "tp=0"), b"expected --reshard tp=N"),
        (("--reshard", "tp=3"), b"cannot be cut for tp=3"),
        (("--bandwidth-limit", "5"), b"unit"),
        (("--filter", "what=ever"), b"expected a filter"),
        (("--to-format", "2"), b"a format that this release can write (1), found '2'"),
        (("--to-format", "v1"), b"a format that this release can write (1), found 'v1'"),
        (("--to-format", "1000000000000"), b"a format that this release can write (1)"),
    ],
)
def test_wrong_words_are_refused(inside: Inside, kv: Path, other: Path, words: tuple[str, ...], said: bytes) -> None:
    ran = inside("migrate", kv, other, *words)
    assert ran.code == 2
    assert said in ran.stderr
    assert not (other / "ns").exists()


@pytest.mark.parametrize("operation", ["open_read", "list", "put", "stat"])
def test_unknown_is_exit_1_and_nothing_is_deleted(
    inside: Inside, kv: Path, other: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """C36: what does not answer is neither absent nor present."""
    real, num_calls = getattr(LocalBackend, operation), 0

    def failing(self: LocalBackend, name: str, *arguments: object, **how: object) -> object:
        nonlocal num_calls
        num_calls += "/c/" in name or name.endswith("/c")
        if num_calls >= 3 or (operation == "list" and num_calls):
            raise unavailable()
        return real(self, name, *arguments, **how)

    before = shards(kv)
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, operation, failing)
        ran = inside("migrate", kv, other, "--delete-source", "--concurrency", "1", "-q", "--json")
    found = summary(ran)
    assert found["exit_code"] == 1
    assert "injected" in str(found["error"])
    assert found["num_deleted"] == 0
    assert shards(kv) == before
    done = summary(inside("migrate", kv, other, "--delete-source", "-q", "--json"))
    assert (done["exit_code"], done["num_deleted"]) == (0, 5)
    assert (hit(other), shards(kv)) == (len(TOKENS), [])


def test_a_limit_slows_it_down(inside: Inside, kv: Path, other: Path) -> None:
    size = sum(path.stat().st_size for path in shards(kv))
    start = time.monotonic()
    assert inside("migrate", kv, other, "--bandwidth-limit", f"{size}B", "-q", "--json").code == 0
    assert time.monotonic() - start >= 0.99
