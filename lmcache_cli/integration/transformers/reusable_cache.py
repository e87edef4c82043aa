"""A hit turned into a transformers cache: build it, fill it, continue from it.

    make                        cache = ReusableCache(identity, prompt_tokens)
    from a store's chunks       cache.add(num_tokens, data) for each
    or straight from files      slabs = cache.next_slabs(num_tokens); read into them; cache.accept(num_tokens)
    then                        model.generate(cache.input_ids, past_key_values=cache.past_key_values, …)

A cache never covers its whole prompt: transformers would then have no token to compute, and goes on with wrong text
without saying so. The last token is always left to compute, however long the hit. A cache serves one request, since
generation writes to it; build another for the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_cli.integration.producer import ChunkData, TokenIds
from lmcache_cli.integration.transformers.kv_cache import CacheShape, RoomyCache
from lmcache_format.identity import Identity
from lmcache_format.keys import token_words

SPARE_TOKENS = 256
"""Room for an answer, unless another is asked for."""


class ReusableCache:
    """KV of the beginning of one prompt, as a transformers cache."""

    def __init__(
        self,
        identity: Identity,
        prompt: Sequence[int] | TokenIds,
        *,
        spare_tokens: int = SPARE_TOKENS,
        device: str | torch.device = "cpu",
    ) -> None:
        """Allocate room for `prompt` and an answer of `spare_tokens`; empty so far. Raises ValueError for no prompt."""
        self._prompt = token_words(prompt)
        if len(self._prompt) == 0:
            raise ValueError("a prompt needs at least one token")
        self._cache = RoomyCache(CacheShape.of(identity), 1, len(self._prompt) + spare_tokens, torch.device(device))

    @property
    def past_key_values(self) -> RoomyCache:
        """What transformers calls it: for a model's forward or `generate`, once."""
        return self._cache

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt whose KV is there; at most the prompt's length less one."""
        return self._cache.num_tokens

    @property
    def suffix(self) -> TokenIds:
        """The tokens left to compute, at least one."""
        return self._prompt[self.num_tokens :]

    @property
    def input_ids(self) -> torch.Tensor:
        """The whole prompt `[1, T]`, as `generate` wants it: it skips what the cache holds."""
        return torch.tensor(self._prompt.astype("int64"), device=self._cache.device)[None]

    def add(self, num_tokens: int, data: ChunkData) -> None:
        """Append a chunk's KV from its canonical bytes, which are copied. Only what the prompt can use is kept.

        Raises ValueError for bytes of another length, and for tokens beyond the prompt.
        """
        self._check_room(num_tokens)
        self._cache.write_chunk(self.num_tokens, num_tokens, data)
        self.accept(num_tokens)

    def next_slabs(self, num_tokens: int) -> list[ChunkData]:
        """Where the next chunk's bytes belong: writable arrays in a shard's data order, one a layer, side and head.

        Read the shard's data section into them, check it, then `accept` it; without `accept` nothing was added.
        """
        self._check_room(num_tokens)
        return self._cache.slabs(self.num_tokens, num_tokens)

    def accept(self, num_tokens: int) -> None:
        """Count the next `num_tokens` as there."""
        self._check_room(num_tokens)
        self._cache.claim(min(num_tokens, len(self._prompt) - 1 - self.num_tokens))

    def add_layers(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Append KV given a layer at a time, each `[H, T, D]` in the cache's type. Copied.

        Raises ValueError for tensors of another shape or number, and for tokens beyond the prompt.
        """
        num_tokens = int(keys[0].shape[1]) if keys else 0
        self._check_room(num_tokens)
        given = [side for pair in zip(keys, values, strict=True) for side in pair]
        room = self._cache.tensors(self.num_tokens, num_tokens)
        if [(tensor.shape, tensor.dtype) for tensor in given] != [(tensor.shape, tensor.dtype) for tensor in room]:
            raise ValueError(
                f"expected {len(room) // 2} layers of {tuple(room[0].shape)} {room[0].dtype}, found {len(keys)} "
                f"of {tuple(keys[0].shape) if keys else ()}"
            )
        for target, source in zip(room, given, strict=True):
            target.copy_(source)
        self.accept(num_tokens)

    def _check_room(self, num_tokens: int) -> None:
        end = self.num_tokens + num_tokens
        if num_tokens < 1 or end > len(self._prompt):
            raise ValueError(
                f"the prompt has {len(self._prompt)} tokens; cannot add {num_tokens} after {self.num_tokens}"
            )
