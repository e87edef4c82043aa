"""The raw KV of one part of one chunk, in memory as it will stand in a shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends.buffers import AlignedBuffer
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import Part, TensorSpec, part_bytes, part_tensors
from lmcache_format.identity import Identity

Array = npt.NDArray[np.generic]
BlockViews = tuple[int, int, list[memoryview], list[memoryview], slice]
"""Of a block: offset in the file's data, end in the buffer, its memory, that of its slabs, where its digests are."""


class ChunkBuffer:
    """Memory for the raw tensors of one part, back to back in shard order, with an array for each.

    Reused from chunk to chunk it costs no page faults. The memory is 2 MiB aligned on huge pages unless the caller
    gives its own (a writable, contiguous `memoryview` of format "B", exactly `size_bytes` long).
    """

    def __init__(self, identity: Identity, part: Part, num_tokens: int, memory: memoryview | None = None) -> None:
        self.identity = identity
        self.part = part
        self.num_tokens = num_tokens
        self.specs: tuple[TensorSpec, ...] = part_tensors(identity, part, num_tokens)
        self.size_bytes = part_bytes(identity, part, num_tokens)
        self.memory = AlignedBuffer(self.size_bytes).view(self.size_bytes) if memory is None else memory
        if self.memory.nbytes != self.size_bytes or self.memory.readonly or self.memory.format != "B":
            raise GeometryError(
                "memory does not fit the chunk", expected=f"{self.size_bytes} writable bytes", found=self.memory.nbytes
            )
        self.tensors: dict[str, Array] = self._views()
        self.views: list[BlockViews] = []
        self.views_of: object = None

    def array(self, layer: int, side: str) -> Array:
        """`[H, T, D]` (`[T, D]` for `latent`) of a layer; `side` is `k`, `v` or `latent`. bf16 comes as uint16 bits."""
        return self.tensors[f"layers.{layer}.{side}"]

    def fill(self, tensors: Mapping[str, Array]) -> None:
        """Copy arrays of any strides and byte order into place, by name.

        Raises `GeometryError` before anything is copied unless names, shapes and element types are exactly those of the
        part; bf16 and fp8 are accepted as the unsigned integers that carry their bits.
        """
        if set(tensors) != set(self.tensors):
            missing = sorted(set(self.tensors) ^ set(tensors))
            raise GeometryError("tensors are not those of the part", expected=len(self.tensors), found=missing[:4])
        for name, target in self.tensors.items():
            source = tensors[name]
            if source.shape != target.shape:
                raise GeometryError("tensor has another shape", where=name, expected=target.shape, found=source.shape)
            if source.dtype.newbyteorder("<") != target.dtype.newbyteorder("<"):
                raise GeometryError("tensor has another type", where=name, expected=target.dtype, found=source.dtype)
        for name, target in self.tensors.items():
            target[...] = tensors[name]

    def for_tokens(self, num_tokens: int) -> ChunkBuffer:
        """The same memory, laid out for a chunk of `num_tokens` tokens (a tail): contents become meaningless."""
        if num_tokens == self.num_tokens:
            return self
        size = part_bytes(self.identity, self.part, num_tokens)
        return ChunkBuffer(self.identity, self.part, num_tokens, self.memory[:size])

    def _views(self) -> dict[str, Array]:
        views: dict[str, Array] = {}
        position = 0
        for spec in self.specs:
            data = self.memory[position : position + spec.nbytes]
            views[spec.name] = np.frombuffer(data, spec.dtype.numpy).reshape(spec.shape)
            position += spec.nbytes
        return views
