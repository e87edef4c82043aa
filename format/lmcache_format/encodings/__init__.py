"""Encodings of stored tensors (SPEC §9, encodings.md): one file an encoding, found by name.

    encoding = get_encoding("bfx")
    stored = encoding.encode_many(chunk_bytes, specs)          # one byte string a tensor
    encoding.decode_many(stored, specs, out)                   # into the caller's uint8 array

An encoding module defines `ENCODINGS`, a tuple of instances; naming the module here is all it takes to add one.
May import numpy, zstandard and the rest of `lmcache_format`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_format.canonical_json import dump_canonical
from lmcache_format.encodings import bfx, fp8, huf8, int8, raw, uq
from lmcache_format.encodings.lossy import Lossy
from lmcache_format.encodings.protocol import Bytes, Encoding, Parameters
from lmcache_format.errors import UnsupportedVersion
from lmcache_format.shard import EncodingInfo

__all__ = [
    "Bytes",
    "Encoding",
    "Lossy",
    "Parameters",
    "encoding_for",
    "encoding_names",
    "get_encoding",
    "is_known_label",
    "resolve_encoding",
]

_MODULES = (raw, bfx, huf8, int8, uq, fp8)
_BY_NAME: Mapping[str, Encoding] = {encoding.name: encoding for module in _MODULES for encoding in module.ENCODINGS}
_SPELLINGS: Mapping[str, str] = {
    "uq": "uq006",
    **{
        f"uq:{spelling}": encoding.name
        for encoding in uq.ENCODINGS
        for spelling in (encoding.quality, encoding.step_share, encoding.step_share.removeprefix("0"))
    },
}


def encoding_names() -> tuple[str, ...]:
    """All names this release reads and writes."""
    return tuple(_BY_NAME)


def get_encoding(name: str, parameters: Mapping[str, object] | None = None) -> Encoding:
    """The encoding called `name`; `parameters`, where given, are those a shard recorded.

    Raises `UnsupportedVersion` for a name or parameters of another release: such a shard is a miss, not damage.
    """
    encoding = _BY_NAME.get(name)
    if encoding is None:
        raise UnsupportedVersion("unknown encoding", expected=f"one of {', '.join(_BY_NAME)}", found=repr(name)[:80])
    if parameters is not None and _as_json(parameters) != _as_json(encoding.parameters()):
        raise UnsupportedVersion(
            "unknown encoding parameters", where=name, expected=dict(encoding.parameters()), found=dict(parameters)
        )
    return encoding


def encoding_for(info: EncodingInfo) -> Encoding:
    """The encoding that a shard says it is in, which is known where name, parameters and quality class are.

    Raises `UnsupportedVersion` where one of them is of another release: such a shard is a miss, not damage.
    """
    encoding = get_encoding(info.name, info.parameters)
    if info.quality != encoding.quality:
        raise UnsupportedVersion(
            "unknown quality class", where=info.name, expected=encoding.quality or "none", found=info.quality or "none"
        )
    return encoding


def is_known_label(label: str) -> bool:
    """True for a label that shards of an encoding of this release have: `bfx`, `uq025-fp8-grade`."""
    name, hyphen, quality = label.partition("-")
    encoding = _BY_NAME.get(name)
    return encoding is not None and encoding.quality == (quality if hyphen else None)


def _as_json(parameters: Mapping[str, object]) -> bytes:
    """What compares as JSON does: 1 is not true."""
    return dump_canonical(dict(parameters), error=UnsupportedVersion)


def resolve_encoding(text: str) -> Encoding:
    """The encoding a person means: a name, or `uq` (its best class), `uq:near`, `uq:0.25`, `uq:fp8-grade`, ….

    Raises `UnsupportedVersion`.
    """
    return get_encoding(_SPELLINGS.get(text, text))
