"""Checksums of whole tensors (SPEC §8.3), and headers that are compared instead of parsed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcache_format.dtypes import Dtype
from lmcache_format.errors import ShardError
from lmcache_format.geometry import Part
from lmcache_format.keys import ChunkKey
from lmcache_format.shard import EncodingInfo, HeaderLikeness, ShardHeader, ShardMeta, build_header, parse_header

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(4)]
META = ShardMeta(
    fingerprint="0" * 32,  # type: ignore[arg-type]
    key=KEYS[1],
    parent=KEYS[0],
    depth=9,
    num_tokens=4,
    chunk_tokens=4,
    part=Part(0, 2, 0, 3),
    dtype=Dtype.BF16,
    head_dim_k=8,
    head_dim_v=8,
    nonce="0123456789abcdef",
    created_ms=1_790_000_000_000,
    writer="w",
    producer={"engine": "e"},
)
SLABS, TENSORS = bytes(range(192)), bytes(range(64))
OTHER = replace(META, key=KEYS[2], parent=KEYS[1], depth=10, nonce="f" * 16, created_ms=1_790_000_000_001)


def header_of(meta: ShardMeta, tensors: bytes = TENSORS) -> bytes:
    return build_header(meta, SLABS, tensor_checksums=tensors)


def likeness() -> HeaderLikeness:
    header = header_of(META)
    made = HeaderLikeness.of(header, parse_header(header))
    assert made is not None
    return made


def test_checksums_of_whole_tensors_come_back() -> None:
    parsed: ShardHeader = parse_header(header_of(META))
    assert (parsed.checksums, parsed.tensor_checksums) == (SLABS, TENSORS)
    assert parse_header(build_header(META, SLABS)).tensor_checksums == b""


@pytest.mark.parametrize("tensors", [TENSORS[:16], TENSORS + bytes(16), TENSORS[:63]])
def test_another_number_of_tensor_checksums_is_refused(tensors: bytes) -> None:
    with pytest.raises(ShardError):
        header_of(META, tensors)


def test_encoded_shards_have_no_tensor_checksums() -> None:
    meta = replace(META, encoding=EncodingInfo("bfx", {}))
    with pytest.raises(ShardError):
        build_header(meta, TENSORS, [5] * 4, SLABS, TENSORS)


def test_a_header_like_the_last_one_gives_its_checksums_without_being_parsed() -> None:
    tensors = bytes(reversed(TENSORS))
    assert likeness().tensor_checksums_of(header_of(OTHER, tensors), KEYS[2], KEYS[1], 10) == tensors
    assert likeness().tensor_checksums_of(header_of(META), KEYS[1], KEYS[0], 9) == TENSORS


@pytest.mark.parametrize(
    ("key", "parent", "depth"), [(KEYS[3], KEYS[1], 10), (KEYS[2], KEYS[3], 10), (KEYS[2], KEYS[1], 11)]
)
def test_a_header_of_another_chunk_is_not_alike(key: ChunkKey, parent: ChunkKey, depth: int) -> None:
    assert likeness().tensor_checksums_of(header_of(OTHER), key, parent, depth) is None


@pytest.mark.parametrize(
    "meta",
    [
        replace(OTHER, fingerprint="1" * 32),  # type: ignore[arg-type]
        replace(OTHER, num_tokens=3),
        replace(OTHER, chunk_tokens=5),
        replace(OTHER, part=Part(0, 2, 1, 4)),
        replace(OTHER, dtype=Dtype.F16),
        replace(OTHER, head_dim_v=16),
        replace(OTHER, writer="x"),
        replace(OTHER, producer={"engine": "f"}),
        replace(OTHER, tokens=(1, 2, 3, 4)),
        replace(OTHER, provenance={"x": 1}),
    ],
)
def test_a_header_that_differs_otherwise_is_left_to_the_parser(meta: ShardMeta) -> None:
    header = header_of(meta)
    assert likeness().tensor_checksums_of(header, KEYS[2], KEYS[1], 10) is None
    assert parse_header(header).meta == meta


def test_no_flipped_bit_and_no_cut_of_a_header_is_alike() -> None:
    known, header = likeness(), header_of(OTHER)
    for position in range(len(header)):
        for bit in (0, 3, 7):
            flipped = bytearray(header)
            flipped[position] ^= 1 << bit
            if position >= 8:  # the length field is compared by the reader, with the file
                assert known.tensor_checksums_of(flipped, KEYS[2], KEYS[1], 10) is None, (position, bit)
    for size in range(0, len(header), 7):
        assert known.tensor_checksums_of(header[:size], KEYS[2], KEYS[1], 10) is None


def test_headers_that_change_from_shard_to_shard_have_no_likeness() -> None:
    for meta, tensors in (
        (replace(META, tokens=(1, 2, 3, 4)), TENSORS),
        (replace(META, provenance={"x": 1}), TENSORS),
        (META, b""),
    ):
        header = header_of(meta, tensors)
        assert HeaderLikeness.of(header, parse_header(header)) is None
