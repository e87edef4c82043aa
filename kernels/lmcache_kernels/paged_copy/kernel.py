"""Pages → canonical, or canonical → pages, as a Triton kernel: one launch for one side of one slab.

Addresses are int64 throughout (a cache of many layers passes 2³¹ elements). Tokens and dims are masked; heads and
layers are exact, as the grid has a program for each. Data travels as integers of the element's width.
Checked on the CPU with `TRITON_INTERPRET=1`, set before this module is imported.
"""

import torch
import triton
import triton.language as tl

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.launches import Launch, launches_of
from lmcache_kernels.pages import PagedCache


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # triton has no types where it is not installed
def _copy(  # type: ignore[no-untyped-def]  # Triton gives these their types
    pages,
    chunk,
    slots,
    num_tokens,
    num_heads,
    width,
    block_size,
    page_offset,
    page_layer,
    page_head,
    page_block,
    page_token,
    page_dim,
    chunk_layer,
    chunk_head,
    chunk_token,
    chunk_dim,
    TO_PAGES: tl.constexpr,  # noqa: N803  # Triton's custom for compile-time values
    TILE_T: tl.constexpr,  # noqa: N803
    TILE_D: tl.constexpr,  # noqa: N803
):
    tokens = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    layer = (tl.program_id(1) // num_heads).to(tl.int64)
    dims = tl.arange(0, TILE_D).to(tl.int64)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    filled = (slot >= 0) & (tokens < num_tokens)
    safe = tl.where(filled, slot, 0)
    page_rows = page_offset + layer * page_layer + head * page_head
    page_rows = page_rows + safe // block_size * page_block + safe % block_size * page_token
    chunk_rows = layer * chunk_layer + head * chunk_head + tokens * chunk_token
    mask = filled[:, None] & (dims < width)[None, :]
    in_pages = pages + (page_rows[:, None] + dims[None, :] * page_dim)
    in_chunk = chunk + (chunk_rows[:, None] + dims[None, :] * chunk_dim)
    if TO_PAGES:
        tl.store(in_pages, tl.load(in_chunk, mask=mask), mask=mask)
    else:
        tl.store(in_chunk, tl.load(in_pages, mask=mask), mask=mask)


def copy(cache: PagedCache, slots: torch.Tensor, chunk: CanonicalKV, heads: HeadRange, *, to_pages: bool) -> None:
    """Copy the tokens of `slots`, which lie on the pages' device, from the pages to the chunk or back.

    Raises `LayoutError` for permuted pages, which only CPUs have.
    """
    for launch in launches_of(cache, chunk, heads):
        _launch(launch, slots, to_pages=to_pages)


def _launch(launch: Launch, slots: torch.Tensor, *, to_pages: bool) -> None:
    grid = (triton.cdiv(slots.numel(), launch.tile_tokens), launch.num_heads * launch.num_layers)
    with torch.cuda.device(launch.pages.get_device()):
        _copy[grid](
            launch.pages,
            launch.chunk,
            slots,
            slots.numel(),
            launch.num_heads,
            launch.width,
            launch.block_size,
            launch.page_offset,
            *launch.page_strides,
            *launch.chunk_strides,
            TO_PAGES=to_pages,
            TILE_T=launch.tile_tokens,
            TILE_D=launch.tile_dims,
        )
