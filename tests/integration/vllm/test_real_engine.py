"""A real vLLM on the CPU with SmolLM2: every run is a process of its own.

Greedy answers are compared with an engine without the connector whose own prefix cache ends at the same token, so that
both compute a suffix of the same shape: other shapes round otherwise, and may answer otherwise, without any connector.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_cli.store import Namespace, Store
from lmcache_format.identity import Identity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
RANDOM = np.random.default_rng(7)
LONG, MIDDLE, SHORT = ([int(token) for token in RANDOM.integers(100, 40_000, n)] for n in (4100, 1000, 300))
PROMPTS = [LONG, MIDDLE, SHORT, [*MIDDLE[:600], *SHORT[:250]]]
TEXT_TOKENS = 12
Serve = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def serve(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Run an engine; `results` holds one entry a batch."""

    def run(connector: dict[str, Any] | None, batches: list[tuple[list[int], int]], **spec: Any) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("run") / "out.json"
        spec = {
            "model": str(model_dir),
            "connector": connector,
            "prompts": PROMPTS,
            "batches": [batch for batch, _ in batches],
            "max_tokens": [tokens for _, tokens in batches],
            **spec,
        }
        script = Path(__file__).with_name("serve_prompts.py")
        done = subprocess.run(
            [sys.executable, script, json.dumps(spec), out], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return dict(json.loads(out.read_text()))

    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "store"


@pytest.fixture(scope="module")
def control(serve: Serve) -> dict[str, Any]:
    """Without a connector: each prompt cold, then from vLLM's own prefix cache, which ends at a multiple of 256."""
    batches = [([0], 1), ([0], 1), ([0], TEXT_TOKENS)]
    for number in (1, 2, 3):
        batches += [([number], 1), ([number], TEXT_TOKENS)]
    return serve(None, batches, engine={"block_size": 256})


@pytest.fixture(scope="module")
def stored(serve: Serve, root: Path) -> dict[str, Any]:
    """The run that fills the store, 128 tokens a block."""
    batches = [([0], 1), ([1], 1), ([2], 1), ([3], 1)]
    return serve({"store": str(root), "create_store": True}, batches, engine={"block_size": 128})


def answers(run: dict[str, Any], batches: list[int]) -> list[list[int]]:
    return [run["results"][batch]["tokens"][0] for batch in batches]


def cached(run: dict[str, Any], batches: list[int]) -> list[int]:
    return [run["results"][batch]["cached"][0] for batch in batches]


def test_the_engine_and_transformers_share_a_namespace(stored: dict[str, Any], root: Path, model_dir: Path):
    with Store.open(str(root)) as store:
        assert store.fingerprints() == [identify(model_dir).identity.fingerprint]
        with store.namespace(identify(model_dir).identity) as namespace:
            found = [namespace.match(prompt).num_tokens for prompt in PROMPTS]
    assert found == [4096, 768, 256, 768]


@pytest.mark.parametrize(("mode", "block_size"), [("sync", 32), ("async", 64)])
def test_a_fresh_process_answers_as_vllms_own_prefix_cache_does(
    serve: Serve, stored: dict[str, Any], control: dict[str, Any], root: Path, mode: str, block_size: int
):
    connector = {"store": str(root), "save": False, "load_async": mode == "async"}
    batches = [([0], 1), ([0], 1), ([0], TEXT_TOKENS), *(([number], TEXT_TOKENS) for number in (1, 2, 3))]
    hit = serve(connector, batches, engine={"block_size": block_size}, reset_between=True)
    cold, warm = (control["results"][batch]["seconds"] for batch in (0, 1))
    first, again = (hit["results"][batch]["seconds"] for batch in (0, 1))
    sys.stderr.write(
        f"\nTTFT of {len(LONG)} tokens, {mode}, block {block_size}: cold {cold:.3f} s, vLLM's prefix cache "
        f"{warm:.3f} s, from the store {first:.3f} s (first), {again:.3f} s (then)\n"
    )
    assert cached(hit, [0, 1, 2, 3, 4, 5]) == [4096, 4096, 4096, 768, 256, 768]
    assert cached(control, [2, 4, 6, 8]) == [4096, 768, 256, 768]
    assert answers(hit, [2, 3, 4, 5]) == answers(control, [2, 4, 6, 8])
    assert again < cold / 10


@pytest.fixture
def warm(model_dir: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Warm a new store with a prompt, and a second one that ends within a chunk; the JSON it printed."""
    prompts = {"middle": MIDDLE, "short": SHORT}
    lines = [json.dumps({"name": name, "tokens": tokens}) for name, tokens in prompts.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    Store.create(str(tmp_path / "warmed")).close()

    def run(*more: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "lmcache_cli", "warm", "--store", str(tmp_path / "warmed"), "--json", *more]
        command += ["--model", str(model_dir), "--prompts", str(tmp_path / "prompts.jsonl")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_a_store_warmed_with_transformers_serves_vllm_once_a_probe_has_compared_them(
    serve: Serve, control: dict[str, Any], tmp_path: Path, warm: Callable[..., list[dict[str, Any]]]
):
    probe, summary = warm("--probe-engine", "vllm")
    sys.stderr.write(f"\nprobe: {probe}\n")
    assert probe["schema"] == "lmcache.probe/1"
    assert (probe["passed"], probe["num_tokens"]) == (True, 512)
    assert (probe["producer"]["engine"], probe["consumer"]["engine"]) == ("transformers", "vllm")
    assert 0.001 < probe["relative_l2"] < 0.03
    assert 0.99 < probe["cosine"] < 1
    assert summary["num_complete"] == 2
    hit = serve({"store": str(tmp_path / "warmed"), "save": False}, [([1], TEXT_TOKENS)], engine={"block_size": 256})
    assert cached(hit, [0])[0] >= 768
    assert answers(hit, [0])[0][:1] == answers(control, [4])[0][:1]


def test_a_store_warmed_with_vllm_holds_what_it_computes_while_it_serves(
    stored: dict[str, Any], root: Path, model_dir: Path, tmp_path: Path, warm: Callable[..., list[dict[str, Any]]]
):
    (summary,) = warm("--engine", "vllm")
    assert (summary["num_complete"], summary["tokens_computed"]) == (2, len(MIDDLE) + len(SHORT))
    assert (summary["shards_before"], summary["shards_after"]) == (0, 6)  # two tails among them
    identity = identify(model_dir).identity
    with Store.open(str(tmp_path / "warmed")) as ours, Store.open(str(root)) as theirs:
        with ours.namespace(identity) as warmed, theirs.namespace(identity) as served:
            assert [warmed.match(prompt).num_tokens for prompt in (MIDDLE, SHORT)] == [len(MIDDLE), len(SHORT)]
            for error, cosine in compare(warmed, served, identity, MIDDLE[:512]):
                assert error < 0.03
                assert cosine > 0.99
    (again,) = warm("--engine", "vllm")
    assert (again["tokens_computed"], again["tokens_present"]) == (0, len(MIDDLE) + len(SHORT))


def test_damage_and_prompts_in_pieces_poison_nothing(
    serve: Serve, stored: dict[str, Any], root: Path, model_dir: Path, tmp_path: Path
):
    """Four requests at once, in pieces of 512 tokens, with too few blocks for all, on a store of which one chunk
    is damaged and one is gone: all are answered, and what is stored then is what the model computes. One by one, and in
    every mode: `test_conformance.py`."""
    own = tmp_path / "copy"
    shutil.copytree(root, own)
    identity = identify(model_dir).identity
    with Store.open(str(own)) as store, store.namespace(identity) as namespace:
        chunks = namespace.match(MIDDLE).chunks()
        gone = namespace.match(LONG).chunks()[3]
    damaged = next(own.rglob(f"{chunks[1].key.hex()}.*"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    next(own.rglob(f"{gone.key.hex()}.*")).unlink()
    engine = {
        "block_size": 128,
        "num_gpu_blocks_override": 37,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
    }
    run = serve({"store": str(own), "load_async": True}, [([1, 2, 3, 0], 24)], engine=engine, metrics=True)
    (result,) = run["results"]
    sys.stderr.write(f"\n{run['metrics']}\n")
    assert result["finish"] == ["length"] * 4
    assert run["metrics"]["vllm:lmcache_store_load_failed"] >= 1
    with Store.open(str(own)) as mine, Store.open(str(root)) as theirs:
        with mine.namespace(identity) as after, theirs.namespace(identity) as before:
            for prompt in (MIDDLE, LONG):
                count = before.match(prompt, tails=False).num_tokens
                assert after.match(prompt, tails=False).num_tokens == count
                for error, cosine in compare(after, before, identity, prompt[:count]):
                    assert error < 0.05
                    assert cosine > 0.99


def test_beside_another_connector_with_statistics_on(
    serve: Serve, stored: dict[str, Any], control: dict[str, Any], root: Path, tmp_path: Path
):
    ours = {
        "kv_connector": "LMCacheStoreConnector",
        "kv_connector_module_path": "lmcache_cli.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": str(root), "save": False},
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    engine = {"block_size": 128, "disable_log_stats": False}
    run = serve(None, [([1], TEXT_TOKENS), ([2], TEXT_TOKENS)], transfer=transfer, engine=engine, metrics=True)
    assert cached(run, [0, 1]) == [768, 256]
    assert answers(run, [0, 1]) == answers(control, [4, 6])
    assert run["metrics"]["vllm:external_prefix_cache_hits"] == 768 + 256


def compare(warmed: Namespace, served: Namespace, identity: Identity, tokens: list[int]) -> list[tuple[float, float]]:
    """Relative L2 error and mean cosine of each layer and side over `tokens`, whole chunks."""
    loaded = []
    for namespace in (warmed, served):
        match = namespace.match(tokens, tails=False)
        assert match.num_tokens == len(tokens)
        loaded.append(namespace.load(match)[0])
    found = []
    for layer in range(identity.layers):
        for side in ("k", "v"):
            a, b = (
                np.concatenate(
                    [(buffer.array(layer, side).astype(np.uint32) << 16).view(np.float32) for buffer in kv], 1
                )
                for kv in loaded
            )
            a, b = (array.reshape(-1, array.shape[-1]).astype(np.float64) for array in (a, b))
            cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
            found.append((float(np.linalg.norm(a - b) / np.linalg.norm(b)), float(cosines.mean())))
    return found
