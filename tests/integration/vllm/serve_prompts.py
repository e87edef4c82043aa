"""One run of a real vLLM engine in its own process: JSON in as the first argument, JSON out to the file named second.

{"model": "…", "engine": {…}, "connector": {…} | null, "config": {…}, "prompts": [[ids…], …], "batches": [[0, 1], …],
 "max_tokens": [8, …], "salts": {…}, "reset_between": false, "pause_s": 0, "transfer": {…}, "metrics": false}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[3])]


def main(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    transfer = {}
    if spec.get("connector") is not None:
        transfer["kv_transfer_config"] = {
            "kv_connector": "LMCacheStoreConnector",
            "kv_connector_module_path": "lmcache_cli.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": spec["connector"],
            **spec.get("config", {}),
        }
    if spec.get("transfer"):
        transfer["kv_transfer_config"] = spec["transfer"]
    started = time.perf_counter()
    engine = {"max_model_len": 4608, "enforce_eager": True, "max_num_seqs": 8, **spec.get("engine", {})}
    llm = LLM(model=spec["model"], **transfer, **engine)
    start_s = time.perf_counter() - started
    results = []
    for batch, max_tokens in zip(spec["batches"], spec["max_tokens"], strict=True):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompts: list[Any] = []
        for number in batch:
            prompt: dict[str, Any] = {"prompt_token_ids": spec["prompts"][number]}
            salt = spec.get("salts", {}).get(str(number))
            if salt:
                prompt["cache_salt"] = salt
            prompts.append(prompt)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        results.append(
            {
                "seconds": took,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "finish": [output.outputs[0].finish_reason for output in outputs],
            }
        )
        if spec.get("reset_between"):
            llm.reset_prefix_cache()
        time.sleep(spec.get("pause_s", 0.0))
    metrics = {}
    if spec.get("metrics"):
        for metric in llm.get_metrics():
            if metric.name.startswith(("vllm:lmcache_store", "vllm:external_prefix", "vllm:num_preempt")):
                metrics[metric.name] = getattr(metric, "value", None)
    return {"start_s": start_s, "results": results, "metrics": metrics}


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(answer))
