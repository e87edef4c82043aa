"""The superblock (SPEC §10): which release may do what with a store.

Generations are only ever added (`store.000001.json`, `store.000002.json`, …); the highest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .canonical_json import dump_canonical, load_strict
from .checksums import xxh3_hex
from .errors import ChecksumMismatch, SuperblockError, UnsupportedVersion

FORMAT = "lmcache-store"
VERSION = 1
MAX_SUPERBLOCK_BYTES = 1 << 20
KNOWN_FEATURES: frozenset[str] = frozenset()
_CHECKSUM_PREFIX = "xxh3-128:"


class Operation(StrEnum):
    """What a release may be asked to do with a store."""

    READ = "read"
    WRITE = "write"
    PRUNE = "prune"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Superblock:
    """`incompat` features refuse everything to a release that does not know them, `ro_compat` ones refuse changes,
    `compat` ones nothing; `require` refuses single operations. `store_id` tells copies of a store from other stores."""

    store_id: str
    created_ms: int
    generation: int = 1
    writer: str = ""
    compat: tuple[str, ...] = ()
    ro_compat: tuple[str, ...] = ()
    incompat: tuple[str, ...] = ()
    require: Mapping[Operation, tuple[str, ...]] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> bytes:
        """The exact bytes of the file."""
        fields = {
            "checksum": _CHECKSUM_PREFIX,
            "created": self.created_ms,
            "features": {
                "compat": list(self.compat),
                "incompat": list(self.incompat),
                "ro_compat": list(self.ro_compat),
            },
            "format": FORMAT,
            "generation": self.generation,
            "require": {operation.value: list(self.require.get(operation, ())) for operation in Operation},
            "store": self.store_id,
            "version": self.version,
            "writer": self.writer,
        }
        fields["checksum"] = _CHECKSUM_PREFIX + xxh3_hex(dump_canonical(fields, error=SuperblockError))
        return dump_canonical(fields, error=SuperblockError)

    @classmethod
    def from_json(cls, data: bytes, generation: int | None = None) -> Superblock:
        """Read and check a superblock; `generation`, where given, is the one its path says.

        Damage raises `SuperblockError` or `ChecksumMismatch`, a newer version `UnsupportedVersion`."""
        if len(data) > MAX_SUPERBLOCK_BYTES:
            raise SuperblockError(
                "superblock is too long", expected=f"at most {MAX_SUPERBLOCK_BYTES} bytes", found=len(data)
            )
        value = load_strict(data, error=SuperblockError)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise SuperblockError("not a superblock", expected=f'"format":"{FORMAT}"')
        _verify_checksum(value, data)
        version = value.get("version")
        if type(version) is int and version > VERSION:
            raise UnsupportedVersion(
                "store is of a newer format", expected=f"version {VERSION} or older", found=version
            )
        block = cls._from_dict(value)
        if generation is not None and block.generation != generation:
            raise SuperblockError("superblock lies under another name", expected=generation, found=block.generation)
        return block

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Superblock:
        try:
            features, require = value["features"], value["require"]
            block = cls(
                store_id=_text(value["store"]),
                created_ms=_number(value["created"]),
                generation=_number(value["generation"]),
                writer=_text(value["writer"]),
                compat=_names(features["compat"]),
                ro_compat=_names(features["ro_compat"]),
                incompat=_names(features["incompat"]),
                require={operation: _names(require.get(operation.value, [])) for operation in Operation},
                version=_number(value["version"]),
            )
        except (KeyError, TypeError, AttributeError) as problem:
            raise SuperblockError("superblock has a field missing or of the wrong form", found=repr(problem)) from None
        if block.version != VERSION or block.generation < 1:
            raise SuperblockError("superblock has a number out of range", found=(block.version, block.generation))
        return block

    def check(self, operation: Operation) -> None:
        """Raise `UnsupportedVersion` where this release must not do `operation` with the store."""
        needed = set(self.incompat) | set(self.require.get(operation, ()))
        if operation in (Operation.WRITE, Operation.PRUNE):
            needed |= set(self.ro_compat)
        unknown = sorted(needed - KNOWN_FEATURES)
        if unknown:
            raise UnsupportedVersion(
                f"store needs features for {operation.value} that this release does not know; use a newer release",
                found=", ".join(unknown),
            )


def _verify_checksum(value: dict[str, Any], data: bytes) -> None:
    claimed = value.get("checksum")
    if not isinstance(claimed, str) or not claimed.startswith(_CHECKSUM_PREFIX):
        raise UnsupportedVersion(
            "superblock uses another checksum", expected=_CHECKSUM_PREFIX, found=repr(claimed)[:80]
        )
    if dump_canonical(value, error=SuperblockError) != bytes(data):
        raise SuperblockError("superblock is not in canonical form")
    found = _CHECKSUM_PREFIX + xxh3_hex(dump_canonical(dict(value, checksum=_CHECKSUM_PREFIX), error=SuperblockError))
    if found != claimed:
        raise ChecksumMismatch("superblock checksum", expected=claimed[:80], found=found)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a number")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{value!r} is not a list of names")
    return tuple(value)
