"""The command line with an engine that computes pattern KV at a pace of its choosing, instead of a model.

    python tests/cases/pattern_engine.py SECONDS_A_CHUNK warm --store … --model . --prompts …

A token of a text is one of its bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from lmcache_cli.commands import asked_prompt, bench_ttft, warm
from lmcache_cli.integration.producer import BufferSource, Document, ProducedChunk, TokenIds
from lmcache_cli.integration.prompts import Prompt
from lmcache_cli.integration.transformers import answering
from lmcache_cli.integration.transformers.answering import Answer, AnswerRequest, Way
from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
from lmcache_cli.integration.warming import WarmDocument
from lmcache_cli.store import Store
from lmcache_format.geometry import part_bytes, whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import filled, tiny_identity

ENGINE_IDENTITY = tiny_identity(name="pattern")
CHUNK_TOKENS = ENGINE_IDENTITY.chunk_tokens


class PatternEngine:
    """A producer whose chunk of some tokens at some place always holds the pattern for them."""

    provenance: Mapping[str, Any] = {"engine": "pattern"}
    max_tokens = None

    def __init__(self, identity: Identity, seconds_a_chunk: float) -> None:
        self.identity = identity
        self._seconds_a_chunk = seconds_a_chunk

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        whole = whole_part(self.identity)
        for number, document in enumerate(documents):
            first = document.num_known // CHUNK_TOKENS * CHUNK_TOKENS
            for start in range(first, len(document.tokens), CHUNK_TOKENS):
                time.sleep(self._seconds_a_chunk)
                tokens = [int(token) for token in document.tokens[start : start + CHUNK_TOKENS]]
                data = buffers(part_bytes(self.identity, whole, len(tokens)))
                data[:] = np.frombuffer(filled(self.identity, whole, tokens, start).memory, np.uint8)
                yield ProducedChunk(number, start, len(tokens), data)


def answered(request: AnswerRequest) -> Answer:
    """An answer that took a millisecond, and two without a store."""
    stored = 0
    if request.way is Way.WARM:
        with Store.open(request.store) as store, store.namespace(ENGINE_IDENTITY, missing_ok=True) as namespace:
            stored = namespace.match(request.tokens, salt=request.salt).num_tokens
    ttft_s = 0.001 if stored else 0.002
    return Answer(request.way, [1] * request.max_tokens, ttft_s, stored, stored * 100, load_s=0.0)


def tokenized(model: IdentifiedModel, prompts: Sequence[Prompt], *, as_chat: bool) -> list[WarmDocument]:
    """Bytes as tokens."""
    return [WarmDocument(one.name, one.token_ids(_Bytes(), as_chat=as_chat), one.salt) for one in prompts]


class _Bytes:
    def of_text(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32)

    def of_chat(self, messages: list[Mapping[str, Any]]) -> TokenIds:
        return self.of_text("".join(f"{message['role']}: {message['content']}\n" for message in messages))


class Patch(Protocol):
    """`setattr`, undone after a test or never."""

    def __call__(self, target: object, name: str, value: object, /) -> None: ...


def install(patch: Patch, seconds_a_chunk: float) -> None:
    """Put the engine in the place of models."""

    def load(engine: object, directory: object, identity: Identity, piece_tokens: int) -> PatternEngine:
        return PatternEngine(identity, seconds_a_chunk)

    patch(warm, "_load_engine", load)
    patch(answering, "answer_in_fresh_process", answered)
    for module in (warm, bench_ttft, asked_prompt):
        patch(module, "tokenize", tokenized)
        patch(module, "identify_model", identified)


def identified(model: str, **_: object) -> IdentifiedModel:
    """Every model is the one of the pattern."""
    return IdentifiedModel(Path(model), ENGINE_IDENTITY)


if __name__ == "__main__":
    from lmcache_cli.app import main

    install(setattr, float(sys.argv.pop(1)))
    sys.exit(main())
