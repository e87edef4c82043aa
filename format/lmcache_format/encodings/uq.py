"""`uq`: one uniform step for a whole tensor, a fraction of its standard deviation (encodings.md §7). No calibration.

    symbol = round((x - mean) / step),  step = a * std        mean of each channel: keys and latents only

Uniform noise over a layer costs less quality than noise in proportion to each channel, and Huffman coding takes back
the bits that small channels do not need. KL divergence grows with about 0.04 a².
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.floats import Bits, Float32, from_float32, from_plain_float32
from lmcache_format.encodings.lossy import NO_ESCAPES, SINK_TOKENS, Lossy, Quantised, is_f16, with_rounding
from lmcache_format.encodings.protocol import Parameters
from lmcache_format.encodings.scratch import scratch
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

MAGIC = b"uqs1"
MAX_SYMBOL, MAX_ESCAPE = 127, 32767
ESCAPE = np.dtype([("position", "<u4"), ("symbol", "<i2")])
STEP_BYTES, MEAN_BYTES = 4, 2
LARGEST_F16 = 65504.0
SMALLEST_PLAIN_STEP, LARGEST_PLAIN_STEP = 2.0**-80, 2.0**90
SMALLEST_ENERGY = 1e-25
"""Sums of squares below it have lost too much to underflow to set a step by."""

Array8 = NDArray[np.uint8]


class UniformStep(Lossy):
    """`uq` at one step size."""

    magic: ClassVar[bytes] = MAGIC
    huffman: ClassVar[bool] = True
    step_share: ClassVar[str]
    """The step as a share of the standard deviation, `a` in the literature; text, as canonical JSON has no floats."""

    def parameters(self) -> Parameters:
        """Version, step share, sink tokens, and which sides have their channel means removed."""
        return {"mean": "k,latent", "sink": SINK_TOKENS, "step": self.step_share, "version": 1}

    def max_relative_mse(self, spec: TensorSpec) -> float:
        """Half a step each; step² / 12, a third of it, is what large tensors come to."""
        return with_rounding(float(self.step_share) / 2)

    def _quantise(self, values: Float32, spec: TensorSpec, symbols: Array8) -> Quantised | None:
        if is_f16(spec) and not np.max(np.abs(values)) < LARGEST_F16 / 2:
            return None
        mean = _remove_mean(values) if has_mean(spec) else _NO_MEAN
        flat = values.reshape(-1)
        energy = float(np.dot(flat, flat))
        if energy < SMALLEST_ENERGY and flat.any():
            return None
        step = np.float32(float(self.step_share) * np.sqrt(energy / flat.size)) or np.float32(1)
        per_step = np.float32(1) / step
        if not (np.isfinite(step) and np.isfinite(per_step) and np.isfinite(mean).all()):
            return None
        np.multiply(flat, per_step, out=flat)
        np.rint(flat, out=flat)
        escapes = _take_escapes(flat)
        if escapes is None:
            return None
        np.copyto(symbols.view(np.int8), flat, casting="unsafe")
        table = np.concatenate((step.reshape(1).view(np.uint8), mean.view(np.uint8)))
        return Quantised(table, escapes)

    def _dequantise(self, coded: Quantised, symbols: Array8, spec: TensorSpec, out: Bits) -> None:
        step = coded.table[:STEP_BYTES].copy().view("<f4")[0]
        if not 0 < step < np.inf:
            raise EncodingError("step is no positive number", where=spec.name, found=step)
        values = scratch("values", symbols.size, np.float32)
        np.copyto(values, symbols.view(np.int8))
        if coded.escapes.size:
            escapes = _checked_escapes(coded.escapes, symbols.size, spec)
            values[escapes["position"]] = escapes["symbol"]
        np.multiply(values, step, out=values)
        if has_mean(spec):
            mean = coded.table[STEP_BYTES:].copy().view("<f2").astype(np.float32)
            if not np.isfinite(mean).all():
                raise EncodingError("mean is no number", where=spec.name)
            _add_rows(values, mean.reshape(out.shape[0], out.shape[2]), out.shape)
        # Sums with a mean are multiples of the last bit of one of both, so that none is smaller than these are.
        is_plain = SMALLEST_PLAIN_STEP <= step <= LARGEST_PLAIN_STEP
        round_to = from_plain_float32 if is_plain else from_float32
        round_to(values.reshape(out.shape), spec.dtype, out)

    def _stream_sizes(self, spec: TensorSpec, body_tokens: int) -> tuple[int | None, int | None]:
        channels = spec.num_slabs * spec.shape[-1]
        return STEP_BYTES + (MEAN_BYTES * channels if has_mean(spec) else 0), None


def has_mean(spec: TensorSpec) -> bool:
    """Keys and latents have channel means worth half a bit an element; values do not."""
    return spec.side != "v"


def _remove_mean(values: Float32) -> NDArray[np.float16]:
    """Subtract the rounded mean over tokens of every channel from `values` `[H, B, D]`; returns it, flattened."""
    heads, tokens, dim = values.shape
    mean = (np.add.reduce(_folded(values), axis=1).reshape(heads, -1, dim).sum(axis=1) / tokens).astype(np.float16)
    _add_rows(values, -mean.astype(np.float32), values.shape)
    flat: NDArray[np.float16] = mean.reshape(-1)
    return flat


def _add_rows(values: Float32, rows: Float32, shape: tuple[int, ...]) -> None:
    """values += rows for `values` of `[H, B, D]` and `rows` of `[H, D]`."""
    folded = _folded(values.reshape(shape))
    heads, _, width = folded.shape
    repeated = np.empty((heads, width // shape[2], shape[2]), np.float32)
    repeated[:] = rows[:, None, :]
    np.add(folded, repeated.reshape(heads, 1, width), out=folded)


def _folded(values: NDArray[Any]) -> NDArray[Any]:
    """`[H, B, D]` with several tokens to a row where they divide: numpy is faster on long rows."""
    heads, tokens, dim = values.shape
    fold = next(fold for fold in (8, 4, 2, 1) if tokens % fold == 0)
    return values.reshape(heads, tokens // fold, fold * dim)


def _take_escapes(symbols: Float32) -> Array8 | None:
    """Zero in `symbols` what a signed byte cannot say, and return it as escapes; None where too large for them."""
    if symbols.max() <= MAX_SYMBOL and symbols.min() >= -MAX_SYMBOL:
        return NO_ESCAPES
    positions = np.flatnonzero(~(np.abs(symbols) <= MAX_SYMBOL))
    large = symbols[positions]
    if not (np.abs(large) <= MAX_ESCAPE).all():
        return None
    escapes = np.empty(positions.size, ESCAPE)
    escapes["position"], escapes["symbol"] = positions, large
    symbols[positions] = 0
    return escapes.view(np.uint8)


def _checked_escapes(data: Array8, elements: int, spec: TensorSpec) -> NDArray[Any]:
    if data.size % ESCAPE.itemsize:
        raise EncodingError("escapes are cut", where=spec.name, expected=f"n * {ESCAPE.itemsize}", found=data.size)
    escapes = data.copy().view(ESCAPE)
    positions = escapes["position"].astype(np.int64)
    if positions[-1] >= elements or not (np.diff(positions) > 0).all():
        raise EncodingError("escapes are out of order or range", where=spec.name, expected=f"under {elements}")
    return escapes


_NO_MEAN = np.empty(0, np.float16)


class UniformStep006(UniformStep):
    """The noise of computing in bf16."""

    name: ClassVar[str] = "uq006"
    quality: ClassVar[str | None] = "near"
    step_share: ClassVar[str] = "0.06"


class UniformStep012(UniformStep):
    """Between the noise of bf16 and that of fp8."""

    name: ClassVar[str] = "uq012"
    quality: ClassVar[str | None] = "fine"
    step_share: ClassVar[str] = "0.12"


class UniformStep025(UniformStep):
    """The quality of KV in fp8."""

    name: ClassVar[str] = "uq025"
    quality: ClassVar[str | None] = "fp8-grade"
    step_share: ClassVar[str] = "0.25"


class UniformStep050(UniformStep):
    """The quality of KV in int4."""

    name: ClassVar[str] = "uq050"
    quality: ClassVar[str | None] = "int4-grade"
    step_share: ClassVar[str] = "0.5"


ENCODINGS = (UniformStep006(), UniformStep012(), UniformStep025(), UniformStep050())
