"""Identities for tests: one plain, and a hypothesis strategy for all that the format allows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lmcache_format import AttentionKind, Dtype, Identity, LayerGroup

HEX64 = "0123456789abcdef" * 4
TEXT = st.sampled_from(
    ["X", "X|Y", "org/model/name", "a@b", "a/../b", "modèle é 空 格", "x" * 200, 'quote"', "back\\slash", "nul\0"]
)
DIGEST = st.sampled_from(
    [f"sha256:{HEX64}", f"sha256:{HEX64[::-1]}", "revision:org/model@main", "unverified:", "unverified:X|Y"]
)
ROPE_VALUE = st.recursive(
    st.none() | st.booleans() | st.sampled_from(["10000.0", "yarn", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def plain_identity(**changes: Any) -> Identity:
    """Two full layers of four heads, bf16; `changes` replace fields."""
    layers = changes.get("layers", 2)
    fields: dict[str, Any] = {
        "model": "demo",
        "weights": f"sha256:{HEX64}",
        "dtype": Dtype.BF16,
        "layers": layers,
        "kv_heads": 4,
        "head_dim_k": 8,
        "head_dim_v": 8,
        "groups": (LayerGroup(AttentionKind.FULL, 0, layers),),
        "chunk_tokens": 16,
    }
    return Identity(**(fields | changes))


@st.composite
def groups(draw: st.DrawFn) -> tuple[LayerGroup, ...]:
    """Full and sliding groups that follow each other."""
    position, made = 0, []
    for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        window = draw(st.none() | st.sampled_from([1, 4096]))
        kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING
        made.append(LayerGroup(kind, position, position + size, window))
        position += size
    return tuple(made)


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    """Any identity; fields come from few values, so that pairs often differ in one field only."""
    layer_groups = draw(groups())
    is_latent = draw(st.booleans())
    if is_latent:
        layer_groups = (LayerGroup(AttentionKind.LATENT, 0, layer_groups[-1].stop),)
    return Identity(
        model=draw(TEXT),
        weights=draw(DIGEST),
        adapter=draw(st.none() | DIGEST),
        dtype=draw(st.sampled_from(Dtype)),
        scale=draw(st.sampled_from(["none", "per-tensor:1.0", "per-head"])),
        layers=layer_groups[-1].stop,
        kv_heads=1 if is_latent else draw(st.sampled_from([1, 4])),
        head_dim_k=draw(st.sampled_from([4, 64])),
        head_dim_v=0 if is_latent else draw(st.sampled_from([4, 64])),
        groups=layer_groups,
        rope=draw(st.dictionaries(st.sampled_from(["rope_theta", "scaling"]), ROPE_VALUE, max_size=2)),
        chunk_tokens=draw(st.sampled_from([1, 16, 256])),
    )
