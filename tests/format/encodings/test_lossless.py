"""Lossless encodings give back every bit, of any tensor, and refuse what they did not write."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import encoding_names, get_encoding
from lmcache_format.encodings.frame import PREFIX
from lmcache_format.encodings.protocol import Encoding
from lmcache_format.errors import EncodingError, UnsupportedVersion
from lmcache_format.geometry import TensorSpec
from tests.format.encodings.samples import ODD_SHAPES, hard_16_bit_tensors, kv_like, spec_of

LOSSLESS = [name for name in encoding_names() if get_encoding(name).lossless]
FRAMED = [name for name in LOSSLESS if name != "raw"]
SHAPE = (3, 64, 64)


def decode(encoding: Encoding, stored: object, spec: TensorSpec) -> NDArray[np.uint8]:
    out = np.full(spec.nbytes, 0xA5, np.uint8)
    encoding.decode(stored, spec, out)  # type: ignore[arg-type]
    return out


def is_round_trip_exact(encoding: Encoding, data: NDArray[np.generic], spec: TensorSpec) -> bool:
    stored = encoding.encode(data.tobytes(), spec)
    assert stored.size <= encoding.max_stored_bytes(spec)
    return decode(encoding, stored, spec).tobytes() == data.tobytes()


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (17, 64), (1, 1)])
def test_every_bit_of_two_byte_floats_comes_back(name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
    for what, data in hard_16_bit_tensors(shape):
        assert is_round_trip_exact(get_encoding(name), data, spec_of(shape, dtype)), what


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", list(Dtype))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_bit_of_any_tensor_comes_back(name: str, dtype: Dtype, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 20)))
    count = int(np.prod(shape)) * dtype.itemsize
    few = data.draw(st.binary(min_size=1, max_size=24))
    if data.draw(st.booleans()):
        raw = np.frombuffer((few * (count // len(few) + 1))[:count], np.uint8)
    else:
        raw = np.random.default_rng(data.draw(st.integers(0, 1000))).integers(0, 256, count, np.uint8)
    assert is_round_trip_exact(get_encoding(name), raw, spec_of(shape, dtype))


@pytest.mark.parametrize("name", LOSSLESS)
def test_many_tensors_are_the_same_as_one_by_one(name: str) -> None:
    encoding = get_encoding(name)
    shapes = [(3, 64, 64)] * 20 + [(3, 64, 32)] * 3 + [(64, 64)] + [(3, 64, 64)] * 2
    specs = [spec_of(shape, name=f"layers.{index}.k") for index, shape in enumerate(shapes)]
    arrays = [kv_like(shape, index) for index, shape in enumerate(shapes)]
    arrays[4] = np.random.default_rng(0).integers(0, 1 << 16, shapes[4], np.uint16)  # will be stored as it is
    chunk = b"".join(array.tobytes() for array in arrays)
    stored = encoding.encode_many(chunk, specs)
    for one, array, spec in zip(stored, arrays, specs, strict=True):
        assert one.tobytes() == encoding.encode(array.tobytes(), spec).tobytes()
    out = np.empty(len(chunk), np.uint8)
    encoding.decode_many(stored, specs, out)
    assert out.tobytes() == chunk


@pytest.mark.parametrize("name", LOSSLESS)
def test_tensors_lie_back_to_back_in_the_callers_buffer(name: str) -> None:
    encoding = get_encoding(name)
    specs = [spec_of(SHAPE, name=f"layers.{index}.v") for index in range(5)]
    chunk = b"".join(kv_like(SHAPE, index).tobytes() for index in range(5))
    into = np.full(encoding.encode_bound(specs) + 100, 0xEE, np.uint8)
    stored = encoding.encode_many(chunk, specs, into=into)
    assert all(np.shares_memory(one, into) for one in stored)
    joined = b"".join(one.tobytes() for one in stored)
    assert into[: len(joined)].tobytes() == joined
    assert np.all(into[encoding.encode_bound(specs) :] == 0xEE)


@pytest.mark.parametrize("name", LOSSLESS)
def test_wrong_sizes_and_buffers_are_refused(name: str) -> None:
    encoding, spec = get_encoding(name), spec_of(SHAPE)
    raw = kv_like(SHAPE).tobytes()
    stored = encoding.encode(raw, spec)
    with pytest.raises(EncodingError, match="wrong number of bytes"):
        encoding.encode(raw[:-1], spec)
    with pytest.raises(EncodingError, match="wrong number of bytes"):
        encoding.decode(stored, spec, np.empty(spec.nbytes + 1, np.uint8))
    with pytest.raises(EncodingError, match="too small"):
        encoding.decode(stored, spec, np.empty(spec.nbytes - 1, np.uint8))
    with pytest.raises(EncodingError, match="contiguous"):
        encoding.decode(stored, spec, np.empty(2 * spec.nbytes, np.uint8)[::2])
    with pytest.raises(EncodingError, match="too small"):
        encoding.encode_many(raw, [spec], into=np.empty(10, np.uint8))
    with pytest.raises(EncodingError, match="stored tensors"):
        encoding.decode_many([stored], [spec, spec], np.empty(2 * spec.nbytes, np.uint8))


def test_unaligned_output_is_filled_all_the_same() -> None:
    encoding, spec = get_encoding("bfx"), spec_of(SHAPE)
    raw = kv_like(SHAPE).tobytes()
    out = np.empty(spec.nbytes + 1, np.uint8)[1:]
    encoding.decode(encoding.encode(raw, spec), spec, out)
    assert out.tobytes() == raw


def test_bfx_makes_kv_a_third_smaller() -> None:
    spec = spec_of((3, 256, 64))
    assert spec.nbytes / get_encoding("bfx").encode(kv_like(spec.shape), spec).size > 1.45


def test_incompressible_tensors_grow_by_the_prefix_only() -> None:
    spec = spec_of(SHAPE)
    noise = np.random.default_rng(0).integers(0, 1 << 16, SHAPE, np.uint16)
    assert get_encoding("bfx").encode(noise, spec).size == spec.nbytes + PREFIX.size


def test_unknown_names_and_parameters_are_not_damage() -> None:
    with pytest.raises(UnsupportedVersion, match="unknown encoding"):
        get_encoding("zfp")
    with pytest.raises(UnsupportedVersion, match="parameters"):
        get_encoding("bfx", {"version": 2})
    assert get_encoding("bfx", {"version": 1}).name == "bfx"


# ---- bytes that lie


def framed(name: str) -> tuple[Encoding, TensorSpec, bytes]:
    encoding = get_encoding(name)
    spec = spec_of(SHAPE, Dtype.F8_E4M3 if name == "huf8" else Dtype.BF16)
    data = kv_like(SHAPE) if spec.dtype is Dtype.BF16 else (kv_like(SHAPE) >> 8).astype(np.uint8)
    stored = encoding.encode(data.tobytes(), spec).tobytes()
    assert stored[4] == 0, "the sample must be compressed, not stored"
    return encoding, spec, stored


@pytest.mark.parametrize("name", FRAMED)
def test_every_flipped_bit_of_the_prefix_is_refused(name: str) -> None:
    encoding, spec, stored = framed(name)
    for bit in range(PREFIX.size * 8):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncodingError):
            decode(encoding, flipped, spec)


@pytest.mark.parametrize("name", FRAMED)
def test_every_flipped_bit_of_a_stored_tensors_prefix_is_refused(name: str) -> None:
    encoding, spec = get_encoding(name), spec_of((2, 8, 16))
    noise = np.random.default_rng(0).integers(0, 1 << 16, spec.shape, np.uint16)
    stored = encoding.encode(noise, spec).tobytes()
    assert stored[4] == 1
    for bit in range(PREFIX.size * 8):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncodingError):
            decode(encoding, flipped, spec)


@pytest.mark.parametrize("name", FRAMED)
def test_every_truncation_and_any_trailing_byte_is_refused(name: str) -> None:
    encoding, spec, stored = framed(name)
    for length in {0, 1, 31, 32, 33, *(len(stored) * tenth // 10 for tenth in range(10)), len(stored) - 1}:
        with pytest.raises(EncodingError):
            decode(encoding, stored[:length], spec)
    for extra in (b"\0", stored, b"x" * 4096):
        with pytest.raises(EncodingError):
            decode(encoding, stored + extra, spec)


@pytest.mark.parametrize("name", FRAMED)
def test_flipped_bits_of_the_huffman_coded_stream_are_refused(name: str) -> None:
    encoding, spec, stored = framed(name)
    begin, end = zstd_stream(stored)
    generator = np.random.default_rng(1)
    for bit in generator.integers(begin * 8, end * 8, 400):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncodingError):
            decode(encoding, flipped, spec)


def other_frames(content: bytes) -> dict[str, bytes]:
    """zstd streams that are not one frame of `content` with its size and a checksum."""
    plain = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    half = len(content) // 2
    two = [zstandard.ZstdCompressor(write_checksum=True).compress(part) for part in (content[:half], content[half:])]
    skippable = struct.pack("<II", 0x184D2A50, len(content)) + bytes(len(content))
    return {
        "no checksum": zstandard.ZstdCompressor().compress(content),
        "no content size": zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(content),
        "three frames": plain * 3,
        "two halves": b"".join(two),
        "an empty frame behind": plain + zstandard.ZstdCompressor(write_checksum=True).compress(b""),
        "a skippable frame in front": struct.pack("<II", 0x184D2A50, 4) + b"abcd" + plain,
        "a skippable frame behind": plain + struct.pack("<II", 0x184D2A50, 4) + b"abcd",
        "a skippable frame alone": skippable,
        "one byte short": zstandard.ZstdCompressor(write_checksum=True).compress(content[:-1]),
        "one byte long": zstandard.ZstdCompressor(write_checksum=True).compress(content + b"\0"),
        "claims a terabyte": claim_size(plain, 1 << 40),
        "claims what is expected": claim_size(
            zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 20)), len(content)
        ),
        "empty": b"",
        "no zstd": bytes(range(256)),
    }


def claim_size(frame: bytes, size: int) -> bytes:
    """The same blocks behind a header with an 8-byte content size."""
    descriptor = 0b1110_0100  # 8-byte size, single segment, checksum
    return frame[:4] + struct.pack("<BQ", descriptor, size) + frame[zstandard.frame_header_size(frame) :]


def zstd_stream(stored: bytes) -> tuple[int, int]:
    """Where the stream that is a zstd frame lies."""
    begin = stored.index(b"\x28\xb5\x2f\xfd")
    sizes = PREFIX.unpack_from(stored)[5:]
    starts = np.cumsum([PREFIX.size, *sizes])
    index = list(starts).index(begin)
    return begin, int(starts[index + 1])


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize("kind", list(other_frames(b"x" * 100)))
def test_zstd_streams_of_another_kind_are_refused_in_bounded_memory(name: str, kind: str) -> None:
    encoding, spec, stored = framed(name)
    begin, end = zstd_stream(stored)
    content = zstandard.ZstdDecompressor().decompress(stored[begin:end])
    stream = other_frames(content)[kind]
    fields = list(PREFIX.unpack_from(stored))
    fields[fields.index(end - begin, 5)] = len(stream)
    lie = PREFIX.pack(*fields) + stored[PREFIX.size : begin] + stream + stored[end:]
    decode(encoding, stored, spec)  # scratch memory is there now
    tracemalloc.start()
    try:
        with pytest.raises(EncodingError):
            decode(encoding, lie, spec)
        assert tracemalloc.get_traced_memory()[1] < 4 * spec.nbytes + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FRAMED)
def test_a_frame_of_any_zstd_level_is_read(name: str) -> None:
    encoding, spec, stored = framed(name)
    begin, end = zstd_stream(stored)
    content = zstandard.ZstdDecompressor().decompress(stored[begin:end])
    stream = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(content)
    fields = list(PREFIX.unpack_from(stored))
    fields[fields.index(end - begin, 5)] = len(stream)
    other = PREFIX.pack(*fields) + stored[PREFIX.size : begin] + stream + stored[end:]
    assert decode(encoding, other, spec).tobytes() == decode(encoding, stored, spec).tobytes()


@pytest.mark.parametrize("name", FRAMED)
@given(noise=st.binary(max_size=300), at=st.integers(0, 200), data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_decoded(name: str, noise: bytes, at: int, data: st.DataObject) -> None:
    encoding, spec, stored = framed(name)
    lie = noise if data.draw(st.booleans()) else stored[:at] + noise + stored[at + len(noise) :]
    try:
        decode(encoding, lie, spec)
    except EncodingError:
        pass
