"""From a shard on a back-end to verified bytes in a buffer (SPEC §12, read).

Nothing here decides what a fault means for the store; it says what kind it is. A byte counts as read only after the
checksum over it was found right, which is done block by block while the block is still in the CPU's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np

from lmcache_cli.backends import Backend, BackendError, NotFound, Obstructed, ReadHandle, ShortRead
from lmcache_cli.backends.buffers import AlignedBuffer
from lmcache_format.checksums import DIGEST_BYTES, xxh3
from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import get_encoding
from lmcache_format.errors import ChecksumMismatch, FormatError, ShardError, UnsupportedVersion
from lmcache_format.geometry import Part, TensorSpec, tensors_of
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.keys import ChunkKey
from lmcache_format.names import ShardName
from lmcache_format.shard import ALIGNMENT, RAW, ShardHeader, header_bytes, parse_header

from .chunk import ChunkBuffer

_FIRST_READ_BYTES = 16_384
_BATCH_BYTES = 4 << 20
"""Decoded bytes that one thread works on at a time, beside the buffer it fills."""


class Fault(Enum):
    """Why a shard gave no bytes."""

    MISSING = "missing"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    TOO_NEW = "too new"
    UNAVAILABLE = "unavailable"


class ReadFault(Exception):
    """A shard gave no bytes: `fault` says of which kind, `path` and `reason` which and why."""

    def __init__(self, fault: Fault, path: str, reason: object) -> None:
        super().__init__(f"{path}: {fault.value}: {reason}")
        self.fault = fault
        self.path = path
        self.reason = str(reason)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a shard must say about itself before its bytes may stand for a chunk. `parent` None accepts any."""

    identity: Identity
    key: ChunkKey
    num_tokens: int
    depth: int
    part: Part
    encoding: str
    parent: ChunkKey | None = None
    fingerprint: Fingerprint | None = None  # of the identity, where the caller has it at hand: it costs a hash

    @property
    def name(self) -> ShardName:
        """Where the shard lies."""
        return ShardName(self.fingerprint or self.identity.fingerprint, self.key, self.part, self.encoding)


def read_part(backend: Backend, wanted: Wanted, piece: Part, out: ChunkBuffer) -> int:
    """Fill the layers and heads `piece` of `out` from one shard; returns the bytes read from the back-end.

    On return every byte was verified. Raises `ReadFault`; the piece of `out` then holds unspecified bytes.
    """
    path = wanted.name.path
    try:
        with backend.open_read(path) as handle:
            header = read_header(handle)
            check_wanted(header, wanted)
            if header.meta.encoding.name == RAW:
                _read_raw(handle, header, piece, out)
            else:
                _read_encoded(handle, header, piece, out)
            return _bytes_read(header, piece)
    except (BackendError, FormatError) as problem:
        raise as_fault(path, problem) from problem


def _bytes_read(header: ShardHeader, piece: Part) -> int:
    """Of an encoded shard all of it, of a raw one the header and the piece."""
    if header.meta.encoding.name != RAW:
        return header.file_bytes
    meta = header.meta
    width = (meta.head_dim_k + meta.head_dim_v) * meta.dtype.itemsize
    return header.data_start + piece.num_layers * piece.num_heads * meta.num_tokens * width


def as_fault(path: str, problem: BackendError | FormatError) -> ReadFault:
    """The kind of fault an error of the layers below means."""
    match problem:
        case NotFound():
            fault = Fault.MISSING
        case ShortRead() | Obstructed():
            fault = Fault.DAMAGED
        case BackendError():
            fault = Fault.UNAVAILABLE
        case UnsupportedVersion():
            fault = Fault.TOO_NEW
        case ForeignShard():
            fault = Fault.FOREIGN
        case _:
            fault = Fault.DAMAGED
    return ReadFault(fault, path, problem)


class ForeignShard(ShardError):
    """A sound shard that lies under a name which is not its own."""


def read_header(handle: ReadHandle) -> ShardHeader:
    """The parsed header of an open shard, its claims checked against the object's length."""
    first = bytearray(min(_FIRST_READ_BYTES, handle.size))
    handle.read_into(0, [memoryview(first)])
    size = header_bytes(first, handle.size)
    if size > len(first):
        rest = bytearray(size - len(first))
        handle.read_into(len(first), [memoryview(rest)])
        first += rest
    return parse_header(memoryview(first)[:size], handle.size)


def check_wanted(header: ShardHeader, wanted: Wanted) -> None:
    """Raise `ForeignShard` unless the shard is exactly the one wanted: identity, key, parent, shape."""
    meta, identity = header.meta, wanted.identity
    pairs = (
        ("fingerprint", wanted.fingerprint or identity.fingerprint, meta.fingerprint),
        ("key", wanted.key.hex(), meta.key.hex()),
        ("part", str(wanted.part), str(meta.part)),
        ("encoding", wanted.encoding, meta.encoding.label),
        ("num_tokens", wanted.num_tokens, meta.num_tokens),
        ("depth", wanted.depth, meta.depth),
        ("parent", (wanted.parent or meta.parent).hex(), meta.parent.hex()),
        ("chunk_tokens", identity.chunk_tokens, meta.chunk_tokens),
        ("dtype", identity.dtype, meta.dtype),
        ("head_dim_k", identity.head_dim_k, meta.head_dim_k),
        ("head_dim_v", identity.head_dim_v, meta.head_dim_v),
    )
    for field, expected, found in pairs:
        if expected != found:
            raise ForeignShard(f"shard has another {field}", expected=expected, found=found)


def verify_data(handle: ReadHandle, header: ShardHeader) -> None:
    """Read every data byte and check it, decoding where a lossless encoding promises checksums of the result.

    Raises `ChecksumMismatch`, `EncodingError`, `ShortRead`, `Unavailable`.
    """
    if header.meta.encoding.name != RAW:
        for _ in _decoded(handle, header, range(len(header.tensors)), partial(_tensor_scratch, header=header)):
            pass
        return
    sizes = [spec.slab_bytes for spec in header.meta.specs for _ in range(spec.num_slabs)]
    stored = _scratch("stored", max(sizes))
    offset = 0
    for number, size in enumerate(sizes):
        view = stored[:size]
        handle.read_into(header.data_start + offset, [view])
        _check_digest(view, header.checksums, number, offset)
        offset += size


@dataclass(frozen=True, slots=True)
class _Block:
    """A run of slabs that lie together in the file and in memory: read at once, then checked one by one."""

    file_offset: int
    start: int
    stop: int
    digests: slice
    slabs: tuple[tuple[int, int], ...]


def _read_raw(handle: ReadHandle, header: ShardHeader, piece: Part, out: ChunkBuffer) -> None:
    meta = header.meta
    blocks = _plan(
        meta.part, piece, out.part, meta.num_tokens, meta.dtype, meta.head_dim_k, meta.head_dim_v, handle.block_bytes
    )
    memory, checksums, data_start = out.memory, header.checksums, header.data_start
    for block in blocks:
        handle.read_into(data_start + block.file_offset, [memory[block.start : block.stop]])
        found = b"".join([xxh3(memory[start:stop]) for start, stop in block.slabs])
        if found != checksums[block.digests]:
            raise ChecksumMismatch(
                f"data checksum within {block.file_offset} to {block.file_offset + block.stop - block.start}",
                expected=checksums[block.digests].hex()[:64],
                found=found.hex()[:64],
            )


@lru_cache(maxsize=256)
def _plan(
    source: Part,
    piece: Part,
    target: Part,
    num_tokens: int,
    dtype: Dtype,
    head_dim_k: int,
    head_dim_v: int,
    block_bytes: int,
) -> tuple[_Block, ...]:
    """Blocks that bring the layers and heads `piece` from a raw shard of `source` to a buffer laid out for `target`."""
    positions = _slab_positions(tensors_of(target, num_tokens, dtype, head_dim_k, head_dim_v), target)
    blocks: list[_Block] = []
    run: list[tuple[int, int, int, int]] = []  # file offset, memory offset, bytes, number of the slab

    def close() -> None:
        if run:
            start = run[0][1]
            stop = run[-1][1] + run[-1][2]
            digests = slice(run[0][3] * DIGEST_BYTES, (run[-1][3] + 1) * DIGEST_BYTES)
            slabs = tuple((memory, memory + size) for _, memory, size, _ in run)
            blocks.append(_Block(run[0][0], start, stop, digests, slabs))
            run.clear()

    offset = 0
    number = 0
    for spec in tensors_of(source, num_tokens, dtype, head_dim_k, head_dim_v):
        for index in range(spec.num_slabs):
            head = None if source.head_start is None else source.head_start + index
            is_wanted = piece.layer_start <= spec.layer < piece.layer_stop and (
                head is None or piece.head_start is None or piece.head_start <= head < (piece.head_stop or 0)
            )
            if is_wanted:
                memory = positions[(spec.layer, spec.side, head)]
                follows = run and run[-1][0] + run[-1][2] == offset and run[-1][1] + run[-1][2] == memory
                if not follows or memory + spec.slab_bytes - run[0][1] > block_bytes:
                    close()
                run.append((offset, memory, spec.slab_bytes, number))
            offset += spec.slab_bytes
            number += 1
    close()
    return tuple(blocks)


def _slab_positions(specs: Sequence[TensorSpec], part: Part) -> dict[tuple[int, str, int | None], int]:
    positions: dict[tuple[int, str, int | None], int] = {}
    position = 0
    for spec in specs:
        for index in range(spec.num_slabs):
            head = None if part.head_start is None else part.head_start + index
            positions[(spec.layer, spec.side, head)] = position
            position += spec.slab_bytes
    return positions


def _read_encoded(handle: ReadHandle, header: ShardHeader, piece: Part, out: ChunkBuffer) -> None:
    part = header.meta.part
    wanted = [n for n, t in enumerate(header.tensors) if piece.layer_start <= t.spec.layer < piece.layer_stop]
    if piece == part == out.part:
        starts = [0, *accumulate(spec.nbytes for spec in out.specs)]
        in_place = _decoded(
            handle, header, wanted, lambda numbers: out.memory[starts[numbers[0]] : starts[numbers[-1] + 1]]
        )
        for _ in in_place:
            pass
        return
    for spec, data in _decoded(handle, header, wanted, partial(_tensor_scratch, header=header)):
        here = np.frombuffer(data, spec.dtype.numpy).reshape(spec.shape)
        there = out.tensors[spec.name]
        if piece.head_start is None or part.head_start is None or out.part.head_start is None:
            there[...] = here
            continue
        first, to = piece.head_start - part.head_start, piece.head_start - out.part.head_start
        there[to : to + piece.num_heads] = here[first : first + piece.num_heads]


def _decoded(
    handle: ReadHandle, header: ShardHeader, wanted: Sequence[int], room: Callable[[Sequence[int]], memoryview]
) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Read, check and decode the tensors with the numbers `wanted` (ascending, without a gap), some MiB at a time.

    `room` gives the memory for a batch of them, back to back. What was read is not held: several threads at once need
    little beyond the buffers they fill.
    """
    encoding = get_encoding(header.meta.encoding.name, header.meta.encoding.parameters)
    slabs = [0, *accumulate(tensor.spec.num_slabs for tensor in header.tensors)]
    for numbers in _batches(header, wanted):
        tensors = [header.tensors[number] for number in numbers]
        begin = tensors[0].begin
        stored = _scratch("stored", tensors[-1].end - begin)[: tensors[-1].end - begin]
        handle.read_into(header.data_start + begin, [stored])
        pieces = [stored[tensor.begin - begin : tensor.end - begin] for tensor in tensors]
        for number, view in zip(numbers, pieces, strict=True):
            _check_digest(view, header.checksums, number, header.tensors[number].begin)
        specs = [tensor.spec for tensor in tensors]
        memory = room(numbers)
        encoding.decode_many(pieces, specs, np.frombuffer(memory, np.uint8))
        offset = 0
        for number, spec in zip(numbers, specs, strict=True):
            data = memory[offset : offset + spec.nbytes]
            if header.decoded_checksums:
                size = spec.slab_bytes
                found = b"".join(xxh3(data[head * size : (head + 1) * size]) for head in range(spec.num_slabs))
                if found != header.decoded_checksums[slabs[number] * DIGEST_BYTES : slabs[number + 1] * DIGEST_BYTES]:
                    raise ChecksumMismatch("checksum of the decoded data", where=spec.name)
            yield spec, data
            offset += spec.nbytes


def _batches(header: ShardHeader, wanted: Sequence[int]) -> Iterator[Sequence[int]]:
    """Runs of tensors that are some MiB long when decoded, one at least."""
    batch: list[int] = []
    size = 0
    for number in wanted:
        nbytes = header.tensors[number].spec.nbytes
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += nbytes
    if batch:
        yield batch


def _tensor_scratch(numbers: Sequence[int], header: ShardHeader) -> memoryview:
    return _scratch("decoded", sum(header.tensors[number].spec.nbytes for number in numbers))


def _check_digest(view: memoryview, checksums: bytes, number: int, offset: int) -> None:
    expected = checksums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
    found = xxh3(view)
    if found != expected:
        raise ChecksumMismatch(
            f"data checksum within {offset} to {offset + len(view)}", expected=expected.hex(), found=found.hex()
        )


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, AlignedBuffer] = {}


_SCRATCH = _Scratch()


def _scratch(name: str, size: int) -> memoryview:
    """This thread's buffer of that name, grown to `size` bytes; its content lasts until the next call."""
    buffer = _SCRATCH.buffers.get(name)
    if buffer is None or buffer.size_bytes < size:
        buffer = _SCRATCH.buffers[name] = AlignedBuffer(size + -size % ALIGNMENT)
    return buffer.view(size)
