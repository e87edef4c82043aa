"""zstd as a Huffman coder (encodings.md §3): its match finder costs more than it saves on exponents and symbols.

The output is plain zstd, one frame with its content size and a checksum; any zstd reads it. Where zstandard's cffi
module is there, its match finder is made to skip nearly everything, and bytes go straight from and to the caller's
memory. Without it, streams are a little longer and take half as long again. Both release the interpreter lock.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from lmcache_format.errors import EncodingError

WINDOW_LOG = 17
"""128 KiB, the largest block zstd makes: a smaller window would make smaller blocks, each with a table of its own."""
HASH_LOG, CHAIN_LOG, SEARCH_LOG, MIN_MATCH = 6, 6, 1, 7
SKIPPED_BYTES = 16
"""How far the search for matches steps: zstd's target length, which for its strategy `fast` means that."""

_BLOCK_HEADER_BYTES = 3
_CHECKSUM_BYTES = 4
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3

Array8 = NDArray[np.uint8]


class Coder(ABC):
    """A compressor and a decompressor. They keep their memory, and serve one thread."""

    @abstractmethod
    def compress_into(self, data: Array8, room: Array8) -> int | None:
        """Write one frame of `data` to the start of `room`; its bytes, or None where they do not fit."""

    @abstractmethod
    def decompress_into(self, frame: Array8, out: Array8) -> int | None:
        """Write the content of a frame to the start of `out`; its bytes, or None where the frame is damaged."""


class DirectCoder(Coder):
    """zstd by cffi. Raises `ImportError` where that, or what is needed of it, is not there."""

    def __init__(self) -> None:
        module = import_module("zstandard.backend_cffi")
        self._ffi: Any = module.ffi
        self._zstd: Any = module.lib
        zstd = self._zstd
        try:
            parameters = {
                zstd.ZSTD_c_strategy: zstd.ZSTD_fast,
                zstd.ZSTD_c_windowLog: WINDOW_LOG,
                zstd.ZSTD_c_hashLog: HASH_LOG,
                zstd.ZSTD_c_chainLog: CHAIN_LOG,
                zstd.ZSTD_c_searchLog: SEARCH_LOG,
                zstd.ZSTD_c_minMatch: MIN_MATCH,
                zstd.ZSTD_c_targetLength: SKIPPED_BYTES,
                # By itself zstd takes a target length for a wish not to code literals.
                zstd.ZSTD_c_experimentalParam5: zstd.ZSTD_ps_enable,
                zstd.ZSTD_c_contentSizeFlag: 1,
                zstd.ZSTD_c_checksumFlag: 1,
                zstd.ZSTD_c_dictIDFlag: 0,
            }
        except AttributeError as problem:
            raise ImportError(f"zstandard.backend_cffi: {problem}") from None
        self._compressing = self._ffi.gc(zstd.ZSTD_createCCtx(), zstd.ZSTD_freeCCtx)
        self._decompressing = self._ffi.gc(zstd.ZSTD_createDCtx(), zstd.ZSTD_freeDCtx)
        if not (self._compressing and self._decompressing):
            raise MemoryError("zstd has no memory for its contexts")
        for name, value in parameters.items():
            if zstd.ZSTD_isError(zstd.ZSTD_CCtx_setParameter(self._compressing, name, value)):
                raise ImportError(f"zstandard.backend_cffi: parameter {name} cannot be {value}")

    def compress_into(self, data: Array8, room: Array8) -> int | None:
        """See `Coder`."""
        source, target = self._ffi.from_buffer(data), self._ffi.from_buffer(room, require_writable=True)
        size = self._zstd.ZSTD_compress2(self._compressing, target, room.size, source, data.size)
        return None if self._zstd.ZSTD_isError(size) else int(size)

    def decompress_into(self, frame: Array8, out: Array8) -> int | None:
        """See `Coder`."""
        source, target = self._ffi.from_buffer(frame), self._ffi.from_buffer(out, require_writable=True)
        size = self._zstd.ZSTD_decompressDCtx(self._decompressing, target, out.size, source, frame.size)
        return None if self._zstd.ZSTD_isError(size) else int(size)


class PlainCoder(Coder):
    """zstd by its Python interface, which cannot turn the search for matches off and Huffman coding on."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=WINDOW_LOG,
            hash_log=HASH_LOG,
            chain_log=CHAIN_LOG,
            search_log=SEARCH_LOG,
            min_match=MIN_MATCH,
            target_length=0,
            write_content_size=True,
            write_checksum=True,
            write_dict_id=False,
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress_into(self, data: Array8, room: Array8) -> int | None:
        """See `Coder`."""
        frame = self._compressor.compress(data.data)
        return _copied(frame, room)

    def decompress_into(self, frame: Array8, out: Array8) -> int | None:
        """See `Coder`."""
        try:
            return _copied(self._decompressor.decompress(frame.data), out)
        except zstandard.ZstdError:
            return None


def _copied(content: bytes, out: Array8) -> int | None:
    if len(content) > out.size:
        return None
    out[: len(content)] = np.frombuffer(content, np.uint8)
    return len(content)


class _Coders(threading.local):
    """The coder of a thread."""

    def __init__(self) -> None:
        try:
            self.coder: Coder = DirectCoder()
        except ImportError:
            self.coder = PlainCoder()


_coders = _Coders()


@contextmanager
def using(coder: Coder) -> Iterator[None]:
    """Code with `coder` in this thread: golden files, whose bytes do not change, are made with a `PlainCoder`."""
    usual, _coders.coder = _coders.coder, coder
    try:
        yield
    finally:
        _coders.coder = usual


def compress_into(data: Array8, room: Array8) -> Array8 | None:
    """One zstd frame of `data`, not empty, at the start of `room`: the part it fills, or None where it does not fit.

    What of `room` lies behind the frame is undefined then.
    """
    size = _coders.coder.compress_into(data, room)
    return None if size is None else room[:size]


def decompress_into(frame: Array8, out: Array8, where: str) -> None:
    """Fill `out`, not empty, from a stream that must be exactly one frame of as many bytes; raises `EncodingError`.

    A frame that claims another size, needs a larger window, or is not alone in its stream is refused before anything is
    decoded.
    """
    _check_frame(frame, out.size, where)
    size = _coders.coder.decompress_into(frame, out)
    if size is None:
        raise EncodingError("zstd frame is damaged", where=where)
    if size != out.size:
        raise EncodingError("zstd frame ends early", where=where, expected=out.size, found=size)


def _check_frame(frame: Array8, size: int, where: str) -> None:
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


def _end_of_blocks(frame: Array8, block: int) -> int:
    """Where the blocks of a frame end, by their headers; past the end of `frame` where it is cut short."""
    data = frame.data
    while block + _BLOCK_HEADER_BYTES <= frame.size:
        word = int.from_bytes(data[block : block + _BLOCK_HEADER_BYTES], "little")
        is_last, kind, size = word & 1, word >> 1 & 3, word >> 3
        if kind == _RESERVED_BLOCK:
            break
        block += _BLOCK_HEADER_BYTES + (1 if kind == _RLE_BLOCK else size)
        if is_last:
            return block
    return frame.size + 1
