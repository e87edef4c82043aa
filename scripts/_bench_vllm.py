"""The cases of `scripts/bench_vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _bench import ROOT, Row, Sample, row

BENCH = "vllm"
SERVE = ROOT / "tests" / "integration" / "vllm" / "serve_prompts.py"


def rows(num_tokens: int, repeat: int, directory: Path | None) -> Iterator[Row]:
    """All cases, at four engine starts."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        yield from _rows(num_tokens, repeat, Path(place))


def _rows(num_tokens: int, repeat: int, place: Path) -> Iterator[Row]:
    got = subprocess.run([ROOT / "scripts" / "get_model"], check=True, stdout=subprocess.PIPE, text=True)
    random = np.random.default_rng(3)
    prompts = [[int(token) for token in random.integers(100, 40_000, num_tokens)] for _ in range(repeat)]
    bench = _Engines(got.stdout.strip(), prompts, place)
    cold, cached = bench.run(None, [0, 1])
    saving = bench.run({"store": str(place / "kv"), "create_store": True}, [0])[0]
    idle = bench.run({"store": str(place / "none"), "create_store": True, "save": False}, [0])[0]
    first, hit = bench.run({"store": str(place / "kv"), "save": False}, [0, 1], reset_between=True)
    tokens = f"{num_tokens} tokens"
    yield row(BENCH, f"cold, no connector, {tokens}", cold, "s")
    yield row(BENCH, "cold, connector saves", saving, "s", limit=cold.median, at_most=1.05)
    yield row(BENCH, "cold, connector has nothing to do", idle, "s", limit=cold.median, at_most=1.01)
    yield row(BENCH, "vLLM's own prefix cache", cached, "s", limit=cold.median)
    yield row(BENCH, "store, fresh process", first, "s", limit=cold.median, at_most=1 / 40, note="each prompt once")
    yield row(BENCH, "store, read before", hit, "s", limit=cached.median, at_most=1.0, note="ratio to the prefix cache")


class _Engines:
    """Engines that serve the prompts one by one, each round a sample of seconds."""

    def __init__(self, model: str, prompts: list[list[int]], place: Path) -> None:
        self._model = model
        self._prompts = prompts
        self._place = place

    def run(self, connector: dict[str, Any] | None, rounds: list[int], **spec: Any) -> list[Sample]:
        """`rounds` times over all prompts, after one short prompt that warms the engine up."""
        count = len(self._prompts)
        batches = [[count]] + [[number] for _ in rounds for number in range(count)]
        out = self._place / "out.json"
        given = {
            "model": self._model,
            "connector": connector,
            "prompts": [*self._prompts, list(range(200, 232))],
            "batches": batches,
            "max_tokens": [1] * len(batches),
            **spec,
        }
        subprocess.run([sys.executable, SERVE, json.dumps(given), out], check=True, stdout=subprocess.DEVNULL)
        seconds = [result["seconds"] for result in json.loads(out.read_text())["results"][1:]]
        return [Sample.of(seconds[n * count : (n + 1) * count]) for n in range(len(rounds))]
