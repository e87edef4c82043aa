"""What the kernel benches share: a correctness gate, timing, and the rows of `scripts/_bench.py`.

A bench moves known bytes, and before anything is timed its result must equal the reference's; otherwise `RedGate` stops
it. Rates count the bytes of the canonical chunk once: what is moved, not what is read plus what is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
from _bench import Row, Sample, bench_arguments, finish, in_project_venv, measure, row

__all__ = ["RedGate", "Row", "bench_arguments", "finish", "gate", "in_project_venv", "memcpy_rate", "rate_of", "row"]


class RedGate(Exception):
    """A result differs from the reference's: no figure is reported."""


def gate(case: str, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raise `RedGate` unless all bytes agree."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise RedGate(f"{case}: tensor {index} differs from the reference; fix it before measuring it")


def rate_of(move: Callable[[], object], size_bytes: int, device: torch.device, *, repeat: int = 15) -> Sample:
    """GB/s of a move of that many bytes; on a device every repeat is waited for."""

    def moved() -> None:
        move()
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return measure(moved, repeat=repeat).rate(size_bytes / 1e9)


def memcpy_rate(size_bytes: int, device: torch.device) -> Sample:
    """GB/s of copying as many bytes from one flat tensor to another there: the limit of the same run."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return rate_of(lambda: target.copy_(source), size_bytes, device)
