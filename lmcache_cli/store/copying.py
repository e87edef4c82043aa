"""One shard from a store to another: read whole and verified, put, looked at or read back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from lmcache_cli.backends import Backend, NotFound, Obstructed, ShortRead, Unavailable, VersionChanged
from lmcache_format.encodings import encoding_for
from lmcache_format.errors import FormatError, ShardError, UnsupportedVersion
from lmcache_format.geometry import Part, check_part, part_bytes
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName, new_nonce
from lmcache_format.shard import (
    ENCODING_OVERHEAD_BYTES,
    MAX_HEADER_BYTES,
    RAW,
    ShardHeader,
    build_header,
    parse_header,
)

from .checking import Health, check_shard
from .publishing import Blocked, Publication, Published, publish, set_aside
from .reading import Wanted, check_wanted, read_header, verify_content, verify_data
from .recoding import NotAsWritten, provenance_of
from .writing import whole_crc32c

_TRIES = 2
_TENSORS_A_LAYER = 2


class MemoryHandle:
    """A `ReadHandle` on bytes that are in memory already."""

    def __init__(self, name: str, content: memoryview, version: str) -> None:
        self._content = content
        self.name = name
        self.size = len(content)
        self.version = version
        self.block_bytes = 256 * 1024

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ReadHandle`."""
        for buffer in buffers:
            end = offset + buffer.nbytes
            if end > self.size:
                raise ShortRead(f"{self.name}: ends at {self.size}, before {end}", name=self.name)
            buffer[:] = self._content[offset:end]
            offset = end

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class WholeShard:
    """A shard, verified: its header, the bytes to put, and the version of the object they are from.

    The bytes are in memory of this thread that lasts until the next shard is read.
    """

    header: ShardHeader
    parts: tuple[bytes | memoryview, ...]
    version: str

    def renewed(self) -> WholeShard:
        """The same data as a write of its own, for a place where this very write was removed: nonces never return."""
        old = self.header
        meta = replace(old.meta, nonce=new_nonce(), provenance=provenance_of(old))
        sizes = None if meta.encoding.name == RAW else [tensor.end - tensor.begin for tensor in old.tensors]
        data = memoryview(self.parts[0])[old.data_start :]
        head = build_header(meta, old.checksums, sizes, old.decoded_checksums)
        return WholeShard(parse_header(head, len(head) + len(data)), (head, data), self.version)


class SourceFault(Exception):
    """A shard cannot be copied: `health` and `reason` say why. It stays where it is."""

    def __init__(self, health: Health, reason: str) -> None:
        super().__init__(f"{health}: {reason}")
        self.health = health
        self.reason = reason


class _Memory(threading.local):
    def __init__(self) -> None:
        self.buffer = bytearray()

    def view(self, size_bytes: int) -> memoryview:
        if len(self.buffer) < size_bytes:
            self.buffer = bytearray()  # let go of the old one first
            self.buffer = bytearray(size_bytes)
        return memoryview(self.buffer)[:size_bytes]

    def clear(self) -> None:
        np.frombuffer(self.buffer, np.uint8)[...] = 0


_MEMORY = _Memory()


def read_whole(backend: Backend, name: ShardName, identity: Identity) -> WholeShard:
    """Read all of a shard and check every byte. Damage is believed when it was seen twice.

    Raises `SourceFault`, `Unavailable`.
    """
    for number in range(_TRIES):
        try:
            return _read_once(backend, name, identity)
        except NotFound as problem:
            raise SourceFault(Health.GONE, str(problem)) from problem
        except UnsupportedVersion as problem:
            raise SourceFault(Health.NEWER, str(problem)) from problem
        except VersionChanged as problem:  # replaced while it was read
            if number + 1 == _TRIES:
                raise Unavailable(str(problem), name=name.path) from problem
        except (FormatError, ShortRead, Obstructed) as problem:
            if number + 1 == _TRIES:
                raise SourceFault(Health.DAMAGED, str(problem)) from problem
    raise AssertionError


def _read_once(backend: Backend, name: ShardName, identity: Identity) -> WholeShard:
    check_part(identity, name.part)
    with backend.open_read(name.path) as handle:
        check_size(handle.size, identity, name.part)
        content = _MEMORY.view(handle.size)
        handle.read_into(0, [content])
        version = handle.version
    return verified(name, identity, content, version)


def most_shard_bytes(identity: Identity, part: Part) -> int:
    """No shard of that part is longer."""
    most = part_bytes(identity, part, identity.chunk_tokens) + MAX_HEADER_BYTES
    return most + ENCODING_OVERHEAD_BYTES * _TENSORS_A_LAYER * part.num_layers


def check_size(size_bytes: int, identity: Identity, part: Part) -> None:
    """Raise `ShardError` for an object that is longer than a shard of that part can be, before memory is taken."""
    most = most_shard_bytes(identity, part)
    if size_bytes > most:
        raise ShardError("longer than any such shard", expected=f"at most {most} bytes", found=size_bytes)


def verified(name: ShardName, identity: Identity, content: memoryview, version: str) -> WholeShard:
    """The shard whose bytes these are, every one of them checked. Raises `FormatError`, `ShortRead`."""
    inside = MemoryHandle(name.path, content, version)
    header = read_header(inside)
    meta = header.meta
    check_wanted(header, Wanted(identity, name.key, meta.num_tokens, meta.depth, name.part, name.encoding))
    encoding_for(meta.encoding)
    if meta.encoding.name == RAW:
        verify_content(content, header)
    else:
        verify_data(inside, header)
    return WholeShard(header, (content,), version)


@dataclass(frozen=True, slots=True)
class Copied:
    """What stands at the target now: this very write, or (`is_other_write`) another sound one that was there."""

    header: ShardHeader
    crc32c: int | None
    is_new: bool
    is_other_write: bool
    quarantined: str = ""


def copy_bytes(
    backend: Backend,
    name: ShardName,
    identity: Identity,
    shard: WholeShard,
    *,
    is_removed: Callable[[str], bool],
    read_back: bool,
    standing: ShardHeader | None = None,
) -> Copied:
    """Put a shard byte for byte, and compare its length and CRC32C with what stands there then; with `read_back`, read
    all of it and compare every checksum.

    What does not come back goes to quarantine, unless somebody put another sound write in its place meanwhile, which
    stays. `standing`: what `standing_write` found there before, so that nothing need be sent. Raises
    `NotAsWritten`, `Blocked`, `NoSpace`, `Unavailable`.
    """
    if is_removed(shard.header.meta.nonce):
        shard = shard.renewed()
    if standing is not None:
        return Copied(standing, None, False, standing.header_checksum != shard.header.header_checksum)
    published = publish(backend, name, identity, shard.parts, is_removed=is_removed)
    if published.how is Publication.PRESENT:
        return _standing(published, shard.header)
    try:
        crc32c = _compare(backend, name, shard, published)
        if read_back:
            confirm(backend, name, identity, shard.header)
    except NotAsWritten:
        found = check_shard(backend, name, identity, with_data=True)
        if found.health is Health.NEWER:
            raise
        other = found.header if found.health is Health.SOUND else None
        if other is None or other.meta.nonce == shard.header.meta.nonce:
            set_aside(backend, name, found.version)
            raise
        if is_removed(other.meta.nonce):  # whoever removed it sees to it
            raise
        return Copied(other, None, False, True, published.quarantined)
    return Copied(shard.header, crc32c, True, False, published.quarantined)


def standing_write(
    backend: Backend, name: ShardName, identity: Identity, is_removed: Callable[[str], bool]
) -> ShardHeader | None:
    """The header of a sound shard at the target, read in full into this thread's memory, that nobody removed.

    Raises `Blocked`, `Unavailable`.
    """
    try:
        found = _read_target(backend, name, identity).header
    except SourceFault:
        return None
    return None if is_removed(found.meta.nonce) else found


def _read_target(backend: Backend, name: ShardName, identity: Identity) -> WholeShard:
    try:
        return read_whole(backend, name, identity)
    except SourceFault as fault:
        if fault.health is not Health.NEWER:
            raise
        reason = f"{name.path} is of a newer format: {fault.reason}"
        raise Blocked(reason, next_step="use a newer release") from fault


def _standing(published: Published, wanted: ShardHeader) -> Copied:
    found = published.found
    assert found is not None
    is_same = found.header_checksum == wanted.header_checksum
    return Copied(found, None, False, not is_same, published.quarantined)


def _compare(backend: Backend, name: ShardName, shard: WholeShard, published: Published) -> int | None:
    info = published.info if backend.capabilities.confirmed_put else backend.stat(name.path)
    if info is None:
        raise NotAsWritten(f"{name.path} is not there after it was put")
    if info.size_bytes != shard.header.file_bytes:
        raise NotAsWritten(f"{name.path} has {info.size_bytes} bytes after {shard.header.file_bytes} were put")
    if not backend.capabilities.object_crc32c:
        return None
    checksum = whole_crc32c(list(shard.parts))
    if info.crc32c is not None and info.crc32c != checksum:
        raise NotAsWritten(f"{name.path} has CRC32C {info.crc32c:08x}, {checksum:08x} was put")
    return checksum


def confirm(backend: Backend, name: ShardName, identity: Identity, wanted: ShardHeader) -> None:
    """Read all of a shard at the target and check it: it must be that very write.

    This thread's memory of the shard is the only buffer; what it held is gone. Raises `NotAsWritten`, `Unavailable`,
    `Blocked`.
    """
    _MEMORY.clear()  # so that nothing but what is read now can pass for the shard
    try:
        found = _read_target(backend, name, identity)
    except SourceFault as fault:
        raise NotAsWritten(f"{name.path} did not come back as it was written: {fault.reason}") from fault
    if found.header.header_checksum != wanted.header_checksum:
        raise NotAsWritten(f"{name.path} came back as another write")
