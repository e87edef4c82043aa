"""C15: shape alone cannot tell layouts apart. What is gathered from any declared layout can be scattered into any
other.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from lmcache_kernels import ChunkError, PageLayout, SlotMapping, gather_paged, scatter_paged
from tests.kernels.made_pages import (
    VARIANTS,
    MadePages,
    Sizes,
    Variant,
    assert_same_bits,
    assert_same_memory,
    expected_chunk,
    make_pages,
    poisoned_chunk,
)

HEADS = (1, 2, 4, 8)
BLOCK_SIZES = (2, 16)
CONTIGUOUS = [each for each in VARIANTS if each.memory == "contiguous" and each.interior in ("", "tiles", "shuffled")]
STRIDED = [each for each in VARIANTS if each.memory != "contiguous" and each.interior in ("", "transposed")]


# Heads {1, 2, 4, 8} and block sizes {2, 16}; the hardest to tell apart, 2 of everything, is the one of the fast run.
GEOMETRIES = [
    pytest.param(
        Sizes(layers=2, blocks=2 if block_size == 2 else 3, heads=heads, block_size=block_size),
        id=f"{heads}-heads-{block_size}-tokens",
        marks=[] if heads == 2 and block_size == 2 else [pytest.mark.slow],
    )
    for heads, block_size in itertools.product(HEADS, BLOCK_SIZES)
]


def check_pair(writer: Variant, reader: Variant, sizes: Sizes, dtype: torch.dtype) -> None:
    source, target = make_pages(writer, sizes, dtype), make_pages(reader, sizes, dtype)
    source.fill()
    before = source.snapshot()
    slots = list(range(1, sizes.slots))  # a partial block, then whole ones
    landing = slots[::-1]
    chunk = poisoned_chunk(len(slots), sizes, dtype, latent=writer.is_latent, heads=sizes.heads)

    gather_paged(source.cache, SlotMapping.of(slots), chunk)
    scatter_paged(target.cache, SlotMapping.of(landing), chunk)

    assert_same_bits(chunk, expected_chunk(slots, sizes, dtype, latent=writer.is_latent, heads=range(sizes.heads)))
    assert_same_memory(source.snapshot(), before)
    assert_landed(target, dict(zip(landing, slots, strict=True)))


def assert_landed(target: MadePages, source_of: dict[int, int]) -> None:
    """Each landing slot holds what its source slot held; every other byte, padding included, is the sentinel."""
    found = target.snapshot()
    target.poison()
    sizes, n = target.sizes, target.sizes.block_size
    for layer in range(sizes.layers):
        for side in range(1 if target.variant.is_latent else 2):
            values = target.values(layer, side, torch.tensor([source_of.get(slot, 0) for slot in range(sizes.slots)]))
            for head, block in itertools.product(range(sizes.heads), range(sizes.blocks)):
                positions = [p for p in range(n) if block * n + p in source_of]
                target.block(layer, side, block, head)[positions] = values[head, [block * n + p for p in positions]]
    assert_same_memory(found, target.snapshot())


def fits(sizes: Sizes, variant: Variant) -> Sizes:
    """Latents have one head."""
    return replace(sizes, heads=1) if variant.is_latent else sizes


@pytest.mark.parametrize("sizes", GEOMETRIES)
@pytest.mark.parametrize("writer", CONTIGUOUS, ids=str)
def test_every_layout_reads_what_every_other_wrote(writer: Variant, sizes: Sizes) -> None:
    for reader in CONTIGUOUS:
        if writer.is_latent == reader.is_latent:
            check_pair(writer, reader, fits(sizes, writer), torch.bfloat16)


@pytest.mark.parametrize("layout", [PageLayout.LATENT, PageLayout.FUSED_HND], ids=str)
def test_latents_do_not_pass_for_keys_and_values(layout: PageLayout) -> None:
    latent_chunk = layout is PageLayout.FUSED_HND
    chunk = poisoned_chunk(4, Sizes(heads=1), torch.bfloat16, latent=latent_chunk, heads=1)
    with pytest.raises(ChunkError, match="head dims"):
        scatter_paged(make_pages(Variant(layout), Sizes(heads=1)).cache, SlotMapping.of([0, 1, 2, 3]), chunk)


@pytest.mark.parametrize("sizes", GEOMETRIES)
@pytest.mark.parametrize("variant", STRIDED, ids=str)
def test_strided_pages_are_read_and_written_like_contiguous_ones(variant: Variant, sizes: Sizes) -> None:
    plain = CONTIGUOUS[-1] if not variant.is_latent else next(each for each in CONTIGUOUS if each.is_latent)
    sizes = fits(sizes, variant)
    check_pair(variant, plain, sizes, torch.bfloat16)
    check_pair(plain, variant, sizes, torch.bfloat16)
    check_pair(variant, variant, sizes, torch.float32)
