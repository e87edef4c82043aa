"""One answer in a process of its own: `python -m lmcache_cli.integration.transformers.answering < request.json`.

Reads one `AnswerRequest` as JSON on stdin and writes one `Answer` as JSON on stdout. A fresh process has no cache of
any kind but what it finds in the store and what the operating system holds of files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_cli.integration.errors import AnswerFailed
from lmcache_cli.integration.producer import TokenIds
from lmcache_format.identity import Identity
from lmcache_format.keys import token_words

if TYPE_CHECKING:
    from lmcache_cli.integration.transformers.engine import TransformersEngine

_MODULE = "lmcache_cli.integration.transformers.answering"


class Way(StrEnum):
    """How the beginning of the prompt gets its KV."""

    COLD = "cold"
    """Computed with the rest of the prompt, in one pass."""
    WARM = "warm"
    """Read from the store; the rest is computed in one pass."""
    CONTROL = "control"
    """Computed by the engine as for the store, and kept in memory; the rest is computed in one pass."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What to answer. `prefix_tokens` is for the control: how much of the prompt counts as its beginning."""

    way: Way
    directory: str
    identity_json: str
    tokens: list[int]
    max_tokens: int
    piece_tokens: int
    store: str = ""
    salt: str | None = None
    prefix_tokens: int = 0
    attention: str = "sdpa"


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. `ttft_s` runs from the token ids to the first token of the answer, with the model loaded and
    the store open."""

    way: Way
    answer: list[int]
    ttft_s: float
    hit_tokens: int
    bytes_read: int
    load_s: float


def answer_in_fresh_process(request: AnswerRequest) -> Answer:
    """Run one request in a new interpreter. Raises `AnswerFailed` with what the process said last."""
    done = subprocess.run(
        [sys.executable, "-m", _MODULE],
        input=json.dumps(asdict(request)).encode("ascii"),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise AnswerFailed(f"answering {request.way.value} ended with exit status {done.returncode}: {last[0]}")
    value = json.loads(done.stdout)
    return Answer(**{**value, "way": Way(value["way"])})


def answer(request: AnswerRequest) -> Answer:
    """Load the model and answer, here. Raises `ModelError` for tokens that the model does not have."""
    from lmcache_cli.integration.transformers.engine import TransformersEngine

    identity = Identity.from_json(request.identity_json.encode("utf-8"))
    tokens = token_words(request.tokens)
    started = time.perf_counter()
    engine = TransformersEngine.load(
        Path(request.directory), identity, piece_tokens=request.piece_tokens, attention=request.attention
    )
    load_s = time.perf_counter() - started
    engine.check_tokens(tokens)
    if request.way is Way.WARM:
        return _answer_from_store(request, engine, tokens, load_s)
    cache = engine.new_cache(len(tokens) + request.max_tokens)
    prefix = request.prefix_tokens if request.way is Way.CONTROL else 0
    if prefix:
        engine.extend(cache, tokens[:prefix])
    answer_tokens, ttft_s = _timed_greedy(engine, cache, tokens[prefix:], request.max_tokens, time.perf_counter())
    return Answer(request.way, answer_tokens, ttft_s, prefix, 0, load_s)


def _answer_from_store(request: AnswerRequest, engine: TransformersEngine, tokens: TokenIds, load_s: float) -> Answer:
    from lmcache_cli.integration.transformers.reusable_cache import ReusableCache
    from lmcache_cli.integration.transformers.stored_prefix import fill_prefix
    from lmcache_cli.store import Store

    allow_unverified = not engine.identity.is_verified
    with (
        Store.open(request.store) as store,
        store.namespace(engine.identity, allow_unverified=allow_unverified) as namespace,
    ):
        cache = ReusableCache(
            engine.identity, tokens, spare_tokens=request.max_tokens
        )  # as the others' before the clock
        started = time.perf_counter()
        bytes_read = fill_prefix(namespace, cache, salt=request.salt)
        hit_tokens = cache.num_tokens
        answer_tokens, ttft_s = _timed_greedy(engine, cache.past_key_values, cache.suffix, request.max_tokens, started)
    return Answer(request.way, answer_tokens, ttft_s, hit_tokens, bytes_read, load_s)


def _timed_greedy(
    engine: TransformersEngine, cache: Any, suffix: TokenIds, max_tokens: int, started: float
) -> tuple[list[int], float]:
    tokens: list[int] = []
    ttft_s = 0.0
    for token in engine.greedy(cache, suffix, max_tokens=max_tokens, stop_at_eos=False):
        if not tokens:
            ttft_s = time.perf_counter() - started
        tokens.append(token)
    return tokens, ttft_s


def main() -> None:
    """Answer the request on stdin."""
    value = json.load(sys.stdin)
    print(json.dumps(asdict(answer(AnswerRequest(**{**value, "way": Way(value["way"])})))))  # noqa: T201 — the protocol


if __name__ == "__main__":
    main()
