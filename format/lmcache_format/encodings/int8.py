"""`int8`: a signed byte an element and one scale for each token and head (encodings.md §8). Quality of bf16 noise.

`int8` has a fixed width, which a GPU decodes without Huffman tables; `int8huf` is the same, Huffman-coded, for storage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.floats import Bits, Float32, from_plain_float32
from lmcache_format.encodings.lossy import NO_ESCAPES, SINK_TOKENS, Lossy, Quantised, with_rounding
from lmcache_format.encodings.protocol import Parameters
from lmcache_format.encodings.scratch import scratch
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

MAX_SYMBOL = 127
SCALE_BYTES = 2
SMALLEST_SCALE = 2.0**-14
"""Below it f16 has fewer than 11 bits, and a rounded scale could move the largest element past 127."""

Array8 = NDArray[np.uint8]


class Int8(Lossy):
    """Symmetric, scale = largest magnitude / 127."""

    name: ClassVar[str] = "int8"
    magic: ClassVar[bytes] = b"i8f1"
    quality: ClassVar[str | None] = "near"
    huffman: ClassVar[bool] = False

    def parameters(self) -> Parameters:
        """Version and sink tokens."""
        return {"scale": "token-head", "sink": SINK_TOKENS, "version": 1}

    def max_relative_mse(self, spec: TensorSpec) -> float:
        """Half a scale each; the largest square of a row is at most its sum of squares, `D` times its mean square."""
        return with_rounding(spec.shape[-1] ** 0.5 / (2 * MAX_SYMBOL))

    def _quantise(self, values: Float32, spec: TensorSpec, symbols: Array8) -> Quantised | None:
        rows = values.reshape(-1, values.shape[2])
        largest = _largest_magnitudes(rows)
        scale = (largest / MAX_SYMBOL).astype(np.float16)
        wide = scale.astype(np.float32)
        if not wide.max() < np.inf:  # nor is a NaN
            return None
        if wide.min() >= SMALLEST_SCALE:
            np.divide(1, wide, out=wide)
        elif ((wide >= SMALLEST_SCALE) | (largest == 0)).all():
            np.divide(1, wide, out=wide, where=wide > 0)
        else:
            return None
        np.multiply(rows, wide[:, None], out=rows)
        np.rint(rows, out=rows)
        np.copyto(symbols.view(np.int8), rows.reshape(-1), casting="unsafe")
        return Quantised(scale.view(np.uint8), NO_ESCAPES)

    def _dequantise(self, coded: Quantised, symbols: Array8, spec: TensorSpec, out: Bits) -> None:
        scale = coded.table.copy().view("<f2").astype(np.float32)
        if not (scale.min() >= 0 and scale.max() < np.inf):  # a NaN is neither
            raise EncodingError("scale is no number from 0 up", where=spec.name)
        values = scratch("values", symbols.size, np.float32)
        np.copyto(values, symbols.view(np.int8))
        rows = values.reshape(scale.size, -1)
        np.multiply(rows, scale[:, None], out=rows)
        # A scale is an f16: 0, or from 2^-24 to 65504.
        from_plain_float32(values.reshape(out.shape), spec.dtype, out)

    def _stream_sizes(self, spec: TensorSpec, body_tokens: int) -> tuple[int | None, int | None]:
        return SCALE_BYTES * spec.num_slabs * body_tokens, 0


class Int8Huffman(Int8):
    """The same symbols, Huffman-coded."""

    name: ClassVar[str] = "int8huf"
    magic: ClassVar[bytes] = b"i8h1"
    huffman: ClassVar[bool] = True


def _largest_magnitudes(rows: Float32) -> Float32:
    """max |x| of every row, NaN where there is one: magnitudes order like the integers of the same bits.

    `reduceat` because numpy's reduction along short rows is six times slower.
    """
    magnitudes = np.abs(rows, out=scratch("magnitudes", rows.size, np.float32).reshape(rows.shape))
    bits = magnitudes.reshape(-1).view(np.int32)
    largest: Float32 = np.maximum.reduceat(bits, _starts(*rows.shape)).view(np.float32)
    return largest


@lru_cache(maxsize=64)
def _starts(rows: int, length: int) -> NDArray[np.int64]:
    """Where each of `rows` begins."""
    return np.arange(0, rows * length, length)


ENCODINGS = (Int8(), Int8Huffman())
