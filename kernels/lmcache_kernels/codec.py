"""The order of elements inside a page that an engine keeps to itself (CPU attention keeps K transposed, or in tiles).

A page run is the memory of one block and one head: `P` elements. The codec says where in it the element (token n, dim
d) of K and of V lies. Such orders are almost always mixed-radix: n and d split into digits, each with a stride. Then
a page is a plain strided view with a few more axes, and moving it is a strided copy; `digits_of` finds those digits.
Any other order is moved by index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lmcache_kernels.errors import CodecError


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of an index: `size` values, `stride` elements apart."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class RunDigits:
    """An order as digits, innermost (fastest) first: element (n, d) lies at `offset + Σ n_i·stride_i + Σ
    d_j·stride_j`.
    """

    offset: int
    tokens: tuple[Digit, ...]
    dims: tuple[Digit, ...]


@dataclass(frozen=True, eq=False)
class SideOrder:
    """Where one side's elements lie in a page run: `table[n, d]`, int64."""

    table: npt.NDArray[np.int64]

    @cached_property
    def digits(self) -> RunDigits | None:
        """The order as digits, or None if it is no mixed-radix order."""
        offset = int(self.table[0, 0])
        by_token, by_dim = self.table[:, 0] - offset, self.table[0] - offset
        if not np.array_equal(self.table, offset + by_token[:, None] + by_dim[None, :]):
            return None
        tokens, dims = digits_of(by_token.tolist()), digits_of(by_dim.tolist())
        return None if tokens is None or dims is None else RunDigits(offset, tokens, dims)


@dataclass(frozen=True, eq=False)
class PageCodec:
    """The order inside a page: `keys.table [N, D_k]` and `values.table [N, D_v]`, element offsets into the page run.

    Fused pages have one run of N·(D_k+D_v) elements for both; KV-first pages one run of N·D a side.
    Learn one with `learn_codec`, or state a known one with `of`. Raises `CodecError` unless the order is one-to-one.
    """

    keys: SideOrder
    values: SideOrder
    shares_run: bool

    @classmethod
    def of(cls, keys: npt.NDArray[np.integer], values: npt.NDArray[np.integer], *, shares_run: bool) -> "PageCodec":
        """From the two tables; `shares_run` says that K and V lie in one run (fused pages)."""
        tables = [np.ascontiguousarray(side, dtype=np.int64) for side in (keys, values)]
        for side in tables:
            if side.ndim != 2 or side.shape[0] != tables[0].shape[0]:
                raise CodecError(f"an order is a table [N, D]; found shapes {tables[0].shape} and {tables[1].shape}")
        runs = [np.concatenate([side.ravel() for side in tables])] if shares_run else [side.ravel() for side in tables]
        for run in runs:
            if not np.array_equal(np.sort(run), np.arange(run.size)):
                raise CodecError(f"an order must reach each of its {run.size} elements once")
        return cls(SideOrder(tables[0]), SideOrder(tables[1]), shares_run)

    def same_as(self, other: "PageCodec") -> bool:
        """Whether two codecs describe one order."""
        return (
            self.shares_run == other.shares_run
            and np.array_equal(self.keys.table, other.keys.table)
            and np.array_equal(self.values.table, other.values.table)
        )


def digits_of(offsets: Sequence[int]) -> tuple[Digit, ...] | None:
    """Split an index into digits, innermost first, so that `offsets[i]` is the sum of digit × stride; None if that
    cannot be.
    """
    array = np.asarray(offsets, dtype=np.int64)
    digits: list[Digit] = []
    while array.size > 1:
        stride = int(array[1] - array[0])
        size = _regular_prefix(array, stride)
        if array.size % size:
            return None
        rows = array.reshape(-1, size)
        if not np.array_equal(rows, rows[:, :1] + stride * np.arange(size)):
            return None
        digits.append(Digit(size, stride))
        array = rows[:, 0]
    return tuple(digits) or (Digit(1, 0),)


def _regular_prefix(array: npt.NDArray[np.int64], stride: int) -> int:
    """How many leading offsets advance by `stride`."""
    irregular = np.flatnonzero(np.diff(array) != stride)
    return int(irregular[0]) + 1 if irregular.size else int(array.size)
