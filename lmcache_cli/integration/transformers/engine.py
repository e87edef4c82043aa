"""The transformers engine: computes KV for the store, and continues from KV.

A document is computed in pieces of `piece_tokens`, each attending to what the cache holds already, so that memory for
activations stays bounded and chunks can be written while the next piece is computed. Pieces end at multiples of
`piece_tokens` counted from the document's beginning, wherever the known prefix ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from lmcache_cli.integration.errors import GeometryMismatch, ModelError, UnsupportedModel
from lmcache_cli.integration.producer import BufferSource, Document, ProducedChunk, TokenIds
from lmcache_cli.integration.transformers.kv_cache import TORCH_DTYPES, CacheShape, RoomyCache
from lmcache_format.identity import Identity

PIECE_TOKENS = 1024


class TransformersEngine:
    """A loaded model that computes under one identity. One caller at a time."""

    def __init__(self, model: PreTrainedModel, identity: Identity, *, piece_tokens: int = PIECE_TOKENS) -> None:
        """Wrap a loaded model. Raises `GeometryMismatch` unless its cache is what `identity` says, and ValueError
        unless `piece_tokens` is a multiple of the identity's `chunk_tokens`."""
        if piece_tokens < 1 or piece_tokens % identity.chunk_tokens:
            raise ValueError(
                f"pieces hold whole chunks: expected a multiple of {identity.chunk_tokens}, got {piece_tokens}"
            )
        self._model: Any = model.eval()
        self._identity = identity
        self._shape = CacheShape.of(identity)
        self._piece_tokens = piece_tokens
        self._check_geometry()

    @classmethod
    def load(
        cls,
        directory: Path,
        identity: Identity,
        *,
        piece_tokens: int = PIECE_TOKENS,
        device: str = "cpu",
        attention: str = "sdpa",
    ) -> TransformersEngine:
        """Load the model of `directory` in the identity's dtype.

        `attention` is transformers' name of an implementation. Raises `UnsupportedModel` and `GeometryMismatch`.
        """
        if identity.adapter is not None:
            raise UnsupportedModel("this version computes KV of models without adapters; merge the adapter first")
        if identity.dtype not in TORCH_DTYPES:
            raise UnsupportedModel(f"transformers does not cache in {identity.dtype}; use BF16, F16 or F32")
        with _without_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=TORCH_DTYPES[identity.dtype],
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
            )
        return cls(model.to(device), identity, piece_tokens=piece_tokens)

    @property
    def identity(self) -> Identity:
        """Under what the KV may be stored."""
        return self._identity

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Who computed."""
        return {
            "engine": "transformers",
            "version": version("transformers"),
            "torch": version("torch"),
            "attention": str(self._model.config._attn_implementation),
            "device": str(self._model.device.type),
            "piece_tokens": self._piece_tokens,
        }

    @property
    def max_tokens(self) -> int | None:
        """Positions the model was made for, from its configuration."""
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def model(self) -> PreTrainedModel:
        """The model itself, for callers who generate with transformers' own means."""
        model: PreTrainedModel = self._model
        return model

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        eos = self._model.generation_config.eos_token_id
        return frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)

    def new_cache(self, capacity: int, num_rows: int = 1) -> RoomyCache:
        """An empty cache with room for `capacity` tokens in each row of the batch; it grows beyond that at a cost."""
        return RoomyCache(self._shape, num_rows, capacity, self._model.device)

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        """See `Producer.prefill`; raises `ModelError` for token ids that the model does not have. Memory: the longest
        document's KV times the number of documents.

        Documents are padded on the right. Causal attention never looks there, so that no mask is needed, and rows of
        documents that ended are left out of the next piece.
        """
        if not documents:
            return
        for document in documents:
            self.check_tokens(document.tokens)
        start = _common_start(documents)
        # Longest first: those that go on are always the first rows of the batch.
        order = sorted(range(len(documents)), key=lambda index: -len(documents[index].tokens))
        lengths = [len(documents[index].tokens) for index in order]
        cache = self.new_cache(lengths[0], len(documents))
        for row, index in enumerate(order):
            _write_known(cache, documents[index], row)
        cache.claim(start)
        done = start // self._identity.chunk_tokens * self._identity.chunk_tokens
        for stop in self._piece_ends(start, lengths[0]):
            rows = sum(length > start for length in lengths)
            cache.keep_rows(rows)
            self._compute(cache, _padded([documents[index].tokens[start:stop] for index in order[:rows]]))
            for row in range(rows):
                yield from self._completed(cache, row, order[row], lengths[row], done, stop, buffers)
            start = stop
            done = stop // self._identity.chunk_tokens * self._identity.chunk_tokens

    def extend(self, cache: RoomyCache, tokens: TokenIds) -> None:
        """Compute `tokens` after what `cache` (one row) holds, in pieces, and keep their KV in it."""
        start = cache.num_tokens
        begin = start
        for stop in self._piece_ends(start, start + len(tokens)):
            self._compute(cache, _padded([tokens[begin - start : stop - start]]))
            begin = stop

    def next_token(self, cache: RoomyCache, tokens: TokenIds) -> int:
        """Compute `tokens` (at least one) in one pass after what `cache` holds; the likeliest token to follow."""
        if len(tokens) == 0:
            raise ValueError("at least one token must be computed to know the next one; cut the cache by one")
        logits = self._compute(cache, _padded([tokens]))
        return int(logits[0, -1].argmax())

    def greedy(
        self, cache: RoomyCache, suffix: TokenIds, *, max_tokens: int, stop_at_eos: bool = True
    ) -> Iterator[int]:
        """The likeliest continuation, token by token: computes `suffix` in one pass, then one token at a time.

        The first token is there after `next()` has computed the suffix: time that for the time to first token.
        The cache ends up holding the suffix and the answer less its last token.
        """
        tokens = suffix
        for _ in range(max_tokens):
            token = self.next_token(cache, tokens)
            yield token
            if stop_at_eos and token in self.eos_tokens:
                return
            tokens = np.array([token], dtype=np.uint32)

    def check_tokens(self, tokens: TokenIds) -> None:
        """Raises `ModelError` for an id that the model does not have."""
        num_known = int(self._model.get_input_embeddings().num_embeddings)
        unknown = np.flatnonzero(tokens >= num_known)
        if len(unknown):
            at = int(unknown[0])
            raise ModelError(
                f"token id {tokens[at]} at position {at} is none of the model's {num_known}; "
                "was the prompt encoded for another model?"
            )

    def _piece_ends(self, start: int, stop: int) -> Iterator[int]:
        while start < stop:
            start = min(stop, (start // self._piece_tokens + 1) * self._piece_tokens)
            yield start

    def _compute(self, cache: RoomyCache, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[B, 1, vocabulary]` after the last of `input_ids` `[B, T]`; the cache grows by T."""
        with torch.inference_mode():
            output = self._model(
                input_ids=input_ids.to(self._model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        logits: torch.Tensor = output.logits
        return logits

    def _completed(
        self, cache: RoomyCache, row: int, document: int, length: int, done: int, stop: int, buffers: BufferSource
    ) -> Iterator[ProducedChunk]:
        """Chunks of a row that the piece ending at `stop` completed, and its tail where the document ends in it."""
        chunk_tokens = self._identity.chunk_tokens
        for start in range(done, min(stop, length), chunk_tokens):
            num_tokens = min(chunk_tokens, length - start)
            if start + num_tokens <= stop:
                data = buffers(self._shape.token_bytes * num_tokens)
                cache.read_chunk(start, num_tokens, data, row)
                yield ProducedChunk(document, start, num_tokens, data)

    def _check_geometry(self) -> None:
        """Compute one token with transformers' own cache and compare what comes out with the identity."""
        from transformers.cache_utils import DynamicCache

        plain: Any = DynamicCache()
        with torch.inference_mode():
            self._model(
                input_ids=torch.zeros((1, 1), dtype=torch.long, device=self._model.device), past_key_values=plain
            )
        shape = self._shape
        expected = [((1, shape.heads, 1, dim), shape.torch_dtype) for dim in (shape.dim_k, shape.dim_v)] * shape.layers
        found = [(tuple(side.shape), side.dtype) for layer in plain.layers for side in (layer.keys, layer.values)]
        if found != expected:
            wrong = next((pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]), None)
            raise GeometryMismatch(
                f"the model's cache is not what its identity says: expected {len(expected)} tensors, found {len(found)}"
                + ("" if wrong is None else f"; expected {wrong[0]}, found {wrong[1]}")
                + "; this version stores plain keys and values only"
            )


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws bars on standard error whether it is a terminal or not; progress is the caller's to show."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _common_start(documents: Sequence[Document]) -> int:
    starts = {document.num_known for document in documents}
    if len(starts) > 1:
        raise ValueError(f"documents of one batch must know equally many tokens, found {sorted(starts)}")
    start = starts.pop()
    short = [len(document.tokens) for document in documents if len(document.tokens) < start]
    if short:
        raise ValueError(f"a document of {short[0]} tokens knows the KV of {start}")
    return start


def _write_known(cache: RoomyCache, document: Document, row: int) -> None:
    start = 0
    for chunk in document.known:
        cache.write_chunk(start, chunk.num_tokens, chunk.data, row)
        start += chunk.num_tokens


def _padded(rows: Sequence[TokenIds]) -> torch.Tensor:
    """Token ids `[B, T]`, shorter rows filled on the right with token 0, which nothing attends to."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)
