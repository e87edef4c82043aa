"""Two-byte floats to float32 and back, without a library that knows bf16. Exact one way, round to nearest even back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings.scratch import scratch

Bits = NDArray[np.uint16]
Float32 = NDArray[np.float32]

FLOAT_DTYPES = (Dtype.BF16, Dtype.F16)


def to_float32(bits: Bits, dtype: Dtype, out: Float32) -> None:
    """Widen `bits`, of a dtype in `FLOAT_DTYPES`, into `out` of the same shape."""
    if dtype is Dtype.F16:
        np.copyto(out, bits.view(np.float16))
        return
    words = out.view(np.uint32)
    np.copyto(words, bits)
    np.left_shift(words, 16, out=words)


def from_float32(values: Float32, dtype: Dtype, out: Bits) -> None:
    """Round `values` to nearest even into `out` of the same shape; `values` is used up. They must not be NaN."""
    if dtype is Dtype.F16:
        np.copyto(out.view(np.float16), values, casting="unsafe")
        return
    words = values.view(np.uint32)
    last_kept_bit = scratch("rounding", words.size, np.uint32).reshape(words.shape)
    np.right_shift(words, 16, out=last_kept_bit)
    np.bitwise_and(last_kept_bit, 1, out=last_kept_bit)
    np.add(words, last_kept_bit, out=words)
    np.add(words, 0x7FFF, out=words)
    np.right_shift(words, 16, out=words)
    np.copyto(out, words, casting="unsafe")


def from_plain_float32(values: Float32, dtype: Dtype, out: Bits) -> None:
    """`from_float32` for values that are zero or of a magnitude from 2^-108 to 2^110; faster.

    Veltkamp's splitting keeps the upper 8 of 24 bits, ties to even: `c - (c - x)` with `c = (2^16 + 1) x`. Above the
    range c overflows; far below, a subnormal bf16 has fewer bits than are kept here.
    """
    if dtype is Dtype.F16:
        np.copyto(out.view(np.float16), values, casting="unsafe")
        return
    multiple = scratch("rounding", values.size, np.float32).reshape(values.shape)
    np.multiply(values, _SPLITTER, out=multiple)
    np.subtract(multiple, values, out=values)
    np.subtract(multiple, values, out=values)
    words = values.view(np.uint32)
    np.right_shift(words, 16, out=words)
    np.copyto(out, words, casting="unsafe")


_SPLITTER = np.float32(2**16 + 1)
