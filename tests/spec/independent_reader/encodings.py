"""Decoders of encodings.md, in plain Python."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import isfinite, prod
from typing import Any

from . import zstd
from .refusals import damaged, later
from .strict_json import canonical

Decoder = Callable[[bytes, str, tuple[int, ...], str], bytes]
"""(stored bytes, side `k`/`v`/`latent`, raw shape, dtype) → raw bytes."""

STORED, LOSSLESS = 1, 2
_PREFIX = struct.Struct("<4sBBHQ4I")
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1}


def _must(holds: object, text: str) -> None:
    if not holds:
        raise damaged(text, 12)


def _shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    heads, tokens, dim = shape if len(shape) == 3 else (1, *shape)
    return heads, tokens, dim


class _Stored:
    """A stored tensor: its prefix checked, its streams cut."""

    def __init__(self, data: bytes, magic: bytes, shape: tuple[int, ...], dtype: str, dtypes: tuple[str, ...]) -> None:
        raw = prod(shape) * _BYTES[dtype]
        _must(_PREFIX.size <= len(data) <= raw + 32, "bytes of a stored tensor")
        found, self.flags, self.sink, zero, size, *lengths = _PREFIX.unpack_from(data)
        _must(found == magic and zero == 0, "magic")
        _must(size == raw, "bytes of the raw tensor")
        _must(_PREFIX.size + sum(lengths) == len(data), "lengths of streams")
        _must(self.flags in (0, STORED, LOSSLESS), "flags")
        self.streams, at = [], _PREFIX.size
        for length in lengths:
            self.streams.append(data[at : at + length])
            at += length
        if self.flags:
            _must(self.sink == 0 and not any(self.streams[1:]), "prefix of an exact tensor")
        if self.flags & STORED:
            _must(len(self.streams[0]) == raw, "bytes of an exact tensor")
        _must(self.flags or dtype in dtypes, "dtype has no streams")


def _inflate(stream: bytes, size: int) -> bytes:
    try:
        return zstd.decompress(stream, size)
    except Exception as error:
        raise damaged(str(error), 12) from error


def _raw(data: bytes, side: str, shape: tuple[int, ...], dtype: str) -> bytes:
    return data


def _bfx(data: bytes, side: str, shape: tuple[int, ...], dtype: str) -> bytes:
    stored = _Stored(data, b"bfx1", shape, dtype, ("BF16", "F16"))
    _must(stored.sink == 0 and not stored.flags & LOSSLESS, "prefix of bfx")
    if stored.flags & STORED:
        return stored.streams[0]
    heads, tokens, dim = _shape(shape)
    levels, packed, low, empty = stored.streams
    count = heads * tokens * dim
    _must(len(levels) == heads * dim and len(low) == count and not empty, "streams of bfx")
    distance = _inflate(packed, count)
    out = []
    for at in range(count):
        level = levels[at // (tokens * dim) * dim + at % dim]
        d, lo = distance[at], low[at]
        if dtype == "BF16":
            out.append(((level - d) % 256) << 7 | lo & 0x7F | (lo & 0x80) << 8)
        else:
            out.append(((level - d) % 128 | d & 0x80) << 8 | lo)
    return struct.pack(f"<{count}H", *out)


def _huf8(data: bytes, side: str, shape: tuple[int, ...], dtype: str) -> bytes:
    stored = _Stored(data, b"huf1", shape, dtype, ("F8_E4M3", "F8_E5M2", "U8", "I8"))
    _must(stored.sink == 0 and not stored.flags & LOSSLESS, "prefix of huf8")
    if stored.flags & STORED:
        return stored.streams[0]
    _must(not any(stored.streams[1:]), "streams of huf8")
    return _inflate(stored.streams[0], prod(shape))


def _f32(value: float) -> float:
    """A double rounded to float32. Of a sum or product of two float32 this is the float32 result, rounded once."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _narrow(value: float, dtype: str) -> bytes:
    """A float32 rounded to the tensor's dtype, ties to even."""
    if dtype == "BF16":
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<H", 0x7C00 if value > 0 else 0xFC00)


Table = Callable[[bytes, str, int, int, int], Callable[[float, int, int, int], float]]
"""(stream 0, side, H, B, D) → element(symbol's number, head, token of the body, dim) in float32."""


def _lossy(magic: bytes, table: Table, number: Callable[[int], float], huffman: bool, escapes: bool) -> Decoder:
    """A decoder of encodings.md §6; `number` is what a symbol byte says."""

    def decode(data: bytes, side: str, shape: tuple[int, ...], dtype: str) -> bytes:
        stored = _Stored(data, magic, shape, dtype, ("BF16", "F16"))
        if stored.flags & STORED:
            return stored.streams[0]
        if stored.flags & LOSSLESS:
            return _bfx(stored.streams[0], side, shape, dtype)
        heads, tokens, dim = _shape(shape)
        sink = stored.sink
        body = tokens - sink
        _must(body >= 1, "no body")
        first, symbols, second, exact = stored.streams
        element = table(first, side, heads, body, dim)
        symbols = _inflate(symbols, heads * body * dim) if huffman else symbols
        _must(len(symbols) == heads * body * dim, "symbols")
        numbers = [number(symbol) for symbol in symbols]
        _must(escapes or not second, "escapes")
        _escape(numbers, second)
        _must(len(exact) == heads * sink * dim * 2, "sink tokens")
        out = []
        for head in range(heads):
            at = 2 * head * sink * dim
            out.append(exact[at : at + 2 * sink * dim])
            for token in range(body):
                at = (head * body + token) * dim
                out += [_narrow(element(numbers[at + d], head, token, d), dtype) for d in range(dim)]
        return b"".join(out)

    return decode


def _escape(numbers: list[float], stream: bytes) -> None:
    """Put numbers beyond a byte where they belong."""
    _must(len(stream) % 6 == 0, "escapes")
    last = -1
    for position, symbol in struct.iter_unpack("<Ih", stream):
        _must(last < position < len(numbers), "position of an escape")
        numbers[position] = symbol
        last = position


def _signed(symbol: int) -> int:
    return symbol - 256 if symbol > 127 else symbol


def _e4m3(symbol: int) -> float:
    _must(symbol & 0x7F != 0x7F, "symbol is not a number")
    exponent, fraction = symbol >> 3 & 15, symbol & 7
    value = (fraction + 8) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -value if symbol & 0x80 else value


def _uq_table(first: bytes, side: str, heads: int, body: int, dim: int) -> Callable[[float, int, int, int], float]:
    channels = heads * dim if side in ("k", "latent") else 0
    _must(len(first) == 4 + 2 * channels, "table")
    step, *means = struct.unpack(f"<f{channels}e", first)
    _must(isfinite(step) and step > 0 and all(map(isfinite, means)), "numbers of the table")

    def element(symbol: float, head: int, token: int, d: int) -> float:
        value = _f32(symbol * step)
        return _f32(value + means[head * dim + d]) if means else value

    return element


def _int8_table(first: bytes, side: str, heads: int, body: int, dim: int) -> Callable[[float, int, int, int], float]:
    _must(len(first) == 2 * heads * body, "table")
    scales = struct.unpack(f"<{heads * body}e", first)
    _must(all(isfinite(scale) and not scale < 0 for scale in scales), "numbers of the table")
    return lambda symbol, head, token, d: _f32(symbol * scales[head * body + token])


def _fp8_table(first: bytes, side: str, heads: int, body: int, dim: int) -> Callable[[float, int, int, int], float]:
    _must(len(first) == 4 * heads, "table")
    scales = struct.unpack(f"<{heads}f", first)
    _must(all(isfinite(scale) and scale > 0 for scale in scales), "numbers of the table")
    return lambda symbol, head, token, d: _f32(symbol * scales[head])


def _uq(step: str, quality: str) -> tuple[str, dict[str, Any], Decoder]:
    parameters = {"mean": "k,latent", "sink": 4, "step": step, "version": 1}
    return quality, parameters, _lossy(b"uqs1", _uq_table, _signed, huffman=True, escapes=True)


_INT8 = {"scale": "token-head", "sink": 4, "version": 1}

KNOWN: dict[str, tuple[str | None, dict[str, Any], Decoder]] = {
    "raw": (None, {}, _raw),
    "bfx": (None, {"version": 1}, _bfx),
    "huf8": (None, {"version": 1}, _huf8),
    "int8": ("near", _INT8, _lossy(b"i8f1", _int8_table, _signed, huffman=False, escapes=False)),
    "int8huf": ("near", _INT8, _lossy(b"i8h1", _int8_table, _signed, huffman=True, escapes=False)),
    "uq006": _uq("0.06", "near"),
    "uq012": _uq("0.12", "fine"),
    "uq025": _uq("0.25", "fp8-grade"),
    "uq050": _uq("0.5", "int4-grade"),
    "fp8": (
        "fp8-grade", {"format": "e4m3", "scale": "head", "sink": 4, "version": 1},
        _lossy(b"f8e1", _fp8_table, _e4m3, huffman=True, escapes=False),
    ),
}  # fmt: skip
"""Quality class, parameters and decoder by name."""


def find(name: str, quality: str | None, parameters: dict[str, Any]) -> Decoder:
    """The decoder of an encoding, or a refusal where a later release must have made it."""
    known = KNOWN.get(name)
    if known is None or known[0] != quality or canonical(known[1]) != canonical(parameters):
        raise later(f"encoding {name!a} {quality!a} {str(parameters)[:60]!a}", 10)
    return known[2]


def is_known(label: str) -> bool:
    """Whether a shard with this label can be decoded, as far as the label says."""
    name, _, quality = label.partition("-")
    return name in KNOWN and KNOWN[name][0] == (quality or None)
