"""C15, the store's side: whatever strides an engine's tensors have, one layout lies on disk; shapes are not guessed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Store
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import Array, differing, document, pattern, refs, small_buffer, tiny_identity

Tensors = dict[str, Array]


def nhd(tensors: Tensors) -> Tensors:
    """Tokens outermost: views of `[T, H, D]` memory."""
    return {name: np.ascontiguousarray(t.transpose(1, 0, 2)).transpose(1, 0, 2) for name, t in tensors.items()}


def dims_first(tensors: Tensors) -> Tensors:
    return {name: np.ascontiguousarray(t.transpose(2, 0, 1)).transpose(1, 2, 0) for name, t in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    """Keys and values of a layer in one array, side by side in the last axis."""
    made = {}
    for name in tensors:
        layer = name.rpartition(".")[0]
        both = np.concatenate([tensors[f"{layer}.k"], tensors[f"{layer}.v"]], axis=2)
        width = tensors[f"{layer}.k"].shape[2]
        made[name] = both[:, :, :width] if name.endswith("k") else both[:, :, width:]
    return made


def across_layers(tensors: Tensors) -> Tensors:
    """All layers in one array, layer innermost."""
    names = list(tensors)
    everything = np.ascontiguousarray(np.stack([tensors[name] for name in names], axis=-1))
    return {name: everything[..., number] for number, name in enumerate(names)}


def spread(tensors: Tensors) -> Tensors:
    """Every second slot of a larger cache."""
    made = {}
    for name, tensor in tensors.items():
        large = np.zeros((tensor.shape[0], 2 * tensor.shape[1], tensor.shape[2]), tensor.dtype)
        large[:, ::2] = tensor
        made[name] = large[:, ::2]
    return made


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "HTD": dict,
    "NHD": nhd,
    "dims first": dims_first,
    "fused": fused,
    "across layers": across_layers,
    "spread": spread,
}


@pytest.mark.parametrize(("heads", "chunk_tokens"), list(product((1, 2, 4, 8), (2, 16))))
def test_every_layout_gives_the_same_file(tmp_path: Path, heads: int, chunk_tokens: int) -> None:
    identity = tiny_identity(kv_heads=heads, chunk_tokens=chunk_tokens, head_dim=2)
    tokens = document(chunk_tokens, 15)
    expected = pattern(identity, whole_part(identity), tokens, 0)
    for name, layout in LAYOUTS.items():
        with Store.create(str(tmp_path / name.replace(" ", "-"))) as store:
            with store.namespace(identity, create=True) as namespace:
                buffer = small_buffer(identity, whole_part(identity), chunk_tokens)
                buffer.fill(layout(expected))
                (ref,) = refs(identity, tokens)
                namespace.put(buffer, key=ref.key, parent=ref.parent, depth=0)
                buffers, result = namespace.load(namespace.match(tokens))
                assert result.num_tokens == chunk_tokens
                assert differing(buffers[0].tensors, expected) == 0


def wrong_shapes(identity: Identity) -> list[Tensors]:
    good = pattern(identity, whole_part(identity), document(4), 0)
    turned = {name: np.ascontiguousarray(tensor.transpose(1, 0, 2)) for name, tensor in good.items()}
    flat = {name: tensor.reshape(-1) for name, tensor in good.items()}
    renamed = {name.replace("layers", "layer"): tensor for name, tensor in good.items()}
    short = dict(list(good.items())[:-1])
    wide = {name: tensor.astype(np.uint32) for name, tensor in good.items()}
    signed = {name: tensor.view(np.int16) for name, tensor in good.items()}
    return [turned, flat, renamed, short, wide, signed]


@pytest.mark.parametrize("number", range(6))
def test_an_undeclared_layout_is_refused_before_anything_is_copied(number: int) -> None:
    identity = tiny_identity(kv_heads=2, chunk_tokens=4)
    buffer = small_buffer(identity, whole_part(identity), 4)
    with pytest.raises(GeometryError):
        buffer.fill(wrong_shapes(identity)[number])
    assert not any(buffer.memory)
