"""Which encoding a namespace gets by itself, and what a lossy one is allowed to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.codec_choice import choose_encoding
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.recoding import relative_mse
from lmcache_cli.store.sweep import sweep
from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import TensorSpec, whole_part
from lmcache_format.identity import AttentionKind
from tests.store.pattern import document, refs, small_buffer, tiny_identity


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (Dtype.BF16, "bfx"),
        (Dtype.F16, "bfx"),
        (Dtype.F8_E4M3, "huf8"),
        (Dtype.F8_E5M2, "huf8"),
        (Dtype.I8, "huf8"),
        (Dtype.U8, "huf8"),
        (Dtype.F32, "raw"),
    ],
)
def test_the_default_is_lossless_and_fits_the_dtype(dtype: Dtype, name: str) -> None:
    choice = choose_encoding(dtype)
    assert (choice.encoding.name, choice.encoding.lossless) == (name, True)
    assert name in choice.reason


@pytest.mark.parametrize(
    ("link_bytes_per_s", "threads", "name"), [(0.2e9, 1, "bfx"), (3e9, 1, "raw"), (3e9, 4, "bfx"), (1.4e9, 1, "bfx")]
)
def test_the_one_that_gives_readers_most_is_taken(link_bytes_per_s: float, threads: int, name: str) -> None:
    choice = choose_encoding(Dtype.BF16, link_bytes_per_s=link_bytes_per_s, threads=threads)
    assert choice.encoding.name == name
    assert "GB/s raw" in choice.reason


@pytest.mark.parametrize(
    ("dtype", "kind", "label"),
    [
        (Dtype.F8_E4M3, AttentionKind.FULL, "huf8"),
        (Dtype.F16, AttentionKind.FULL, "bfx"),
        (Dtype.BF16, AttentionKind.LATENT, "bfx"),
    ],
)
def test_every_kind_of_kv_round_trips(tmp_path: Path, dtype: Dtype, kind: AttentionKind, label: str) -> None:
    identity = tiny_identity(kv_heads=2, head_dim=64, chunk_tokens=64, dtype=dtype, kind=kind)
    tokens = document(64 * 2 + 3)
    exact: dict[bytes, bytes] = {}
    with Store.create(str(tmp_path / "kv")) as store:
        with store.namespace(identity, create=True) as namespace:
            for ref in refs(identity, tokens):
                buffer = small_buffer(identity, whole_part(identity), ref.num_tokens)
                values = np.random.default_rng(list(ref.key[:4])).standard_normal(buffer.size_bytes, np.float32)
                small = {1: np.int8, 2: np.float16}[dtype.itemsize]
                raw = (values * 9).astype(small).view(np.uint8)[: buffer.size_bytes]
                buffer.memory[:] = raw.tobytes()
                exact[ref.key] = bytes(buffer.memory)
                namespace.put(buffer, key=ref.key, parent=ref.parent, depth=ref.depth)
        plan = plan_compress(store)
        assert plan.namespaces[0].label == label
        result = apply_compress(store, plan)
        assert (result.num_encoded + result.num_no_gain, result.is_whole) == (3, True)
        assert result.num_encoded >= 2
        sweep(store, grace_ms=0)
        apply_compress(store, plan_compress(store, CompressOptions(threads=2)))
        with store.namespace(identity) as namespace:
            chunks = namespace.match(tokens).chunks()
            buffers = [small_buffer(identity, whole_part(identity), chunk.num_tokens) for chunk in chunks]
            assert namespace.read(chunks, buffers).num_tokens == len(tokens)
            assert {chunk.key: bytes(buffer.memory) for chunk, buffer in zip(chunks, buffers, strict=True)} == exact


def test_the_error_of_a_lossy_tensor_is_measured_without_its_sink() -> None:
    spec = TensorSpec("layers.0.k", 0, "k", (1, 8, 4), Dtype.F16)
    exact = np.ones(spec.shape, np.float16)
    near = exact.copy()
    near[:, 4:] += np.float16(0.5)
    assert relative_mse(exact, near, spec, 4) == pytest.approx(0.25)
    assert relative_mse(exact, near, spec, 0) == pytest.approx(0.125)
    assert relative_mse(exact, exact, spec, 4) == 0
    near[0, 0, 0] = 2
    assert relative_mse(exact, near, spec, 4) == float("inf")
    nothing = np.zeros(spec.shape, np.float16)
    assert relative_mse(nothing, near, spec, 0) == float("inf")
    odd = exact.copy()
    odd[0, 6, 0] = np.nan
    assert not relative_mse(exact, odd, spec, 4) <= 1
    assert relative_mse(odd, odd, spec, 4) == 0


def test_bf16_is_measured_as_what_it_means() -> None:
    spec = TensorSpec("layers.0.k", 0, "k", (1, 2, 2), Dtype.BF16)
    ones = np.full(spec.shape, 0x3F80, np.uint16)
    twos = np.full(spec.shape, 0x4000, np.uint16)
    assert relative_mse(ones, twos, spec, 0) == pytest.approx(1.0)
