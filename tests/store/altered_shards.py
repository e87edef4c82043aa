"""Shards whose headers say something else, with a header checksum that is right: as another release writes them."""

from __future__ import annotations

import struct
from pathlib import Path

from lmcache_format.checksums import xxh3_hex

_CHECKSUM = b'header_checksum":"'


def replace_in_header(path: Path, old: bytes, new: bytes) -> None:
    """Replace text in the header of a shard file; the padding takes up the difference."""
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0] + 8
    header = data[:size]
    assert header.count(old) == 1, "the header does not say that once"
    header = header.replace(old, new).rstrip(b" ").ljust(size, b" ")
    assert len(header) == size, "the header has no room for that"
    at = header.index(_CHECKSUM) + len(_CHECKSUM)
    blank = header[:at] + b"0" * 32 + header[at + 32 :]
    path.write_bytes(blank[:at] + xxh3_hex(blank).encode() + blank[at + 32 :] + data[size:])


def in_format(path: Path, version: str) -> None:
    """Make a shard one of another format."""
    replace_in_header(path, b'"lmcache.format":"1"', b'"lmcache.format":"' + version.encode() + b'"')


def with_unknown_field(path: Path) -> None:
    """Give a shard a metadata field of a later minor release."""
    replace_in_header(path, b',"lmcache.nonce":', b',"lmcache.from_later":"whatever","lmcache.nonce":')
