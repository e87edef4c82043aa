"""One strided copy on the host."""

import numpy as np
import torch


def copy_strided(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between integer views of equal shape and any strides."""
    if out.stride(-1) == 1 == source.stride(-1):
        out.copy_(source)
    else:
        np.copyto(out.numpy(), source.numpy())
