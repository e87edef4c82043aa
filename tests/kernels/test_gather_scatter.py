"""gather_paged and scatter_paged on the host equal their plain references bit for bit, and touch nothing they were
not told to.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import (
    CanonicalKV,
    ChunkError,
    HeadRange,
    HeadsError,
    PagedCache,
    PageLayout,
    SlotError,
    SlotMapping,
    gather_paged,
    scatter_paged,
)
from lmcache_kernels.gather_paged import reference as gather_reference
from lmcache_kernels.pages import Side
from lmcache_kernels.scatter_paged import reference as scatter_reference
from tests.kernels.made_pages import (
    DTYPES,
    INTEGER,
    VARIANTS,
    Sizes,
    Variant,
    assert_same_bits,
    assert_same_memory,
    expected_chunk,
    make_pages,
    poisoned_chunk,
)
from tests.marks import slow_after


@st.composite
def slot_lists(draw: st.DrawFn, slots: int, block_size: int) -> list[int]:
    """Whole blocks, partial runs, single slots and holes, no slot twice."""
    free = draw(st.permutations(range(-(-slots // block_size))))
    tokens: list[int] = []
    for block in free:
        first = draw(st.integers(0, block_size - 1))
        length = draw(st.sampled_from([0, 1, block_size // 2, block_size - first]))
        run = list(range(block * block_size + first, block * block_size + min(block_size, first + length)))
        tokens += run if draw(st.booleans()) or len(run) > 40 else draw(st.permutations(run))
        tokens += [-1] * draw(st.integers(0, 2))
    return tokens


@st.composite
def moves(draw: st.DrawFn) -> tuple[Variant, Sizes, torch.dtype, list[int], HeadRange, int]:
    variant = draw(st.sampled_from(VARIANTS))
    heads = 1 if variant.is_latent else draw(st.sampled_from([1, 2, 4, 8]))
    block_size = draw(st.sampled_from([2, 16, 32, 128]))
    dim = draw(st.sampled_from([2, 8, 24] if variant.interior == "tiles" else [1, 3, 8, 20]))
    fused = "fused" in variant.layout.value
    other_dim = draw(st.sampled_from([dim, 2, 12])) if fused else dim
    sizes = Sizes(draw(st.integers(1, 3)), draw(st.integers(1, 4)), heads, block_size, dim, other_dim)
    slots = draw(slot_lists(sizes.slots, block_size))
    count = draw(st.integers(1, heads))
    chunk_heads = draw(st.integers(count, 8))
    cut = HeadRange(draw(st.integers(0, heads - count)), draw(st.integers(0, chunk_heads - count)), count)
    return variant, sizes, draw(st.sampled_from(DTYPES)), slots, cut, chunk_heads


@given(moves())
def test_gathering_equals_the_reference_and_leaves_pages_alone(
    move: tuple[Variant, Sizes, torch.dtype, list[int], HeadRange, int],
) -> None:
    variant, sizes, dtype, slots, heads, chunk_heads = move
    pages = make_pages(variant, sizes, dtype)
    pages.fill()
    before = pages.snapshot()
    found, expected = (
        poisoned_chunk(len(slots), sizes, dtype, latent=variant.is_latent, heads=chunk_heads) for _ in range(2)
    )
    gather_paged(pages.cache, SlotMapping.of(slots), found, heads=heads)
    gather_reference.gather_paged(pages.cache, SlotMapping.of(slots), expected, heads=heads)
    assert_same_bits(found, expected)
    assert_same_memory(pages.snapshot(), before)


@given(moves())
def test_scattering_equals_the_reference_everywhere_in_memory(
    move: tuple[Variant, Sizes, torch.dtype, list[int], HeadRange, int],
) -> None:
    variant, sizes, dtype, slots, heads, chunk_heads = move
    chunk = random_chunk(len(slots), sizes, dtype, latent=variant.is_latent, heads=chunk_heads)
    found, expected = make_pages(variant, sizes, dtype), make_pages(variant, sizes, dtype)
    scatter_paged(found.cache, SlotMapping.of(slots), chunk, heads=heads)
    scatter_reference.scatter_paged(expected.cache, SlotMapping.of(slots), chunk, heads=heads)
    assert_same_memory(found.snapshot(), expected.snapshot())


def random_chunk(tokens: int, sizes: Sizes, dtype: torch.dtype, *, latent: bool, heads: int) -> CanonicalKV:
    chunk = poisoned_chunk(tokens, sizes, dtype, latent=latent, heads=heads)
    generator = torch.Generator().manual_seed(tokens)
    for side in chunk.sides:
        raw = side.view(INTEGER[dtype.itemsize])
        info = torch.iinfo(raw.dtype)
        raw.copy_(torch.randint(info.min, info.max, raw.shape, generator=generator).to(raw.dtype))
    return chunk


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", slow_after(2, [1, 63, 1000]))
@pytest.mark.parametrize("block_size", [2, 16, 32, 128])
def test_odd_lengths_round_trip_through_two_layouts(tokens: int, block_size: int, dtype: torch.dtype) -> None:
    sizes = Sizes(layers=3, blocks=-(-(tokens + 1) // block_size), heads=2, block_size=block_size)
    source = make_pages(Variant(PageLayout.FUSED_HND, "one-allocation"), sizes, dtype)
    target = make_pages(Variant(PageLayout.KV_FIRST_NHD), sizes, dtype)
    source.fill()
    slots = list(range(1, tokens + 1))
    first, second = (poisoned_chunk(tokens, sizes, dtype, latent=False, heads=2) for _ in range(2))
    gather_paged(source.cache, SlotMapping.of(slots), first)
    scatter_paged(target.cache, SlotMapping.of(slots[::-1]), first)
    gather_paged(target.cache, SlotMapping.of(slots[::-1]), second)
    assert_same_bits(first, expected_chunk(slots, sizes, dtype, latent=False, heads=range(2)))
    assert_same_bits(second, first)


@pytest.mark.parametrize("computed", [0, 16, 240, 255, 256])
def test_slots_below_what_the_engine_computed_are_never_written(computed: int) -> None:
    sizes = Sizes(blocks=32, heads=2, block_size=16)
    pages = make_pages(Variant(PageLayout.FUSED_HND), sizes)
    table = list(range(31, 15, -1))
    slots = SlotMapping.of_blocks(table, 16, 0, 256).slots.copy()
    slots[:computed] = -1
    chunk = random_chunk(256, sizes, torch.bfloat16, latent=False, heads=2)
    scatter_paged(pages.cache, SlotMapping.of(slots), chunk)
    written = torch.zeros(sizes.slots, dtype=torch.bool)
    sentinel = make_pages(Variant(PageLayout.FUSED_HND), sizes)
    for block in range(sizes.blocks):
        changed = (pages.layers[0][block] != sentinel.layers[0][block]).any(-1).any(0)
        written[block * 16 : (block + 1) * 16] = changed
    assert sorted(written.nonzero().flatten().tolist()) == sorted(slots[computed:].tolist())


def test_many_scattered_single_slots_are_moved_by_index() -> None:
    sizes = Sizes(blocks=8, heads=4, block_size=32)
    pages = make_pages(Variant(PageLayout.BLOCKS_FIRST_NHD, "one-allocation"), sizes)
    pages.fill()
    slots = list(range(0, sizes.slots, 2))
    chunk = poisoned_chunk(len(slots), sizes, torch.bfloat16, latent=False, heads=4)
    gather_paged(pages.cache, SlotMapping.of(slots), chunk)
    assert_same_bits(chunk, expected_chunk(slots, sizes, torch.bfloat16, latent=False, heads=range(4)))


def test_a_chunk_may_be_views_into_one_buffer_of_bytes() -> None:
    sizes = Sizes(heads=2, head_dim_k=24, head_dim_v=16)
    pages = make_pages(Variant(PageLayout.FUSED_NHD), sizes)
    pages.fill()
    buffer = torch.full((2 * 2 * 10 * 40 * 2,), 0x5A, dtype=torch.uint8)
    chunk = CanonicalKV.in_buffer(
        buffer, layers=2, heads=2, tokens=10, head_dim_k=24, head_dim_v=16, dtype=torch.bfloat16
    )
    gather_paged(pages.cache, SlotMapping.of(range(10)), chunk)
    expected = expected_chunk(list(range(10)), sizes, torch.bfloat16, latent=False, heads=range(2))
    assert_same_bits(chunk, expected)
    assert expected.values is not None
    by_layer = [side[layer].flatten() for layer in range(2) for side in (expected.keys, expected.values)]
    assert torch.equal(torch.cat(by_layer).view(torch.uint8), buffer)


def test_an_unaligned_buffer_is_moved_too() -> None:
    sizes = Sizes(heads=2)
    pages = make_pages(Variant(PageLayout.FUSED_HND), sizes)
    pages.fill()
    buffer = torch.zeros(2 * 2 * 10 * 16 * 2 + 2, dtype=torch.uint8)[2:]
    chunk = CanonicalKV.in_buffer(
        buffer, layers=2, heads=2, tokens=10, head_dim_k=8, head_dim_v=8, dtype=torch.bfloat16
    )
    gather_paged(pages.cache, SlotMapping.of(range(10)), chunk)
    assert_same_bits(chunk, expected_chunk(list(range(10)), sizes, torch.bfloat16, latent=False, heads=range(2)))


def test_fp8_pages_fill_a_chunk_of_raw_bytes() -> None:
    sizes = Sizes()
    pages = make_pages(Variant(PageLayout.FUSED_HND), sizes, torch.float8_e4m3fn)
    pages.fill()
    chunk = poisoned_chunk(20, sizes, torch.uint8, latent=False, heads=2)
    gather_paged(pages.cache, SlotMapping.of(range(20)), chunk)
    assert_same_bits(chunk, expected_chunk(list(range(20)), sizes, torch.uint8, latent=False, heads=range(2)))


def test_one_layer_alone_can_be_moved() -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND, "blocks-outermost"), Sizes(layers=3))
    pages.fill()
    chunk = poisoned_chunk(20, Sizes(layers=3), torch.bfloat16, latent=False, heads=2)
    gather_paged(pages.cache.slice_layers(1, 2), SlotMapping.of(range(20)), chunk.slice_layers(1, 2))
    expected = expected_chunk(list(range(20)), Sizes(layers=3), torch.bfloat16, latent=False, heads=range(2))
    assert_same_bits(chunk.slice_layers(1, 2), expected.slice_layers(1, 2))
    assert_same_bits(
        chunk.slice_layers(0, 1), poisoned_chunk(20, Sizes(layers=1), torch.bfloat16, latent=False, heads=2)
    )


def test_layers_at_equal_distances_are_one_slab() -> None:
    joined = make_pages(Variant(PageLayout.FUSED_HND, "one-allocation"), Sizes(layers=3)).cache
    apart = make_pages(Variant(PageLayout.FUSED_HND), Sizes(layers=3)).cache
    assert [len(slabs) for slabs in joined.slabs.values()] == [1, 1]
    assert [len(slabs) for slabs in apart.slabs.values()] == [3, 3]


def test_layers_at_unequal_distances_are_joined_as_far_as_they_go() -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND, "one-allocation"), Sizes(layers=5))
    pages.fill()
    kept = [0, 1, 3, 4]
    cache = PagedCache(tuple(pages.cache.views[layer] for layer in kept))
    assert [(slab.first, slab.layer.size) for slab in cache.slabs[Side.KEY]] == [(0, 2), (2, 2)]
    chunk = poisoned_chunk(20, Sizes(layers=4), torch.bfloat16, latent=False, heads=2)
    gather_paged(cache, SlotMapping.of(range(20)), chunk)
    expected = expected_chunk(list(range(20)), Sizes(layers=5), torch.bfloat16, latent=False, heads=range(2))
    assert torch.equal(chunk.keys.view(torch.int16), expected.keys.view(torch.int16)[kept])


def test_layers_out_of_order_in_memory_are_not_joined_and_still_right() -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND, "one-allocation"), Sizes(layers=3))
    pages.fill()
    turned = PagedCache(pages.cache.views[::-1])
    chunk = poisoned_chunk(20, Sizes(layers=3), torch.bfloat16, latent=False, heads=2)
    gather_paged(turned, SlotMapping.of(range(20)), chunk)
    expected = expected_chunk(list(range(20)), Sizes(layers=3), torch.bfloat16, latent=False, heads=range(2))
    assert torch.equal(chunk.keys.flip(0).view(torch.int16), expected.keys.view(torch.int16))


@pytest.mark.parametrize("operation", [gather_paged, scatter_paged])
@pytest.mark.parametrize(
    ("slots", "chunk_tokens", "dtype", "chunk_heads", "heads", "error"),
    [
        ([0, 64], 2, torch.bfloat16, 2, None, SlotError),
        ([0, 1], 3, torch.bfloat16, 2, None, ChunkError),
        ([0, 1], 2, torch.float16, 2, None, ChunkError),
        ([0, 1], 2, torch.bfloat16, 4, None, HeadsError),
        ([0, 1], 2, torch.bfloat16, 4, HeadRange(1, 0, 2), HeadsError),
        ([0, 1], 2, torch.bfloat16, 2, HeadRange(0, 1, 2), HeadsError),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    operation: object,
    slots: list[int],
    chunk_tokens: int,
    dtype: torch.dtype,
    chunk_heads: int,
    heads: HeadRange | None,
    error: type[Exception],
) -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND), Sizes())
    before = pages.snapshot()
    chunk = poisoned_chunk(chunk_tokens, Sizes(), dtype, latent=False, heads=chunk_heads)
    with pytest.raises(error):
        operation(pages.cache, SlotMapping.of(slots), chunk, heads=heads)  # type: ignore[operator]
    assert_same_memory(pages.snapshot(), before)


def test_a_slot_named_twice_is_refused_when_writing_and_read_twice_when_reading() -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND), Sizes())
    pages.fill()
    slots = [3, 4, 5, 9, 4]
    chunk = poisoned_chunk(5, Sizes(), torch.bfloat16, latent=False, heads=2)
    gather_paged(pages.cache, SlotMapping.of(slots), chunk)
    assert_same_bits(chunk, expected_chunk(slots, Sizes(), torch.bfloat16, latent=False, heads=range(2)))
    with pytest.raises(SlotError, match=r"slot 4 would be written for tokens \[1, 4\]"):
        scatter_paged(pages.cache, SlotMapping.of(slots), chunk)


@pytest.mark.parametrize("operation", [gather_paged, scatter_paged])
def test_nothing_to_move_moves_nothing(operation: object) -> None:
    pages = make_pages(Variant(PageLayout.FUSED_HND), Sizes())
    before = pages.snapshot()
    for slots in ([], [-1, -1]):
        chunk = poisoned_chunk(len(slots), Sizes(), torch.bfloat16, latent=False, heads=2)
        operation(pages.cache, SlotMapping.of(slots), chunk)  # type: ignore[operator]
    assert_same_memory(pages.snapshot(), before)
