"""A real vLLM inside this process, so that the connector's halves and its back-end can be reached and made to fail.

For processes of their own, in the environment `ENVIRONMENT`. Engines come and go in seconds, one at a time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_cli.backends import registry
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import ChunkRef, Namespace, Store, WriterOptions
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import VerifyOptions, verify

ROOT = Path(__file__).resolve().parents[3]
CHUNK = 64
SCHEME = "faulty"
SETTINGS = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 768,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class ChangingScript(FaultScript):
    """Faults that come and go while the back-end is in use."""

    def arm(self, *faults: Fault) -> None:
        """These faults from now on."""
        with self._lock:
            self.faults, self._matched = faults, [0] * len(faults)


SCRIPT = ChangingScript()


def open_url(url: str) -> FaultBackend:
    """The back-end of `faulty:///path`: a local one with the faults of `SCRIPT`."""
    return FaultBackend(LocalBackend(url.removeprefix(f"{SCHEME}://")), SCRIPT)


def allow_faults() -> None:
    """Let this process open such URLs."""
    registry.SCHEMES = {**registry.SCHEMES, SCHEME: registry.Scheme(__name__)}


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    tokens: list[int]
    cached: int
    finish: str


class Engine:
    """One engine. `connector` are the connector's options, None for none."""

    def __init__(
        self, model: str, connector: dict[str, Any] | None, *, policy: str = "recompute", **engine: Any
    ) -> None:
        from vllm import LLM

        transfer = {}
        if connector is not None:
            transfer["kv_transfer_config"] = {
                "kv_connector": "LMCacheStoreConnector",
                "kv_connector_module_path": "lmcache_cli.integration.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"chunk_size": CHUNK, **connector},
            }
        given = {**SETTINGS, "disable_log_stats": False, **engine}
        self.llm = LLM(model=model, **transfer, **given)
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._told: Counter[str] = Counter()
        self.before_load: Callable[[], None] | None = None
        if connector is not None:
            self._hook()

    def _hook(self) -> None:
        """Call `before_load` once, when blocks were given to a request that is to be loaded."""
        scheduler = self.core.scheduler.connector.scheduler
        allocated = scheduler.allocated

        def hooked(request: Any, block_ids: Sequence[int], num_external: int) -> None:
            allocated(request, block_ids, num_external)
            if num_external and self.before_load is not None:
                before, self.before_load = self.before_load, None
                before()

        scheduler.allocated = hooked

    @property
    def worker(self) -> Any:
        """The connector's half that moves."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker  # type: ignore[attr-defined]

    def ask(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[Answer]:
        """All prompts at once, greedily; everything to be saved is written after."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        self.settle()
        return [
            Answer(list(out.outputs[0].token_ids), out.num_cached_tokens or 0, str(out.outputs[0].finish_reason))
            for out in outputs
        ]

    def settle(self) -> None:
        """Wait until nothing is on its way to the store."""
        if self.core.scheduler.connector is not None:
            assert self.worker.writer.wait_idle(60.0)

    def forget(self, *, connector: bool = False) -> None:
        """Empty the engine's own prefix cache; `connector`: the connector's, too."""
        assert self.llm.reset_prefix_cache(reset_connector=connector)

    def counts(self) -> Counter[str]:
        """What the worker's half counted since this was asked last."""
        counts = self.worker.counts + self.worker.writer.counts
        fresh = counts - self._told
        self._told = counts
        return fresh

    def metric(self, name: str) -> float:
        """A counter of vLLM's own."""
        return sum(getattr(metric, "value", 0) for metric in self.llm.get_metrics() if metric.name == name)

    def close(self) -> None:
        """Stop; what is pending is written."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()


@contextmanager
def engine(model: str, connector: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """An engine that is stopped at the end."""
    began = time.perf_counter()
    found = Engine(model, connector, **options)
    sys.stderr.write(f"engine started in {time.perf_counter() - began:.1f} s\n")
    try:
        yield found
    finally:
        found.close()


def text_tokens(model: str, seed: int, count: int) -> list[int]:
    """A prompt of its own, of real text: random ids all get the same few answers."""
    known = _tokens_of_docs(model)
    start = seed * 700
    assert start + count <= len(known), "the documents are too short for so many prompts"
    return list(known[start : start + count])


@cache
def _tokens_of_docs(model: str) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text() for path in sorted((ROOT / "format").glob("*.md")))
    return tuple(AutoTokenizer.from_pretrained(model)(text)["input_ids"])


@contextmanager
def only_namespace(root: Path) -> Iterator[Namespace]:
    """The namespace of a store that has one."""
    with Store.open(str(root)) as store:
        (fingerprint,) = store.fingerprints()
        identity = store.identity(fingerprint)
        with store.namespace(identity, writer=WriterOptions()) as namespace:
            yield namespace


def chunks_of(root: Path, tokens: Sequence[int]) -> tuple[ChunkRef, ...]:
    """The chunks that a store has of these tokens."""
    with only_namespace(root) as namespace:
        return tuple(namespace.match(tokens, tails=False).chunks())


def compared(root: Path, reference: Path, tokens: Sequence[int]) -> tuple[int, float]:
    """How many leading tokens can be read from `root`, and the largest relative L2 error of any chunk, layer and side
    against what the other store has of the same tokens."""
    with only_namespace(root) as ours, only_namespace(reference) as theirs:
        mine, read = ours.load(ours.match(tokens, tails=False))
        others, expected = theirs.load(theirs.match(tokens[: read.num_tokens], tails=False))
        assert expected.num_tokens == read.num_tokens
        worst = 0.0
        for one, other in zip(mine[: read.num_chunks], others, strict=True):
            for name, tensor in one.tensors.items():
                a, b = (np.asarray(each).view(np.float32).astype(np.float64) for each in (tensor, other.tensors[name]))
                worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        return read.num_tokens, worst


def num_damaged(root: Path) -> int:
    """Shards that are not what they say, every byte read."""
    with Store.open(str(root)) as store:
        return verify(store, VerifyOptions(Level.FULL)).num_damaged
