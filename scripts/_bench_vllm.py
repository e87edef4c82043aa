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
        yield from self._cold(repeat, tokens, "saves", 1.05, self._store("kv", create_store=True))

    def idle(self, repeat: int, tokens: str) -> Iterator[Row]:
        """Nothing to load, nothing saved."""
        given = self._store("none", create_store=True, save=False)
        yield from self._cold(repeat, tokens, "has nothing to do", 1.01, given)

    def _cold(self, repeat: int, tokens: str, what: str, bar: float, connector: dict[str, Any]) -> Iterator[Row]:
        """Beside two engines without a connector: how far apart they are says what a ratio is worth."""
        engines = self._start(first=None, second=None, connected=connector)
        one, other, own = _take_turns(engines, repeat)
        plain = Sample.of([*one, *other])
        yield row(BENCH, f"cold, no connector, {tokens}, beside one that {what}", plain, "s")
        apart = Sample.of(other).median / Sample.of(one).median
        note = f"the two without are {max(apart, 1 / apart):.3f} apart"
        yield row(
            BENCH, f"cold, connector {what}, {tokens}", Sample.of(own), "s", limit=plain.median, at_most=bar, note=note
        )

    def hit(self, repeat: int, tokens: str) -> Iterator[Row]:
        """A fresh process loads what another one has saved; beside it, an engine with what is in its own memory."""
        (saving,) = self._start(saving=self._store("kv", create_store=True))
        for number in range(repeat):
            saving.ask(number)
        saving.stop()
        plain, hitting = self._start(plain=None, hit=self._store("kv", save=False))
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

    def _start(self, **connectors: dict[str, Any] | None) -> list[_Engine]:
        """Engines, all at once, each warm after two short prompts."""
        engines = []
        for name, connector in connectors.items():
            engines.append(_Engine(self._model, self._prompts, connector, self._threads, self._place / name))
            self._engines.callback(engines[-1].stop)
        for engine in engines:
            engine.wait_ready()
        for warm_up in (-2, -1):
            for engine in engines:
                engine.ask(len(self._prompts) + warm_up)
        return engines


def _take_turns(engines: list[_Engine], repeat: int) -> list[list[float]]:
    """Seconds of every prompt by every engine, each time in another order: drift hits all alike."""
    seconds: list[list[float]] = [[] for _ in engines]
    for number in range(repeat):
        for turn in range(len(engines)):
            which = (number + turn) % len(engines)
            seconds[which].append(engines[which].ask(number))
    return seconds


class _Engine:
    """An engine in a process that answers one prompt after the other."""

    def __init__(
        self, model: str, prompts: list[list[int]], connector: dict[str, Any] | None, threads: int, place: Path
    ) -> None:
        spec = {"model": model, "connector": connector, "prompts": prompts, "stays": True}
        given = place.with_suffix(".json")
        given.write_text(json.dumps(spec))
        self._log = place.with_suffix(".log")
        answers, out = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, SERVE, f"@{given}", f"/dev/fd/{out}"],
                pass_fds=[out],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads)))},
            )
        os.close(out)
        self._answers: IO[str] = os.fdopen(answers)

    def wait_ready(self) -> None:
        """Wait until it has started."""
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
            raise RuntimeError(f"the engine ended with {self._process.wait(60)}: {self._log.read_text()[-2000:]}")
        return json.loads(line)
