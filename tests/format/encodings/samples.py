"""Tensors that encodings must survive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import TensorSpec

ODD_SHAPES = [(3, 256, 64), (1, 1, 1), (2, 1, 63), (3, 63, 64), (1, 255, 63), (8, 255, 1), (1, 17, 128), (5, 8, 3)]


def spec_of(shape: tuple[int, ...], dtype: Dtype = Dtype.BF16, name: str = "layers.0.k") -> TensorSpec:
    return TensorSpec(name, int(name.split(".")[1]), name.split(".")[2], shape, dtype)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; finite values only."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def kv_like(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint16]:
    """bf16 with a scale and a mean for each channel, as keys have them."""
    generator = np.random.default_rng(seed)
    channel = (*shape[:-2], 1, shape[-1])
    scale = np.exp2(generator.normal(0, 1.5, channel))
    mean = generator.normal(0, 2, channel) * scale
    return bf16_bits((generator.normal(0, 1, shape) * scale + mean).astype(np.float32))


def hard_16_bit_tensors(shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Named bit patterns, the same for bf16 and f16."""
    generator = np.random.default_rng(7)
    yield "random bits", generator.integers(0, 1 << 16, shape, np.uint16)
    for word in (0x0000, 0x8000, 0xFFFF, 0x3F80, 0x7F80, 0x0001):
        yield f"constant {word:#06x}", np.full(shape, word, np.uint16)
    yield (
        "NaN payloads",
        (generator.integers(1, 128, shape, np.uint16) | 0x7F80) ^ (generator.integers(0, 2, shape, np.uint16) << 15),
    )
    yield (
        "infinities among numbers",
        np.where(generator.random(shape) < 0.1, np.uint16(0xFF80), kv_like(shape, 3)).astype(np.uint16),
    )
    yield (
        "subnormals",
        generator.integers(0, 128, shape, np.uint16) | (generator.integers(0, 2, shape, np.uint16) << 15),
    )
    yield "largest finite", np.full(shape, 0x7F7F, np.uint16) ^ (generator.integers(0, 2, shape, np.uint16) << 15)
    yield "KV", kv_like(shape)
    yield "every word", (np.arange(np.prod(shape)) % (1 << 16)).astype(np.uint16).reshape(shape)
