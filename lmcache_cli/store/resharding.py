"""One chunk cut anew along its heads: read from whatever parts hold it, written as the parts that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lmcache_cli.backends import Backend, Unavailable
from lmcache_format.encodings import Encoding, get_encoding
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from lmcache_format.names import is_lossless_label
from lmcache_format.shard import ShardHeader

from .checking import Health, check_shard
from .chunk import ChunkBuffer
from .copying import SourceFault
from .coverage import pick
from .errors import StoreError
from .recoding import Buffers, entry_of_header, provenance_of, read_into, recoded_meta, wanted_of, write_encoded
from .selection import ListedShard
from .state import Entry

_BUFFERS = Buffers()


class PartsMissing(StoreError):
    """The parts of a chunk that are there, in lossless encodings, do not cover what is to be written."""


@dataclass(frozen=True, slots=True)
class Recut:
    """`parts` to be written of every chunk. `encoding` None: as the chunk's shards are now."""

    identity: Identity
    parts: tuple[Part, ...]
    encoding: Encoding | None
    writer: str


@dataclass(frozen=True, slots=True)
class RecutChunk:
    """`entries` are at the target now, read back; `sources` (shard, entry, version) have become dispensable."""

    entries: tuple[Entry, ...]
    sources: tuple[tuple[ListedShard, Entry, str], ...]
    is_new: bool
    quarantined: tuple[str, ...] = ()


def recut(
    source: Backend,
    target: Backend,
    job: Recut,
    shards: Sequence[ListedShard],
    is_removed: Callable[[str], bool],
    is_removed_there: Callable[[str], bool],
) -> RecutChunk:
    """Cut one chunk. All its new parts are at the target on return, or none counts.

    Raises `SourceFault`, `ReadFault`, `StoreError`, `NoSpace`, `Unavailable`.
    """
    usable = [(shard, *found) for shard in shards if (found := _usable(source, job, shard, is_removed)) is not None]
    if not usable:
        if any(not is_lossless_label(shard.name.encoding) for shard in shards):
            raise PartsMissing("only a lossy encoding is there, which cannot be cut anew")
        raise SourceFault(Health.GONE, "all of its shards were removed")
    headers = [header for _, header, _ in usable]
    encoding = job.encoding or get_encoding(headers[0].meta.encoding.name)
    entries, quarantined, is_new = [], [], False
    for part in job.parts:
        chunk = _assemble(source, job.identity, headers, part)
        meta = replace(
            recoded_meta(headers[0], encoding, job.writer),
            part=part,
            provenance={"parts": [{**provenance_of(header), "part": str(header.meta.part)} for header in headers]},
        )
        written = write_encoded(target, meta, chunk, encoding, is_removed=is_removed_there)
        entries.append(written.entry)
        is_new |= written.is_ours
        if written.quarantined:
            quarantined.append(written.quarantined)
    sources = tuple((shard, entry_of_header(header), version) for shard, header, version in usable)
    return RecutChunk(tuple(entries), sources, is_new, tuple(quarantined))


def _usable(
    source: Backend, job: Recut, shard: ListedShard, is_removed: Callable[[str], bool]
) -> tuple[ShardHeader, str] | None:
    if not is_lossless_label(shard.name.encoding):
        return None
    checked = check_shard(source, shard.name, job.identity, with_data=False)
    match checked.health:
        case Health.UNKNOWN:
            raise Unavailable(f"{shard.name.path}: {checked.reason}", name=shard.name.path)
        case Health.SOUND if checked.header is not None:
            return None if is_removed(checked.header.meta.nonce) else (checked.header, checked.version)
        case Health.GONE:
            return None
        case _:
            raise SourceFault(checked.health, f"{shard.name.path}: {checked.reason}")


def _assemble(source: Backend, identity: Identity, headers: Sequence[ShardHeader], part: Part) -> ChunkBuffer:
    """The layers and heads of `part`, every byte verified, in a buffer of this thread."""
    pieces = pick([header.meta.part for header in headers], part)
    area = sum(piece.num_layers * piece.num_heads for _, piece in pieces)
    if area != part.num_layers * part.num_heads:
        there = ", ".join(str(header.meta.part) for header in headers)
        raise PartsMissing(f"{part} cannot be made from {there}", next_step="warm the chunk again, or migrate as it is")
    out = _BUFFERS.get("recut", identity, part, headers[0].meta.num_tokens)
    for number, piece in pieces:
        read_into(source, wanted_of(headers[number], identity), piece, out)
    return out
