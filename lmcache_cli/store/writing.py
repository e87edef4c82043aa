"""From a buffer to a committed shard (SPEC §12, commit): checksums, header, one atomic put."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from lmcache_cli.backends import AlreadyExists, Backend, Durability, HeadLast, ObjectInfo, Obstructed
from lmcache_format.checksums import DIGEST_BYTES, crc32c, xxh3
from lmcache_format.encodings import encoding_for
from lmcache_format.names import ShardName
from lmcache_format.segment import key_number
from lmcache_format.shard import RAW, ShardMeta, build_header

from .chunk import ChunkBuffer
from .state import Entry

_BLOCK_BYTES = 1 << 20
"""What is checked and then written: small enough for the CPU's cache, large enough to be worth a call."""


def build_shard(meta: ShardMeta, chunk: ChunkBuffer) -> Sequence[bytes | memoryview]:
    """Header and data of a shard, to be put one after the other. Raw data is the buffer's own memory, not a copy, and
    its checksums are made while it is put."""
    if meta.encoding.name == RAW:
        return _RawShard(meta, chunk)
    encoding = encoding_for(meta.encoding)
    raw, start = np.frombuffer(chunk.memory, np.uint8), meta.depth * meta.chunk_tokens
    stored = [piece.data for piece in encoding.encode_many(raw, chunk.specs, start_pos=start)]
    checksums = b"".join(xxh3(piece) for piece in stored)
    decoded = _slab_checksums(chunk) if meta.encoding.is_lossless else b""
    return [build_header(meta, checksums, [len(piece) for piece in stored], decoded), *stored]


def _slab_checksums(chunk: ChunkBuffer) -> bytes:
    """XXH3-128 of every head of every tensor, in shard order."""
    sizes = [spec.slab_bytes for spec in chunk.specs for _ in range(spec.num_slabs)]
    stops = accumulate(sizes)
    return b"".join(xxh3(chunk.memory[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True))


class _RawShard(HeadLast):
    """A raw shard: its header holds the XXH3-128 of every tensor and of every head of every tensor."""

    def __init__(self, meta: ShardMeta, chunk: ChunkBuffer) -> None:
        self._meta, self._specs = meta, chunk.specs
        self._head: bytes | None = None
        slabs = sum(spec.num_slabs for spec in chunk.specs)
        blank = self._header(bytes(slabs * DIGEST_BYTES), bytes(len(chunk.specs) * DIGEST_BYTES))
        super().__init__(len(blank), chunk.memory)

    def blocks(self) -> Iterator[memoryview]:
        """Tensor by tensor, so that the pass over its heads, and the write, find the bytes in the CPU's cache."""
        tensors, slabs = [], []
        start = stop = 0
        for spec in self._specs:
            if stop > start and stop + spec.nbytes - start > _BLOCK_BYTES:
                yield self.body[start:stop]
                start = stop
            begin, stop = stop, stop + spec.nbytes
            tensors.append(xxh3(self.body[begin:stop]))
            size = spec.slab_bytes
            slabs += [xxh3(self.body[at : at + size]) for at in range(begin, stop, size)]
        yield self.body[start:stop]
        self._head = self._header(b"".join(slabs), b"".join(tensors))

    def head(self) -> bytes:
        if self._head is None:
            deque(self.blocks(), maxlen=0)
        assert self._head is not None
        return self._head

    def _header(self, slabs: bytes, tensors: bytes) -> bytes:
        return build_header(self._meta, slabs, tensor_checksums=tensors)


def put_shard(
    backend: Backend, meta: ShardMeta, parts: Sequence[bytes | memoryview], durability: Durability, *, replace: bool
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


def whole_crc32c(parts: Sequence[bytes | memoryview]) -> int:
    """CRC32C of the whole object."""
    value = 0
    for part in parts:
        value = crc32c(part, value)
    return value
