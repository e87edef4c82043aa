"""The longest stored prefix of a prompt, read from a store into a transformers cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lmcache_cli.integration.producer import TokenIds
from lmcache_cli.integration.transformers.reusable_cache import SPARE_TOKENS, ReusableCache
from lmcache_cli.store.namespace import Namespace

_BUFFERS = 4
"""Chunks in flight. Their memory is used again and again, which costs no page faults and stays small."""


def load_prefix(
    namespace: Namespace,
    prompt: Sequence[int] | TokenIds,
    *,
    salt: str | bytes | None,
    spare_tokens: int = SPARE_TOKENS,
    device: str | torch.device = "cpu",
) -> ReusableCache:
    """A cache of as much of `prompt` as is stored and sound; its `suffix` is what is left to compute, at least a token.

    `salt` is the tenant's, None for none: it has no default, so that no caller forgets it. `spare_tokens` is the length
    of the answer to expect. Blocks while reading. Every byte is verified; a chunk that cannot be read ends the prefix
    there and is no error.
    """
    cache = ReusableCache(namespace.identity, prompt, spare_tokens=spare_tokens, device=device)
    fill_prefix(namespace, cache, salt=salt)
    return cache


def fill_prefix(namespace: Namespace, cache: ReusableCache, *, salt: str | bytes | None) -> int:
    """Read what is stored and sound of an empty cache's prompt into it; returns the bytes read. See `load_prefix`."""
    chunks = namespace.match(cache.suffix, salt=salt).chunks()
    buffers = [namespace.buffer() for _ in chunks[:_BUFFERS]]
    bytes_read = 0
    for first in range(0, len(chunks), _BUFFERS):
        group = chunks[first : first + _BUFFERS]
        out = [buffer.for_tokens(chunk.num_tokens) for buffer, chunk in zip(buffers, group, strict=False)]
        result = namespace.read(group, out)
        bytes_read += result.bytes_read
        for buffer in out[: result.num_chunks]:
            cache.add(buffer.num_tokens, np.frombuffer(buffer.memory, dtype=np.uint8))
        if result.num_chunks < len(group):
            break
    return bytes_read
