"""C48: `warm` of 5 documents is interrupted. What was done is kept, seen for what it is, and gone on with."""

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
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY
from tests.cli.conftest import Inside, Program, Ran
from tests.marks import slow_after
from tests.store.pattern import document, hit

ENGINE = Path(__file__).with_name("pattern_engine.py")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SHARED = document(2 * CHUNK_TOKENS)
DOCUMENTS = {
    f"doc {number} [/red]": SHARED * (number < 3) + document(8 * CHUNK_TOKENS + 2, seed=number + 1)
    for number in range(5)
}
SECONDS_A_CHUNK = 0.02
WARM = ("warm", "--model", ".", "--prompts", "prompts.jsonl", "--chunk-tokens", str(CHUNK_TOKENS), "--store", "kv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"name": name, "tokens": tokens}) for name, tokens in DOCUMENTS.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    Store.create(str(tmp_path / "kv")).close()
    return tmp_path


@pytest.fixture
def slow(folder: Path) -> Program:
    """The command line with an engine that takes its time."""
    return Program([sys.executable, str(ENGINE), str(SECONDS_A_CHUNK)], folder)


@pytest.fixture
def quick(folder: Path, patterned: Inside) -> Inside:
    """The same here, at once."""
    return patterned


def await_note(process: subprocess.Popen[bytes]) -> None:
    """Returns once the engine is loaded, so that computing begins."""
    assert process.stderr is not None
    for line in process.stderr:
        if b"loading" in line:
            return
    raise AssertionError("the command ended without a word")


def hits(folder: Path) -> dict[str, int]:
    """What a reader gets of every document; every element of it is compared."""
    with Store.open(str(folder / "kv")) as store, store.namespace(ENGINE_IDENTITY) as namespace:
        return {name: hit(namespace, tokens) for name, tokens in DOCUMENTS.items()}


def check_end(ran: Ran, folder: Path, code: int) -> None:
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    records = [json.loads(line) for line in ran.lines]
    assert [record["exit_code"] for record in records] == [code]
    assert list((folder / "kv" / "tmp").iterdir()) == []


def check_what_is_shown(quick: Inside, found: dict[str, int]) -> None:
    """`inspect` tells the same of every document as a reader finds, and the sum."""
    records = [
        json.loads(line) for line in quick("inspect", "--store", "kv", ENGINE_IDENTITY.fingerprint[:8], "--json").lines
    ]
    shown = {record["name"]: record for record in records if record["schema"] == "lmcache.document/1"}
    assert set(shown) == set(DOCUMENTS)
    for name, tokens in DOCUMENTS.items():
        assert (shown[name]["num_usable_tokens"] or 0) == found[name]
        is_complete = found[name] == len(tokens)
        usable = found[name] or "?"
        assert shown[name]["status"] == ("complete" if is_complete else f"incomplete ({usable}/{len(tokens)} tokens)")
    num_complete = sum(found[name] == len(tokens) for name, tokens in DOCUMENTS.items())
    assert records[-1]["documents"] == f"{'complete' if num_complete == 5 else 'incomplete'} ({num_complete}/5)"


def check_rerun(quick: Inside, folder: Path, found: dict[str, int]) -> None:
    """The same command computes what is missing, nothing else, and is done."""
    ran = quick(*WARM, "--json")
    check_end(ran, folder, 0)
    summary = json.loads(ran.lines[-1])
    assert (summary["num_complete"], summary["num_failed"]) == (5, 0)
    assert hits(folder) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
    total = 2 * CHUNK_TOKENS + 5 * (8 * CHUNK_TOKENS + 2)
    shared = min(2 * CHUNK_TOKENS, max(found.values()))
    done = shared + sum(
        max(0, tokens - (2 * CHUNK_TOKENS) * (number < 3)) for number, tokens in enumerate(found.values())
    )
    assert summary["tokens_computed"] == total - done
    assert quick("verify", "--store", "kv").code == 0


@pytest.mark.parametrize("attempt", slow_after(1, range(2)))
@pytest.mark.parametrize("number", slow_after(1, CODES), ids=lambda number: number.name)
def test_a_signal_at_any_time(slow: Program, quick: Inside, folder: Path, number: signal.Signals, attempt: int) -> None:
    process = slow.start(*WARM, "--json")
    await_note(process)
    time.sleep(random.Random(f"{number}{attempt}").random() * 40 * SECONDS_A_CHUNK)
    hits(folder)  # an engine that reads meanwhile
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    check_end(Ran(process.returncode, stdout, stderr), folder, CODES[number])
    assert f"stopped by {number.name}\n  next: run the same command again to go on".encode() in stderr
    found = hits(folder)
    assert any(found[name] < len(tokens) for name, tokens in DOCUMENTS.items())
    check_what_is_shown(quick, found)
    check_rerun(quick, folder, found)


@pytest.mark.slow
def test_a_second_ctrl_c_changes_nothing(slow: Program, quick: Inside, folder: Path) -> None:
    process = slow.start(*WARM, "--json")
    await_note(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    check_end(Ran(process.returncode, stdout, stderr), folder, 130)
    found = hits(folder)
    check_what_is_shown(quick, found)
    check_rerun(quick, folder, found)


@pytest.mark.slow
@pytest.mark.parametrize("computing", [True, False])
def test_a_reader_of_the_output_that_leaves_is_no_news_and_stops_no_work(
    slow: Program, quick: Inside, folder: Path, computing: bool
) -> None:
    process = slow.start(*WARM, "--json")
    if computing:
        await_note(process)
        time.sleep(0.3)
        process.send_signal(signal.SIGPIPE)  # what a writer gets when the reader left
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert said == (b"" if computing else b"loading example/pattern\n")
    assert list((folder / "kv" / "tmp").iterdir()) == []
    check_what_is_shown(quick, hits(folder))
    check_rerun(quick, folder, hits(folder))


@pytest.mark.slow
def test_a_killed_run_is_seen_as_incomplete_and_completed(slow: Program, quick: Inside, folder: Path) -> None:
    process = slow.start(*WARM)
    await_note(process)
    time.sleep(0.4)
    process.kill()
    process.communicate(timeout=60)
    found = hits(folder)
    ran = quick("inspect", "--store", "kv", ENGINE_IDENTITY.fingerprint[:8], "--json")
    assert json.loads(ran.lines[-1])["documents"].startswith("incomplete (")
    summary = json.loads(quick(*WARM, "--json").lines[-1])
    assert (summary["exit_code"], summary["num_complete"]) == (0, 5)
    assert hits(folder) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
    assert found.keys() == DOCUMENTS.keys()
