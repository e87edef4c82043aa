"""From a shard in one encoding to a shard in another: read and verify, encode, put, read back, compare.

Nothing here removes anything. A lossy shard is never decoded to be encoded again: its loss would be hidden by a
lossless name, or added to by a lossy one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend, ObjectInfo, Unavailable
from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import Encoding, Lossy
from lmcache_format.geometry import Part, TensorSpec
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName, new_nonce
from lmcache_format.shard import EncodingInfo, ShardHeader, ShardMeta

from .chunk import ChunkBuffer
from .errors import StoreError
from .publishing import Publication, Published, publish, set_aside
from .reading import Fault, ReadFault, Wanted, read_part
from .state import Entry
from .writing import build_shard, entry_of, whole_crc32c

Array = npt.NDArray[Any]
_SINK_TOKENS = "sink"


class NotAsWritten(StoreError):
    """What was read back is not what was written, or further from it than its class allows; it is not used."""


class NoGain(StoreError):
    """Encoding would not make the shard smaller."""


class Buffers(threading.local):
    """Chunk buffers of this thread, two by default, used again from shard to shard."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Part], ChunkBuffer] = {}

    def get(self, use: str, identity: Identity, part: Part, num_tokens: int) -> ChunkBuffer:
        """A buffer for a part; its content lasts until the next call for the same use."""
        known = self._kept.get((use, part))
        if known is None or known.identity != identity:
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] != use}
            known = self._kept[(use, part)] = ChunkBuffer(identity, part, identity.chunk_tokens)
        return known.for_tokens(num_tokens)


_BUFFERS = Buffers()


@dataclass(frozen=True, slots=True)
class Written:
    """A shard in its new encoding, verified. `is_ours`: it was put now, rather than found standing there."""

    entry: Entry
    is_ours: bool
    quarantined: str = ""


def encoding_info(encoding: Encoding) -> EncodingInfo:
    """How shards of an encoding describe it."""
    return EncodingInfo(encoding.name, encoding.parameters(), encoding.quality, encoding.must_understand)


def wanted_of(header: ShardHeader, identity: Identity) -> Wanted:
    """The very shard that a header was read from, for reading its data."""
    meta = header.meta
    return Wanted(
        identity,
        meta.key,
        meta.num_tokens,
        meta.depth,
        meta.part,
        meta.encoding.label,
        parent=meta.parent,
        fingerprint=meta.fingerprint,
    )


def read_decoded(backend: Backend, header: ShardHeader, identity: Identity) -> ChunkBuffer:
    """All of a shard, verified and decoded, in a buffer of this thread that lasts until the next call.

    Damage is believed when it was seen twice. Raises `ReadFault`, `Unavailable`.
    """
    meta = header.meta
    out = _BUFFERS.get("source", identity, meta.part, meta.num_tokens)
    read_into(backend, wanted_of(header, identity), meta.part, out)
    return out


def read_into(backend: Backend, wanted: Wanted, piece: Part, out: ChunkBuffer) -> None:
    """Fill a piece of a buffer from one shard, twice where the first try finds damage. Raises as `read_decoded`."""
    try:
        read_part(backend, wanted, piece, out)
    except ReadFault as fault:
        _raise_if_unavailable(fault)
        if fault.fault is not Fault.DAMAGED:
            raise
    else:
        return
    try:
        read_part(backend, wanted, piece, out)
    except ReadFault as fault:
        _raise_if_unavailable(fault)
        raise


def _raise_if_unavailable(fault: ReadFault) -> None:
    if fault.fault is Fault.UNAVAILABLE:
        raise Unavailable(f"{fault.path}: {fault.reason}", name=fault.path) from fault


def recoded_meta(header: ShardHeader, encoding: Encoding, writer: str) -> ShardMeta:
    """The header of a shard in another encoding: a write of its own, that says what it was made from.

    It keeps the date of its source: age and last use decide what is archived and pruned, and encoding is no use.
    """
    return replace(
        header.meta,
        encoding=encoding_info(encoding),
        nonce=new_nonce(),
        writer=writer,
        provenance=provenance_of(header),
    )


def provenance_of(header: ShardHeader) -> Mapping[str, Any]:
    """What a shard was made from: encoding, header checksum (which covers the checksums of the data) and nonce."""
    meta = header.meta
    return {"checksum": header.header_checksum, "encoding": meta.encoding.label, "nonce": meta.nonce}


def write_encoded(
    backend: Backend,
    meta: ShardMeta,
    chunk: ChunkBuffer,
    encoding: Encoding,
    *,
    is_removed: Callable[[str], bool],
    smaller_than: int | None = None,
) -> Written:
    """Encode a chunk, put the shard, read it back and compare. A sound shard that stands under the name is kept.

    Lossless must come back bit by bit, lossy within the bound of its class. Raises `NoGain` (nothing was put then),
    `NotAsWritten`, `Blocked`, `NoSpace`, `Unavailable`.
    """
    parts = build_shard(meta, chunk)
    size_bytes = sum(len(part) for part in parts)
    if smaller_than is not None and size_bytes >= smaller_than:
        raise NoGain(f"{size_bytes} bytes in {encoding.name}, {smaller_than} as it is")
    name = ShardName(meta.fingerprint, meta.key, meta.part, meta.encoding.label)
    published = publish(backend, name, chunk.identity, parts, is_removed=is_removed)
    if published.how is Publication.PRESENT:
        return _standing(published, meta)
    assert published.info is not None
    try:
        _compare(backend, meta, chunk, encoding)
    except NotAsWritten:
        set_aside(backend, name, published.info.version)  # or readers would find it by its name
        raise
    checksum = whole_crc32c(parts) if backend.capabilities.object_crc32c else None
    return Written(entry_of(meta, published.info, checksum), True, published.quarantined)


def _standing(published: Published, meta: ShardMeta) -> Written:
    assert published.found is not None
    return Written(entry_of_header(published.found), published.found.meta.nonce == meta.nonce, published.quarantined)


def entry_of_header(header: ShardHeader, crc32c: int | None = None) -> Entry:
    """The index entry of a shard that was read."""
    return entry_of(header.meta, ObjectInfo("", header.file_bytes, "", 0, crc32c))


def _compare(backend: Backend, meta: ShardMeta, chunk: ChunkBuffer, encoding: Encoding) -> None:
    """Raise `NotAsWritten` unless the shard, read back and decoded, is the chunk, or near enough to it."""
    back = _BUFFERS.get("back", chunk.identity, meta.part, meta.num_tokens)
    wanted = Wanted(
        chunk.identity, meta.key, meta.num_tokens, meta.depth, meta.part, meta.encoding.label, parent=meta.parent
    )
    try:
        read_into(backend, wanted, meta.part, back)
    except ReadFault as fault:
        raise NotAsWritten(f"{fault.path} did not come back as it was written: {fault.reason}") from fault
    if encoding.lossless:
        if back.memory != chunk.memory:
            raise NotAsWritten(f"{wanted.name.path} does not decode to what was encoded")
        return
    assert isinstance(encoding, Lossy)
    sink_tokens = max(0, int(encoding.parameters().get(_SINK_TOKENS, 0)) - meta.depth * meta.chunk_tokens)
    for spec in chunk.specs:
        error = relative_mse(chunk.tensors[spec.name], back.tensors[spec.name], spec, sink_tokens)
        allowed = encoding.max_relative_mse(spec)
        if not error <= allowed:
            raise NotAsWritten(
                f"{wanted.name.path}: {spec.name} is off by {error:.3g} of its energy, over {allowed:.3g}"
            )


def relative_mse(exact: Array, found: Array, spec: TensorSpec, sink_tokens: int) -> float:
    """Mean squared error over mean square of the elements after the sink tokens; infinite where exact ones differ.

    Equal bits are no error, whatever number they are.
    """
    axis = exact.ndim - 2
    sink, want = np.split(exact, [sink_tokens], axis=axis)
    found_sink, have = np.split(found, [sink_tokens], axis=axis)
    if not _same_bits(sink, found_sink):
        return float("inf")
    if _same_bits(want, have):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        wanted, got = _float64(want, spec.dtype), _float64(have, spec.dtype)
        energy = float(np.square(wanted).sum())
        return float(np.square(got - wanted).sum()) / energy if energy else float("inf")


def _same_bits(one: Array, other: Array) -> bool:
    """Numbers will not do: NaN is unlike itself, and the zeros are alike."""
    bits = f"u{one.dtype.itemsize}"
    return np.array_equal(np.ascontiguousarray(one).view(bits), np.ascontiguousarray(other).view(bits))


def _float64(bits: Array, dtype: Dtype) -> npt.NDArray[np.float64]:
    if dtype is Dtype.BF16:
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)
