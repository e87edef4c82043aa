"""Lossy encodings stay within their bounds, keep the first tokens exact, and give up on nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import encoding_names, get_encoding
from lmcache_format.encodings.floats import from_float32, from_plain_float32, to_float32
from lmcache_format.encodings.fp8 import E4M3, to_e4m3
from lmcache_format.encodings.frame import LOSSLESS, PREFIX, STORED
from lmcache_format.encodings.lossy import SINK_TOKENS, Lossy
from lmcache_format.geometry import TensorSpec
from tests.format.encodings.samples import ODD_SHAPES, hard_16_bit_tensors, kv_like, spec_of

LOSSY = [name for name in encoding_names() if not get_encoding(name).lossless]
UQ = [name for name in LOSSY if name.startswith("uq")]


def lossy(name: str) -> Lossy:
    encoding = get_encoding(name)
    assert isinstance(encoding, Lossy)
    return encoding


def round_trip(name: str, data: NDArray[np.uint16], spec: TensorSpec, start_pos: int = 0) -> NDArray[np.uint16]:
    encoding = lossy(name)
    stored = encoding.encode(data.tobytes(), spec, start_pos=start_pos)
    assert stored.size <= encoding.max_stored_bytes(spec)
    out = np.full(spec.nbytes, 0xA5, np.uint8)
    encoding.decode(stored, spec, out)
    return out.view(np.uint16).reshape(spec.shape)


def floats(bits: NDArray[np.uint16], dtype: Dtype = Dtype.BF16) -> NDArray[np.float32]:
    out = np.empty(bits.shape, np.float32)
    to_float32(bits, dtype, out)
    return out


def as_f16(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return floats(bits).clip(-3e4, 3e4).astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
@pytest.mark.parametrize("shape", [(3, 256, 64), (1, 255, 63), (8, 63, 128), (2, 17, 1)])
def test_error_stays_within_the_bound_of_the_class(name: str, side: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
    spec = spec_of(shape, dtype, f"layers.0.{side}")
    data = kv_like(shape) if dtype is Dtype.BF16 else as_f16(kv_like(shape))
    values, decoded = floats(data, dtype), floats(round_trip(name, data, spec, start_pos=256), dtype)
    error = np.mean((values - decoded).astype(np.float64) ** 2)
    assert error <= lossy(name).max_relative_mse(spec) * np.mean(values.astype(np.float64) ** 2)
    assert error > 0 or shape[-1] == 1


@pytest.mark.parametrize("name", UQ)
@pytest.mark.parametrize("side", ["k", "v", "latent"])
def test_no_element_is_off_by_more_than_half_a_step(name: str, side: str) -> None:
    shape = (256, 64) if side == "latent" else (3, 256, 64)
    spec = spec_of(shape, name=f"layers.0.{side}")
    data = kv_like(shape)
    data.reshape(-1)[1000:1002] = 0x4480  # 1024: far outside, so that there are escapes
    stored = lossy(name).encode(data, spec, start_pos=4).tobytes()
    assert PREFIX.unpack_from(stored)[7] > 0
    step = struct.unpack_from("<f", stored, PREFIX.size)[0]
    values, decoded = floats(data), floats(round_trip(name, data, spec, start_pos=4))
    rounding = 2.0**-8 * np.abs(decoded)
    assert (np.abs(values - decoded) <= step * 0.51 + rounding).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("start_pos", "exact"), [(0, 4), (1, 3), (3, 1), (4, 0), (256, 0)])
def test_the_first_tokens_of_a_sequence_are_exact(name: str, start_pos: int, exact: int) -> None:
    assert exact == max(0, SINK_TOKENS - start_pos)
    spec = spec_of((3, 64, 64))
    data = kv_like(spec.shape)
    decoded = round_trip(name, data, spec, start_pos=start_pos)
    is_exact = (decoded == data).all(axis=(0, 2))
    assert is_exact[:exact].all()
    assert not is_exact[exact:].any()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_tensor_of_nothing_but_first_tokens_is_exact(name: str, tokens: int) -> None:
    spec = spec_of((3, tokens, 64))
    data = kv_like(spec.shape)
    assert (round_trip(name, data, spec) == data).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC1, 0x7F01])
def test_what_is_not_finite_makes_the_tensor_exact(name: str, word: int) -> None:
    spec = spec_of((3, 256, 64))
    data = kv_like(spec.shape)
    data[1, 77, 5] = word
    assert (round_trip(name, data, spec, start_pos=256) == data).all() or word == 0x7F01
    flags = lossy(name).encode(data, spec, start_pos=256)[4]
    assert flags == LOSSLESS or word == 0x7F01


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (17, 64)])
def test_hard_tensors_are_exact_or_within_the_bound(name: str, dtype: Dtype, side: str, shape: tuple[int, ...]) -> None:
    spec = spec_of(shape, dtype, f"layers.0.{side}")
    for what, data in hard_16_bit_tensors(shape):
        decoded = round_trip(name, data, spec, start_pos=256)
        if lossy(name).encode(data, spec, start_pos=256)[4] in (STORED, LOSSLESS):
            assert (decoded == data).all(), what
        else:
            values, result = floats(data, dtype).astype(np.float64), floats(decoded, dtype).astype(np.float64)
            assert np.isfinite(result).all(), what
            error, energy = np.sum((values - result) ** 2), np.sum(values**2)
            smallest = {Dtype.BF16: 2.0**-133, Dtype.F16: 2.0**-24}[dtype]
            assert error <= lossy(name).max_relative_mse(spec) * energy + data.size * smallest**2, what


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.F8_E4M3, Dtype.I8])
def test_other_dtypes_are_kept_as_they_are(name: str, dtype: Dtype) -> None:
    spec = spec_of((2, 64, 16), dtype)
    data = np.random.default_rng(0).integers(0, 256, spec.nbytes, np.uint8)
    stored = lossy(name).encode(data, spec)
    assert stored.size == spec.nbytes + PREFIX.size
    out = np.empty(spec.nbytes, np.uint8)
    lossy(name).decode(stored, spec, out)
    assert (out == data).all()


@pytest.mark.parametrize("name", LOSSY)
def test_a_group_with_tensors_of_every_kind_decodes_in_place(name: str) -> None:
    shape = (3, 64, 64)
    specs = [spec_of(shape, name=f"layers.{index // 2}.{'kv'[index % 2]}") for index in range(6)]
    arrays = [kv_like(shape, index) for index in range(6)]
    arrays[2][0, 9, 9] = 0x7F80
    arrays[3] = np.random.default_rng(0).integers(0x7F80, 0x8000, shape, np.uint16)
    arrays[4] = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    chunk = np.concatenate([array.reshape(-1) for array in arrays])
    stored = lossy(name).encode_many(chunk.tobytes(), specs)
    out = np.empty(chunk.nbytes, np.uint8)
    lossy(name).decode_many(stored, specs, out)
    for index, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        mine = out[index * spec.nbytes : (index + 1) * spec.nbytes].view(np.uint16).reshape(shape)
        assert (mine == round_trip(name, array, spec)).all()


@pytest.mark.parametrize("name", LOSSY)
@given(data=st.data())
def test_any_bits_decode_to_finite_values_or_come_back(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 20)))
    side = data.draw(st.sampled_from("kv"))
    generator = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    low, high = sorted(data.draw(st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16))))
    bits = generator.integers(low, high + 1, shape).astype(np.uint16)
    spec = spec_of(shape, name=f"layers.0.{side}")
    start_pos = data.draw(st.integers(0, 6))
    decoded = round_trip(name, bits, spec, start_pos)
    if lossy(name).encode(bits, spec, start_pos=start_pos)[4]:
        assert (decoded == bits).all()
    else:
        assert np.isfinite(floats(decoded[:, max(0, SINK_TOKENS - start_pos) :])).all()


def test_rates_rise_with_the_step() -> None:
    spec = spec_of((3, 256, 64))
    sizes = [lossy(name).encode(kv_like(spec.shape), spec, start_pos=256).size for name in UQ]
    assert sizes == sorted(sizes, reverse=True)
    assert spec.nbytes / sizes[0] > 2.2
    assert spec.nbytes / sizes[2] > 3.3


@given(st.floats(width=32, allow_nan=False))
def test_rounding_to_bf16_is_to_nearest_even(value: float) -> None:
    out = np.empty(1, np.uint16)
    from_float32(np.array([value], np.float32), Dtype.BF16, out)
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    low, kept = word & 0xFFFF, word >> 16
    up = low > 0x8000 or (low == 0x8000 and kept & 1)
    assert out[0] == kept + up


@pytest.mark.parametrize("exponent", [-108, 0, 109])
def test_the_faster_rounding_to_bf16_gives_the_same_bits_for_every_mantissa(exponent: int) -> None:
    mantissas = np.arange(1 << 23, dtype=np.uint32)
    for sign in (0, 1 << 31):
        values = (mantissas | ((exponent + 127) << 23) | sign).view(np.float32)
        values[0] = np.uint32(sign).view(np.float32)  # a zero keeps its sign too
        expected, found = np.empty(values.size, np.uint16), np.empty(values.size, np.uint16)
        from_float32(values.copy(), Dtype.BF16, expected)
        from_plain_float32(values, Dtype.BF16, found)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("step", [2.0**-149, 1.7e-41, 2.0**-81, 2.0**-80, 3e-3, 2.0**90, 1.9 * 2.0**90, 2.0**121])
def test_any_step_decodes_by_the_formula(step: float) -> None:
    spec = spec_of((3, 64, 64), name="layers.0.v")
    stored = lossy("uq025").encode(kv_like(spec.shape), spec, start_pos=4)
    assert PREFIX.unpack_from(stored.data)[4:8:3] == (spec.nbytes, 0)  # no escapes

    def decoded(one_step: float) -> NDArray[np.uint16]:
        struct.pack_into("<f", stored.data, PREFIX.size, one_step)
        out = np.empty(spec.nbytes, np.uint8)
        lossy("uq025").decode(stored, spec, out)
        return out.view(np.uint16)

    symbols = floats(decoded(1))
    expected = np.empty(symbols.size, np.uint16)
    from_float32(symbols * np.float32(step), Dtype.BF16, expected)
    assert np.array_equal(decoded(step), expected)


def test_every_e4m3_value_maps_to_itself_and_halves_go_to_even() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    out = np.empty(codes.size, np.uint8)
    to_e4m3(E4M3[codes].copy(), out)
    assert (out == codes).all()
    lower = codes[(codes < 0x7E)]
    halves = ((E4M3[lower].astype(np.float64) + E4M3[lower + 1]) / 2).astype(np.float32)
    out = np.empty(lower.size, np.uint8)
    to_e4m3(halves, out)
    assert (out == lower + (lower & 1)).all()
