"""The field's example: its keys, what is refused, and a real engine built again with the connector."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_cli.integration.vllm.options import OptionError
from lmcache_cli.integration.vllm.wrapper import CONNECTOR, LMCacheWrapper, connector_options

EXAMPLE = {"chunk_size": 256, "local_cpu": True, "local_disk": "/kv", "remote_url": None, "compression": "fp8"}


def test_the_fields_keys_become_options():
    assert connector_options(EXAMPLE) == {
        "store": "/kv",
        "create_store": True,
        "chunk_size": 256,
        "encoding": "fp8",
        "allow_lossy": True,
        "save_decode": False,
    }


def test_a_remote_store_beside_a_local_one_is_its_archive():
    options = connector_options({**EXAMPLE, "remote_url": "s3://bucket/kv"})
    assert (options["store"], options["archive"]) == ("/kv", ["s3://bucket/kv"])
    assert (
        connector_options({**EXAMPLE, "local_disk": None, "remote_url": "s3://bucket/kv"})["store"] == "s3://bucket/kv"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunksize": 1}, "did you mean 'chunk_size'"),
        ({"max_local_cpu_size": 5}, "page cache"),
        ({"local_disk": None}, "found neither"),
        ({"compression": "zip"}, "none, lossless, fp8"),
        ({"chunk_size": "big"}, "expected int"),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine_is_touched(changes: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        LMCacheWrapper(None, {**EXAMPLE, **changes})


def llm_with(**transfer: Any) -> Any:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**transfer))
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


def test_an_llm_with_another_connector_is_refused():
    with pytest.raises(OptionError, match="NixlConnector"):
        LMCacheWrapper(llm_with(kv_connector="NixlConnector"), EXAMPLE)
    with pytest.raises(OptionError, match="not what config asks for"):
        LMCacheWrapper(llm_with(kv_connector=CONNECTOR, kv_connector_extra_config={"store": "/other"}), EXAMPLE)
    LMCacheWrapper(llm_with(kv_connector=CONNECTOR, kv_connector_extra_config=connector_options(EXAMPLE)), EXAMPLE)


SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
from lmcache_cli.integration.vllm.wrapper import LMCacheWrapper

if __name__ == "__main__":
    model, store, out = sys.argv[1:]
    prompts = ["The quick brown fox jumps over the lazy dog. " * 80]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)

    llm = LLM(model=model, max_model_len=2048, enforce_eager=True, max_num_seqs=4, enable_prefix_caching=False)
    cached_llm = LMCacheWrapper(
        llm,
        config={"chunk_size": 256, "local_cpu": True, "local_disk": store, "remote_url": None, "compression": "fp8"},
    )
    first = cached_llm.generate(prompts, sampling_params)
    before = cached_llm.saved_prefill_tokens
    time.sleep(3.0)  # a chunk is found once it is written
    second = cached_llm.generate(prompts, sampling_params)

    result = {"first": list(first[0].outputs[0].token_ids), "second": list(second[0].outputs[0].token_ids),
              "before": before, "after": cached_llm.saved_prefill_tokens, "prompt": len(first[0].prompt_token_ids)}
    cached_llm.close()
    open(out, "w").write(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_fields_example_runs_as_written_and_tells_the_prefill_it_saved(model_dir: Path, tmp_path: Path):
    script, out = tmp_path / "example.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parents[3]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, script, str(model_dir), str(tmp_path / "kv"), out],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert "is built again" in said
    found = json.loads(out.read_text())
    assert found["prompt"] > 768
    saved = found["prompt"] // 256 * 256
    assert (found["before"], found["after"]) == (0, saved)
    assert f"prefill saved: 0 of {found['prompt']} prompt tokens" in said
    assert f"prefill saved: {saved} of {found['prompt']} prompt tokens" in said
    assert found["first"][0] == found["second"][0]  # fp8 loses a little: later tokens may differ
