"""Lossless encodings give back every bit, of any tensor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import encoding_names, get_encoding, huffman, resolve_encoding
from lmcache_format.encodings.frame import PREFIX
from lmcache_format.encodings.protocol import Encoding
from lmcache_format.errors import EncodingError, UnsupportedVersion
from lmcache_format.geometry import TensorSpec
from tests.format.encodings.samples import ODD_SHAPES, hard_16_bit_tensors, kv_like, spec_of

LOSSLESS = [name for name in encoding_names() if get_encoding(name).lossless]
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


@pytest.mark.parametrize("coder", [huffman.DirectCoder, huffman.PlainCoder])
def test_memory_that_is_not_to_be_written_to_is_not(coder: type[huffman.Coder]) -> None:
    data = np.zeros(1000, np.uint8)
    frame = coder().compress_into(data, room := np.empty(200, np.uint8))
    read_only = np.frombuffer(bytes(1000), np.uint8)
    for work in (coder().compress_into, coder().decompress_into):
        with pytest.raises((ValueError, BufferError)):
            work(data if work.__name__ == "compress_into" else room[:frame], read_only)
    assert not read_only.any()


def test_unaligned_output_is_filled_all_the_same() -> None:
    encoding, spec = get_encoding("bfx"), spec_of(SHAPE)
    raw = kv_like(SHAPE).tobytes()
    out = np.empty(spec.nbytes + 1, np.uint8)[1:]
    encoding.decode(encoding.encode(raw, spec), spec, out)
    assert out.tobytes() == raw


def test_bfx_makes_kv_a_third_smaller() -> None:
    spec = spec_of((3, 256, 64))
    assert spec.nbytes / get_encoding("bfx").encode(kv_like(spec.shape), spec).size > 1.45


def test_huf8_makes_one_byte_kv_smaller() -> None:
    spec = spec_of((3, 256, 64), Dtype.F8_E4M3)
    kv = (kv_like(spec.shape) >> 8).astype(np.uint8)
    assert spec.nbytes / get_encoding("huf8").encode(kv, spec).size > 1.15


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfx", "bfx"),
        ("uq", "uq006"),
        ("uq:near", "uq006"),
        ("uq:0.25", "uq025"),
        ("uq:.5", "uq050"),
        ("uq:fine", "uq012"),
    ],
)
def test_people_may_name_the_step_or_the_class(text: str, name: str) -> None:
    assert resolve_encoding(text).name == name


def test_threads_share_encodings() -> None:
    specs = [spec_of((3, 64, 64), name=f"layers.{index}.k") for index in range(8)]
    chunks = [b"".join(kv_like((3, 64, 64), 8 * thread + index).tobytes() for index in range(8)) for thread in range(4)]

    def is_exact(chunk: bytes) -> bool:
        out = np.empty(len(chunk), np.uint8)
        for _ in range(10):
            get_encoding("bfx").decode_many(get_encoding("bfx").encode_many(chunk, specs), specs, out)
            if out.tobytes() != chunk:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_exact, chunks))


CODERS = [huffman.DirectCoder, huffman.PlainCoder]


@pytest.mark.parametrize("writer", CODERS)
@pytest.mark.parametrize("reader", CODERS)
def test_with_and_without_cffi_each_reads_what_the_other_wrote(
    writer: type[huffman.Coder], reader: type[huffman.Coder]
) -> None:
    generator = np.random.default_rng(5)
    for size in (1, 2, 63, 1000, 49_152, 300_000):
        for data in (
            generator.binomial(40, 0.3, size).astype(np.uint8),
            generator.integers(0, 256, size, np.uint8),
            np.full(size, 7, np.uint8),
        ):
            room, out = np.empty(size + 1024, np.uint8), np.empty(size, np.uint8)
            with huffman.using(writer()):
                frame = huffman.compress_into(data, room)
                assert frame is not None
                assert huffman.compress_into(data, np.empty(frame.size - 1, np.uint8)) is None
            with huffman.using(reader()):
                huffman.decompress_into(frame.copy(), out, "here")
            assert (out == data).all()
            flipped = frame.copy()
            flipped[-1] ^= 1
            with huffman.using(reader()), pytest.raises(EncodingError):
                huffman.decompress_into(flipped, out, "here")


def test_without_cffi_the_python_classes_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(huffman, "import_module", missing)
    assert isinstance(huffman._Coders().coder, huffman.PlainCoder)
    monkeypatch.undo()
    assert isinstance(huffman._Coders().coder, huffman.DirectCoder)
