"""Pages made for tests, in every declared layout and several memory orders, filled and read by plain indexing.

Nothing here uses the package's own addressing: each layout says in its own words where a block's tokens lie, so that
a test that goes through `fill` and `read_block` checks `gather_paged` and `scatter_paged` against a second opinion.
Elements carry their own position: `pattern(layer, side, head, slot, dim)`, so that a mix-up shows in the values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from lmcache_kernels import CanonicalKV, PageCodec, PagedCache, PageGeometry, PageLayout

SENTINEL = 0x5A
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
)


@dataclass(frozen=True)
class Sizes:
    """L layers, B blocks, H heads, N tokens a block, D_k, D_v."""

    layers: int = 2
    blocks: int = 4
    heads: int = 2
    block_size: int = 16
    head_dim_k: int = 8
    head_dim_v: int = 8

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size


@dataclass(frozen=True)
class Variant:
    """A layout in a certain memory order, and for permuted layouts a certain order inside the page."""

    layout: PageLayout
    memory: str = "contiguous"
    interior: str = ""

    def __str__(self) -> str:
        return "+".join(filter(None, (self.layout.value, self.memory, self.interior)))

    @property
    def is_latent(self) -> bool:
        return self.layout.is_latent


TOKEN_MAJOR = [layout for layout in PageLayout if not layout.is_permuted]
PERMUTED = [layout for layout in PageLayout if layout.is_permuted]
MEMORIES = ("contiguous", "one-allocation", "reversed", "padded", "every-other", "odd-blocks", "blocks-outermost")
INTERIORS = ("transposed", "tiles", "shuffled")
VARIANTS = [Variant(layout, memory) for layout in TOKEN_MAJOR for memory in MEMORIES] + [
    Variant(layout, memory, interior)
    for layout in PERMUTED
    for memory in ("contiguous", "one-allocation", "odd-blocks", "blocks-outermost")
    for interior in INTERIORS
]


def shape_of(layout: PageLayout, sizes: Sizes) -> list[int]:
    """One layer's shape, or the whole cache's where the layout spans layers."""
    layers, b, h, n = sizes.layers, sizes.blocks, sizes.heads, sizes.block_size
    dk, dv = sizes.head_dim_k, sizes.head_dim_v
    return {
        PageLayout.KV_FIRST_NHD: [2, b, n, h, dk],
        PageLayout.KV_FIRST_HND: [2, b, h, n, dk],
        PageLayout.BLOCKS_FIRST_NHD: [b, 2, n, h, dk],
        PageLayout.BLOCKS_FIRST_HND: [b, 2, h, n, dk],
        PageLayout.FUSED_HND: [b, h, n, dk + dv],
        PageLayout.FUSED_NHD: [b, n, h, dk + dv],
        PageLayout.CROSS_LAYER_NHD: [b, layers, 2, n, h, dk],
        PageLayout.CROSS_LAYER_HND: [b, h, layers, 2, n, dk],
        PageLayout.LATENT: [b, n, dk],
        PageLayout.LATENT_ONE_HEAD: [b, 1, n, dk],
        PageLayout.PERMUTED_FUSED: [b, h, n, dk + dv],
        PageLayout.PERMUTED_KV_FIRST: [2, b, h, n, dk],
        PageLayout.PERMUTED_FLAT: [2, b, h * n * dk],
    }[layout]


def block_axis(layout: PageLayout) -> int:
    kv_first = {
        PageLayout.KV_FIRST_NHD,
        PageLayout.KV_FIRST_HND,
        PageLayout.PERMUTED_KV_FIRST,
        PageLayout.PERMUTED_FLAT,
    }
    return 1 if layout in kv_first else 0


def interior_table(interior: str, side: int, block_size: int, dim: int) -> np.ndarray:
    """Where element (n, d) of a side lies in its own N·D elements."""
    n, d = np.meshgrid(np.arange(block_size), np.arange(dim), indexing="ij")
    if interior == "shuffled":
        return np.random.default_rng(side).permutation(block_size * dim).reshape(block_size, dim)
    if interior == "transposed":  # K [D, N], V [N, D]
        return d * block_size + n if side == 0 else n * dim + d
    # Tiles as a matrix unit wants them: K in pairs of dims, V in pairs of tokens.
    if side == 0:
        return (d // 2 * block_size + n) * 2 + d % 2
    return (n // 2 * dim + d) * 2 + n % 2


@dataclass
class MadePages:
    """A cache, the tensors that own its memory, and how to reach one block without the package."""

    variant: Variant
    sizes: Sizes
    cache: PagedCache
    memory: list[torch.Tensor]
    layers: list[torch.Tensor]

    def poison(self) -> None:
        for owner in self.memory:
            owner.view(torch.uint8).fill_(SENTINEL)

    def fill(self) -> None:
        """Write every element's pattern."""
        n = self.sizes.block_size
        for layer, side in itertools.product(range(self.sizes.layers), range(1 if self.variant.is_latent else 2)):
            values = self.values(layer, side, torch.arange(self.sizes.slots))
            for block, head in itertools.product(range(self.sizes.blocks), range(self.sizes.heads)):
                self.block(layer, side, block, head)[:] = values[head, block * n : (block + 1) * n]

    def values(self, layer: int, side: int, slots: torch.Tensor) -> torch.Tensor:
        """The pattern `[H, T, D]` of some slots."""
        dim = self.sizes.head_dim_k if side == 0 else self.sizes.head_dim_v
        heads = torch.arange(self.sizes.heads)[:, None, None]
        dims = torch.arange(dim)[None, None, :]
        return pattern(torch.tensor(layer), side, heads, slots[None, :, None], dims, self.layers[layer].dtype)

    def block(self, layer: int, side: int, block: int, head: int) -> torch.Tensor | _PermutedBlock:
        """The tokens `[N, D]` of one block and head: something that reads by `[:]` and writes by `[:] =`."""
        page, layout = self.layers[layer], self.variant.layout
        dk, dv = self.sizes.head_dim_k, self.sizes.head_dim_v
        fused = slice(0, dk) if side == 0 else slice(dk, dk + dv)
        match layout:
            case PageLayout.KV_FIRST_NHD:
                return page[side, block, :, head]
            case PageLayout.KV_FIRST_HND:
                return page[side, block, head]
            case PageLayout.BLOCKS_FIRST_NHD | PageLayout.CROSS_LAYER_NHD:
                return page[block, side, :, head]
            case PageLayout.BLOCKS_FIRST_HND:
                return page[block, side, head]
            case PageLayout.CROSS_LAYER_HND:
                return page[block, head, side]
            case PageLayout.FUSED_HND:
                return page[block, head, :, fused]
            case PageLayout.FUSED_NHD:
                return page[block, :, head, fused]
            case PageLayout.LATENT:
                return page[block]
            case PageLayout.LATENT_ONE_HEAD:
                return page[block, 0]
        n = self.sizes.block_size
        table = torch.from_numpy(interior_table(self.variant.interior, side, n, dk if side == 0 else dv))
        if layout is PageLayout.PERMUTED_FUSED:
            run = page[block, head].reshape(-1).as_strided((n * (dk + dv),), (1,), page[block, head].storage_offset())
            return _PermutedBlock(run, table + (n * dk if side else 0))
        if layout is PageLayout.PERMUTED_KV_FIRST:
            return _PermutedBlock(page[side, block, head].view(-1), table)
        return _PermutedBlock(page[side, block, head * n * dk : (head + 1) * n * dk], table)

    def snapshot(self) -> list[torch.Tensor]:
        return [owner.clone() for owner in self.memory]


@dataclass
class _PermutedBlock:
    run: torch.Tensor
    table: torch.Tensor

    def __getitem__(self, key: object) -> torch.Tensor:
        return self.run[self.table][key]

    def __setitem__(self, key: slice, values: torch.Tensor) -> None:
        if key == slice(None):
            self.run[self.table] = values
        else:
            self.run[self.table[key]] = values


def make_pages(variant: Variant, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> MadePages:
    """Pages of that layout and memory order, every byte a sentinel."""
    layout = variant.layout
    integer = INTEGER[dtype.itemsize]
    shape = shape_of(layout, sizes)
    heads, dv = (1, 0) if layout.is_latent else (sizes.heads, sizes.head_dim_v)
    geometry = PageGeometry(layout, sizes.block_size, heads, sizes.head_dim_k, dv, dtype)
    if layout.spans_layers:
        owner, tensor = _allocate(shape, integer, variant.memory, block_axis(layout))
        cache = PagedCache.of_cross_layer(tensor.view(dtype), geometry)
        axis = 1 if layout is PageLayout.CROSS_LAYER_NHD else 2
        return MadePages(variant, sizes, cache, [owner], list(tensor.unbind(axis)))
    if variant.memory == "one-allocation":
        owner, tensor = _allocate([sizes.layers, *shape], integer, "contiguous", 0)
        owners, layers = [owner], list(tensor.unbind(0))
    elif variant.memory == "blocks-outermost":
        at = block_axis(layout)
        outer = [shape[at], sizes.layers, *shape[:at], *shape[at + 1 :]]
        owner, tensor = _allocate(outer, integer, "contiguous", 0)
        owners, layers = [owner], [layer.movedim(0, at) for layer in tensor.unbind(1)]
    else:
        pairs = [_allocate(shape, integer, variant.memory, block_axis(layout)) for _ in range(sizes.layers)]
        owners, layers = [owner for owner, _ in pairs], [tensor for _, tensor in pairs]
    cache = PagedCache.of_layers([layer.view(dtype) for layer in layers], geometry, codec_of(variant, sizes))
    return MadePages(variant, sizes, cache, owners, layers)


def codec_of(variant: Variant, sizes: Sizes) -> PageCodec | None:
    """The codec that states the variant's interior order."""
    if not variant.interior:
        return None
    keys = interior_table(variant.interior, 0, sizes.block_size, sizes.head_dim_k)
    values = interior_table(variant.interior, 1, sizes.block_size, sizes.head_dim_v)
    fused = variant.layout is PageLayout.PERMUTED_FUSED
    return PageCodec.of(keys, values + (keys.size if fused else 0), shares_run=fused)


def _allocate(shape: list[int], integer: torch.dtype, memory: str, block_at: int) -> tuple[torch.Tensor, torch.Tensor]:
    match memory:
        case "reversed":  # memory runs opposite to the axes
            owner = _poisoned(shape[::-1], integer)
            return owner, owner.permute(*reversed(range(len(shape))))
        case "padded":  # rows further apart than they are long, by an odd number of elements
            owner = _poisoned([*shape[:-1], shape[-1] + 3], integer)
            return owner, owner[..., 1 : shape[-1] + 1]
        case "every-other":
            owner = _poisoned([*shape[:-1], shape[-1] * 2], integer)
            return owner, owner[..., ::2]
        case "odd-blocks":  # blocks further apart than they are long, by an odd number of elements
            inner = [*shape[:block_at], *shape[block_at + 1 :]]
            owner = _poisoned([shape[block_at], prod(inner) + 5], integer)
            return owner, owner[:, : prod(inner)].unflatten(1, inner).movedim(0, block_at)
        case "blocks-outermost":
            owner = _poisoned([shape[block_at], *shape[:block_at], *shape[block_at + 1 :]], integer)
            return owner, owner.movedim(0, block_at)
        case _:
            owner = _poisoned(shape, integer)
            return owner, owner


def _poisoned(shape: list[int], integer: torch.dtype) -> torch.Tensor:
    owner = torch.empty(shape, dtype=integer)
    owner.view(torch.uint8).fill_(SENTINEL)
    return owner


def pattern(
    layer: torch.Tensor,
    side: torch.Tensor | int,
    head: torch.Tensor,
    slot: torch.Tensor,
    dim: torch.Tensor,
    integer: torch.dtype,
) -> torch.Tensor:
    """f(layer, K/V, head, slot, dim) as the bits of one element, NaNs and all; distinct as far as the width allows."""
    code = (((layer * 2 + side) * 8 + head) * 4096 + slot) * 640 + dim
    mixed = (code * 2654435761 + 12345) & 0xFFFFFFFF
    width = integer.itemsize * 8
    cut = (mixed >> (32 - width)) if width < 32 else mixed
    signed = cut if integer == torch.uint8 else torch.where(cut >= 1 << (width - 1), cut - (1 << width), cut)
    return signed.to(integer)


def expected_chunk(slots: list[int], sizes: Sizes, dtype: torch.dtype, *, latent: bool, heads: range) -> CanonicalKV:
    """What gathering filled pages must give; holes and heads that are not moved stay the sentinel."""
    chunk = poisoned_chunk(len(slots), sizes, dtype, latent=latent, heads=len(heads))
    filled = [token for token, slot in enumerate(slots) if slot >= 0]
    at = torch.tensor([slots[token] for token in filled], dtype=torch.int64)
    integer = INTEGER[dtype.itemsize]
    for side, tensor in enumerate(chunk.sides):
        values = pattern(
            torch.arange(sizes.layers)[:, None, None, None],
            side,
            torch.tensor(list(heads))[None, :, None, None],
            at[None, None, :, None],
            torch.arange(tensor.shape[3])[None, None, None, :],
            integer,
        )
        tensor.view(integer)[:, :, filled] = values
    return chunk


def poisoned_chunk(tokens: int, sizes: Sizes, dtype: torch.dtype, *, latent: bool, heads: int) -> CanonicalKV:
    dims = (sizes.head_dim_k,) if latent else (sizes.head_dim_k, sizes.head_dim_v)
    integer = INTEGER[dtype.itemsize]
    sides = [_poisoned([sizes.layers, heads, tokens, dim], integer).view(dtype) for dim in dims]
    return CanonicalKV(sides[0], None if latent else sides[1])


def assert_same_bits(found: CanonicalKV, expected: CanonicalKV) -> None:
    for one, other in zip(found.sides, expected.sides, strict=True):
        integer = INTEGER[one.dtype.itemsize]
        assert torch.equal(one.view(integer), other.view(integer))


def assert_same_memory(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
