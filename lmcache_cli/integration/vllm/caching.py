"""Whether a request may be cached, and under what: computed once a request, before anything is looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_cli.store import ChunkRef, Match
from lmcache_format.keys import ChunkKey, MultimodalItem, Tokens, chunk_extras, next_key, token_words

Words = npt.NDArray[np.uint32]


class Request(Protocol):
    """What is asked of an engine's request."""

    request_id: str
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt, and what was generated so far."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids."""
        ...


class Prefixes(Protocol):
    """Where a prompt is looked up: a namespace, or what of it an engine takes."""

    def root(self, salt: str | bytes | None = None) -> ChunkKey:
        """See `Namespace.root`."""
        ...

    def match(self, tokens: Tokens, *, salt: str | bytes | None = None, items: Sequence[MultimodalItem] = ()) -> Match:
        """See `Namespace.match`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """What besides tokens decides a request's KV: the adapter's digest, the tenant's salt, images and the like. All of
    it has to be said: who forgets a salt would share what is one tenant's."""

    adapter: str | None
    salt: str | None
    items: tuple[MultimodalItem, ...]


BARE = Caching(adapter=None, salt=None, items=())
"""Tokens alone decide."""


@dataclass(frozen=True, slots=True)
class Uncached:
    """A request that is neither looked up nor saved. `reason` is one word for a counter."""

    reason: str


class ChunkChain:
    """The chunks of a growing sequence; each key is computed once."""

    def __init__(self, root: ChunkKey, items: tuple[MultimodalItem, ...], chunk_tokens: int) -> None:
        self._items = items
        self._chunk_tokens = chunk_tokens
        self._keys = [root]

    def full(self, words: Words, first: int, stop: int) -> tuple[ChunkRef, ...]:
        """Full chunks `first` to `stop` of the sequence."""
        size = self._chunk_tokens
        while len(self._keys) <= stop:
            start = (len(self._keys) - 1) * size
            extras = chunk_extras(self._items, start, size)
            self._keys.append(next_key(self._keys[-1], words[start : start + size], extras))
        return tuple(ChunkRef(self._keys[n + 1], self._keys[n], n, size) for n in range(first, stop))

    def tail(self, words: Words, stop: int) -> ChunkRef:
        """The chunk from the last full one's end to `stop`."""
        depth = stop // self._chunk_tokens
        start = depth * self._chunk_tokens
        self.full(words, depth, depth)
        extras = chunk_extras(self._items, start, stop - start)
        parent = self._keys[depth]
        return ChunkRef(next_key(parent, words[start:stop], extras), parent, depth, stop - start)


def words_of(request: Request, known: Words | None, stop: int) -> Words:
    """The first `stop` token ids; `known` is what an earlier call returned."""
    if known is not None and len(known) >= stop:
        return known[:stop]
    have = 0 if known is None else len(known)
    fresh = token_words(list(request.all_token_ids[have:stop]))
    return fresh if known is None else np.concatenate([known, fresh])
