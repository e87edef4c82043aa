"""`huf8`: lossless for one-byte elements, such as KV in fp8 (encodings.md §5). About 1.2 times smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.frame import STORED, Coded, check_streams, pack_frame, pack_stored, parse_frame
from lmcache_format.encodings.huffman import decompress_into
from lmcache_format.encodings.protocol import Encoding, Parameters, equal_parts
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
        for spec, raw in zip(group, equal_parts(data, len(group)), strict=True):
            coded = pack_frame(MAGIC, spec, (Coded(raw),), into) if spec.dtype.itemsize == 1 else None
            one = pack_stored(MAGIC, spec, raw, into) if coded is None else coded
            into = into[one.size :]
            yield one

    def _decode_group(
        self, stored: Sequence[NDArray[np.uint8]], group: Sequence[TensorSpec], out: NDArray[np.uint8]
    ) -> None:
        for one, spec, target in zip(stored, group, equal_parts(out, len(group)), strict=True):
            frame = parse_frame(one, MAGIC, spec)
            is_stored = frame.flags == STORED
            check_streams(frame, (None if is_stored or spec.dtype.itemsize == 1 else 0,), spec)
            if is_stored:
                np.copyto(target, frame.streams[0])
            else:
                decompress_into(frame.streams[0], target, spec.name)


ENCODINGS = (Huf8(),)
