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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunksize": 1}, "did you mean 'chunk_size'"),
        ({"max_local_cpu_size": 5}, "page cache"),
        ({"remote_url": "s3://bucket"}, "found 2"),
        ({"local_disk": None}, "found 0"),
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
    llm = LLM(model=model, max_model_len=2048, enforce_eager=True, max_num_seqs=4, enable_prefix_caching=False)
    text = "The quick brown fox jumps over the lazy dog. " * 80
    config = {"chunk_size": 256, "local_cpu": True, "local_disk": store, "remote_url": None, "compression": "fp8"}
    cached = LMCacheWrapper(llm, config=config)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    first = cached.generate([text], sampling, use_tqdm=False)
    before = cached.saved_prefill_tokens
    time.sleep(3.0)  # a chunk is found once it is written
    second = cached.generate([text], sampling, use_tqdm=False)
    result = {"first": list(first[0].outputs[0].token_ids), "second": list(second[0].outputs[0].token_ids),
              "before": before, "after": cached.saved_prefill_tokens, "prompt": len(first[0].prompt_token_ids)}
    cached.close()
    open(out, "w").write(json.dumps(result))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_llm_built_without_the_connector_saves_prefill_with_it(model_dir: Path, tmp_path: Path):
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
    assert "is built again" in done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["prompt"] > 768
    assert (found["before"], found["after"]) == (0, found["prompt"] // 256 * 256)
    assert found["first"][0] == found["second"][0]  # fp8 loses a little: later tokens may differ
