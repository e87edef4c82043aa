"""Every path of a store (SPEC §9). Components are `[a-z0-9._-]`, at most 255 bytes; names of people live inside JSON.

::

    store.000001.json
    ns/<fingerprint>/ns.json
    ns/<fingerprint>/c/<hh>/<hh>/<key>.<part>.<encoding>.safetensors
    ns/<fingerprint>/m/<ulid>-<writer>.lmi
    ns/<fingerprint>/a/<32 hex digits>.json
    quarantine/<fingerprint>.<shard file name>   tmp/<host>.<pid>.<random>   maint/lease.json   CACHEDIR.TAG
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from .errors import BadName, GeometryError
from .geometry import Part
from .identity import Fingerprint
from .keys import ChunkKey

CACHEDIR_TAG = "CACHEDIR.TAG"
NAMESPACES = "ns"
QUARANTINE = "quarantine"
STAGING = "tmp"
_FINGERPRINT = r"(?P<fingerprint>[0-9a-f]{32})"
_LABEL = r"[a-z0-9]{1,16}(?:-[a-z0-9][a-z0-9-]{0,15})?"
_SHARD_FILE = (
    r"(?P<key>[0-9a-f]{64})\.(?P<part>l[0-9]+-[0-9]+(?:h[0-9]+-[0-9]+)?)"
    rf"\.(?P<encoding>{_LABEL})\.safetensors"
)
_SHARD = re.compile(rf"ns/{_FINGERPRINT}/c/(?P<first>[0-9a-f]{{2}})/(?P<second>[0-9a-f]{{2}})/{_SHARD_FILE}")
_SEGMENT = re.compile(rf"ns/{_FINGERPRINT}/m/(?P<ulid>[0-9a-hjkmnp-tv-z]{{26}})-(?P<writer>[a-z0-9]{{1,32}})\.lmi")
_ACCEPTANCE = re.compile(rf"ns/{_FINGERPRINT}/a/(?P<name>[0-9a-f]{{32}})\.json")
_NAMESPACE = re.compile(rf"ns/{_FINGERPRINT}/ns\.json")
_SUPERBLOCK = re.compile(r"store\.([0-9]{6})\.json")
_ENCODING_LABEL = re.compile(_LABEL)
_SEGMENT_FILE = re.compile(_SEGMENT.pattern.rpartition("/")[2])
MAX_GENERATION = 999_999
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(frozen=True, slots=True)
class ShardName:
    """What the path of a shard says."""

    fingerprint: Fingerprint
    key: ChunkKey
    part: Part
    encoding: str

    @property
    def path(self) -> str:
        """Path of the shard within its store."""
        return f"{chunk_directory(self.fingerprint, self.key)}/{self.file_name}"

    @property
    def file_name(self) -> str:
        """Last component of the path."""
        return f"{self.key.hex()}.{self.part}.{self.encoding}.safetensors"

    @property
    def quarantine_path(self) -> str:
        """Where the shard goes when its bytes are found to be wrong."""
        return f"{QUARANTINE}/{self.fingerprint}.{self.file_name}"

    @classmethod
    def parse(cls, path: str) -> ShardName:
        """Read a path; raises `BadName` for any that `path` would not give back."""
        match = _SHARD.fullmatch(path)
        if match is None:
            raise BadName(
                "not the path of a shard",
                where=path[:200],
                expected="ns/<fp>/c/<hh>/<hh>/<key>.<part>.<encoding>.safetensors",
            )
        try:
            part = Part.parse(match["part"])
        except GeometryError as problem:
            raise BadName("not the path of a shard", where=path[:200], found=problem.message) from None
        name = cls(Fingerprint(match["fingerprint"]), ChunkKey(bytes.fromhex(match["key"])), part, match["encoding"])
        if name.path != path:
            raise BadName("shard lies in another directory", where=path[:200], expected=name.path)
        return name


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What the path of a manifest segment says. Names sort by the time they were made."""

    fingerprint: Fingerprint
    ulid: str
    writer: str

    @property
    def path(self) -> str:
        """Path of the segment within its store."""
        return f"{segment_directory(self.fingerprint)}/{self.file_name}"

    @property
    def file_name(self) -> str:
        """Last component of the path, as kept in `SUPR` sections."""
        return f"{self.ulid}-{self.writer}.lmi"

    @classmethod
    def parse(cls, path: str) -> SegmentName:
        """Read a path; raises `BadName`."""
        match = _SEGMENT.fullmatch(path)
        if match is None:
            raise BadName(
                "not the path of a manifest segment", where=path[:200], expected="ns/<fp>/m/<ulid>-<writer>.lmi"
            )
        return cls(Fingerprint(match["fingerprint"]), match["ulid"], match["writer"])


def namespace_directory(fingerprint: Fingerprint) -> str:
    """Directory of a namespace."""
    return f"{NAMESPACES}/{fingerprint}"


def identity_path(fingerprint: Fingerprint) -> str:
    """Path of a namespace's canonical identity."""
    return f"{NAMESPACES}/{fingerprint}/ns.json"


def parse_identity_path(path: str) -> Fingerprint:
    """Fingerprint from the path of a `ns.json`; raises `BadName`."""
    match = _NAMESPACE.fullmatch(path)
    if match is None:
        raise BadName("not the path of an identity", where=path[:200], expected="ns/<fingerprint>/ns.json")
    return Fingerprint(match["fingerprint"])


def chunks_directory(fingerprint: Fingerprint) -> str:
    """Directory under which all shards of a namespace lie."""
    return f"{NAMESPACES}/{fingerprint}/c"


def chunk_directory(fingerprint: Fingerprint, key: ChunkKey) -> str:
    """Directory that holds every shard of one chunk."""
    text = key.hex()
    return f"{NAMESPACES}/{fingerprint}/c/{text[:2]}/{text[2:4]}"


def segment_directory(fingerprint: Fingerprint) -> str:
    """Directory of a namespace's manifest segments."""
    return f"{NAMESPACES}/{fingerprint}/m"


def acceptance_directory(fingerprint: Fingerprint) -> str:
    """Directory of a namespace's acceptances."""
    return f"{NAMESPACES}/{fingerprint}/a"


def acceptance_path(fingerprint: Fingerprint, name: str) -> str:
    """Path of an acceptance; `name` is its own, 32 hex digits."""
    return f"{acceptance_directory(fingerprint)}/{name}.json"


def is_acceptance_path(path: str) -> bool:
    """True for `ns/<fingerprint>/a/<32 hex digits>.json`."""
    return _ACCEPTANCE.fullmatch(path) is not None


def superblock_path(generation: int) -> str:
    """Path of a superblock generation, from 1 on."""
    if not 1 <= generation <= MAX_GENERATION:
        raise BadName("superblock generation is out of range", expected=f"1 to {MAX_GENERATION}", found=generation)
    return f"store.{generation:06d}.json"


def parse_superblock_path(path: str) -> int:
    """Generation from the path of a superblock; raises `BadName`."""
    match = _SUPERBLOCK.fullmatch(path)
    if match is None or int(match[1]) < 1:
        raise BadName("not the path of a superblock", where=path[:200], expected="store.<6 digits>.json")
    return int(match[1])


def is_encoding_label(text: str) -> bool:
    """True for `raw`, `bfx`, `uq-near`: a name, and the quality class of a lossy encoding."""
    return _ENCODING_LABEL.fullmatch(text) is not None


def is_segment_file_name(text: str) -> bool:
    """True for `<ulid>-<writer>.lmi`."""
    return _SEGMENT_FILE.fullmatch(text) is not None


def is_lossless_label(label: str) -> bool:
    """True for `raw` and `bfx`; the label of a lossy encoding names a class of quality, too."""
    return "-" not in label


def new_ulid(time_ms: int) -> str:
    """A 26-character identifier that sorts by `time_ms` (Unix, 48 bits) and never repeats (80 random bits)."""
    number = (time_ms & 0xFFFF_FFFF_FFFF) << 80 | secrets.randbits(80)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def new_writer_id() -> str:
    """A name for one writer of manifest segments: 13 characters, unique without asking anybody."""
    return "".join(secrets.choice(_CROCKFORD) for _ in range(13))


def new_nonce() -> str:
    """8 random bytes as 16 hex digits: tells one write of a shard from every other."""
    return secrets.token_hex(8)
