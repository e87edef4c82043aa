"""`raw`: the bytes as they are. No prefix; the tensor keeps its dtype and shape in the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.encodings.protocol import Encoding, check_size, equal_parts
from lmcache_format.geometry import TensorSpec


class Raw(Encoding):
    """Stored as computed."""

    name: ClassVar[str] = "raw"

    def max_stored_bytes(self, spec: TensorSpec) -> int:
        """Exactly the tensor."""
        return spec.nbytes

    def _encode_group(
        self, data: NDArray[np.uint8], group: Sequence[TensorSpec], start_pos: int, into: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.uint8]]:
        np.copyto(into[: data.size], data)
        yield from equal_parts(into[: data.size], len(group))

    def _decode_group(
        self, stored: Sequence[NDArray[np.uint8]], group: Sequence[TensorSpec], out: NDArray[np.uint8]
    ) -> None:
        for one, spec, target in zip(stored, group, equal_parts(out, len(group)), strict=True):
            check_size(one, spec.nbytes, spec.name)
            np.copyto(target, one)


ENCODINGS = (Raw(),)
