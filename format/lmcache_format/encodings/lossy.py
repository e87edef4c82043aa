"""What lossy encodings share (encodings.md §6): exact sink tokens, the way out for values they cannot hold, framing.

The first tokens of a sequence are attended to by all others; an error in them never averages out. They are kept exact,
and take no part in any scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings.bfx import Bfx
from lmcache_format.encodings.floats import FLOAT_DTYPES, Bits, Float32, to_float32
from lmcache_format.encodings.frame import (
    LOSSLESS,
    STORED,
    Coded,
    Frame,
    check_streams,
    pack_frame,
    pack_stored,
    parse_frame,
)
from lmcache_format.encodings.huffman import decompress_into
from lmcache_format.encodings.protocol import Encoding, equal_parts
from lmcache_format.encodings.scratch import scratch
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

SINK_TOKENS = 4

Array8 = NDArray[np.uint8]
NO_ESCAPES = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a codec says about a tensor beside its symbols: scales or steps, and the values that no symbol can say."""

    table: Array8
    escapes: Array8


class Lossy(Encoding):
    """One symbol byte an element, with a table of scales. Streams: table, symbols, escapes, sink tokens."""

    magic: ClassVar[bytes]
    quality: ClassVar[str | None]
    huffman: ClassVar[bool]

    @abstractmethod
    def max_relative_mse(self, spec: TensorSpec) -> float:
        """What mean squared error / mean square of the elements that are not sink tokens cannot exceed."""

    @abstractmethod
    def _quantise(self, values: Float32, spec: TensorSpec, symbols: Array8) -> Quantised | None:
        """Write one symbol for each of `values` `[H, B, D]`, which may be overwritten, to `symbols` `[H * B * D]`.

        None where the values cannot be held: not finite, or out of the range of a scale. numpy does not warn here.
        """

    @abstractmethod
    def _dequantise(self, coded: Quantised, symbols: Array8, spec: TensorSpec, out: Bits) -> None:
        """Write elements of `spec.dtype` to `out` `[H, B, D]`, of which `symbols` is the flat form."""

    @abstractmethod
    def _stream_sizes(self, spec: TensorSpec, body_tokens: int) -> tuple[int | None, int | None]:
        """Bytes of the table and of the escapes for `[H, B, D]`; None for any."""

    def _encode_group(
        self, data: Array8, group: Sequence[TensorSpec], start_pos: int, into: Array8
    ) -> Iterator[Array8]:
        spec = group[0]
        heads, tokens, dim = _shape_of(spec)
        sink_tokens = max(0, min(tokens, SINK_TOKENS - start_pos))
        raws = equal_parts(data, len(group))
        elements = heads * (tokens - sink_tokens) * dim
        symbols = scratch("symbols", len(group) * elements, np.uint8)
        coded: list[Quantised | None] = [None] * len(group)
        if elements and spec.dtype in FLOAT_DTYPES:
            values = scratch("values", elements, np.float32).reshape(heads, tokens - sink_tokens, dim)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                for index, (raw, each) in enumerate(zip(raws, group, strict=True)):
                    body = raw.view(np.uint16).reshape(heads, tokens, dim)[:, sink_tokens:]
                    to_float32(body, spec.dtype, values)
                    coded[index] = self._quantise(values, each, symbols[index * elements : (index + 1) * elements])
        for index, (raw, each, one) in enumerate(zip(raws, group, coded, strict=True)):
            packed = None
            if one is not None:
                mine = symbols[index * elements : (index + 1) * elements]
                parts = (
                    one.table,
                    Coded(mine) if self.huffman else mine,
                    one.escapes,
                    raw.reshape(heads, tokens, -1)[:, :sink_tokens].reshape(-1),
                )
                packed = pack_frame(self.magic, each, parts, into, sink_tokens=sink_tokens)
            if packed is None:
                packed = self._pack_exact(raw, each, into)
            into = into[packed.size :]
            yield packed

    def _decode_group(self, stored: Sequence[Array8], group: Sequence[TensorSpec], out: Array8) -> None:
        frames = [self._parse(one, each) for one, each in zip(stored, group, strict=True)]
        with np.errstate(over="ignore"):  # only scales that no writer made overflow; the result is an infinity
            for frame, each, target in zip(frames, group, equal_parts(out, len(group)), strict=True):
                if frame.flags == STORED:
                    np.copyto(target, frame.streams[0])
                elif frame.flags == LOSSLESS:
                    _EXACT.decode(frame.streams[0], each, target)
                else:
                    self._decode_one(frame, self._symbols(frame, each), each, target)

    def _parse(self, stored: Array8, spec: TensorSpec) -> Frame:
        heads, tokens, dim = _shape_of(spec)
        allowed = STORED | LOSSLESS
        frame = parse_frame(stored, self.magic, spec, allowed_flags=allowed, max_sink_tokens=min(255, tokens - 1))
        if frame.flags != STORED and spec.dtype not in FLOAT_DTYPES:
            raise EncodingError("dtype is stored as it is or not at all", where=spec.name, found=spec.dtype.value)
        if frame.flags:
            return frame
        body_tokens = tokens - frame.sink_tokens
        table_bytes, escape_bytes = self._stream_sizes(spec, body_tokens)
        symbol_bytes = None if self.huffman else heads * body_tokens * dim
        sink_bytes = heads * frame.sink_tokens * dim * spec.dtype.itemsize
        check_streams(frame, (table_bytes, symbol_bytes, escape_bytes, sink_bytes), spec)
        return frame

    def _symbols(self, frame: Frame, spec: TensorSpec) -> Array8:
        """One symbol an element of the body; decoded ones are in scratch memory."""
        if not self.huffman:
            return frame.streams[1]
        heads, tokens, dim = _shape_of(spec)
        symbols: Array8 = scratch("symbols", heads * (tokens - frame.sink_tokens) * dim, np.uint8)
        decompress_into(frame.streams[1], symbols, spec.name)
        return symbols

    def _decode_one(self, frame: Frame, symbols: Array8, spec: TensorSpec, out: Array8) -> None:
        heads, tokens, dim = _shape_of(spec)
        sink = frame.sink_tokens
        target = out.view(np.uint16).reshape(heads, tokens, dim)
        self._dequantise(Quantised(frame.streams[0], frame.streams[2]), symbols, spec, target[:, sink:])
        if sink:
            out.reshape(heads, tokens, -1)[:, :sink] = frame.streams[3].reshape(heads, sink, -1)

    def _pack_exact(self, raw: Array8, spec: TensorSpec, into: Array8) -> Array8:
        packed = pack_frame(self.magic, spec, (_EXACT.encode(raw, spec),), into, flags=LOSSLESS)
        return pack_stored(self.magic, spec, raw, into) if packed is None else packed


_EXACT = Bfx()


def _shape_of(spec: TensorSpec) -> tuple[int, int, int]:
    """`[H, T, D]`, with H = 1 for latents."""
    return spec.num_slabs, spec.shape[-2], spec.shape[-1]


def with_rounding(relative_rms: float) -> float:
    """Relative mean square of an error of `relative_rms` with the rounding to a two-byte float on top."""
    return 1.001 * (relative_rms + 2.0**-8 * (1 + relative_rms)) ** 2


def is_f16(spec: TensorSpec) -> bool:
    """True for the narrow range of f16, where a decoded value could pass the largest finite one."""
    return spec.dtype is Dtype.F16
