"""Elements as opaque integers: data is moved, never computed with, so every dtype travels as an integer of its
width.
"""

import torch

from lmcache_kernels.errors import LayoutError

MOVABLE = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8}
)
_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_movable(dtype: torch.dtype) -> None:
    """Raise `LayoutError` for a dtype that no canonical chunk has."""
    if dtype not in MOVABLE:
        raise LayoutError(f"dtype {dtype} is not supported; expected one of {sorted(map(str, MOVABLE))}")


def integer_of(size_bytes: int) -> torch.dtype:
    """The integer dtype of 1, 2, 4 or 8 bytes."""
    return _INTEGER_OF_BYTES[size_bytes]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, whatever the strides."""
    return tensor.view(integer_of(tensor.dtype.itemsize))


def view_words(
    memory: torch.Tensor, word_bytes: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A view of the storage under `memory` in words of `word_bytes`; offset and strides count words from the
    storage's start.
    """
    view = torch.empty(0, dtype=integer_of(word_bytes), device=memory.device)
    return view.set_(memory.untyped_storage(), offset, size, stride)


def all_words(memory: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """The whole storage under `memory`, flat, in words of `word_bytes`."""
    return view_words(memory, word_bytes, 0, (memory.untyped_storage().nbytes() // word_bytes,), (1,))
