"""Stored bytes that no writer made are refused, with the documented error and in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import encoding_names, get_encoding, huffman
from lmcache_format.encodings.frame import LOSSLESS, PREFIX
from lmcache_format.encodings.protocol import Encoding
from lmcache_format.encodings.uq import ESCAPE
from lmcache_format.errors import EncodingError
from lmcache_format.geometry import TensorSpec
from tests.format.encodings.samples import kv_like, spec_of

FRAMED = [name for name in encoding_names() if name != "raw"]
HUFFMAN = [name for name in FRAMED if name != "int8"]
SHAPE = (3, 64, 64)


def decode(encoding: Encoding, stored: object, spec: TensorSpec) -> NDArray[np.uint8]:
    out = np.full(spec.nbytes, 0xA5, np.uint8)
    encoding.decode(stored, spec, out)  # type: ignore[arg-type]
    return out


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
    encoding, spec = get_encoding(name), spec_of((2, 4, 16))
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


@pytest.mark.parametrize("name", HUFFMAN)
def test_flipped_bits_of_the_huffman_coded_stream_are_refused_or_mean_nothing(name: str) -> None:
    encoding, spec, stored = framed(name)
    begin, end = zstd_stream(stored)
    decoded = decode(encoding, stored, spec)
    bits = [*range(begin * 8, (begin + 24) * 8), *np.random.default_rng(1).integers(begin * 8, end * 8, 400)]
    num_spare = 0
    for bit in bits:
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert (decode(encoding, flipped, spec) == decoded).all()
        except EncodingError:
            continue
        num_spare += 1  # zstd's headers have bits that mean nothing
    assert num_spare < 16


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


@pytest.mark.parametrize("name", HUFFMAN)
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


@pytest.mark.parametrize("kind", [kind for kind in other_frames(b"x" * 100) if kind != "claims what is expected"])
def test_a_frame_that_is_not_alone_or_not_of_the_size_never_reaches_zstd(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, spec, stored = framed("bfx")
    begin, end = zstd_stream(stored)
    content = zstandard.ZstdDecompressor().decompress(stored[begin:end])
    lie = repacked(stored, {1: other_frames(content)[kind]})

    def decompress(*_: object) -> None:
        pytest.fail("memory was given to a frame that lies")

    monkeypatch.setattr(type(huffman._coders.coder), "decompress_into", decompress)
    with pytest.raises(EncodingError):
        decode(encoding, lie, spec)


@pytest.mark.parametrize("name", HUFFMAN)
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
def test_any_bytes_are_refused_or_decoded(name: str, noise: bytes, at: int, data: st.DataObject) -> None:
    encoding, spec, stored = framed(name)
    lie = noise if data.draw(st.booleans()) else stored[:at] + noise + stored[at + len(noise) :]
    try:
        decode(encoding, lie, spec)
    except EncodingError:
        pass


# ---- what the tables of lossy encodings can say


def repacked(stored: bytes, changes: dict[int, bytes]) -> bytes:
    """The same stored tensor with other streams."""
    fields = list(PREFIX.unpack_from(stored))
    streams, begin = [], PREFIX.size
    for size in fields[5:]:
        streams.append(stored[begin : begin + size])
        begin += size
    for index, stream in changes.items():
        streams[index] = stream
    return PREFIX.pack(*fields[:5], *map(len, streams)) + b"".join(streams)


def with_first(stored: bytes, stream: int, first: bytes) -> bytes:
    """The same stored tensor with other first bytes of a stream."""
    sizes = PREFIX.unpack_from(stored)[5:]
    begin = PREFIX.size + sum(sizes[:stream])
    return stored[:begin] + first + stored[begin + len(first) :]


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_is_no_positive_number_is_refused(step: float) -> None:
    encoding, spec, stored = framed("uq025")
    with pytest.raises(EncodingError, match="step"):
        decode(encoding, with_first(stored, 0, struct.pack("<f", step)), spec)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("name", "form"), [("int8", "<e"), ("int8huf", "<e"), ("fp8", "<f")])
def test_a_scale_that_is_no_number_is_refused(name: str, form: str, scale: float) -> None:
    encoding, spec, stored = framed(name)
    with pytest.raises(EncodingError, match="scale"):
        decode(encoding, with_first(stored, 0, struct.pack(form, scale)), spec)


def test_a_mean_that_is_no_number_is_refused() -> None:
    encoding, spec, stored = framed("uq025")
    with pytest.raises(EncodingError, match="mean"):
        decode(encoding, with_first(stored, 0, struct.pack("<fe", 1.0, float("nan"))), spec)


@pytest.mark.parametrize("positions", [[5, 5], [6, 5], [SHAPE[0] * SHAPE[1] * SHAPE[2]], [2**32 - 1], [0, 2**31]])
def test_escapes_out_of_order_or_range_are_refused(positions: list[int]) -> None:
    encoding, spec, stored = framed("uq025")
    escapes = np.array([(position, 300) for position in positions], ESCAPE).tobytes()
    with pytest.raises(EncodingError, match="escapes"):
        decode(encoding, repacked(stored, {2: escapes}), spec)
    with pytest.raises(EncodingError, match="cut"):
        decode(encoding, repacked(stored, {2: escapes[:-1]}), spec)


def test_fp8_symbols_that_are_no_number_are_refused() -> None:
    encoding, spec, stored = framed("fp8")
    begin, end = zstd_stream(stored)
    content = bytearray(zstandard.ZstdDecompressor().decompress(stored[begin:end]))
    content[100] = 0xFF
    lie = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    with pytest.raises(EncodingError, match="not a number"):
        decode(encoding, repacked(stored, {1: lie}), spec)


@pytest.mark.parametrize("name", [name for name in FRAMED if not get_encoding(name).lossless])
def test_an_exact_copy_inside_a_lossy_frame_is_checked_as_well(name: str) -> None:
    encoding, spec = get_encoding(name), spec_of(SHAPE)
    data = kv_like(SHAPE)
    data[0, 10, 3] = 0x7F80
    stored = encoding.encode(data, spec).tobytes()
    assert stored[4] == LOSSLESS
    assert decode(encoding, stored, spec).tobytes() == data.tobytes()
    for bit in range(2 * PREFIX.size * 8):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EncodingError):
            decode(encoding, flipped, spec)
