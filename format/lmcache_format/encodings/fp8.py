"""`fp8`: e4m3 with one scale a head (encodings.md §9). At the same size its error is far larger than that of `int8`;
it is here because engines that run fp8 KV are asked for it by name.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.floats import Bits, Float32, from_float32
from lmcache_format.encodings.lossy import NO_ESCAPES, SINK_TOKENS, Lossy, Quantised, with_rounding
from lmcache_format.encodings.protocol import Parameters
from lmcache_format.encodings.scratch import scratch
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

SCALE_BYTES = 4
LARGEST = 448.0
SMALLEST_NORMAL, SMALLEST = 2.0**-6, 2.0**-9


Array8 = NDArray[np.uint8]


class Fp8(Lossy):
    """E4M3 of x / scale, Huffman-coded; scale = largest magnitude of the head / 448."""

    name: ClassVar[str] = "fp8"
    magic: ClassVar[bytes] = b"f8e1"
    quality: ClassVar[str | None] = "fp8-grade"
    huffman: ClassVar[bool] = True

    def parameters(self) -> Parameters:
        """Version, element format, scale granularity and sink tokens."""
        return {"format": "e4m3", "scale": "head", "sink": SINK_TOKENS, "version": 1}

    def max_relative_mse(self, spec: TensorSpec) -> float:
        """2^-4 of the value each, or 2^-10 of the scale where it is below the normal numbers."""
        small = spec.slab_bytes * (SMALLEST / 2 / LARGEST) ** 2
        return with_rounding((2.0**-8 + small) ** 0.5)

    def _quantise(self, values: Float32, spec: TensorSpec, symbols: Array8) -> Quantised | None:
        heads = values.reshape(values.shape[0], -1)
        scale = np.maximum(heads.max(axis=1), -heads.min(axis=1)) / np.float32(LARGEST)
        scale[scale == 0] = 1
        if not (np.isfinite(scale).all() and (scale >= np.finfo(np.float32).tiny).all()):
            return None
        np.divide(heads, scale[:, None], out=heads)
        to_e4m3(heads.reshape(-1), symbols)
        return Quantised(scale.view(np.uint8), NO_ESCAPES)

    def _dequantise(self, coded: Quantised, symbols: Array8, spec: TensorSpec, out: Bits) -> None:
        scale = coded.table.copy().view("<f4")
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise EncodingError("scale is no positive number", where=spec.name)
        if (symbols & 0x7F).max() == 0x7F:
            raise EncodingError("symbol is not a number", where=spec.name, expected="no 0x7f, 0xff")
        by_head = symbols.reshape(scale.size, -1)
        decoded = scratch("decoded", symbols.size, np.uint16).reshape(by_head.shape)
        for head, one_scale in enumerate(scale):
            meaning = np.empty(256, np.uint16)
            from_float32(E4M3 * one_scale, spec.dtype, meaning)
            np.take(meaning, by_head[head], out=decoded[head], mode="clip")
        np.copyto(out, decoded.reshape(out.shape))

    def _stream_sizes(self, spec: TensorSpec, body_tokens: int) -> tuple[int | None, int | None]:
        return SCALE_BYTES * spec.num_slabs, 0


def to_e4m3(values: Float32, out: Array8) -> None:
    """Round finite `values`, which are used up, to the nearest e4m3, ties to even, beyond ±448 to ±448."""
    words = values.view(np.uint32)
    sign = np.right_shift(words, 24, out=scratch("sign32", words.size, np.uint32))
    np.bitwise_and(sign, 0x80, out=sign)
    size = np.minimum(np.abs(values, out=values), np.float32(LARGEST), out=values)
    # Below the smallest normal number e4m3 is a multiple of 2^-9, which adding 2^14 moves to the last bit of a float32.
    small = np.add(size, np.float32(2.0**14), out=scratch("small", words.size, np.float32)).view(np.uint32)
    np.bitwise_and(small, 0xF, out=small)
    is_small = np.less(size, np.float32(SMALLEST_NORMAL), out=scratch("is_small", words.size, np.bool_))
    # Else: round to 3 bits of mantissa, and move the exponent from a bias of 127 to one of 7.
    last_kept_bit = np.right_shift(words, 20, out=scratch("rounding", words.size, np.uint32))
    np.bitwise_and(last_kept_bit, 1, out=last_kept_bit)
    np.add(words, last_kept_bit, out=words)
    np.add(words, 0x7FFFF, out=words)
    np.right_shift(words, 20, out=words)
    np.subtract(words, 120 << 3, out=words)
    np.copyto(words, small, where=is_small)
    np.bitwise_or(words, sign, out=words)
    np.copyto(out, words, casting="unsafe")


def _e4m3_values() -> Float32:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * SMALLEST, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(code & 0x80, -size, size)
    values[code & 0x7F == 0x7F] = 0  # not a number: refused before the table is used
    return values.astype(np.float32)


E4M3 = _e4m3_values()
"""What each byte means."""

ENCODINGS = (Fp8(),)
