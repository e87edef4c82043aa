"""Shards: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from _corrupt import TINY, header_text, seal_header, tiny_shard, with_field
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import (
    ChecksumMismatch,
    ChunkKey,
    Dtype,
    Fingerprint,
    FormatError,
    Part,
    ShardError,
    UnsupportedVersion,
)
from lmcache_format.checks import check_identity, check_name, stored_pieces, verify_data
from lmcache_format.checksums import crc32c, crc32c_combine, xxh3
from lmcache_format.names import ShardName
from lmcache_format.shard import (
    ALIGNMENT,
    EncodingInfo,
    ShardMeta,
    build_header,
    header_bytes,
    looks_like_shard,
    parse_header,
)
from tests.format.judge import judge
from tests.format.test_geometry import PARTS

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OBJECTS = st.dictionaries(UNICODE, UNICODE | st.integers(0, 1 << 53) | st.none(), max_size=3)
ENCODINGS = st.sampled_from(
    [
        EncodingInfo(),
        EncodingInfo("bfx", {"version": 1}),
        EncodingInfo("uq", {"a": "0.25"}, "fp8"),
        EncodingInfo("new", {}, None, False),
    ]
)


@st.composite
def metas(draw: st.DrawFn) -> ShardMeta:
    """Everything a shard may say about itself."""
    part = draw(PARTS)
    chunk_tokens = draw(st.integers(1, 20))
    num_tokens = draw(st.integers(1, chunk_tokens))
    tokens = draw(st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=num_tokens, max_size=num_tokens).map(tuple))
    return ShardMeta(
        fingerprint=Fingerprint(draw(st.binary(min_size=16, max_size=16)).hex()),
        key=ChunkKey(draw(st.binary(min_size=32, max_size=32))),
        parent=ChunkKey(draw(st.binary(min_size=32, max_size=32))),
        depth=draw(st.integers(0, 2**32 - 1)),
        num_tokens=num_tokens,
        chunk_tokens=chunk_tokens,
        part=part,
        dtype=draw(st.sampled_from(Dtype)),
        head_dim_k=draw(st.integers(1, 9)),
        head_dim_v=0 if part.head_start is None else draw(st.integers(1, 9)),
        nonce=draw(st.binary(min_size=8, max_size=8)).hex(),
        created_ms=draw(st.integers(0, 1 << 53)),
        writer=draw(UNICODE),
        encoding=draw(ENCODINGS),
        producer=draw(OBJECTS),
        provenance=draw(OBJECTS),
        tokens=tokens,
    )


def digests(count: int) -> bytes:
    return b"".join(xxh3(bytes([index % 256])) for index in range(count))


def header_for(meta: ShardMeta) -> tuple[bytes, bytes, bytes]:
    """A header with made-up checksums; the checksums, and those of decoded slabs."""
    slabs = sum(spec.num_slabs for spec in meta.specs)
    if meta.encoding.name == "raw":
        return build_header(meta, digests(slabs)), digests(slabs), b""
    decoded = digests(slabs) if meta.encoding.is_lossless else b""
    sizes = [index % 7 + 1 for index in range(len(meta.specs))]
    return build_header(meta, digests(len(sizes)), sizes, decoded), digests(len(sizes)), decoded


@given(metas())
def test_a_header_survives(meta: ShardMeta) -> None:
    header, checksums, decoded = header_for(meta)
    assert len(header) % ALIGNMENT == 0
    assert len(header) == header_bytes(header[:8])
    assert looks_like_shard(header[:64])
    parsed = parse_header(header)
    assert parsed.meta == meta
    assert (parsed.checksums, parsed.decoded_checksums) == (checksums, decoded)
    assert parsed.data_start == len(header)
    assert parsed == parse_header(header, parsed.file_bytes)
    assert [tensor.spec for tensor in parsed.tensors] == list(meta.specs)


@given(metas())
def test_a_header_is_plain_safetensors(meta: ShardMeta) -> None:
    header, _, _ = header_for(meta)
    (size,) = struct.unpack_from("<Q", header)
    value = json.loads(header[8 : 8 + size])
    metadata = value.pop("__metadata__")
    assert all(isinstance(text, str) for text in metadata.values())
    assert list(value) == [spec.name for spec in meta.specs]


@given(metas())
def test_writing_is_repeatable(meta: ShardMeta) -> None:
    header, checksums, decoded = header_for(meta)
    parsed = parse_header(header)
    sizes = None if meta.encoding.name == "raw" else [tensor.end - tensor.begin for tensor in parsed.tensors]
    assert build_header(parsed.meta, checksums, sizes, decoded) == header


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    for encoding in ("raw", "bfx"):
        file = tiny_shard(encoding).file
        header = file[: header_bytes(file)]
        for bit in range(8 * len(header)):
            flipped = bytearray(header)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises((ShardError, ChecksumMismatch)):
                parse_header(flipped[: header_bytes(flipped, len(file))], len(file))


def test_every_flipped_bit_of_the_data_is_noticed() -> None:
    for encoding in ("raw", "bfx"):
        shard = tiny_shard(encoding)
        header = parse_header(shard.file[: header_bytes(shard.file)])
        verify_data(header, shard.data)
        for bit in range(8 * len(shard.data)):
            flipped = bytearray(shard.data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ChecksumMismatch):
                verify_data(header, flipped)


def test_every_cut_and_every_longer_file_is_noticed() -> None:
    shard = tiny_shard()
    for size in range(len(shard.file)):
        refusal = judge(shard.name.path, shard.file[:size], TINY)
        assert refusal is not None
        assert isinstance(refusal.error, ShardError)
    assert judge(shard.name.path, shard.file, TINY) is None
    assert judge(shard.name.path, shard.file + b"\0", TINY) is not None


def test_heads_can_be_checked_alone() -> None:
    shard = tiny_shard()
    header = parse_header(shard.file[:4096])
    pieces = list(stored_pieces(header))
    assert len(pieces) == 2 * 2 * 2  # layers × sides × heads
    assert all(xxh3(shard.data[begin:end]) == digest for begin, end, digest in pieces)
    assert [begin for begin, _, _ in pieces] + [len(shard.data)] == [0] + [end for _, end, _ in pieces]


def test_data_of_another_length_is_refused() -> None:
    shard = tiny_shard()
    with pytest.raises(ShardError):
        verify_data(parse_header(shard.file[:4096]), shard.data[:-1])


def test_c04_a_dtype_edited_under_right_checksums_is_refused() -> None:
    text = header_text(tiny_shard().file)
    in_metadata = seal_header(with_field(text, "dtype", "F16"))
    with pytest.raises(ShardError, match="table"):
        parse_header(in_metadata)
    throughout = parse_header(seal_header(text.replace(b'"BF16"', b'"F16"')))
    assert throughout.meta.dtype is Dtype.F16
    with pytest.raises(ShardError, match="namespace"):
        check_identity(throughout.meta, TINY)


def test_c13_a_shard_says_how_many_tokens_a_chunk_has() -> None:
    meta = tiny_shard().meta
    assert (meta.num_tokens, meta.chunk_tokens, meta.is_tail) == (4, 4, False)
    with pytest.raises(ShardError, match="namespace"):
        check_identity(replace(meta, chunk_tokens=8), TINY)


def test_a_shard_under_another_name_or_in_another_namespace_is_refused() -> None:
    shard = tiny_shard()
    check_name(shard.meta, shard.name)
    check_identity(shard.meta, TINY)
    changes: list[dict[str, Any]] = [
        {"key": ChunkKey(bytes(32))},
        {"part": Part(0, 1, 0, 2)},
        {"encoding": "bfx"},
        {"fingerprint": Fingerprint("0" * 32)},
    ]
    for change in changes:
        name = replace(shard.name, **change)
        assert isinstance(name, ShardName)
        with pytest.raises(ShardError, match="another name"):
            check_name(shard.meta, name)
    with pytest.raises(ShardError, match="namespace"):
        check_identity(replace(shard.meta, part=Part(0, 2, 2, 4)), TINY)


def test_unknown_metadata_and_more_padding_are_accepted() -> None:
    shard = tiny_shard()
    text = with_field(header_text(shard.file), "from_the_future", 'x"y')
    assert parse_header(seal_header(text)).meta == shard.meta
    assert parse_header(seal_header(text.ljust(5000))).data_start == 8192


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "0" * 31},
        {"key": bytes(31)},
        {"parent": b""},
        {"nonce": "0" * 15},
        {"nonce": "A" * 16},
        {"num_tokens": 0},
        {"num_tokens": 5},
        {"chunk_tokens": 1 << 17},
        {"depth": -1},
        {"depth": 1 << 32},
        {"created_ms": -1},
        {"created_ms": 1 << 54},
        {"writer": "\ud800"},
        {"tokens": (1,)},
        {"encoding": EncodingInfo("raw", {}, "near")},
        {"encoding": EncodingInfo("../x")},
        {"producer": {"speed": 1.5}},
        {"provenance": {"\ud800": 1}},
    ],
)
def test_a_header_that_could_not_be_read_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(ShardError):
        build_header(replace(tiny_shard().meta, **change), digests(8))


def test_checksums_and_sizes_must_be_those_of_the_tensors() -> None:
    raw, encoded = tiny_shard().meta, tiny_shard("bfx").meta
    for arguments in (
        (raw, digests(7)),
        (raw, digests(8), None, digests(8)),
        (raw, digests(4), [1] * 4),
        (encoded, digests(8)),
        (encoded, digests(4), [1] * 4),
        (encoded, digests(4), [1] * 3, digests(8)),
        (encoded, digests(4), [1, 1, 0, 1], digests(8)),
    ):
        with pytest.raises(ShardError):
            build_header(*arguments)


def test_a_header_has_a_limit() -> None:
    with pytest.raises(ShardError, match="too long"):
        build_header(replace(tiny_shard().meta, producer={"log": "x" * (4 << 20)}), digests(8))


def test_a_header_is_parsed_whole_or_not_at_all() -> None:
    for header in (tiny_shard().file[:4095], tiny_shard().file[:4097]):
        with pytest.raises(ShardError, match="length"):
            parse_header(header)


def test_a_newer_shard_is_no_damage() -> None:
    text = header_text(tiny_shard().file)
    for field, value in (("format", "2"), ("checksums", "blake3:AAAA"), ("dtype", "F4_E2M1")):
        with pytest.raises(UnsupportedVersion):
            parse_header(seal_header(with_field(text, field, value)))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_crc32c_of_parts_combines(data: bytes, at: int) -> None:
    first, second = data[:at], data[at:]
    assert crc32c_combine(crc32c(first), crc32c(second), len(second)) == crc32c(data) == crc32c(second, crc32c(first))


def test_checksums_are_those_of_the_standards() -> None:
    assert crc32c(b"123456789") == 0xE306_9283
    assert xxh3(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_errors_tell_what_was_found_in_little_room_and_no_control_characters() -> None:
    error = ShardError("bad", where="\x1b[31m", expected="x" * 10_000, found="\ud800\n")
    assert str(error).isprintable()
    assert len(str(error)) < 600
    assert str(FormatError("bad").at("here")) == "here: bad"
