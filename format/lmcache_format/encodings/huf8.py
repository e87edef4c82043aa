"""`huf8`: lossless for one-byte elements, such as KV in fp8 (encodings.md §5). About 1.2 times smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.frame import STORED, check_streams, pack_frame, pack_stored, parse_frame
from lmcache_format.encodings.huffman import compress_many, decompress_many
from lmcache_format.encodings.protocol import Encoding, Parameters
from lmcache_format.geometry import TensorSpec

MAGIC = b"huf1"


class Huf8(Encoding):
    """Every byte Huffman-coded; tensors of wider elements are stored as they are, behind a prefix."""

    name: ClassVar[str] = "huf8"

    def parameters(self) -> Parameters:
        """The version of the layout."""
        return {"version": 1}

    def _encode_group(
        self, data: NDArray[np.uint8], group: Sequence[TensorSpec], start_pos: int, into: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.uint8]]:
        raws = np.split(data, len(group))
        streams = compress_many(raws) if group[0].dtype.itemsize == 1 else raws
        for spec, raw, stream in zip(group, raws, streams, strict=True):
            if stream.size < spec.nbytes:
                one = pack_frame(MAGIC, spec, (stream,), into)
            else:
                one = pack_stored(MAGIC, spec, raw, into)
            into = into[one.size :]
            yield one

    def _decode_group(
        self, stored: Sequence[NDArray[np.uint8]], group: Sequence[TensorSpec], out: NDArray[np.uint8]
    ) -> None:
        spec = group[0]
        frames = [parse_frame(one, MAGIC, each) for one, each in zip(stored, group, strict=True)]
        for frame, each in zip(frames, group, strict=True):
            check_streams(frame, (None if spec.dtype.itemsize == 1 or frame.flags == STORED else 0,), each)
        coded = [frame.streams[0] for frame in frames if frame.flags != STORED]
        decoded = iter(decompress_many(coded, [spec.nbytes] * len(coded), spec.name))
        for frame, target in zip(frames, np.split(out, len(group)), strict=True):
            np.copyto(target, frame.streams[0] if frame.flags == STORED else next(decoded))


ENCODINGS = (Huf8(),)
