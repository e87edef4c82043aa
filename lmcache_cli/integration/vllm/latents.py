"""vLLM's latents (MLA): how they are written to pages, and whether what the engine computes of them may be stored."""

from __future__ import annotations

from typing import Any

import torch

from lmcache_format.identity import Identity
from lmcache_kernels import PageWriter

from .identity import UnsupportedEngine

SPEC = "MLAAttentionSpec"
"""What vLLM calls pages of latents."""
_EXTRAS = ("model_version", "is_index_group_leader", "non_causal_multi_token_decode", "alignment")
_TOKENS = 7
_MOST_RELATIVE_L2 = 0.05


def check_latent_spec(spec: Any) -> None:
    """Raise `UnsupportedEngine` where latents are more than one plain vector a token (sparse attention, drafts)."""
    for field in _EXTRAS:
        if getattr(spec, field, None):
            raise UnsupportedEngine(f"latents have {field} {getattr(spec, field)!r}; plain ones are supported")


def latent_writer(layer: Any, identity: Identity) -> PageWriter:
    """The engine's own way to write latents: the compressed KV and the rotated key of a token are two tensors to it,
    and the first comes first in the pages. `keys` are `[T, 1, R]`; there are no values. Raises `UnsupportedEngine`."""
    if getattr(layer, "use_sparse", False) or getattr(layer, "hisparse_cache", None) is not None:
        raise UnsupportedEngine("attention to latents is sparse; that is not supported")
    rank, rotated = int(layer.kv_lora_rank), int(layer.qk_rope_head_dim)
    if rank + rotated != identity.head_dim_k:
        raise UnsupportedEngine(
            f"latents are {rank} and {rotated} wide; expected {identity.head_dim_k} together, as the model's "
            "configuration says"
        )

    def write(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(
            keys[:, 0, :rank].contiguous(),
            keys[:, :, rank:].contiguous(),
            pages.squeeze(1),
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    return write


def check_rotation(vllm_config: Any, layer: Any) -> None:
    """Raise `UnsupportedEngine` where the engine does not rotate the keys of latents by each one's own position.

    vLLM 0.32 has an operation for the CPU that takes them for packed, which they are not: each is the end of a row of
    `kv_lora_rank + qk_rope_head_dim` elements. What is computed then depends on which tokens are computed together, so
    that it is nobody else's KV.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = vllm_config.model_config.hf_text_config
    dim, rank, dtype = int(layer.qk_rope_head_dim), int(layer.kv_lora_rank), vllm_config.model_config.dtype
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((_TOKENS, rank + dim), generator=generator).to(dtype)
    queries = torch.randn((_TOKENS, 2, 2 * dim), generator=generator).to(dtype)
    positions = torch.arange(1, _TOKENS + 1)
    with set_current_vllm_config(vllm_config):
        rope = get_rope(
            dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            is_neox_style=False,
        )
    expected = rope.forward_native(positions, queries.clone()[..., dim:], rows.clone()[:, None, rank:])
    found = rope(positions, queries.clone()[..., dim:], rows.clone()[:, None, rank:])
    for one, other in zip(found, expected, strict=True):
        assert other is not None, "keys were given"
        if not float((one - other).float().norm()) <= _MOST_RELATIVE_L2 * float(other.float().norm()):
            raise UnsupportedEngine(
                "this vLLM's rotary operation for the CPU mixes up the keys of latents, so that they depend on which "
                """tokens are computed together; start it with --compilation-config '{"custom_ops": ["all", """
                """"-rotary_embedding"]}'"""
            )
