"""Working memory that a thread keeps between calls, so that encoding and decoding touch no fresh pages."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEEP_BYTES = 32 << 20
"""Larger buffers are handed out but not kept."""


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[str, NDArray[np.uint8]] = {}


_buffers = _Buffers()


def scratch(use: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """`count` elements with undefined values, valid until this thread asks for the same `use` again."""
    size_bytes = count * np.dtype(dtype).itemsize
    buffer = _buffers.by_use.get(use)
    if buffer is None or buffer.size < size_bytes:
        buffer = np.empty(size_bytes, np.uint8)
        if size_bytes <= KEEP_BYTES:
            _buffers.by_use[use] = buffer
    return buffer[:size_bytes].view(dtype)
