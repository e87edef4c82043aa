"""Warming against bare prefill, warming twice, and time to first token; on the real model of `scripts/get_model`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _bench import ROOT, Row, Sample, row

BENCH = "store"
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
DOCUMENT = ROOT / "docs" / "architecture.md"
DOCUMENT_TOKENS = 2048
NUM_DOCUMENTS = 3


def rows(directory: Path) -> Iterator[Row]:
    """Rows of the group `warm`; needs a few minutes."""
    subprocess.run([str(ROOT / "scripts" / "get_model")], check=True, stdout=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    yield from _overlap(directory)
    yield from _twice(directory)
    yield from _ttft(directory)


def _overlap(directory: Path) -> Iterator[Row]:
    """The same engine and documents, with and without a store behind it, in turns."""
    from lmcache_cli.integration.transformers.engine import TransformersEngine
    from lmcache_cli.integration.transformers.model_identity import identify
    from lmcache_cli.integration.warming import WarmDocument, warm
    from lmcache_cli.store import Store

    found = identify(MODEL)
    engine = TransformersEngine.load(found.directory, found.identity)
    random = np.random.default_rng(7)
    documents = [
        WarmDocument(f"{n}", random.integers(100, 40_000, DOCUMENT_TOKENS).astype(np.uint32))
        for n in range(NUM_DOCUMENTS)
    ]
    total = DOCUMENT_TOKENS * NUM_DOCUMENTS
    bare, warmed = [], []
    for turn in range(4):
        start = time.perf_counter()
        for document in documents:
            engine.extend(engine.new_cache(DOCUMENT_TOKENS), document.tokens)
        bare.append(time.perf_counter() - start)
        with Store.create(str(directory / f"overlap{turn}")) as store:
            with store.namespace(found.identity, create=True) as namespace:
                start = time.perf_counter()
                report = warm(namespace, lambda: engine, documents)
                warmed.append(time.perf_counter() - start)
                assert report.tokens_computed == total, report
    yield row(
        BENCH,
        f"warm, {NUM_DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens",
        Sample.of(warmed[1:]).rate(total),
        "tokens/s",
        limit=total / Sample.of(bare[1:]).median,
        at_least=0.95,
        note="limit: prefill by the same engine, nothing stored",
    )


def _twice(directory: Path) -> Iterator[Row]:
    """`lmcache warm` as a command, its start included; a second run has nothing to compute and loads no model."""
    store = directory / "twice"
    _lmcache("init", "--store", str(store))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        _lmcache("warm", "--store", str(store), "--model", str(MODEL), "--documents", str(DOCUMENT))
        seconds.append(time.perf_counter() - start)
    yield row(BENCH, "warm again, first over second", seconds[0] / seconds[1], "x", at_least=20, note="whole commands")


def _ttft(directory: Path) -> Iterator[Row]:
    told = _lmcache(
        "bench",
        "ttft",
        "--store",
        str(directory / "twice"),
        "--model",
        str(MODEL),
        "--documents",
        str(DOCUMENT),
        "--json",
    )
    found = next(one for one in map(json.loads, told.splitlines()) if one["schema"] == "lmcache.ttft/1")
    hit, total, agreement = found["hit_tokens"], found["num_tokens"], found["cold_agreement"]
    note = f"{hit} of {total} tokens from the store; cold agreement {agreement}"
    yield row(
        BENCH,
        "time to first token, warm over cold",
        found["warm_ttft_ms"],
        "ms",
        limit=found["cold_ttft_ms"],
        at_most=1 / 15,
        note=note,
    )
    yield row(BENCH, "answers unlike the control", int(not found["identical_to_control"]), "answers", at_most=0)


def _lmcache(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_cli", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ).stdout
