"""zstd as a Huffman coder (encodings.md §3): its match finder costs more than it saves on exponents and symbols.

The output is plain zstd, one frame with its content size and a checksum; any zstd reads it. Several streams go through
one call, during which the interpreter lock is free: with a call for each, two threads would mostly wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from lmcache_format.errors import EncodingError

WINDOW_LOG = 17
"""128 KiB, the largest block zstd makes: a smaller window would make smaller blocks, each with a table of its own."""

_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3
_MANY = {"multi_compress_to_buffer", "multi_decompress_to_buffer"} <= set(zstandard.backend_features)


class _Coders(threading.local):
    """One compressor and one decompressor a thread: they keep their memory, and are not thread-safe."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=WINDOW_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
            write_checksum=True,
            write_dict_id=False,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


def compress(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One zstd frame of `data`."""
    return compress_many([data])[0]


def compress_many(streams: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """One zstd frame for each of `streams`, none of them empty."""
    views: list[bytes | bytearray | memoryview] = [stream.data for stream in streams]
    if not _MANY:
        return [np.frombuffer(_coders.compressor.compress(view), np.uint8) for view in views]
    frames = _coders.compressor.multi_compress_to_buffer(views, threads=0)
    return [np.frombuffer(cast(memoryview, frames[index]), np.uint8) for index in range(len(frames))]


def decompress(frame: NDArray[np.uint8], size: int, where: str) -> NDArray[np.uint8]:
    """The `size` bytes of a stream that must be exactly one frame of them; raises `EncodingError`."""
    return decompress_many([frame], [size], where)[0]


def decompress_many(frames: Sequence[NDArray[np.uint8]], sizes: Sequence[int], where: str) -> list[NDArray[np.uint8]]:
    """The content of each frame, as long as `sizes` says, read-only; raises `EncodingError`.

    A frame that claims another size, needs a larger window, or is not alone in its stream is refused before anything is
    allocated.
    """
    for frame, size in zip(frames, sizes, strict=True):
        _check_frame(frame, size, where)
    views: list[bytes | bytearray | memoryview] = [frame.data for frame in frames]
    try:
        decoded = _decompress_checked(views, sizes)
    except zstandard.ZstdError as problem:
        raise EncodingError("zstd frame is damaged", where=where, found=problem) from None
    for one, size in zip(decoded, sizes, strict=True):
        if one.size != size:
            raise EncodingError("zstd frame ends early", where=where, expected=size, found=one.size)
    return decoded


def _decompress_checked(frames: list[bytes | bytearray | memoryview], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    if not _MANY or not frames:
        return [np.frombuffer(_coders.decompressor.decompress(frame), np.uint8) for frame in frames]
    u64_sizes = np.array(sizes, np.uint64).data
    contents = _coders.decompressor.multi_decompress_to_buffer(frames, decompressed_sizes=u64_sizes, threads=0)
    return [np.frombuffer(cast(memoryview, contents[index]), np.uint8) for index in range(len(contents))]


def _check_frame(frame: NDArray[np.uint8], size: int, where: str) -> None:
    try:
        header = zstandard.get_frame_parameters(frame.data)
        block = zstandard.frame_header_size(frame.data)
    except zstandard.ZstdError as problem:
        raise EncodingError("not a zstd frame", where=where, found=problem) from None
    if header.content_size != size:
        raise EncodingError("zstd frame claims another size", where=where, expected=size, found=header.content_size)
    if not header.has_checksum or header.dict_id or header.window_size > max(size, 1 << WINDOW_LOG):
        found = f"checksum {header.has_checksum}, dictionary {header.dict_id}, window {header.window_size}"
        raise EncodingError("zstd frame of a kind that is not written here", where=where, found=found)
    end = _end_of_blocks(frame, block) + _CHECKSUM_BYTES
    if end != frame.size:
        raise EncodingError("zstd frame is not alone in its stream", where=where, expected=end, found=frame.size)


def _end_of_blocks(frame: NDArray[np.uint8], block: int) -> int:
    """Where the blocks of a frame end, by their headers; past the end of `frame` where it is cut short."""
    while block + _BLOCK_HEADER_BYTES <= frame.size:
        word = int(frame[block]) | int(frame[block + 1]) << 8 | int(frame[block + 2]) << 16
        is_last, kind, size = word & 1, word >> 1 & 3, word >> 3
        if kind == _RESERVED_BLOCK:
            break
        block += _BLOCK_HEADER_BYTES + (1 if kind == _RLE_BLOCK else size)
        if is_last:
            return block
    return frame.size + 1
