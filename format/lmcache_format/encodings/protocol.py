"""What every encoding offers, and the part of it that is the same for most."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]
Parameters = Mapping[str, str | int | bool]


class Encoding(ABC):
    """How the tensors of a shard are stored: one encoded byte string a tensor, each decodable on its own.

    Instances hold no state but constants, and may be used from any number of threads. `quality` is None for a lossless
    encoding and names the class of a lossy one. `must_understand` is true where a reader that does not know the
    encoding must take the shard for absent. Scratch memory is kept per thread and reused.
    """

    name: ClassVar[str]
    quality: ClassVar[str | None] = None
    must_understand: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        """True where decoding gives back the very bytes that were encoded."""
        return self.quality is None

    def parameters(self) -> Parameters:
        """What `lmcache.encoding` records beside the name: JSON values without floats, the same for every shard."""
        return {}

    def max_stored_bytes(self, spec: TensorSpec) -> int:
        """No writer stores more than this for one tensor; readers refuse larger claims before they allocate."""
        return spec.nbytes + PREFIX_BYTES

    def encode(self, raw: Bytes, spec: TensorSpec, *, start_pos: int = 0) -> NDArray[np.uint8]:
        """Encode one tensor; see `encode_many`."""
        return self.encode_many(raw, (spec,), start_pos=start_pos)[0]

    def decode(self, stored: Bytes, spec: TensorSpec, out: NDArray[np.uint8]) -> None:
        """Decode one tensor into `out`; see `decode_many`."""
        self.decode_many((stored,), (spec,), out)

    def encode_many(
        self,
        raw: Bytes,
        specs: Sequence[TensorSpec],
        *,
        start_pos: int = 0,
        into: NDArray[np.uint8] | None = None,
    ) -> list[NDArray[np.uint8]]:
        """Encode tensors that lie back to back in `raw`, C-contiguous, as in a chunk: 1-D uint8, one a tensor.

        They are written back to back to the start of `into`, where given (1-D uint8 with at least `encode_bound(specs)`
        bytes, owned by the caller), else to fresh memory; a reused `into` saves the page faults. `start_pos` is the
        absolute position of the first token: lossy encodings keep the first tokens of a sequence exact. Raises
        `EncodingError` where a size does not fit.
        """
        data = bytes_of(raw)
        check_size(data, sum(spec.nbytes for spec in specs), "tensors")
        bound = self.encode_bound(specs)
        room = np.empty(bound, np.uint8) if into is None else into
        check_room(room, bound)
        encoded: list[NDArray[np.uint8]] = []
        read = written = 0
        for group in _groups(specs):
            group_bytes = group[0].nbytes * len(group)
            for one in self._encode_group(data[read : read + group_bytes], group, start_pos, room[written:]):
                encoded.append(one)
                written += one.size
            read += group_bytes
        return encoded

    def decode_many(self, stored: Sequence[Bytes], specs: Sequence[TensorSpec], out: NDArray[np.uint8]) -> None:
        """Decode tensors back to back into `out`: 1-D uint8 with exactly their bytes, owned by the caller.

        Raises `EncodingError` for every byte string that no writer made, having allocated no more than a few times the
        bytes of `specs`; `out` is then undefined.
        """
        if len(stored) != len(specs):
            raise EncodingError("wrong number of stored tensors", expected=len(specs), found=len(stored))
        size = sum(spec.nbytes for spec in specs)
        check_room(out, size)
        check_size(out, size, "output")
        first = written = 0
        for group in _groups(specs):
            group_bytes = group[0].nbytes * len(group)
            mine = [bytes_of(one) for one in stored[first : first + len(group)]]
            self._decode_group(mine, group, out[written : written + group_bytes])
            first += len(group)
            written += group_bytes

    def encode_bound(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes that `encode_many` needs at most for `specs`."""
        return sum(self.max_stored_bytes(spec) for spec in specs)

    @abstractmethod
    def _encode_group(
        self, data: NDArray[np.uint8], group: Sequence[TensorSpec], start_pos: int, into: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.uint8]]:
        """Encode tensors of one shape and dtype back to back into `into`."""

    @abstractmethod
    def _decode_group(
        self, stored: Sequence[NDArray[np.uint8]], group: Sequence[TensorSpec], out: NDArray[np.uint8]
    ) -> None:
        """Decode tensors of one shape and dtype back to back into `out`."""


PREFIX_BYTES = 32
"""What a stored tensor may be larger than the raw one: a prefix, since incompressible data is kept as it is."""

GROUP_BYTES = 3 << 19
"""Equal tensors are worked on together up to this many raw bytes: few calls, and scratch still in the cache."""


def _groups(specs: Sequence[TensorSpec]) -> Iterator[Sequence[TensorSpec]]:
    """Runs of tensors of one shape and dtype."""
    first = 0
    while first < len(specs):
        spec = specs[first]
        most = max(1, GROUP_BYTES // max(1, spec.nbytes))
        last = first + 1
        while last < len(specs) and last - first < most and _is_alike(specs[last], spec):
            last += 1
        yield specs[first:last]
        first = last


def _is_alike(one: TensorSpec, other: TensorSpec) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def bytes_of(data: Bytes) -> NDArray[np.uint8]:
    """`data` as 1-D uint8 without a copy."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def equal_parts(data: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
    """`count` views of equal length, which divides that of `data`: numpy's own split takes ten times as long."""
    size = data.size // count
    return [data[begin : begin + size] for begin in range(0, size * count, size or 1)] or [data[:0]] * count


def check_size(data: NDArray[np.uint8], expected: int, where: str) -> None:
    """Raise `EncodingError` unless `data` has `expected` bytes."""
    if data.size != expected:
        raise EncodingError("wrong number of bytes", where=where, expected=expected, found=data.size)


def check_room(room: NDArray[np.uint8], at_least: int) -> None:
    """Raise `EncodingError` unless `room` can be written as `at_least` plain bytes."""
    if room.dtype != np.uint8 or room.ndim != 1 or not room.flags.c_contiguous or not room.flags.writeable:
        raise EncodingError(
            "not writable 1-D contiguous uint8", where="output", found=f"{room.dtype}{list(room.shape)}"
        )
    if room.size < at_least:
        raise EncodingError("too small", where="output", expected=f"at least {at_least} bytes", found=room.size)
