"""The golden store: a tiny, complete store whose every byte follows from this file.

Times, nonces, names and writers are fixed, values follow from their position, so that every run makes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lmcache_format import (
    AttentionKind,
    ChunkKey,
    Dtype,
    Extra,
    Fingerprint,
    Identity,
    LayerGroup,
    Part,
    TensorSpec,
    chunk_keys,
    next_key,
    part_tensors,
    rank_part,
    root_key,
    whole_part,
)
from lmcache_format.checksums import crc32c, xxh3
from lmcache_format.encodings import get_encoding
from lmcache_format.names import (
    CACHEDIR_TAG,
    SegmentName,
    ShardName,
    identity_path,
    superblock_path,
)
from lmcache_format.segment import (
    ADD_DTYPE,
    KEY_DTYPE,
    NO_VERSION,
    REMOVE_DTYPE,
    TOUCH_DTYPE,
    AddFlags,
    Label,
    RemoveFlags,
    RemoveReason,
    Segment,
    encode_segment,
    key_number,
)
from lmcache_format.shard import EncodingInfo, ShardMeta, build_header
from lmcache_format.superblock import Superblock

WRITER = "golden-0.1.0"
CREATED_MS = 1_795_910_400_000  # 2026-11-29T00:00:00Z
DAY = CREATED_MS // 86_400_000
TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This directory holds caches that can be computed again.\n"
FULL = (LayerGroup(AttentionKind.FULL, 0, 2),)


@dataclass(frozen=True)
class Shard:
    """One shard file and what a reader must find in it."""

    name: ShardName
    meta: ShardMeta
    raw: bytes
    data: bytes
    file: bytes


@dataclass
class Namespace:
    """A namespace while it is being made: files by path, shards in the order they were written."""

    identity: Identity
    shards: list[Shard] = field(default_factory=list)
    segments: dict[str, bytes] = field(default_factory=dict)
    sequences: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> Fingerprint:
        return self.identity.fingerprint


def tokens_of(seed: int, count: int) -> list[int]:
    """`count` token ids that differ from those of every other seed from the first one on."""
    return [(1009 * seed + 7919 * position) % 49_152 for position in range(count)]


def pattern(spec: TensorSpec, tokens: Sequence[int], first_position: int, first_head: int) -> bytes:
    """Values that name their own place, so that a mix-up shows: see `format/golden/README.md`."""
    side = {"k": 0, "v": 1, "latent": 2}[spec.side]
    shape = spec.shape if len(spec.shape) == 3 else (1, *spec.shape)
    head, position, dim = np.indices(shape, dtype=np.uint64)
    token = np.asarray(tokens, np.uint64)[position.astype(np.int64)]
    number = position + np.uint64(first_position)
    for term in (token, np.uint64(spec.layer), np.uint64(side), head + np.uint64(first_head), dim):
        number = number * np.uint64(131) + term
    number = (number * np.uint64(2_654_435_761)) & np.uint64(0xFFFF_FFFF)
    return _as_finite(number, spec.dtype).astype(spec.dtype.numpy.newbyteorder("<").str.replace("f", "u")).tobytes()


def _as_finite(number: np.ndarray[Any, Any], dtype: Dtype) -> np.ndarray[Any, Any]:
    """Bits of a finite value of `dtype` with a few different exponents, from 32 well-mixed bits."""
    sign, exponent, mantissa = number >> 31, (number >> 28) & 7, number & 0x7F_FFFF
    if dtype is Dtype.BF16:
        return sign << 15 | (120 + exponent) << 7 | mantissa >> 16
    if dtype is Dtype.F16:
        return sign << 15 | (10 + exponent) << 10 | mantissa >> 13
    if dtype is Dtype.F32:
        return sign << 31 | (120 + exponent) << 23 | mantissa
    if dtype is Dtype.F8_E4M3:
        return sign << 7 | mantissa % 0x7F
    if dtype is Dtype.F8_E5M2:
        return sign << 7 | mantissa % 0x7C
    return number >> 24


def make_shard(
    identity: Identity,
    key: ChunkKey,
    parent: ChunkKey,
    depth: int,
    tokens: Sequence[int],
    *,
    part: Part | None = None,
    encoding: str = "raw",
    keep_tokens: bool = False,
    **changes: Any,
) -> Shard:
    """A shard of pattern values. Its nonce follows from its name; `changes` go into its `ShardMeta`."""
    part = part or whole_part(identity)
    specs = part_tensors(identity, part, len(tokens))
    first = depth * identity.chunk_tokens
    raws = [pattern(spec, tokens, first, part.head_start or 0) for spec in specs]
    codec = get_encoding(encoding)
    name = ShardName(identity.fingerprint, key, part, encoding)
    meta = ShardMeta(
        fingerprint=identity.fingerprint,
        key=key,
        parent=parent,
        depth=depth,
        num_tokens=len(tokens),
        chunk_tokens=identity.chunk_tokens,
        part=part,
        dtype=identity.dtype,
        head_dim_k=identity.head_dim_k,
        head_dim_v=identity.head_dim_v,
        nonce=hashlib.sha256(name.path.encode()).hexdigest()[:16],
        created_ms=CREATED_MS + 1000 * depth,
        writer=WRITER,
        encoding=EncodingInfo(encoding, codec.parameters()),
        tokens=tuple(tokens) if keep_tokens else None,
    )
    meta = replace(meta, **changes)
    slabs = [slab for spec, raw in zip(specs, raws, strict=True) for slab in _slabs(spec, raw)]
    if encoding == "raw":
        data = b"".join(raws)
        header = build_header(meta, b"".join(map(xxh3, slabs)))
    else:
        stored = [bytes(codec.encode(raw, spec)) for raw, spec in zip(raws, specs, strict=True)]
        data = b"".join(stored)
        header = build_header(
            meta, b"".join(map(xxh3, stored)), [len(each) for each in stored], b"".join(map(xxh3, slabs))
        )
    return Shard(name, meta, b"".join(raws), data, header + data)


def _slabs(spec: TensorSpec, raw: bytes) -> Iterator[bytes]:
    for begin in range(0, spec.nbytes, spec.slab_bytes):
        yield raw[begin : begin + spec.slab_bytes]


def add_sequence(
    space: Namespace,
    seed: int,
    count: int,
    *,
    salt: str | None = None,
    parts: Sequence[Part] | None = None,
    encodings: Sequence[str] = ("raw",),
    keep_tokens: bool = False,
    first_extras: Sequence[Extra] = (),
) -> list[ChunkKey]:
    """Store `count` tokens: full chunks, and what remains as a tail. Returns their keys."""
    identity = space.identity
    size = identity.chunk_tokens
    tokens = tokens_of(seed, count)
    root = root_key(identity.fingerprint, salt)
    extras = [list(first_extras), *([[]] * (count // size))]
    keys = list(chunk_keys(root, tokens, size, extras if first_extras else None))
    if count % size:
        keys.append(next_key(keys[-1] if keys else root, tokens[-(count % size) :]))
    for depth, key in enumerate(keys):
        for part in parts or [whole_part(identity)]:
            for encoding in encodings:
                mine = tokens[depth * size : (depth + 1) * size]
                parent = keys[depth - 1] if depth else root
                shard = make_shard(
                    identity, key, parent, depth, mine, part=part, encoding=encoding, keep_tokens=keep_tokens
                )
                space.shards.append(shard)
    space.sequences.append(
        {
            "extras": [{"payload": e.payload.hex(), "tag": e.tag} for e in first_extras],
            "keys": [key.hex() for key in keys],
            "salt": salt,
            "seed": seed,
            "tokens": count,
        }
    )
    return keys


def add_records(shards: Sequence[Shard], *, with_crc32c: bool = True) -> dict[str, Any]:
    """`keys`, `adds`, `parts` and `encodings` of a segment that lists `shards`."""
    shards = sorted(shards, key=lambda shard: (shard.meta.key, str(shard.meta.part), shard.name.encoding))
    parts = sorted({str(shard.meta.part) for shard in shards})
    encodings = sorted({shard.name.encoding for shard in shards})
    adds = np.zeros(len(shards), ADD_DTYPE)
    for row, shard in zip(adds, shards, strict=True):
        row["key_rest"] = key_number(shard.meta.key, 8)
        row["parent"] = key_number(shard.meta.parent)
        row["nonce"] = int(shard.meta.nonce, 16)
        row["size_bytes"] = len(shard.file)
        row["created_ms"] = shard.meta.created_ms
        row["crc32c"] = crc32c(shard.file) if with_crc32c else 0
        row["flags"] = AddFlags.HAS_CRC32C if with_crc32c else 0
        row["num_tokens"] = shard.meta.num_tokens
        row["depth"] = shard.meta.depth
        row["part"] = parts.index(str(shard.meta.part))
        row["encoding"] = encodings.index(shard.name.encoding)
    keys = np.array([key_number(shard.meta.key) for shard in shards], KEY_DTYPE)
    return {"keys": keys, "adds": adds, "parts": tuple(parts), "encodings": tuple(encodings)}


def remove_records(
    shards: Sequence[Shard], names: dict[str, Any], reason: RemoveReason, *, swept: bool, version: int = NO_VERSION
) -> np.ndarray[Any, Any]:
    """Removes of `shards`, whose parts and encodings are among `names`."""
    removes = np.zeros(len(shards), REMOVE_DTYPE)
    for row, shard in zip(removes, shards, strict=True):
        row["key"] = key_number(shard.meta.key)
        row["key_rest"] = key_number(shard.meta.key, 8)
        row["nonce"] = int(shard.meta.nonce, 16)
        row["marked_ms"] = CREATED_MS + 86_400_000
        row["version"] = version
        row["part"] = names["parts"].index(str(shard.meta.part))
        row["encoding"] = names["encodings"].index(shard.name.encoding)
        row["reason"] = reason
        row["flags"] = RemoveFlags.SWEPT if swept else 0
    return removes


def touch_records(keys: Sequence[ChunkKey], day: int, hits: int) -> np.ndarray[Any, Any]:
    """Touches of `keys`, ascending."""
    touches = np.zeros(len(keys), TOUCH_DTYPE)
    for row, key in zip(touches, sorted(keys), strict=True):
        row["key"], row["day"], row["hits"] = key_number(key), day, hits
    return touches


def add_segment(space: Namespace, number: int, writer: str, **content: Any) -> str:
    """Write one segment; returns its file name."""
    created_ms = CREATED_MS + 60_000 * number
    name = SegmentName(space.fingerprint, fixed_ulid(created_ms, number), writer)
    space.segments[name.path] = encode_segment(Segment(space.fingerprint, created_ms, writer, **content))
    return name.file_name


def fixed_ulid(time_ms: int, number: int) -> str:
    """The identifier of `time_ms` whose random bits are `number`."""
    bits = time_ms << 80 | number
    return "".join("0123456789abcdefghjkmnpqrstvwxyz"[bits >> shift & 31] for shift in range(125, -1, -5))


def main_namespace() -> Namespace:
    """Bf16, grouped heads: chains with a shared prefix, tails, salts, extras, ranks, removes, touches, compaction."""
    identity = Identity(
        model="golden/Main é",
        weights="sha256:" + hashlib.sha256(b"golden weights").hexdigest(),
        dtype=Dtype.BF16,
        layers=2,
        kv_heads=4,
        head_dim_k=8,
        head_dim_v=8,
        groups=(LayerGroup(AttentionKind.FULL, 0, 1), LayerGroup(AttentionKind.SLIDING, 1, 2, 4096)),
        rope={"rope_theta": "100000.0", "rope_type": "default"},
        chunk_tokens=16,
    )
    space = Namespace(identity)
    plain = add_sequence(space, 1, 52, encodings=("raw", "bfx"))
    salted = add_sequence(space, 1, 32, salt="tenant ä")
    pieces = [rank_part(identity, rank, 2) for rank in range(2)]
    stages = [replace(piece, layer_start=layer, layer_stop=layer + 1) for layer in range(2) for piece in pieces]
    ranks = add_sequence(space, 2, 16, parts=pieces)
    grid = add_sequence(space, 3, 16, parts=stages)
    item = Extra(1, (4).to_bytes(8, "little") + (6).to_bytes(4, "little") + b"sha256:picture")
    pictured = add_sequence(space, 1, 16, first_extras=[item], keep_tokens=True)
    doomed = add_sequence(space, 4, 40)
    by_key = {
        key: [shard for shard in space.shards if shard.meta.key == key] for key in {s.meta.key for s in space.shards}
    }
    one = [shard for key in plain for shard in by_key[key]]
    two = [shard for key in (*salted, *ranks, *grid, *pictured) for shard in by_key[key]]
    three = [shard for key in doomed for shard in by_key[key]]
    first = add_segment(space, 1, "writera", **add_records(one))
    second = add_segment(
        space,
        2,
        "writerb",
        **add_records(two, with_crc32c=False),
        touches=touch_records([*salted, *ranks], DAY, 1),
        labels=(Label(ranks[-1][:16], "dir/two \udcff.txt", 16, CREATED_MS, 0),),
    )
    names = add_records(three)
    swept, marked = by_key[doomed[2]], by_key[doomed[1]]
    add_segment(space, 3, "writera", **names)
    add_segment(
        space,
        4,
        "pruner",
        parts=names["parts"],
        encodings=names["encodings"],
        versions=("1234-5678",),
        removes=np.concatenate(
            [
                remove_records(swept, names, RemoveReason.PRUNED, swept=True),
                remove_records(marked, names, RemoveReason.DAMAGED, swept=False, version=0),
            ]
        ),
        touches=touch_records([*plain[:2], doomed[0]], DAY + 1, 3),
    )
    add_segment(
        space,
        5,
        "compactor",
        **add_records(one + two),
        touches=touch_records([*salted, *ranks], DAY + 2, 2),
        supersedes=(first, second),
        labels=(
            Label(ranks[-1][:16], "dir/two \udcff.txt", 16, CREATED_MS, 0),
            Label(plain[-1][:16], "one.txt", 52, CREATED_MS, 3),
        ),
    )
    gone = {shard.name.path for shard in swept}
    space.expected = {
        "labels": {ranks[-1].hex()[:32]: "dir/two \\udcff.txt", plain[-1].hex()[:32]: "one.txt"},
        "marked": [shard.name.path for shard in marked],
        "swept": sorted(gone),
        "touches": {
            **{key.hex()[:16]: [DAY + 1, 3] for key in (*plain[:2], doomed[0])},
            **{key.hex()[:16]: [DAY + 2, 2] for key in (*salted, *ranks)},
        },
    }
    return space


def latent_namespace() -> Namespace:
    """MLA: one latent a layer, layers split between two stages in the second chunk's case."""
    identity = Identity(
        model="golden/latent",
        weights="revision:golden/latent@0123456789abcdef0123456789abcdef01234567",
        adapter="sha256:" + hashlib.sha256(b"golden adapter").hexdigest(),
        dtype=Dtype.BF16,
        layers=3,
        kv_heads=1,
        head_dim_k=24,
        head_dim_v=0,
        groups=(LayerGroup(AttentionKind.LATENT, 0, 3),),
        chunk_tokens=16,
    )
    space = Namespace(identity)
    add_sequence(space, 5, 23)
    add_sequence(space, 6, 16, parts=[Part(0, 2), Part(2, 3)])
    add_segment(space, 1, "writera", **add_records(space.shards))
    return space


def dtype_namespace(dtype: Dtype) -> Namespace:
    """Two layers of two heads, keys wider than values, in one of the dtypes."""
    identity = Identity(
        model=f"golden/{dtype.value}",
        weights=f"unverified:golden {dtype.value}",
        dtype=dtype,
        scale="none" if dtype in (Dtype.BF16, Dtype.F16, Dtype.F32) else "per-tensor:1.0",
        layers=2,
        kv_heads=2,
        head_dim_k=12,
        head_dim_v=8,
        groups=FULL,
        chunk_tokens=8,
    )
    space = Namespace(identity)
    add_sequence(space, 7, 11, encodings=("raw", "bfx") if dtype in (Dtype.BF16, Dtype.F16) else ("raw",))
    add_segment(space, 1, "writera", **add_records(space.shards))
    return space


def aligned_namespace() -> Namespace:
    """The usual chunk of 256 tokens, whose every slab is a multiple of 4096 bytes."""
    identity = Identity(
        model="golden/aligned",
        weights="unverified:golden aligned",
        dtype=Dtype.F16,
        layers=1,
        kv_heads=1,
        head_dim_k=64,
        head_dim_v=64,
        groups=(LayerGroup(AttentionKind.FULL, 0, 1),),
    )
    space = Namespace(identity)
    add_sequence(space, 8, 256, encodings=("raw", "bfx"))
    add_segment(space, 1, "writera", **add_records(space.shards))
    return space


def namespaces() -> list[Namespace]:
    """All namespaces of the golden store."""
    return [main_namespace(), latent_namespace(), aligned_namespace(), *map(dtype_namespace, Dtype)]


def superblock() -> Superblock:
    """The golden store's only superblock; it has a compatible feature that nobody needs to know."""
    return Superblock(store_id="0" * 31 + "1", created_ms=CREATED_MS, writer=WRITER, compat=("golden",))


def golden_files() -> dict[str, bytes]:
    """Every file of the golden folder by its path: `store/…`, and `expected.json` with what a reader must find."""
    spaces = namespaces()
    files = {CACHEDIR_TAG: TAG, superblock_path(1): superblock().to_json()}
    for space in spaces:
        files[identity_path(space.fingerprint)] = space.identity.canonical_json()
        files |= space.segments
        files |= {s.name.path: s.file for s in space.shards if s.name.path not in space.expected.get("swept", ())}
    made = {f"store/{path}": data for path, data in files.items()}
    made["expected.json"] = json_bytes(
        {"namespaces": [expected_namespace(space) for space in spaces], "writer": WRITER}
    )
    return made


def expected_namespace(space: Namespace) -> dict[str, Any]:
    """What a reader must find in a namespace."""
    swept = space.expected.get("swept", ())
    return {
        "fingerprint": space.fingerprint,
        "identity": space.identity.to_dict(),
        "sequences": space.sequences,
        "shards": [_expected_shard(s) for s in space.shards if s.name.path not in swept],
        **space.expected,
    }


def _expected_shard(shard: Shard) -> dict[str, Any]:
    return {
        "crc32c": crc32c(shard.file),
        "depth": shard.meta.depth,
        "file_bytes": len(shard.file),
        "nonce": shard.meta.nonce,
        "num_tokens": shard.meta.num_tokens,
        "parent": shard.meta.parent.hex(),
        "path": shard.name.path,
        "raw_sha256": hashlib.sha256(shard.raw).hexdigest(),
    }


def key_vectors() -> dict[str, Any]:
    """Keys of fixed tokens under fixed fingerprints, salts and extras, as SPEC §5 prints them."""
    fingerprint = Fingerprint("000102030405060708090a0b0c0d0e0f")
    tokens = tokens_of(1, 600)
    picture = Extra(1, (4).to_bytes(8, "little") + (6).to_bytes(4, "little") + b"sha256:picture")
    roots = {salt: root_key(fingerprint, salt) for salt in (None, "a", "é")}
    full = chunk_keys(roots[None], tokens, 256)
    return {
        "fingerprint": fingerprint,
        "tokens": "t[i] = (1009 + 7919 * i) % 49152 for i in 0 .. 599",
        "chunk_tokens": 256,
        "root": roots[None].hex(),
        "root_with_salt_a": roots["a"].hex(),
        "root_with_salt_é": roots["é"].hex(),
        "chunk_0": full[0].hex(),
        "chunk_1": full[1].hex(),
        "tail_of_88": next_key(full[1], tokens[512:]).hex(),
        "chunk_0_with_salt_a": chunk_keys(roots["a"], tokens, 256)[0].hex(),
        "chunk_0_with_picture": next_key(roots[None], tokens[:256], [picture]).hex(),
    }


def json_bytes(value: object) -> bytes:
    """JSON for people and tests: sorted, indented, ASCII."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()
