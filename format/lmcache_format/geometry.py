"""Parts, tensors and byte offsets of a chunk (SPEC §6).

Shape letters: L layers, H kv heads, T tokens, D head dim. A raw tensor is `[H, T, D]` (`[T, D]` for a latent), so a
range of heads is one contiguous run of bytes; layers follow each other, so a range of layers is one too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import Dtype
from .errors import GeometryError
from .identity import Identity

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_POSITION = 9_999_999
_PART = re.compile(r"l(0|[1-9][0-9]{0,6})-([1-9][0-9]{0,6})(?:h(0|[1-9][0-9]{0,6})-([1-9][0-9]{0,6}))?")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The slice of a chunk one writer holds: layers `layer_start` to `layer_stop`, and heads likewise.

    Both ends of the heads are None for latents. Its text form, used in file names, is `l0-30h0-3`; `l0-30` for latents.
    """

    layer_start: int
    layer_stop: int
    head_start: int | None = None
    head_stop: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.layer_start < self.layer_stop:
            raise GeometryError("part has no layers", found=(self.layer_start, self.layer_stop))
        if (self.head_start is None) != (self.head_stop is None):
            raise GeometryError("part names one end of its heads only", found=(self.head_start, self.head_stop))
        if self.head_start is not None and self.head_stop is not None and not 0 <= self.head_start < self.head_stop:
            raise GeometryError("part has no heads", found=(self.head_start, self.head_stop))
        if max(self.layer_stop, self.head_stop or 0) > MAX_POSITION:
            raise GeometryError("part is outside every model", expected=f"at most {MAX_POSITION}", found=str(self))

    def __str__(self) -> str:
        heads = "" if self.head_start is None else f"h{self.head_start}-{self.head_stop}"
        return f"l{self.layer_start}-{self.layer_stop}{heads}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read the text form; raises `GeometryError`."""
        match = _PART.fullmatch(text)
        if match is None:
            raise GeometryError("not the name of a part", expected="such as l0-30h0-3", found=text[:80])
        return cls(*(None if number is None else int(number) for number in match.groups()))  # type: ignore[arg-type]

    def covers(self, other: Part) -> bool:
        """True where every layer and head of `other` is in this part."""
        if (self.head_start is None) != (other.head_start is None):
            return False
        layers = self.layer_start <= other.layer_start and other.layer_stop <= self.layer_stop
        if self.head_start is None or self.head_stop is None or other.head_start is None or other.head_stop is None:
            return layers
        return layers and self.head_start <= other.head_start and other.head_stop <= self.head_stop

    def intersect(self, other: Part) -> Part | None:
        """The layers and heads both have, or None."""
        if (self.head_start is None) != (other.head_start is None):
            return None
        layers = (max(self.layer_start, other.layer_start), min(self.layer_stop, other.layer_stop))
        if layers[0] >= layers[1]:
            return None
        if self.head_start is None or self.head_stop is None or other.head_start is None or other.head_stop is None:
            return Part(*layers)
        heads = (max(self.head_start, other.head_start), min(self.head_stop, other.head_stop))
        return None if heads[0] >= heads[1] else Part(*layers, *heads)

    @property
    def num_layers(self) -> int:
        """Layers in this part."""
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        """Heads in this part; 1 for latents."""
        return 1 if self.head_start is None or self.head_stop is None else self.head_stop - self.head_start


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One raw tensor of a chunk. `side` is `k`, `v` or `latent`; `shape` is `[H, T, D]`, or `[T, D]` for a latent."""

    name: str
    layer: int
    side: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return self.slab_bytes * self.num_slabs

    @property
    def num_slabs(self) -> int:
        """Runs of bytes that can be read and checked alone: one a head."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def slab_bytes(self) -> int:
        """Bytes of one head's `[T, D]`."""
        return self.shape[-2] * self.shape[-1] * self.dtype.itemsize


def raw_bytes(spec: TensorSpec, array: npt.NDArray[Any]) -> memoryview:
    """The bytes to store for `array`: row-major, little-endian, whatever its strides and byte order.

    Bf16 comes as uint16 and fp8 as uint8 (`Dtype.numpy`). A view where nothing has to move, else a copy. Raises
    `GeometryError` for another shape or type: values are never converted.
    """
    own = spec.dtype.numpy
    if array.shape != spec.shape or array.dtype.newbyteorder("=") != own.newbyteorder("="):
        raise GeometryError(
            "array is not that of the tensor",
            where=spec.name,
            expected=f"{own} {spec.shape}",
            found=f"{array.dtype} {array.shape}",
        )
    return np.ascontiguousarray(array, own).data.cast("B")


def whole_part(identity: Identity) -> Part:
    """All layers and heads."""
    return Part(0, identity.layers) if identity.is_latent else Part(0, identity.layers, 0, identity.kv_heads)


def rank_part(identity: Identity, rank: int, num_ranks: int, layers: tuple[int, int] | None = None) -> Part:
    """What tensor-parallel rank `rank` of `num_ranks` holds, of `layers` (all by default).

    With more ranks than heads, several ranks hold the same head. Raises `GeometryError` where heads do not divide.
    """
    start, stop = layers or (0, identity.layers)
    if not 0 <= rank < num_ranks:
        raise GeometryError("rank is out of range", expected=f"0 to {num_ranks - 1}", found=rank)
    if identity.is_latent:
        return Part(start, stop)
    heads = identity.kv_heads
    if heads % num_ranks and num_ranks % heads:
        raise GeometryError(
            "heads do not divide among the ranks", expected=f"a divisor or multiple of {heads}", found=num_ranks
        )
    if num_ranks <= heads:
        share = heads // num_ranks
        return Part(start, stop, rank * share, (rank + 1) * share)
    head = rank // (num_ranks // heads)
    return Part(start, stop, head, head + 1)


def check_part(identity: Identity, part: Part) -> None:
    """Raise `GeometryError` unless `part` lies within the model."""
    if not whole_part(identity).covers(part):
        raise GeometryError("part is outside the model", expected=f"within {whole_part(identity)}", found=str(part))


def part_tensors(identity: Identity, part: Part, num_tokens: int) -> tuple[TensorSpec, ...]:
    """The raw tensors of a part in data order: `layers.0.k`, `layers.0.v`, `layers.1.k`, …

    Raises `GeometryError` for a part outside the model or a token count outside 1 … chunk_tokens.
    """
    check_part(identity, part)
    if not 1 <= num_tokens <= identity.chunk_tokens:
        raise GeometryError("token count is out of range", expected=f"1 to {identity.chunk_tokens}", found=num_tokens)
    return tensors_of(part, num_tokens, identity.dtype, identity.head_dim_k, identity.head_dim_v)


def part_bytes(identity: Identity, part: Part, num_tokens: int) -> int:
    """Bytes of all raw tensors of a part."""
    width = identity.head_dim_k + identity.head_dim_v
    return part.num_layers * part.num_heads * num_tokens * width * identity.dtype.itemsize


@lru_cache(maxsize=64)
def tensors_of(part: Part, num_tokens: int, dtype: Dtype, dim_k: int, dim_v: int) -> tuple[TensorSpec, ...]:
    """The raw tensors of a part in data order, from a shard's own words; see `part_tensors` for an identity's.

    Raises `GeometryError` where they would be more than a shard can hold.
    """
    if part.num_layers > MAX_LAYERS or part.num_heads > MAX_HEADS:
        raise GeometryError("part is larger than a shard can be", expected=f"{MAX_LAYERS} layers of {MAX_HEADS} heads")
    if dim_k < 1 or (dim_v < 1) != (part.head_start is None):
        raise GeometryError("latents have no value width, and all others have one", found=(str(part), dim_k, dim_v))
    tensors = []
    for layer in range(part.layer_start, part.layer_stop):
        if part.head_start is None:
            tensors.append(TensorSpec(f"layers.{layer}.latent", layer, "latent", (num_tokens, dim_k), dtype))
        else:
            for side, dim in (("k", dim_k), ("v", dim_v)):
                shape = (part.num_heads, num_tokens, dim)
                tensors.append(TensorSpec(f"layers.{layer}.{side}", layer, side, shape, dtype))
    return tuple(tensors)
