"""The protocol of an engine that computes KV for storage. Knows no engine and no torch.

A chunk's KV travels as one flat `uint8` array in the canonical order of the format (SPEC §6, `part_tensors` of the
whole part): `layers.0.k`, `layers.0.v`, `layers.1.k`, … each `[H, T, D]`. It is what a shard holds after its header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmcache_format.identity import Identity

ChunkData = npt.NDArray[np.uint8]
TokenIds = npt.NDArray[np.uint32]

BufferSource = Callable[[int], ChunkData]
"""Gives a writable, contiguous 1-D array of exactly that many bytes; may block until one is free.

The producer fills it and hands it on inside a `ProducedChunk`; from then on it is the receiver's.
"""


@dataclass(frozen=True, slots=True)
class KnownChunk:
    """KV of the next `num_tokens` tokens of a document, computed before. Only read, and only while `prefill` begins."""

    num_tokens: int
    data: ChunkData


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids to compute, all of them; the KV of the first ones may be known. Chunks that are known whole are not
    produced again; one that is known in part (a tail) is produced whole."""

    tokens: TokenIds
    known: Sequence[KnownChunk] = ()

    @property
    def num_known(self) -> int:
        """Tokens whose KV is known."""
        return sum(chunk.num_tokens for chunk in self.known)


@dataclass(frozen=True, slots=True)
class ProducedChunk:
    """KV of tokens `start` to `start + num_tokens` of one document of the batch.

    `num_tokens` is the identity's `chunk_tokens`, or less in a document's last chunk: then it is a tail.
    """

    document: int
    start: int
    num_tokens: int
    data: ChunkData


class Producer(Protocol):
    """An engine that computes KV."""

    @property
    def identity(self) -> Identity:
        """Under what the KV may be stored."""
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Who computed: engine, versions, attention implementation. JSON-able; goes into each shard's header."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence the model can attend to; None where there is no limit."""
        ...

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        """Compute the documents as one batch; yield each chunk as soon as it is complete, in order within a document.

        All documents of a batch know equally many tokens; `ValueError` otherwise. Blocks while computing; the result
        for the same batch, in the same process set-up, is the same to the bit.
        """
        ...
