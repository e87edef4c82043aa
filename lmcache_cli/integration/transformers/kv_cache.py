"""A transformers cache with room: KV is written in place instead of concatenated, and chunks are copied in and out.

transformers' own `DynamicLayer` makes a new tensor for every piece and every generated token; here each layer has one
buffer `[B, H, capacity, D]` and shows the filled part of it as `.keys` and `.values`. No layer drops tokens, so that
sliding-window models, which mask what is out of the window, keep everything a chunk must hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from lmcache_cli.backends.buffers import HUGE_PAGE_BYTES, AlignedBuffer
from lmcache_cli.integration.producer import ChunkData
from lmcache_format.dtypes import Dtype
from lmcache_format.identity import Identity

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16, Dtype.F32: torch.float32}


class RoomyLayer(DynamicLayer):
    """One layer of a `RoomyCache`: `[B, H, T, D]` views of buffers with room for more tokens."""

    def __init__(self, keys_room: torch.Tensor, values_room: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys_room = keys_room
        self._values_room = values_room
        self.dtype, self.device = keys_room.dtype, keys_room.device
        self.is_initialized = True
        # True once rows were reordered, repeated or selected: `.keys` is then a tensor of its own, no view of the room.
        self._detached = False
        self.show(0)

    @property
    def rooms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of keys and values, `[B, H, capacity, D]`."""
        return self._keys_room, self._values_room

    def show(self, num_tokens: int, num_rows: int | None = None) -> None:
        """Count the first `num_tokens` of the room as filled; of the first `num_rows` of the batch, where given."""
        rows = slice(None if num_rows is None else num_rows)
        self._keys_room, self._values_room = self._keys_room[rows], self._values_room[rows]
        self.keys: torch.Tensor = self._keys_room[:, :, :num_tokens]
        self.values: torch.Tensor = self._values_room[:, :, :num_tokens]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if self._detached or stop > self._keys_room.shape[-2]:
            self._grow(max(stop, start + start // 2))
        self._keys_room[:, :, start:stop] = key_states
        self._values_room[:, :, start:stop] = value_states
        self.show(stop)
        return self.keys, self.values

    def _grow(self, capacity: int) -> None:
        start = self.keys.shape[-2]
        for side in ("keys", "values"):
            shown: torch.Tensor = getattr(self, side)
            rows, heads, _, dim = shown.shape
            room = shown.new_empty((rows, heads, capacity, dim))
            room[:, :, :start] = shown
            setattr(self, f"_{side}_room", room)
        self._detached = False

    def reset(self) -> None:
        self.show(0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._detached = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._detached = True

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._detached = True


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model's cache looks like: L layers, H KV heads, D head dim."""

    layers: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: Dtype

    @classmethod
    def of(cls, identity: Identity) -> CacheShape:
        """The shape an identity promises."""
        return cls(identity.layers, identity.kv_heads, identity.head_dim_k, identity.head_dim_v, identity.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers and heads."""
        return self.layers * self.heads * (self.dim_k + self.dim_v) * self.dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the tensors."""
        return TORCH_DTYPES[self.dtype]


class RoomyCache(DynamicCache):
    """A `DynamicCache` of `RoomyLayer`s for a batch of `num_rows`, with room for `capacity` tokens each.

    Allocated at once; on the CPU from huge pages, faulted in: a fault costs more than copying what goes on the page.
    """

    def __init__(self, shape: CacheShape, num_rows: int, capacity: int, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.device = device
        self.num_rows = num_rows
        self.capacity = capacity
        room = _allocate(shape.token_bytes * num_rows * capacity, shape.torch_dtype, device)
        sides = (shape.dim_k, shape.dim_v)
        sizes = [num_rows * shape.heads * capacity * dim for dim in sides] * shape.layers
        parts = iter(torch.split(room, sizes))
        self._roomy = [
            RoomyLayer(*(next(parts).view(num_rows, shape.heads, capacity, dim) for dim in sides))
            for _ in range(shape.layers)
        ]
        self.layers = list(self._roomy)

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return int(self._roomy[0].keys.shape[-2])

    def keep_rows(self, num_rows: int) -> None:
        """Go on with the first `num_rows` of the batch. Copies nothing."""
        for layer in self._roomy:
            layer.show(layer.keys.shape[-2], num_rows)
        self.num_rows = num_rows

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens`. Copies nothing."""
        for layer in self._roomy:
            layer.show(min(num_tokens, layer.keys.shape[-2]))

    def claim(self, num_tokens: int) -> None:
        """Count `num_tokens` more as filled; the caller has written them, or will before the cache is used."""
        total = self.num_tokens + num_tokens
        if total > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, {total} are wanted")
        for layer in self._roomy:
            layer.show(total)

    def slabs(self, start: int, num_tokens: int, row: int = 0) -> list[ChunkData]:
        """Where the bytes of a chunk belong: writable views of the cache's memory (on the CPU), in a shard's order.

        One slab `[T, D]` for every layer, side and head; a store can read and check a shard straight into them.
        """
        if self.device.type != "cpu":
            raise ValueError(f"the cache lies on {self.device}; only one on the CPU can be read into directly")
        stop = start + num_tokens
        return [
            head[start:stop].view(torch.uint8).numpy().reshape(-1)
            for layer in self._roomy
            for room in layer.rooms
            for head in room[row]
        ]

    def write_chunk(self, start: int, num_tokens: int, data: ChunkData, row: int = 0) -> None:
        """Copy a chunk's canonical bytes to tokens `start` to `start + num_tokens`. Does not `claim` them."""
        for slab, part in zip(self.tensors(start, num_tokens, row), self._parts(data, num_tokens), strict=True):
            if self.device.type == "cpu":
                slab.view(torch.uint8).numpy()[...] = part
            else:
                slab.view(torch.uint8).copy_(torch.from_numpy(np.require(part, requirements="W")))

    def read_chunk(self, start: int, num_tokens: int, data: ChunkData, row: int = 0) -> None:
        """Copy tokens `start` to `start + num_tokens` to `data` in canonical order."""
        tensors = self.tensors(start, num_tokens, row)
        if self.device.type == "cpu":
            for tensor, part in zip(tensors, self._parts(data, num_tokens), strict=True):
                part[...] = tensor.view(torch.uint8).numpy()
        else:
            # One transfer: the pieces are put together on the device.
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            torch.from_numpy(data).copy_(flat.view(torch.uint8))

    def tensors(self, start: int, num_tokens: int, row: int = 0) -> list[torch.Tensor]:
        """Views `[H, T, D]` of tokens `start` to `start + num_tokens`: keys, then values, of each layer."""
        stop = start + num_tokens
        return [room[row, :, start:stop] for layer in self._roomy for room in layer.rooms]

    def _parts(self, data: ChunkData, num_tokens: int) -> list[ChunkData]:
        """A chunk's bytes as its tensors `[H, T, D × itemsize]`, sharing memory. Raises ValueError for another size."""
        shape = self.shape
        if data.nbytes != shape.token_bytes * num_tokens:
            raise ValueError(
                f"a chunk of {num_tokens} tokens has {shape.token_bytes * num_tokens} bytes, found {data.nbytes}"
            )
        row_bytes = [dim * shape.dtype.itemsize for dim in (shape.dim_k, shape.dim_v)]
        parts, begin = [], 0
        for index in range(2 * shape.layers):
            end = begin + shape.heads * num_tokens * row_bytes[index % 2]
            parts.append(data[begin:end].reshape(shape.heads, num_tokens, row_bytes[index % 2]))
            begin = end
        return parts


def _allocate(num_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory as a flat tensor; on the CPU it is faulted in, so that filling it costs no more than the copy."""
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).view(dtype)
    return torch.frombuffer(AlignedBuffer(num_bytes).view(num_bytes), dtype=torch.uint8).view(dtype)
