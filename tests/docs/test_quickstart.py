"""What scripts/quickstart and the tour of README.md show, on the real model: from a document to the same answer.

Starting the model and computing four thousand tokens takes a minute on a busy machine, so it is done once for all.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import README, ROOT, tour

pytestmark = pytest.mark.timeout(1800)  # for the first test with the model, which waits for all of the quickstart

DOCUMENT = ROOT / "docs" / "architecture.md"
QUICKSTART = ROOT / "scripts" / "quickstart"
FEWEST_TOKENS, MOST_TOKENS = 3500, 6000
NEED_NO_MODEL = ["init", "ls", "inspect", "verify", "repair", "doctor"]


def quickstart_lines() -> list[str]:
    """The `lmcache` commands of scripts/quickstart, as shell lines."""
    lines = QUICKSTART.read_text(encoding="utf-8").splitlines()
    return [f"lmcache {line.removeprefix('run ')}" for line in lines if line.startswith("run ")]


def environment(store: Path, model: Path | None = None) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "HOME": os.environ.get("HOME", str(store.parent)),
        "XDG_CONFIG_HOME": str(store.parent / "config-home"),
        "XDG_CACHE_HOME": str(store.parent / "cache-home"),
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_STORE": str(store),
        **({} if model is None else {"MODEL": str(model), "model": str(model), "document": str(DOCUMENT)}),
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """One line of a shell: its exit code, the records it printed, and what it said."""

    line: str
    code: int
    records: list[dict[str, Any]]
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        return self.records[-1]


def run_line(line: str, env: dict[str, str]) -> Ran:
    ran = subprocess.run(
        ["bash", "-c", f"exec {line} --json"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    return Ran(line, ran.returncode, [json.loads(text) for text in ran.stdout.splitlines()], ran.stderr)


def words(line: str) -> list[str]:
    """A line without the ways in which a script and a page name the same model and document."""
    line = re.sub(r'"?\$(model|MODEL)"?', "MODEL", line)
    line = re.sub(r'"?\$document"?|docs/architecture\.md', "DOCUMENT", line)
    return [word for word in shlex.split(line) if word != "--if-missing"]


# ---- without the model ----------------------------------------------------------------------------------------------


def test_the_tour_shows_everything_that_the_quickstart_does():
    shown = [words(line) for line in tour()]
    assert [line for line in quickstart_lines() if words(line) not in shown] == []


def test_the_two_commands_of_the_readme_are_there():
    for name in re.findall(r"^(scripts/\w+) ", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert os.access(ROOT / name, os.X_OK), name


@pytest.mark.slow
def test_the_tour_works_without_a_model_where_it_needs_none(tmp_path):
    store = tmp_path / "kv"
    lines = [line for line in tour() if "MODEL" not in line]
    assert [line.split()[1] for line in lines] == NEED_NO_MODEL
    script = "\n".join(lines)
    ran = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment(store), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert (store / "store.000001.json").is_file()


def test_the_quickstarts_document_is_long_enough():
    tokenizers = pytest.importorskip("tokenizers")
    file = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct" / "tokenizer.json"
    if not file.exists():
        pytest.skip("the model is not there; scripts/get_model makes it")
    tokens = tokenizers.Tokenizer.from_file(str(file)).encode(DOCUMENT.read_text(encoding="utf-8")).ids
    assert FEWEST_TOKENS <= len(tokens) <= MOST_TOKENS


# ---- with the model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every command of scripts/quickstart, each in a process of its own, by its name."""
    env = environment(tmp_path_factory.mktemp("quickstart") / "kv", model_dir)
    ran: dict[str, Ran] = {}
    for line in quickstart_lines():
        name = " ".join(line.split()[1:3]) if "bench" in line else line.split()[1]
        ran[name] = run_line(line, env)
        assert ran[name].code == 0, f"{line}: {ran[name].stderr}"
    ran["env"] = Ran("", 0, [dict(env)], "")
    return ran


@pytest.fixture(scope="module")
def moved_store(quickstart: dict[str, Ran], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store under another path: every process that wrote to it has ended, and its old place is gone."""
    store = Path(quickstart["env"].records[0]["LMCACHE_STORE"])
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "a moved store"
    store.rename(elsewhere)
    return elsewhere


@pytest.mark.slow
def test_point_1_the_quickstart_answers_from_the_store_as_from_memory(quickstart):
    (row,) = [record for record in quickstart["bench ttft"].records if record["schema"] == "lmcache.ttft/1"]
    assert row["num_tokens"] >= 3000
    assert row["hit_tokens"] >= 3000
    assert row["identical_to_control"] is True
    assert len(row["answer_tokens"]) == 64
    assert row["cold_agreement"].endswith("/64")
    assert row["warm_ttft_ms"] < row["cold_ttft_ms"]


@pytest.mark.slow
def test_the_quickstart_keeps_all_of_the_document(quickstart):
    warmed = quickstart["warm"].summary
    assert (warmed["num_complete"], warmed["num_failed"]) == (1, 0)
    assert warmed["tokens_computed"] == warmed["num_tokens"] >= FEWEST_TOKENS
    verified = quickstart["verify"].summary
    assert verified["num_good"] == verified["num_listed"] == warmed["chunks_stored"]


@pytest.mark.slow
def test_the_rest_of_the_tour_works(quickstart, moved_store, model_dir):
    """What the quickstart has not run already; the second `warm` finds everything and starts no model."""
    done = [words(line) for line in quickstart_lines() if "warm" not in line]
    env = environment(moved_store, model_dir)
    for line in tour()[1:]:
        if words(line) not in done:
            ran = run_line(line, env)
            assert ran.code == 0, f"{line}: {ran.stderr}"
            if " warm " in line:
                assert (ran.summary["tokens_computed"], ran.summary["num_complete"]) == (0, 1)


@pytest.mark.slow
def test_the_example_continues_from_the_store(quickstart, moved_store, model_dir):
    example = ROOT / "docs" / "examples" / "continue_from_store.py"
    ran = subprocess.run(
        [sys.executable, example, moved_store, model_dir, DOCUMENT, "\n\nIn one sentence, what is this text about?\n"],
        env=environment(moved_store),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    come_from_store, computed = map(int, re.findall(r"(\d+) (?:of|are)", ran.stdout.splitlines()[0]))
    assert come_from_store == quickstart["warm"].summary["num_tokens"]
    assert 0 < computed < 30
    assert len(ran.stdout.splitlines()) > 1


@pytest.mark.slow
def test_point_2_the_store_answers_after_the_process_ended_and_the_directory_moved(quickstart, moved_store, model_dir):
    """And for prompts that share a part of the document: the exact shared full chunks, and a tail that agrees."""
    import numpy as np
    import torch

    from lmcache_cli.integration.transformers.engine import TransformersEngine
    from lmcache_cli.integration.transformers.model_identity import identify
    from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens
    from lmcache_cli.integration.transformers.stored_prefix import load_prefix
    from lmcache_cli.integration.warming import WarmDocument, warm
    from lmcache_cli.store import Store

    torch.set_num_threads(1)  # two that wait for each other on a busy machine take far longer
    identity = identify(model_dir).identity
    tokenizer = load_prompt_tokens(model_dir)
    document = tokenizer.of_text(DOCUMENT.read_text(encoding="utf-8"))
    (asked,) = [record for record in quickstart["bench ttft"].records if record["schema"] == "lmcache.ttft/1"]
    question = tokenizer.of_text("\n\nIn one sentence, what is this text about?\n")
    engine = TransformersEngine.load(model_dir, identity)

    with Store.open(str(moved_store)) as store, store.namespace(identity, create=True) as namespace:

        def hit(prompt):
            return namespace.match(prompt, salt=None).num_tokens

        # All of it, as the benchmark asked: the same answer from another process and another place.
        prompt = np.concatenate([document, question])
        cache = load_prefix(namespace, prompt, salt=None)
        assert cache.num_tokens == asked["hit_tokens"] == len(document)
        answer = list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=16, stop_at_eos=False))
        assert answer == asked["answer_tokens"][:16]

        # A part of it: exactly the full chunks that are shared, wherever inside a chunk the prompts part.
        for shared in (255, 256, 511, 700, 768, len(document) - 1):
            other = np.concatenate([document[:shared], [document[shared] ^ 1], question])
            assert hit(other) == shared // 256 * 256
        assert hit(document) == len(document)  # with its tail

        # A tail: of another document, stored under the same chunk, for prompts that agree with all of it.
        short = WarmDocument("the beginning", document[:300])
        report = warm(namespace, lambda: engine, [short])
        assert (report.tokens_present, report.tokens_computed) == (256, 44)
        assert hit(np.concatenate([document[:300], question])) == 300
        assert hit(np.concatenate([document[:299], question])) == 256
        assert hit(document) == len(document)

        # What is computed after a partial hit is what is computed after the same prefix in memory.
        prompt = np.concatenate([document[:300], question])
        cache = load_prefix(namespace, prompt, salt=None)
        control = engine.new_cache(len(prompt) + 16)
        engine.extend(control, prompt[:256])
        engine.extend(control, prompt[256:300])
        assert cache.num_tokens == 300
        from_store = list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=16, stop_at_eos=False))
        from_memory = list(engine.greedy(control, prompt[300:], max_tokens=16, stop_at_eos=False))
        assert from_store == from_memory
