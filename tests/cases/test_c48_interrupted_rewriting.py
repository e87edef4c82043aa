"""C48: `compress` and `migrate` of 20 chunks are interrupted. Every chunk stays readable, and the next run finishes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.sweep import sweep
from tests.cli.conftest import Inside, Program, Ran
from tests.marks import slow_after
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

NUM_CHUNKS = 20
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS)
SECONDS_A_SHARD = 0.05
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
COMMANDS = {
    "compress": ("compress", "--store", "kv", "--threads", "1", "--json"),
    "migrate": ("migrate", "kv", "other", "--concurrency", "1", "--delete-source", "--json"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    Store.create(str(tmp_path / "other")).close()
    return tmp_path


@pytest.fixture
def slow(folder: Path) -> Program:
    """The command line on slow stores."""
    program = Path(__file__).with_name("slow_backend.py")
    return Program([sys.executable, str(program), str(SECONDS_A_SHARD)], folder)


def shards(folder: Path, store: str) -> list[Path]:
    return sorted((folder / store / "ns").rglob("*.safetensors"))


def readable(folder: Path, store: str) -> int:
    with Store.open(str(folder / store)) as opened, opened.namespace(KV_IDENTITY, missing_ok=True) as namespace:
        return read_kv(namespace, TOKENS)


def check_end(ran: Ran, code: int) -> None:
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    records = [json.loads(line) for line in ran.lines]
    assert records[-1]["schema"] == "lmcache.summary/1"
    assert records[-1]["exit_code"] == code


def check_rerun(inside: Inside, folder: Path, name: str) -> None:
    """The same command does the rest, and a third one nothing."""
    ran = inside(*COMMANDS[name])
    check_end(ran, 0)
    with Store.open(str(folder / "kv")) as store:
        sweep(store, grace_ms=0)
    if name == "compress":
        assert readable(folder, "kv") == len(TOKENS)
        assert [path.name.split(".")[2] for path in shards(folder, "kv")] == ["bfx"] * NUM_CHUNKS
    else:
        assert readable(folder, "other") == len(TOKENS)
        assert shards(folder, "kv") == []
    third = json.loads(inside(*COMMANDS[name]).lines[-1])
    made = "num_encoded" if name == "compress" else "num_copied"
    assert (third["exit_code"], third[made], third["num_left"]) == (0, 0, 0)


def await_first_shard(process: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    found = NUM_CHUNKS if name == "compress" else 0
    store = "kv" if name == "compress" else "other"
    for _ in range(2000):
        if len(shards(folder, store)) > found or process.poll() is not None:
            return
        time.sleep(0.02)
    raise AssertionError("nothing was written")


@pytest.mark.parametrize("number", slow_after(1, [*CODES, signal.SIGKILL]), ids=lambda number: number.name)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_time(slow: Program, inside: Inside, folder: Path, name: str, number: signal.Signals) -> None:
    process = slow.start(*COMMANDS[name])
    await_first_shard(process, folder, name)
    time.sleep(random.Random(f"{name}{number}").random() * 10 * SECONDS_A_SHARD)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    if number is signal.SIGKILL:
        assert process.returncode == -9
    else:
        check_end(Ran(process.returncode, stdout, stderr), CODES[number])
        assert [path for store in ("kv", "other") for path in (folder / store).glob("tmp/*")] == []
        assert f"stopped by {number.name}\n  next: run the same command again to go on".encode() in stderr
    if name == "compress":
        assert readable(folder, "kv") == len(TOKENS)
    else:
        held = {path.name for store in ("kv", "other") for path in shards(folder, store)}
        assert len(held) == NUM_CHUNKS
        assert len(shards(folder, "kv")) > 0
    check_rerun(inside, folder, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_time_left_is_exit_3_and_the_rest_follows(inside: Inside, folder: Path, name: str) -> None:
    ran = inside(*COMMANDS[name], "-q", "--max-duration", "0s")
    assert ran.code == 3
    (line,) = ran.lines
    assert json.loads(line)["num_left"] == NUM_CHUNKS
    check_rerun(inside, folder, name)
