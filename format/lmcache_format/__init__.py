"""The store format, version 1, as pure functions: bytes to meaning and back. `format/SPEC.md` is the normative text.

Lives here: identities, prefix keys, geometry, encodings, shards, manifest segments, superblocks, names on disk,
checksums, errors. May import numpy, xxhash, crc32c, zstandard and the standard library; does no I/O and knows no torch.
"""

from .dtypes import Dtype
from .errors import (
    BadName,
    ChecksumMismatch,
    EncodingError,
    FormatError,
    GeometryError,
    IdentityError,
    KeyInputError,
    SegmentError,
    ShardError,
    SuperblockError,
    UnsupportedVersion,
)
from .geometry import Part, TensorSpec, part_bytes, part_tensors, rank_part, whole_part
from .identity import AttentionKind, Fingerprint, Identity, LayerGroup
from .keys import ChunkKey, Extra, KeyList, chunk_keys, next_key, root_key

__all__ = [
    "AttentionKind",
    "BadName",
    "ChecksumMismatch",
    "ChunkKey",
    "Dtype",
    "EncodingError",
    "Extra",
    "Fingerprint",
    "FormatError",
    "GeometryError",
    "Identity",
    "IdentityError",
    "KeyInputError",
    "KeyList",
    "LayerGroup",
    "Part",
    "SegmentError",
    "ShardError",
    "SuperblockError",
    "TensorSpec",
    "UnsupportedVersion",
    "chunk_keys",
    "next_key",
    "part_bytes",
    "part_tensors",
    "rank_part",
    "root_key",
    "whole_part",
]
