"""The 32 bytes in front of every encoded tensor (encodings.md §2): which codec, which flags, how long its streams are.

::

    offset  size  field
         0     4  magic, names codec and version
         4     1  flags
         5     1  sink tokens, kept exact at the start of the tensor
         6     2  zero
         8     8  bytes of the decoded tensor
        16    16  bytes of streams 0 to 3
        32        the streams, back to back
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.huffman import compress_into
from lmcache_format.encodings.protocol import Bytes, bytes_of
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

PREFIX = struct.Struct("<4sBBHQ4I")
NUM_STREAMS = 4
STORED = 0x01
"""Flag: stream 0 is the tensor as it was."""
LOSSLESS = 0x02
"""Flag: stream 0 is the tensor as `bfx` encodes it, because a lossy codec cannot hold its values."""
MAX_STREAM_BYTES = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed prefix and views of the streams behind it."""

    flags: int
    sink_tokens: int
    streams: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True)
class Coded:
    """A stream, not empty, that is to be Huffman-coded as it is written."""

    data: NDArray[np.uint8]


def pack_frame(
    magic: bytes,
    spec: TensorSpec,
    streams: Sequence[NDArray[np.uint8] | Coded],
    into: NDArray[np.uint8],
    *,
    flags: int = 0,
    sink_tokens: int = 0,
) -> NDArray[np.uint8] | None:
    """Write prefix and streams to the start of `into`; returns the part of it that they fill.

    None where the streams would not be shorter than the tensor: `into` is undefined then.
    """
    room = spec.nbytes - 1 - sum(0 if isinstance(stream, Coded) else stream.size for stream in streams)
    sizes = [0] * NUM_STREAMS
    begin = PREFIX.size
    for index, stream in enumerate(streams):
        if room < 0:
            return None
        if isinstance(stream, Coded):
            coded = compress_into(stream.data, into[begin : begin + room])
            if coded is None:
                return None
            sizes[index] = coded.size
            room -= coded.size
        else:
            sizes[index] = stream.size
            into[begin : begin + stream.size] = stream
        begin += sizes[index]
    _pack_prefix(magic, spec, sizes, into, flags, sink_tokens)
    return into[:begin]


def pack_stored(magic: bytes, spec: TensorSpec, raw: NDArray[np.uint8], into: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write a frame that holds the tensor as it was; returns the part of `into` that it fills."""
    _pack_prefix(magic, spec, [raw.size, 0, 0, 0], into, STORED, 0)
    into[PREFIX.size : PREFIX.size + raw.size] = raw
    return into[: PREFIX.size + raw.size]


def _pack_prefix(
    magic: bytes, spec: TensorSpec, sizes: Sequence[int], into: NDArray[np.uint8], flags: int, sink_tokens: int
) -> None:
    if max(sizes) > MAX_STREAM_BYTES:
        raise EncodingError("tensor is too large to encode", where=spec.name, expected="under 4 GiB", found=max(sizes))
    PREFIX.pack_into(into.data, 0, magic, flags, sink_tokens, 0, spec.nbytes, *sizes)


def parse_frame(
    stored: Bytes, magic: bytes, spec: TensorSpec, *, allowed_flags: int = STORED, max_sink_tokens: int = 0
) -> Frame:
    """Check the prefix against `spec` and the length of `stored`; raises `EncodingError`."""
    data = bytes_of(stored)
    if data.size < PREFIX.size:
        raise EncodingError("shorter than its prefix", where=spec.name, expected=PREFIX.size, found=data.size)
    found_magic, flags, sink_tokens, zero, raw_bytes, *sizes = PREFIX.unpack_from(data.data)
    if found_magic != magic:
        raise EncodingError("wrong codec", where=spec.name, expected=magic, found=found_magic)
    if flags & ~allowed_flags or zero:
        raise EncodingError("unknown flags", where=spec.name, expected=f"of {allowed_flags:#x}", found=(flags, zero))
    if sink_tokens > max_sink_tokens:
        raise EncodingError("too many sink tokens", where=spec.name, expected=max_sink_tokens, found=sink_tokens)
    if raw_bytes != spec.nbytes:
        raise EncodingError("claims another decoded size", where=spec.name, expected=spec.nbytes, found=raw_bytes)
    size = PREFIX.size + sum(sizes)
    if size != data.size:
        raise EncodingError("streams do not fill it", where=spec.name, expected=size, found=data.size)
    streams = []
    begin = PREFIX.size
    for stream_bytes in sizes:
        streams.append(data[begin : begin + stream_bytes])
        begin += stream_bytes
    frame = Frame(flags, sink_tokens, tuple(streams))
    if flags:
        _check_single_stream(frame, spec)
    return frame


def check_streams(frame: Frame, sizes: tuple[int | None, ...], spec: TensorSpec) -> None:
    """Raise `EncodingError` unless every stream has its size; None stands for any, streams not named are empty."""
    for index, stream in enumerate(frame.streams):
        expected = sizes[index] if index < len(sizes) else 0
        if expected is not None and stream.size != expected:
            raise EncodingError(
                f"stream {index} has the wrong size", where=spec.name, expected=expected, found=stream.size
            )


def _check_single_stream(frame: Frame, spec: TensorSpec) -> None:
    if frame.flags not in (STORED, LOSSLESS) or frame.sink_tokens:
        raise EncodingError("flags contradict each other", where=spec.name, found=(frame.flags, frame.sink_tokens))
    check_streams(frame, (spec.nbytes if frame.flags == STORED else None,), spec)
