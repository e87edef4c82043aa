"""From token ids to chunks: where each begins and ends, and its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.store import ChunkRef
from lmcache_format.identity import Identity
from lmcache_format.keys import Tokens, chunk_keys, next_key, root_key, token_words

Mask = npt.NDArray[np.bool_] | Sequence[bool]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens `start` to `end` of a sequence, and how their chunk is found."""

    start: int
    end: int
    ref: ChunkRef


class ChunkedTokenDatabase:
    """Cuts sequences into chunks of an identity's `chunk_tokens`. Keeps nothing."""

    def __init__(self, identity: Identity, *, save_unfull_chunk: bool = False) -> None:
        self.identity = identity
        self.save_unfull_chunk = save_unfull_chunk

    def process_tokens(
        self, tokens: Tokens, mask: Mask | None = None, *, salt: str | bytes | None = None
    ) -> Iterator[TokenChunk]:
        """The chunks of `tokens` that begin where `mask` is True (everywhere by default), in order.

        `mask` is False for a prefix and True from then on; the prefix is a multiple of the chunk size. Raises
        `ValueError` for any other mask, and `KeyInputError` for ids that are none.
        """
        size = self.identity.chunk_tokens
        words = token_words(tokens)
        skipped = skipped_by(mask, len(words), size)
        root = root_key(self.identity.fingerprint, salt)
        keys = [root, *chunk_keys(root, words, size)]
        for depth in range(skipped // size, len(keys) - 1):
            yield TokenChunk(depth * size, (depth + 1) * size, ChunkRef(keys[depth + 1], keys[depth], depth, size))
        depth = len(keys) - 1
        rest: Any = words[depth * size :]
        if len(rest) and self.save_unfull_chunk:
            yield TokenChunk(depth * size, len(words), ChunkRef(next_key(keys[-1], rest), keys[-1], depth, len(rest)))


def skipped_by(mask: Mask | None, num_tokens: int, chunk_size: int) -> int:
    """How many leading tokens a mask leaves out."""
    if mask is None:
        return 0
    wanted = np.asarray(mask, np.bool_)
    skipped = num_tokens - int(wanted.sum())
    if len(wanted) != num_tokens or wanted[:skipped].any():
        raise ValueError(f"a mask is False for a prefix and True after it, {num_tokens} values; found {len(wanted)}")
    if skipped % chunk_size:
        raise ValueError(f"a mask leaves out whole chunks of {chunk_size} tokens; found {skipped} left out")
    return skipped
