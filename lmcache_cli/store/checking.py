"""Is one shard what its name, its namespace and the index say? Reads its header, or every byte."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from lmcache_cli.backends import Backend, BackendError, NotFound, Obstructed, ReadHandle, ShortRead
from lmcache_format.encodings import encoding_for
from lmcache_format.errors import ChecksumMismatch, FormatError, UnsupportedVersion
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName
from lmcache_format.segment import key_number
from lmcache_format.shard import FORMAT, ShardHeader, ShardMeta, looks_like_shard

from .reading import read_header, verify_data
from .state import Entry

_LOOK_BYTES = 64 * 1024
_START_BYTES = 64
_FORMAT = re.compile(rb'"lmcache\.format"\s*:\s*"([^"\\]{1,40})"')
_TRIES = 2


class Health(StrEnum):
    """What a check of one shard found."""

    SOUND = "sound"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    NEWER = "newer"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Checked:
    """`header` is there where it could be read, whatever the rest; `version` is the object's that was read."""

    health: Health
    reason: str = ""
    bytes_read: int = 0
    header: ShardHeader | None = None
    version: str = ""


def check_shard(backend: Backend, name: ShardName, identity: Identity | None, *, with_data: bool) -> Checked:
    """Read a shard's header, and with `with_data` every byte of it. `identity` None: its namespace has lost it.

    Damage is only reported once it was seen twice: a fault on the way from the device must not condemn what lies on it.
    """
    checked = _check_once(backend, name, identity, with_data)
    for _ in range(_TRIES - 1):
        if checked.health is not Health.DAMAGED:
            break
        checked = _check_once(backend, name, identity, with_data)
    return checked


def _check_once(backend: Backend, name: ShardName, identity: Identity | None, with_data: bool) -> Checked:
    try:
        with backend.open_read(name.path) as handle:
            return _check_open(handle, name, identity, with_data)
    except NotFound as problem:
        return Checked(Health.GONE, str(problem))
    except (ShortRead, Obstructed) as problem:
        return Checked(Health.DAMAGED, str(problem))
    except BackendError as problem:
        return Checked(Health.UNKNOWN, str(problem))


def _check_open(handle: ReadHandle, name: ShardName, identity: Identity | None, with_data: bool) -> Checked:
    try:
        header = read_header(handle)
    except UnsupportedVersion as problem:
        return Checked(Health.NEWER, str(problem), version=handle.version)
    except FormatError as problem:
        return _not_a_shard(handle, problem)
    reason = _contradiction(header.meta, name, identity)
    if reason:
        return Checked(Health.DAMAGED, reason, header.data_start, header, handle.version)
    health, bytes_read = Health.SOUND, header.data_start
    try:
        encoding_for(header.meta.encoding)
    except UnsupportedVersion as problem:
        health, reason = Health.NEWER, str(problem)
    if with_data:
        bytes_read = header.file_bytes
        try:
            verify_data(handle, header)
        except UnsupportedVersion as problem:
            health, reason = Health.NEWER, str(problem)
        except FormatError as problem:
            health, reason = Health.DAMAGED, str(problem)
    return Checked(health, reason, bytes_read, header, handle.version)


def _not_a_shard(handle: ReadHandle, problem: FormatError) -> Checked:
    """A file whose header does not hold: damaged, of a newer format, or never one of ours."""
    first = bytearray(min(_LOOK_BYTES, handle.size))
    handle.read_into(0, [memoryview(first)])
    claimed = _FORMAT.search(first)
    if claimed is not None and claimed[1] != FORMAT.encode() and not isinstance(problem, ChecksumMismatch):
        found = claimed[1].decode("ascii", "backslashreplace")
        return Checked(Health.NEWER, f"newer format v{found}", len(first), version=handle.version)
    start = bytes(first[:_START_BYTES])
    is_ours = looks_like_shard(start) or len(start) < _START_BYTES or not any(start)
    health = Health.DAMAGED if is_ours else Health.FOREIGN
    return Checked(health, str(problem), len(first), version=handle.version)


def _contradiction(meta: ShardMeta, name: ShardName, identity: Identity | None) -> str:
    """In what a header differs from the name it stands under, or from its namespace; empty where in nothing."""
    pairs: list[tuple[str, object, object]] = [
        ("fingerprint", name.fingerprint, meta.fingerprint),
        ("key", name.key.hex(), meta.key.hex()),
        ("part", str(name.part), str(meta.part)),
        ("encoding", name.encoding, meta.encoding.label),
    ]
    if identity is not None:
        pairs += [
            ("chunk_tokens", identity.chunk_tokens, meta.chunk_tokens),
            ("dtype", identity.dtype.value, meta.dtype.value),
            ("head_dim_k", identity.head_dim_k, meta.head_dim_k),
            ("head_dim_v", identity.head_dim_v, meta.head_dim_v),
        ]
    for field, expected, found in pairs:
        if expected != found:
            return f"shard has another {field}; expected {expected}; found {found}"
    if identity is not None and not whole_part(identity).covers(meta.part):
        return f"part is outside the model; expected within {whole_part(identity)}; found {meta.part}"
    return ""


def contradicts_index(header: ShardHeader, entry: Entry, crc32c: int | None = None) -> str:
    """In what an index entry differs from its shard, nonces apart; empty where in nothing."""
    meta = header.meta
    for field, listed, found in (
        ("size_bytes", entry.size_bytes, header.file_bytes),
        ("num_tokens", entry.num_tokens, meta.num_tokens),
        ("depth", entry.depth, meta.depth),
        ("parent", f"{entry.parent:016x}", f"{key_number(meta.parent):016x}"),
    ):
        if listed != found:
            return f"index says {field} {listed}, the shard {found}"
    if None not in (crc32c, entry.crc32c) and crc32c != entry.crc32c:
        return f"index says crc32c {entry.crc32c:08x}, the back-end {crc32c:08x}, and the shard is sound"
    return ""
