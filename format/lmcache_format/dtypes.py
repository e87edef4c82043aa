"""The element types a store may hold (SPEC §4.1). Values are the names safetensors uses in its header."""

from __future__ import annotations

import re
from enum import StrEnum

import numpy as np

NEWER_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
"""A name of this form that this release does not know belongs to a later one, and is no damage (SPEC §3)."""


class Dtype(StrEnum):
    """A stored element type; little-endian."""

    BF16 = "BF16"
    F16 = "F16"
    F32 = "F32"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    U8 = "U8"
    I8 = "I8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type that carries these bits: bf16 travels as uint16, fp8 as uint8."""
        return _NUMPY[self]


_ITEMSIZE = {
    Dtype.BF16: 2,
    Dtype.F16: 2,
    Dtype.F32: 4,
    Dtype.F8_E4M3: 1,
    Dtype.F8_E5M2: 1,
    Dtype.U8: 1,
    Dtype.I8: 1,
}
_NUMPY: dict[Dtype, np.dtype[np.generic]] = {
    Dtype.BF16: np.dtype("<u2"),
    Dtype.F16: np.dtype("<f2"),
    Dtype.F32: np.dtype("<f4"),
    Dtype.F8_E4M3: np.dtype("u1"),
    Dtype.F8_E5M2: np.dtype("u1"),
    Dtype.U8: np.dtype("u1"),
    Dtype.I8: np.dtype("i1"),
}
