"""A second golden store: one raw shard that has a checksum for each whole tensor beside those of its heads.

The first store has none, and its bytes stay as they are. Everything else is made as there.
"""

from __future__ import annotations

from dataclasses import replace

from _golden import (
    CREATED_MS,
    FULL,
    TAG,
    WRITER,
    Namespace,
    Shard,
    add_records,
    add_segment,
    add_sequence,
    expected_namespace,
    json_bytes,
)

from lmcache_format import Dtype, Identity
from lmcache_format.checksums import xxh3
from lmcache_format.names import CACHEDIR_TAG, identity_path, superblock_path
from lmcache_format.shard import build_header, parse_header
from lmcache_format.superblock import Superblock


def with_tensor_checksums(shard: Shard) -> Shard:
    """The same raw shard with `lmcache.tensor_checksums`."""
    old = parse_header(shard.file[: len(shard.file) - len(shard.data)])
    of_tensors = b"".join(xxh3(shard.data[tensor.begin : tensor.end]) for tensor in old.tensors)
    header = build_header(shard.meta, old.checksums, tensor_checksums=of_tensors)
    return replace(shard, file=header + shard.data)


def tensor_checksums_namespace() -> Namespace:
    """Two layers of two heads, keys wider than values, one full chunk."""
    identity = Identity(
        model="golden/tensor checksums",
        weights="unverified:golden tensor checksums",
        dtype=Dtype.BF16,
        layers=2,
        kv_heads=2,
        head_dim_k=12,
        head_dim_v=8,
        groups=FULL,
        chunk_tokens=8,
    )
    space = Namespace(identity)
    add_sequence(space, 9, 8)
    space.shards = [with_tensor_checksums(shard) for shard in space.shards]
    add_segment(space, 1, "writera", **add_records(space.shards))
    return space


def tensor_checksums_files() -> dict[str, bytes]:
    """Every file of the folder by its path: `store/…` and `expected.json`."""
    space = tensor_checksums_namespace()
    block = Superblock(store_id="0" * 31 + "2", created_ms=CREATED_MS, writer=WRITER)
    files = {CACHEDIR_TAG: TAG, superblock_path(1): block.to_json()}
    files |= {identity_path(space.fingerprint): space.identity.canonical_json(), **space.segments}
    files |= {shard.name.path: shard.file for shard in space.shards}
    made = {f"store/{path}": data for path, data in files.items()}
    made["expected.json"] = json_bytes({"namespaces": [expected_namespace(space)], "writer": WRITER})
    return made
