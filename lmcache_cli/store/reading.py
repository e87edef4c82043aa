"""From a shard on a back-end to verified bytes in a buffer (SPEC §12, read).

Nothing here decides what a fault means for the store; it says what kind it is. A byte counts as read only after the
checksum over it was found right, which is done block by block while the block is still in the CPU's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np

from lmcache_cli.backends import Backend, BackendError, NotFound, Obstructed, ReadHandle, ShortRead
from lmcache_cli.backends.buffers import AlignedBuffer
from lmcache_cli.backends.turns import Turns
from lmcache_format.checksums import DIGEST_BYTES, xxh3
from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import encoding_for
from lmcache_format.errors import ChecksumMismatch, FormatError, ShardError, UnsupportedVersion
from lmcache_format.geometry import Part, TensorSpec, tensors_of
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.keys import ChunkKey
from lmcache_format.names import ShardName
from lmcache_format.shard import ALIGNMENT, RAW, HeaderLikeness, ShardHeader, StoredTensor, header_bytes, parse_header

from .chunk import BlockViews, ChunkBuffer

_FIRST_READ_BYTES = 16_384
_DEVICE_BLOCK_BYTES = 2 << 20
"""A handle that wants blocks this large waits for a device."""
_CHECKS = Turns()
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


def read_part(
    backend: Backend, wanted: Wanted, piece: Part, out: ChunkBuffer, *, on_wait: Callable[[], None] = lambda: None
) -> int:
    """Fill the layers and heads `piece` of `out` from one shard; returns the bytes read from the back-end.

    `on_wait` is called before the first read that has to wait for a device rather than for memory.
    On return every byte was verified. Raises `ReadFault`; the piece of `out` then holds unspecified bytes.
    """
    path = wanted.name.path
    try:
        with backend.open_read(path) as handle:
            if handle.block_bytes >= _DEVICE_BLOCK_BYTES:
                on_wait()
            if _read_alike(handle, wanted, piece, out):
                return handle.size
            header, likeness = _read_header_and_likeness(handle)
            check_wanted(header, wanted)
            if header.meta.encoding.name == RAW:
                blocks = _plan_of(wanted, piece, out, handle)
                _read_raw(handle, header.checksums, header.data_start, blocks, out)
            else:
                _read_encoded(handle, header, piece, out)
            if likeness is not None and piece == wanted.part == out.part:
                _KNOWN_HEADERS[_kind(wanted)] = (header.data_start, likeness)
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
    return parse_header(_read_header_bytes(handle), handle.size)


def _read_header_bytes(handle: ReadHandle) -> memoryview:
    first = bytearray(min(_FIRST_READ_BYTES, handle.size))
    handle.read_into(0, [memoryview(first)])
    size = header_bytes(first, handle.size)
    if size > len(first):
        rest = bytearray(size - len(first))
        handle.read_into(len(first), [memoryview(rest)])
        first += rest
    return memoryview(first)[:size]


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

    def read(tensor: StoredTensor) -> memoryview:
        view = _scratch("stored", tensor.end - tensor.begin)
        handle.read_into(header.data_start + tensor.begin, [view])
        return view

    _verify_tensors(header, read)


def verify_content(content: memoryview, header: ShardHeader) -> None:
    """The same for a whole shard in the encoding `raw` that is in memory, where it lies. Raises `ChecksumMismatch`."""
    data = content[header.data_start :]
    _verify_tensors(header, lambda tensor: data[tensor.begin : tensor.end])


def _verify_tensors(header: ShardHeader, read: Callable[[StoredTensor], memoryview]) -> None:
    """Every tensor, read once: its slabs, and all of it where the shard has a checksum of that."""
    slab = 0
    for number, tensor in enumerate(header.tensors):
        view = read(tensor)
        size = tensor.spec.slab_bytes
        for start in range(0, tensor.spec.num_slabs * size, size):
            _check_digest(view[start : start + size], header.checksums, slab, tensor.begin + start)
            slab += 1
        if header.tensor_checksums:
            _check_digest(view, header.tensor_checksums, number, tensor.begin)


@dataclass(frozen=True, slots=True)
class _Block:
    """A run of slabs that lie together in the file and in memory: read at once, then checked one by one."""

    file_offset: int
    start: int
    stop: int
    digests: slice
    slabs: tuple[tuple[int, int], ...]


_KNOWN_HEADERS: dict[tuple[object, ...], tuple[int, HeaderLikeness]] = {}
"""Of the last whole raw shard of a kind: how long its header was, and what the next one's will look like."""


def _kind(wanted: Wanted) -> tuple[object, ...]:
    return wanted.fingerprint, wanted.part, wanted.num_tokens, wanted.encoding


def _read_alike(handle: ReadHandle, wanted: Wanted, piece: Part, out: ChunkBuffer) -> bool:
    """The short way for a shard that is laid out as the buffer is, and whose header is like the last one's but for what
    is wanted: header and first data come with one read, and the header is compared, not parsed.

    False where it is not so; nothing is concluded then. Raises `ChecksumMismatch` for data, `ShortRead`, `Unavailable`.
    """
    known = _KNOWN_HEADERS.get(_kind(wanted))
    if known is None or not piece == wanted.part == out.part or wanted.parent is None:
        return False
    size, likeness = known
    identity = wanted.identity
    if handle.size != size + out.size_bytes:
        return False
    blocks = _whole_plan(
        out.part, out.num_tokens, identity.dtype, identity.head_dim_k, identity.head_dim_v, handle.block_bytes
    )
    header = _scratch("header", size)
    first = blocks[0].stop
    handle.read_into(0, [header, out.memory[:first]])
    checksums = likeness.tensor_checksums_of(header, wanted.key, wanted.parent, wanted.depth)
    if checksums is None or header_bytes(header, handle.size) != size:
        return False
    _read_raw(handle, checksums, size, blocks, out, already=first)
    return True


def _read_header_and_likeness(handle: ReadHandle) -> tuple[ShardHeader, HeaderLikeness | None]:
    raw = _read_header_bytes(handle)
    header = parse_header(raw, handle.size)
    return header, HeaderLikeness.of(raw, header)


def _plan_of(wanted: Wanted, piece: Part, out: ChunkBuffer, handle: ReadHandle) -> tuple[_Block, ...]:
    identity = wanted.identity
    return _plan(
        wanted.part,
        piece,
        out.part,
        wanted.num_tokens,
        identity.dtype,
        identity.head_dim_k,
        identity.head_dim_v,
        handle.block_bytes,
    )


def _read_raw(
    handle: ReadHandle,
    checksums: bytes,
    data_start: int,
    blocks: tuple[_Block, ...],
    out: ChunkBuffer,
    already: int = 0,
) -> None:
    """Read and check block by block; the first `already` bytes of the data are in the buffer, to be checked only."""
    read_into = handle.read_into
    turn = _CHECKS.one if handle.block_bytes >= _DEVICE_BLOCK_BYTES else nullcontext
    for file_offset, stop, whole, slabs, digests in _views(out, blocks):
        if stop > already:
            read_into(data_start + file_offset, whole)
        with turn():
            found = b"".join(map(xxh3, slabs))
        if found != checksums[digests]:
            raise ChecksumMismatch(
                f"data checksum within {file_offset} to {file_offset + whole[0].nbytes}",
                expected=checksums[digests].hex()[:64],
                found=found.hex()[:64],
            )


@lru_cache(maxsize=64)
def _whole_plan(
    part: Part, num_tokens: int, dtype: Dtype, head_dim_k: int, head_dim_v: int, block_bytes: int
) -> tuple[_Block, ...]:
    """Blocks of whole tensors, each tensor with one checksum, for a buffer laid out as the shard is."""
    blocks = []
    tensors: list[tuple[int, int]] = []
    first = stop = 0
    for number, spec in enumerate(tensors_of(part, num_tokens, dtype, head_dim_k, head_dim_v)):
        if tensors and stop + spec.nbytes - tensors[0][0] > block_bytes:
            blocks.append(_whole_block(tensors, first))
            tensors, first = [], number
        tensors.append((stop, stop + spec.nbytes))
        stop += spec.nbytes
    return (*blocks, _whole_block(tensors, first))


def _whole_block(tensors: list[tuple[int, int]], first: int) -> _Block:
    digests = slice(first * DIGEST_BYTES, (first + len(tensors)) * DIGEST_BYTES)
    return _Block(tensors[0][0], tensors[0][0], tensors[-1][1], digests, tuple(tensors))


def _views(out: ChunkBuffer, blocks: tuple[_Block, ...]) -> Sequence[BlockViews]:
    """Every block with its memory and that of its slabs. Kept with the buffer while it is read into in the same way:
    making them costs as much as the checksums do."""
    if out.views_of is not blocks:
        memory = out.memory
        out.views = [
            (
                block.file_offset,
                block.stop,
                [memory[block.start : block.stop]],
                [memory[start:stop] for start, stop in block.slabs],
                block.digests,
            )
            for block in blocks
        ]
        out.views_of = blocks
    return out.views


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
    encoding = encoding_for(header.meta.encoding)
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
