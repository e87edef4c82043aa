"""The cases of `scripts/bench_vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from _bench import ROOT, Row, Sample, row

BENCH = "vllm"
SERVE = ROOT / "tests" / "integration" / "vllm" / "serve_prompts.py"
CASES = ("saving", "idle", "hit")


def rows(cases: Sequence[str], num_tokens: int, repeat: int, threads: int, directory: Path | None) -> Iterator[Row]:
    """The rows of the cases, each of which starts the engines it compares, and lets them take turns."""
    got = subprocess.run([ROOT / "scripts" / "get_model"], check=True, stdout=subprocess.PIPE, text=True)
    random = np.random.default_rng(3)
    warm_up = [[int(token) for token in random.integers(100, 40_000, 300)] for _ in range(2)]
    prompts = [[int(token) for token in random.integers(100, 40_000, num_tokens)] for _ in range(repeat)]
    for case in cases:
        with tempfile.TemporaryDirectory(dir=directory) as place, contextlib.ExitStack() as engines:
            bench = _Bench(got.stdout.strip(), [*prompts, *warm_up], threads, Path(place), engines)
            yield from getattr(bench, case)(
                repeat, f"{num_tokens} tokens" + (f", {threads} threads" if threads > 1 else "")
            )


class _Bench:
    """Engines that serve one and the same list of prompts."""

    def __init__(
        self, model: str, prompts: list[list[int]], threads: int, place: Path, engines: contextlib.ExitStack
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._threads = threads
        self._place = place
        self._engines = engines

    def saving(self, repeat: int, tokens: str) -> Iterator[Row]:
        """Nothing to load, everything to save."""
        plain, saving = self._start("plain", None), self._start("saving", self._store("kv", create_store=True))
        cold, own = _take_turns([plain, saving], repeat)
        yield row(BENCH, f"cold, no connector, {tokens}", cold, "s")
        yield row(BENCH, f"cold, connector saves, {tokens}", own, "s", limit=cold.median, at_most=1.05)

    def idle(self, repeat: int, tokens: str) -> Iterator[Row]:
        """Nothing to load, nothing saved."""
        plain = self._start("plain", None)
        idle = self._start("idle", self._store("none", create_store=True, save=False))
        cold, own = _take_turns([plain, idle], repeat)
        yield row(BENCH, f"cold, no connector, {tokens}, beside an idle one", cold, "s")
        yield row(BENCH, f"cold, connector has nothing to do, {tokens}", own, "s", limit=cold.median, at_most=1.01)

    def hit(self, repeat: int, tokens: str) -> Iterator[Row]:
        """A fresh process loads what another one has saved; beside it, an engine with what is in its own memory."""
        saving = self._start("saving", self._store("kv", create_store=True))
        for number in range(repeat):
            saving.ask(number)
        saving.stop()
        plain, hitting = self._start("plain", None), self._start("hit", self._store("kv", save=False))
        first, again, cold, cached = [], [], [], []
        for number in range(repeat):
            first.append(hitting.ask(number, reset=True))
            cold.append(plain.ask(number))
            again.append(hitting.ask(number, reset=True))
            cached.append(plain.ask(number))
        computed, known = Sample.of(cold), Sample.of(cached)
        yield row(BENCH, f"cold, no connector, {tokens}, beside one that loads", computed, "s")
        yield row(BENCH, "vLLM's own prefix cache", known, "s", limit=computed.median)
        for name, seconds in (("fresh process", first), ("read before", again)):
            sample = Sample.of(seconds)
            yield row(BENCH, f"store, {name}", sample, "s", limit=computed.median, at_most=1 / 40)
            yield row(BENCH, f"store, {name}, to the prefix cache", sample, "s", limit=known.median, at_most=1.0)

    def _store(self, name: str, **options: Any) -> dict[str, Any]:
        return {"store": str(self._place / name), **options}

    def _start(self, name: str, connector: dict[str, Any] | None) -> _Engine:
        engine = _Engine(self._model, self._prompts, connector, self._threads, self._place / name)
        self._engines.callback(engine.stop)
        for warm_up in (-2, -1):
            engine.ask(len(self._prompts) + warm_up)
        return engine


def _take_turns(engines: list[_Engine], repeat: int) -> list[Sample]:
    """Every prompt once by every engine, in turn, and the other way round every second time: drift hits all alike."""
    seconds: list[list[float]] = [[] for _ in engines]
    for number in range(repeat):
        order = range(len(engines)) if number % 2 == 0 else reversed(range(len(engines)))
        for which in order:
            seconds[which].append(engines[which].ask(number))
    return [Sample.of(values) for values in seconds]


class _Engine:
    """An engine in a process that answers one prompt after the other."""

    def __init__(
        self, model: str, prompts: list[list[int]], connector: dict[str, Any] | None, threads: int, answers: Path
    ) -> None:
        os.mkfifo(answers)
        spec = {"model": model, "connector": connector, "prompts": prompts, "stays": True}
        given = answers.with_suffix(".json")
        given.write_text(json.dumps(spec))
        with answers.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, SERVE, f"@{given}", answers],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads)))},
            )
        self._answers: IO[str] = answers.open()
        self._hear()

    def ask(self, number: int, *, reset: bool = False) -> float:
        """Seconds until the prompt's first token. `reset`: forget what the engine's own cache holds after it."""
        assert self._process.stdin is not None
        command = {"batch": [number], "max_tokens": 1, "reset": reset, "pause_s": 0.5}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._hear()["seconds"])

    def stop(self) -> None:
        """Let the engine end by itself, everything written."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait(60)
        self._answers.close()

    def _hear(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(
                f"the engine has ended: {self._process.wait(60)}; see the log beside {self._answers.name}"
            )
        return json.loads(line)
