"""A transformers model as the judge of what KV says: see `lmcache_cli.integration.evaluating`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from lmcache_cli.integration.evaluating import LogProbabilities
from lmcache_cli.integration.producer import Document, KnownChunk, TokenIds
from lmcache_cli.integration.transformers.engine import TransformersEngine
from lmcache_cli.integration.transformers.kv_cache import TORCH_DTYPES, CacheShape, RoomyCache
from lmcache_format.dtypes import Dtype
from lmcache_format.identity import Identity


class TransformersJudge:
    """Scores continuations in a type of its own, of which float32 does not hide a codec's loss behind rounding."""

    def __init__(self, engine: TransformersEngine, reader: TransformersEngine) -> None:
        """`engine` judges, `reader` computed the KV; they may be one."""
        self._engine = engine
        self._reader = reader

    @classmethod
    def load(cls, directory: Path, reader: TransformersEngine, dtype: Dtype, *, piece_tokens: int) -> TransformersJudge:
        """Load the reader's model again in `dtype`, unless it is that already. Raises as `TransformersEngine.load`."""
        if dtype is reader.identity.dtype:
            return cls(reader, reader)
        identity = replace(reader.identity, dtype=dtype)
        return cls(TransformersEngine.load(directory, identity, piece_tokens=piece_tokens), reader)

    def unaided(self, prefix: TokenIds, continuation: TokenIds) -> LogProbabilities | None:
        """See `Judge.unaided`."""
        if self._engine is self._reader:
            return None
        produced = self._engine.prefill([Document(prefix)], lambda size: np.empty(size, np.uint8))
        chunks = [KnownChunk(chunk.num_tokens, chunk.data) for chunk in produced]
        return self._scores(self._engine.identity, chunks, continuation)

    def scores(self, prefix: Sequence[KnownChunk], continuation: TokenIds) -> LogProbabilities:
        """See `Judge.scores`."""
        return self._scores(self._reader.identity, prefix, continuation)

    def _scores(self, identity: Identity, prefix: Sequence[KnownChunk], continuation: TokenIds) -> LogProbabilities:
        model: Any = self._engine.model
        cache: Any = DynamicCache()
        with torch.inference_mode():
            for layer, (keys, values) in enumerate(_layers(identity, prefix)):
                own_type = TORCH_DTYPES[self._engine.identity.dtype]
                cache.update(keys.to(model.device, own_type), values.to(model.device, own_type), layer)
            ids = torch.from_numpy(continuation.astype(np.int64))[None].to(model.device)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, :-1]
            scores: LogProbabilities = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
        return scores


def _layers(identity: Identity, chunks: Sequence[KnownChunk]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[1, H, T, D]` of every layer, in the identity's type."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    room = RoomyCache(CacheShape.of(identity), 1, num_tokens, torch.device("cpu"))
    start = 0
    for chunk in chunks:
        room.write_chunk(start, chunk.num_tokens, chunk.data)
        start += chunk.num_tokens
    sides = [side[None] for side in room.tensors(0, num_tokens)]
    return list(zip(sides[0::2], sides[1::2], strict=True))
