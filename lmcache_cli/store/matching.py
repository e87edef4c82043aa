"""What a look-up gives: chunks of a prompt, and what a read made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmcache_format.keys import ChunkKey, KeyList

from .reading import ReadFault


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk of a match: enough to find it, and to know it when it is found."""

    key: ChunkKey
    parent: ChunkKey
    depth: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest present prefix of a prompt: `num_tokens` tokens in full chunks (`keys`) and perhaps a tail.

    `parent` is the root key. A match is a promise of nothing: a chunk may be gone, or found damaged, when it is read.
    """

    num_tokens: int
    keys: KeyList
    parent: ChunkKey
    chunk_tokens: int
    tail: ChunkRef | None = None

    def chunks(self) -> list[ChunkRef]:
        """All chunks in order."""
        refs = []
        parent = self.parent
        for depth, key in enumerate(self.keys):
            refs.append(ChunkRef(key, parent, depth, self.chunk_tokens))
            parent = key
        return refs if self.tail is None else [*refs, self.tail]

    def up_to(self, num_tokens: int) -> Match:
        """The match without the chunks that reach beyond `num_tokens` tokens."""
        if num_tokens >= self.num_tokens:
            return self
        full = min(len(self.keys), num_tokens // self.chunk_tokens)
        return replace(self, num_tokens=full * self.chunk_tokens, keys=self.keys.first(full), tail=None)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`num_tokens` and `num_chunks` were read and verified, from the first on; `fault` tells why not all."""

    num_tokens: int
    num_chunks: int
    bytes_read: int
    fault: ReadFault | None = None
