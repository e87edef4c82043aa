"""From a buffer to a committed shard (SPEC §12, commit): checksums, header, one atomic put."""

from __future__ import annotations

import numpy as np

from lmcache_cli.backends import AlreadyExists, Backend, Durability, ObjectInfo, Obstructed
from lmcache_format.checksums import crc32c, xxh3
from lmcache_format.encodings import encoding_for
from lmcache_format.names import ShardName
from lmcache_format.segment import key_number
from lmcache_format.shard import RAW, ShardMeta, build_header

from .chunk import ChunkBuffer
from .state import Entry


def build_shard(meta: ShardMeta, chunk: ChunkBuffer) -> list[bytes | memoryview]:
    """Header and data of a shard, to be put one after the other. Raw data is the buffer's own memory, not a copy."""
    tensors, slabs = chunk_checksums(chunk)
    if meta.encoding.name == RAW:
        return [build_header(meta, slabs, tensor_checksums=tensors), chunk.memory]
    encoding = encoding_for(meta.encoding)
    raw, start = np.frombuffer(chunk.memory, np.uint8), meta.depth * meta.chunk_tokens
    stored = [piece.data for piece in encoding.encode_many(raw, chunk.specs, start_pos=start)]
    checksums = b"".join(xxh3(piece) for piece in stored)
    decoded = slabs if meta.encoding.is_lossless else b""
    return [build_header(meta, checksums, [len(piece) for piece in stored], decoded), *stored]


def chunk_checksums(chunk: ChunkBuffer) -> tuple[bytes, bytes]:
    """XXH3-128 of every tensor, and of every head of every tensor, in shard order.

    Tensor by tensor, so that the second pass finds the bytes in the CPU's cache.
    """
    memory = chunk.memory
    tensors, slabs = [], []
    position = 0
    for spec in chunk.specs:
        size, stop = spec.slab_bytes, position + spec.nbytes
        tensors.append(xxh3(memory[position:stop]))
        slabs += [xxh3(memory[start : start + size]) for start in range(position, stop, size)]
        position = stop
    return b"".join(tensors), b"".join(slabs)


def put_shard(
    backend: Backend, meta: ShardMeta, parts: list[bytes | memoryview], durability: Durability, *, replace: bool
) -> Entry | None:
    """Publish a shard; None where something stands under the name already: a shard, unless `replace` is asked for, or
    what is no object."""
    path = ShardName(meta.fingerprint, meta.key, meta.part, meta.encoding.label).path
    try:
        info = backend.put(path, parts, durability=durability, if_absent=not replace)
    except (AlreadyExists, Obstructed):
        return None
    checksum = whole_crc32c(parts) if backend.capabilities.object_crc32c else None
    return entry_of(meta, info, checksum)


def entry_of(meta: ShardMeta, info: ObjectInfo, checksum: int | None = None) -> Entry:
    """The manifest's record of a shard, from its header and the object that holds it."""
    return Entry(
        key=meta.key[:16],
        parent=key_number(meta.parent),
        depth=meta.depth,
        num_tokens=meta.num_tokens,
        part=meta.part,
        encoding=meta.encoding.label,
        nonce=meta.nonce,
        size_bytes=info.size_bytes,
        created_ms=meta.created_ms,
        crc32c=info.crc32c if checksum is None else checksum,
    )


def whole_crc32c(parts: list[bytes | memoryview]) -> int:
    """CRC32C of the whole object."""
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value
