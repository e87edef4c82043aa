"""The command line with an engine that computes pattern KV at a pace of its choosing, instead of a model.

    python tests/cases/pattern_engine.py SECONDS_A_CHUNK warm --store … --model . --prompts …

Prompts must be token ids.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from lmcache_cli.commands import inspect, warm
from lmcache_cli.integration.producer import BufferSource, Document, ProducedChunk
from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
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


def identified(model: str, **_: object) -> IdentifiedModel:
    """Every model is the one of the pattern."""
    return IdentifiedModel(Path(model), ENGINE_IDENTITY)


if __name__ == "__main__":
    from lmcache_cli.app import main

    seconds = float(sys.argv.pop(1))
    warm._load_engine = lambda engine, directory, identity, piece_tokens: PatternEngine(identity, seconds)  # type: ignore[attr-defined]
    warm.identify_model = inspect.identify_model = identified  # type: ignore[attr-defined]
    sys.exit(main())
