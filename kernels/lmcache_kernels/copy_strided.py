"""One strided copy on the host, at the speed its strides allow.

Measured on 2026-11-29 with one thread (`kernels/benchmarks/bench_paged`): rows that are contiguous on both sides are
moved as opaque items (numpy `V`, one memcpy each), half as fast again as the same order element by element. Where the
target's innermost axis is tiny (tiles of 2), an element loop spends its time on loops of 2: copying each position of
that axis on its own is twice as fast.
"""

import numpy as np
import numpy.typing as npt
import torch

TINY_AXIS = 4


def copy_strided(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between integer views of equal shape and any strides; neither may overlap the other."""
    outer = _axes_before_rows(out, source)
    if outer == 0:
        out.copy_(source)
    elif outer < out.ndim and out.stride(-1) == 1:
        np.copyto(_rows(out, outer), _rows(source, outer))
    else:
        _copy_elements(out, source)


def _copy_elements(out: torch.Tensor, source: torch.Tensor) -> None:
    innermost = min(range(out.ndim), key=lambda axis: out.stride(axis) if out.shape[axis] > 1 else out.numel())
    if 1 < out.shape[innermost] <= TINY_AXIS:
        for each_out, each_source in zip(out.unbind(innermost), source.unbind(innermost), strict=True):
            np.copyto(each_out.numpy(), each_source.numpy())
    else:
        np.copyto(out.numpy(), source.numpy())


def _axes_before_rows(out: torch.Tensor, source: torch.Tensor) -> int:
    """How many leading axes are left when the trailing ones, contiguous on both sides, are seen as one row."""
    row = 1
    for axis in reversed(range(out.ndim)):
        size = out.shape[axis]
        if size > 1 and not out.stride(axis) == row == source.stride(axis):
            return axis + 1
        row *= size
    return 0


def _rows(tensor: torch.Tensor, outer: int) -> npt.NDArray[np.void]:
    flat = tensor.view(*tensor.shape[:outer], -1).numpy()
    return flat.view(f"V{flat.shape[-1] * flat.itemsize}")[..., 0]
