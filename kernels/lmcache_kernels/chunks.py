"""The canonical side: K and V of a run of tokens, per layer `[H, T, D]`, whatever engine they came from."""

from dataclasses import dataclass
from math import prod

import torch

from lmcache_kernels.errors import ChunkError


@dataclass(frozen=True, slots=True)
class CanonicalKV:
    """Canonical tensors of some layers: `keys [L, H, T, D_k]`, `values [L, H, T, D_v]`; a latent chunk has no values
    and H = 1.

    Holds views: the caller owns the memory, which may be strided but must not overlap itself.
    """

    keys: torch.Tensor
    values: torch.Tensor | None

    def __post_init__(self) -> None:
        for side in self.sides:
            if side.ndim != 4:
                raise ChunkError(
                    f"a canonical tensor is [L, H, T, D]; found {side.ndim} axes, shape {tuple(side.shape)}"
                )
            if overlaps_itself(side):
                raise ChunkError(
                    f"a canonical tensor must not overlap itself; shape {tuple(side.shape)}, strides {side.stride()}"
                )
        if self.values is not None and not _same_place(self.keys, self.values):
            raise ChunkError(
                "keys and values must agree in L, H, T, dtype and device; "
                f"found {_describe(self.keys)} and {_describe(self.values)}"
            )

    @classmethod
    def latent(cls, latent: torch.Tensor) -> "CanonicalKV":
        """From MLA latents `[L, T, R]`."""
        if latent.ndim != 3:
            raise ChunkError(f"a latent chunk is [L, T, R]; found {latent.ndim} axes, shape {tuple(latent.shape)}")
        return cls(latent.unsqueeze(1), None)

    @classmethod
    def in_buffer(
        cls,
        buffer: torch.Tensor,
        *,
        layers: int,
        heads: int,
        tokens: int,
        head_dim_k: int,
        head_dim_v: int,
        dtype: torch.dtype,
    ) -> "CanonicalKV":
        """Views into one contiguous buffer of bytes that holds, layer after layer, K `[H, T, D_k]` and then V `[H, T,
        D_v]`.

        `head_dim_v = 0` gives a latent chunk. Raises `ChunkError` unless the buffer is exactly as long as that.
        """
        layer_elements = heads * tokens * (head_dim_k + head_dim_v)
        size_bytes = layers * layer_elements * dtype.itemsize
        if (
            buffer.dtype != torch.uint8
            or buffer.ndim != 1
            or not buffer.is_contiguous()
            or buffer.numel() != size_bytes
        ):
            raise ChunkError(f"expected a contiguous 1-D uint8 buffer of {size_bytes} bytes; found {_describe(buffer)}")
        by_layer = buffer.view(dtype).view(layers, layer_elements)
        split = heads * tokens * head_dim_k
        keys = split_axis(by_layer[:, :split], 1, (heads, tokens, head_dim_k))
        values = split_axis(by_layer[:, split:], 1, (heads, tokens, head_dim_v)) if head_dim_v else None
        return cls(keys, values)

    @property
    def sides(self) -> tuple[torch.Tensor, ...]:
        """Keys, and values where there are any."""
        return (self.keys,) if self.values is None else (self.keys, self.values)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.keys.shape[0]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.keys.shape[1]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.keys.shape[2]

    def slice_tokens(self, start: int, stop: int) -> "CanonicalKV":
        """The same memory, tokens `[start, stop)` alone."""
        return CanonicalKV(self.keys[:, :, start:stop], None if self.values is None else self.values[:, :, start:stop])

    def slice_layers(self, start: int, stop: int) -> "CanonicalKV":
        """The same memory, layers `[start, stop)` alone."""
        return CanonicalKV(self.keys[start:stop], None if self.values is None else self.values[start:stop])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may reach one address: true unless every stride clears all that the smaller strides span."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def split_axis(tensor: torch.Tensor, axis: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The same memory with one axis seen as several."""
    strides = tensor.stride()
    inner = [strides[axis] * prod(sizes[after:]) for after in range(1, len(sizes) + 1)]
    size = (*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])
    return tensor.as_strided(size, (*strides[:axis], *inner, *strides[axis + 1 :]))


def _same_place(keys: torch.Tensor, values: torch.Tensor) -> bool:
    return keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype and keys.device == values.device


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
