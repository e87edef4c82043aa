"""Checks of sound shards against what they must agree with: their name, their namespace, their own checksums.

`parse_header` finds damage; these find sound bytes in the wrong place, which a rename, a copy or an edit can make.
"""

from __future__ import annotations

from collections.abc import Iterator

from .checksums import DIGEST_BYTES, Buffer, xxh3
from .errors import ChecksumMismatch, GeometryError, ShardError
from .geometry import check_part
from .identity import Identity
from .names import ShardName
from .shard import RAW, ShardHeader, ShardMeta


def check_name(meta: ShardMeta, name: ShardName) -> None:
    """Raise `ShardError` unless a shard lies under the name that its header gives it (SPEC §8.5)."""
    own = ShardName(meta.fingerprint, meta.key, meta.part, meta.encoding.label)
    if own != name:
        raise ShardError("shard lies under another name", where=name.path, expected=name.file_name, found=own.path)


def check_identity(meta: ShardMeta, identity: Identity) -> None:
    """Raise `ShardError` unless a shard's words about its shape are those of its namespace (SPEC §8.5)."""
    told = (meta.fingerprint, meta.dtype, meta.head_dim_k, meta.head_dim_v, meta.chunk_tokens)
    own = (identity.fingerprint, identity.dtype, identity.head_dim_k, identity.head_dim_v, identity.chunk_tokens)
    if told != own:
        raise ShardError("shard differs from its namespace", expected=tuple(map(str, own)), found=tuple(map(str, told)))
    try:
        check_part(identity, meta.part)
    except GeometryError as problem:
        raise ShardError("shard differs from its namespace", expected=problem.expected, found=problem.found) from None


def stored_pieces(header: ShardHeader) -> Iterator[tuple[int, int, bytes]]:
    """Begin, end (counted from the start of the data) and digest of every run of bytes that has its own checksum."""
    is_raw = header.meta.encoding.name == RAW
    index = 0
    for tensor in header.tensors:
        step = tensor.spec.slab_bytes if is_raw else tensor.end - tensor.begin
        for begin in range(tensor.begin, tensor.end, step):
            yield begin, begin + step, header.checksums[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            index += 1


def verify_data(header: ShardHeader, data: Buffer) -> None:
    """Check all bytes after the header; raises `ShardError` for their number, `ChecksumMismatch` for their content."""
    view = memoryview(data).cast("B")
    if len(view) != header.data_bytes:
        raise ShardError("data has another length than the header says", expected=header.data_bytes, found=len(view))
    for begin, end, digest in stored_pieces(header):
        found = xxh3(view[begin:end])
        if found != digest:
            where = next(tensor.spec.name for tensor in header.tensors if tensor.begin <= begin < tensor.end)
            raise ChecksumMismatch(
                f"bytes {begin} to {end} of the data", where=where, expected=digest.hex(), found=found.hex()
            )
