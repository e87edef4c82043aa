"""C20: non-contiguous views are stored in index order, or refused before any file appears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Store
from lmcache_format.dtypes import Dtype
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import whole_part
from lmcache_format.names import ShardName
from tests.store.pattern import Array, document, refs, tiny_identity

TOKENS = document(256, 20)
IDENTITY = tiny_identity(name="views", layers=4, kv_heads=8, head_dim=64, chunk_tokens=256, dtype=Dtype.F16)
KV = np.random.default_rng(20).normal(size=(2, 4, 256, 8, 64)).astype(np.float16)
"""[side, layer, token, head, dim]"""

VIEWS: dict[str, Callable[[Array], Array]] = {
    "transposed": lambda kv: kv.transpose(0, 1, 3, 2, 4),
    "transposed and Fortran": lambda kv: np.asfortranarray(kv).transpose(0, 1, 3, 2, 4),
    "contiguous": lambda kv: np.ascontiguousarray(kv.transpose(0, 1, 3, 2, 4)),
    "every second dim of a wider array": lambda kv: np.repeat(kv, 2, axis=4)[..., ::2].transpose(0, 1, 3, 2, 4),
    "reversed twice": lambda kv: kv[:, :, ::-1].copy()[:, :, ::-1].transpose(0, 1, 3, 2, 4),
    "big-endian": lambda kv: kv.astype(">f2").transpose(0, 1, 3, 2, 4),
}


def tensors(kv: Array) -> dict[str, Array]:
    return {f"layers.{layer}.{side}": kv[number, layer] for layer in range(4) for number, side in enumerate("kv")}


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_comes_back_element_for_element(tmp_path: Path, view: str) -> None:
    with Store.create(str(tmp_path / "s")) as store, store.namespace(IDENTITY, create=True) as namespace:
        buffer = namespace.buffer()
        buffer.fill(tensors(VIEWS[view](KV)))
        (ref,) = refs(IDENTITY, TOKENS)
        namespace.put(buffer, key=ref.key, parent=ref.parent, depth=0, tokens=TOKENS)
        (read,), result = namespace.load(namespace.match(TOKENS))
        assert result.num_tokens == 256
        for name, expected in tensors(KV.transpose(0, 1, 3, 2, 4)).items():
            assert read.tensors[name].dtype == np.dtype("<f2")
            assert np.array_equal(read.tensors[name], expected)
        path = tmp_path / "s" / ShardName(IDENTITY.fingerprint, ref.key, whole_part(IDENTITY), "raw").path
        data = np.ascontiguousarray(KV.transpose(1, 0, 3, 2, 4)).tobytes()  # layer, side, head, token, dim
        assert path.read_bytes().endswith(data)


@pytest.mark.parametrize(
    "bad",
    [
        lambda kv: kv.transpose(0, 1, 3, 2, 4)[..., :0],
        lambda kv: kv.transpose(0, 1, 3, 2, 4)[..., ::2],
        lambda kv: np.broadcast_to(np.float16(1), (2, 4)),
        lambda kv: kv.astype(np.float32).transpose(0, 1, 3, 2, 4),
        lambda kv: kv.view(np.uint16).transpose(0, 1, 3, 2, 4),
        lambda kv: kv,
    ],
    ids=["zero-size", "half the dims", "0-d", "float32", "other bits", "tokens first"],
)
def test_what_does_not_fit_is_refused_before_any_file_appears(tmp_path: Path, bad: Callable[[Array], Array]) -> None:
    with Store.create(str(tmp_path / "s")) as store, store.namespace(IDENTITY, create=True) as namespace:
        with pytest.raises(GeometryError):
            namespace.buffer().fill(tensors(bad(KV)))
        assert not list((tmp_path / "s").rglob("*.safetensors"))
