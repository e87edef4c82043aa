"""A real vLLM engine in its own process. JSON in as the first argument, or `@` and a file that has it; JSON
out to the file named second.

{"model": "…", "engine": {…}, "connector": {…} | null, "config": {…}, "prompts": [[ids…], …], "batches": [[0, 1], …],
 "max_tokens": [8, …], "salts": {…}, "reset_between": false, "pause_s": 0, "transfer": {…}, "metrics": false}

With "stays": true it then asks for more on its standard input, a line each, until that ends, and writes a line for each
answer (and one at first, when it is ready): {"batch": [0], "max_tokens": 1, "salts": {…}, "reset": true, "pause_s": 0}.
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


class Engine:
    """The engine that a spec describes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

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
        self.llm = LLM(model=spec["model"], **transfer, **engine)
        self.start_s = time.perf_counter() - started
        self._prompts = spec["prompts"]
        self._has_text = not engine.get("skip_tokenizer_init")

    def ask(self, batch: list[int], max_tokens: int, salts: dict[str, str]) -> dict[str, Any]:
        """Some of the prompts at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=self._has_text)
        prompts: list[Any] = []
        for number in batch:
            prompt: dict[str, Any] = {"prompt_token_ids": self._prompts[number]}
            salt = salts.get(str(number))
            if salt:
                prompt["cache_salt"] = salt
            prompts.append(prompt)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - began,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
        }

    def metrics(self) -> dict[str, Any]:
        """Those of the connector, and how it served."""
        names = ("vllm:lmcache_store", "vllm:external_prefix", "vllm:num_preempt")
        found = [metric for metric in self.llm.get_metrics() if metric.name.startswith(names)]
        return {metric.name: getattr(metric, "value", None) for metric in found}


def main(spec: dict[str, Any], out: Path) -> None:
    """Serve the batches of the spec, then those of the standard input."""
    engine = Engine(spec)
    results = []
    for batch, max_tokens in zip(spec.get("batches", []), spec.get("max_tokens", []), strict=True):
        results.append(engine.ask(batch, max_tokens, spec.get("salts", {})))
        if spec.get("reset_between"):
            engine.llm.reset_prefix_cache()
        time.sleep(spec.get("pause_s", 0.0))
    metrics = engine.metrics() if spec.get("metrics") else {}
    with out.open("w") as answers:
        answers.write(json.dumps({"start_s": engine.start_s, "results": results, "metrics": metrics}) + "\n")
        answers.flush()
        for line in sys.stdin if spec.get("stays") else ():
            asked = json.loads(line)
            answer = engine.ask(asked["batch"], asked["max_tokens"], asked.get("salts", {}))
            if asked.get("reset"):
                engine.llm.reset_prefix_cache()
            time.sleep(asked.get("pause_s", 0.0))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    given = sys.argv[1]
    main(json.loads(Path(given[1:]).read_text() if given.startswith("@") else given), Path(sys.argv[2]))
