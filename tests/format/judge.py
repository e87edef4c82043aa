"""Reads one file of a store the way a careful reader must, and names the first check that refuses it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmcache_format import FormatError, Identity
from lmcache_format.checks import check_identity, check_name, verify_data
from lmcache_format.encodings import encoding_for
from lmcache_format.names import (
    SegmentName,
    ShardName,
    parse_identity_path,
    parse_superblock_path,
)
from lmcache_format.segment import decode_segment
from lmcache_format.shard import ShardHeader, header_bytes, parse_header
from lmcache_format.superblock import Operation, Superblock


@dataclass(frozen=True)
class Refusal:
    """Which check refused a file, and why."""

    check: str
    error: FormatError


def judge(path: str, content: bytes, identity: Identity, operation: str = "read") -> Refusal | None:
    """The first check that refuses `content` at `path`, or None where all hold. Only `FormatError` is caught."""
    if path.endswith(".safetensors") or ".safetensors." in path:
        return judge_shard(path, content, identity)
    check = "path"
    try:
        if path.endswith(".lmi"):
            check = "segment"
            decode_segment(content, SegmentName.parse(path).fingerprint)
        elif path.endswith("ns.json"):
            check = "namespace"
            Identity.from_json(content, parse_identity_path(path))
        else:
            check = "superblock"
            Superblock.from_json(content, parse_superblock_path(path)).check(Operation(operation))
    except FormatError as error:
        return Refusal(check, error)
    return None


def judge_shard(path: str, content: bytes, identity: Identity) -> Refusal | None:
    """All checks of a shard in the order a reader makes them: cheap ones first."""
    try:
        check = "path"
        name = ShardName.parse(path)
        check = "header"
        header = parse_header(content[: header_bytes(content[:8], len(content))], len(content))
        check = "name"
        check_name(header.meta, name)
        check = "identity"
        check_identity(header.meta, identity)
        check = "encoding"
        encoding_for(header.meta.encoding)
        check = "data"
        data = content[header.data_start :]
        verify_data(header, data)
        check = "decode"
        decoded(header, data)
    except FormatError as error:
        return Refusal(check, error)
    return None


def decoded(header: ShardHeader, data: bytes) -> bytes:
    """The raw bytes of all tensors."""
    encoding = encoding_for(header.meta.encoding)
    out = np.empty(sum(spec.nbytes for spec in header.meta.specs), np.uint8)
    encoding.decode_many([data[t.begin : t.end] for t in header.tensors], header.meta.specs, out)
    return out.tobytes()
