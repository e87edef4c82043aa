"""vLLM's pages: what they must be, how they are laid out, and proof that they are.

From 0.29 on every backend hands over one `[B, H, N, C]` tensor a layer whose strides say how it lies in memory. On the
CPU the inside of a page is the instruction set's own: it is learnt by writing through the layer's own writer. A layout
is checked that way on every platform; what disagrees is refused, since wrong KV raises no error later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

from lmcache_cli.runtime.torch_pages import TORCH_DTYPES, TorchPages
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from lmcache_kernels import (
    CodecError,
    LayoutError,
    PagedCache,
    PageGeometry,
    PageLayout,
    PageWriter,
    check_pages,
    learn_codec,
)

from . import latents
from .identity import UnsupportedEngine

_LOG = logging.getLogger("lmcache.vllm")
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def supported_group(kv_cache_config: Any) -> Any:
    """The one group of layers there may be. Raises `UnsupportedEngine` that says what is served, and what was found."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise UnsupportedEngine(
            f"the engine has {len(groups)} groups of KV layers ({kinds}); models with one group are supported, "
            "sliding windows among full attention with --disable-hybrid-kv-cache-manager"
        )
    check_spec(groups[0].kv_cache_spec)
    return groups[0]


def check_spec(spec: Any) -> None:
    """Raise `UnsupportedEngine` unless pages hold plain keys and values, or plain latents, one state a token."""
    name = type(spec).__name__
    if name not in ("FullAttentionSpec", latents.SPEC):
        raise UnsupportedEngine(f"KV layers are of kind {name}; plain full attention and latents (MLA) are supported")
    mode = getattr(spec, "kv_quant_mode", 0)
    if int(mode) != 0:
        raise UnsupportedEngine(f"the KV cache is quantised ({getattr(mode, 'name', mode)}); serve it unquantised")
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "state_content_bytes", None) is not None:
        raise UnsupportedEngine("a page holds something else than one key and value a token; that is not supported")
    if getattr(spec, "attention_chunk_size", None):
        raise UnsupportedEngine("attention is local to chunks of the prompt; that is not supported")
    if getattr(spec, "non_causal", False):
        raise UnsupportedEngine("attention is not causal: KV depends on later tokens")
    if name == latents.SPEC:
        latents.check_latent_spec(spec)


def layer_numbers(names: list[str]) -> dict[int, str]:
    """Layers by their number in the model, which must follow each other. Raises `UnsupportedEngine`."""
    found: dict[int, str] = {}
    for name in names:
        numbers = _LAYER_NUMBER.findall(name)
        if len(numbers) != 1:
            raise UnsupportedEngine(
                f"layer {name!r} does not tell its number; expected a name such as model.layers.7.…"
            )
        number = int(numbers[0])
        if number in found:
            raise UnsupportedEngine(f"layers {found[number]!r} and {name!r} have one number; two caches a layer?")
        found[number] = name
    numbers_sorted = sorted(found)
    if numbers_sorted != list(range(numbers_sorted[0], numbers_sorted[0] + len(found))):
        raise UnsupportedEngine(f"layers with KV do not follow each other: {numbers_sorted}")
    return dict(sorted(found.items()))


def open_pages(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    identity: Identity,
    part: Part,
) -> TorchPages:
    """Declare, learn and check the pages of this rank. Raises `UnsupportedEngine`; the pages stay as they were."""
    group = supported_group(kv_cache_config)
    names = layer_numbers(list(group.layer_names))
    if (min(names), max(names) + 1) != (part.layer_start, part.layer_stop):
        raise UnsupportedEngine(f"this rank holds layers {min(names)} to {max(names)}, expected {part}")
    tensors = [kv_caches[name] for name in names.values()]
    layers = vllm_config.compilation_config.static_forward_context
    on_cpu = tensors[0].device.type == "cpu"
    if tensors[0].ndim != 4:
        raise UnsupportedEngine(
            f"pages have shape {tuple(tensors[0].shape)}; expected [blocks, heads, tokens, content] as of vLLM 0.29"
        )
    if identity.is_latent != (type(group.kv_cache_spec).__name__ == latents.SPEC):
        raise UnsupportedEngine(
            f"KV layers are of kind {type(group.kv_cache_spec).__name__}, which is not what {identity.model} caches"
        )
    geometry = _geometry(identity, part, int(tensors[0].shape[2]), on_cpu=on_cpu)
    engine_layers = [layers[name] for name in names.values()]
    if identity.is_latent:
        writers = [latents.latent_writer(layer, identity) for layer in engine_layers]
        if on_cpu:
            latents.check_rotation(vllm_config, engine_layers[0])
    else:
        writers = [layer_writer(layer) for layer in engine_layers]
    if group.kv_cache_spec.block_size % geometry.block_size:
        raise UnsupportedEngine(
            f"pages hold {geometry.block_size} tokens and blocks {group.kv_cache_spec.block_size}; "
            "expected pages that divide blocks"
        )
    try:
        codec = learn_codec(tensors[0], geometry, writers[0]) if geometry.layout.is_permuted else None
        cache = PagedCache.of_layers(tensors, geometry, codec)
        for number in sorted({0, len(tensors) - 1}):
            check_pages(cache, number, writers[number])
    except (LayoutError, CodecError) as problem:
        raise UnsupportedEngine(f"the engine's pages are not as this version knows them: {problem}") from problem
    _LOG.info("pages: %s, %d layers, %d tokens", geometry.layout.value, len(tensors), geometry.block_size)
    return TorchPages(cache)


def _geometry(identity: Identity, part: Part, block_size: int, *, on_cpu: bool) -> PageGeometry:
    dtype = TORCH_DTYPES[identity.dtype]
    if identity.is_latent:
        return PageGeometry.latent(
            PageLayout.LATENT_ONE_HEAD, block_size=block_size, width=identity.head_dim_k, dtype=dtype
        )
    return PageGeometry(
        PageLayout.PERMUTED_FUSED if on_cpu else PageLayout.FUSED_HND,
        block_size=block_size,
        heads=part.num_heads,
        head_dim_k=identity.head_dim_k,
        head_dim_v=identity.head_dim_v,
        dtype=dtype,
    )


def layer_writer(layer: Any) -> PageWriter:
    """The engine's own way to write keys and values to the pages of a layer."""

    def write(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, pages, slots)

    return write
