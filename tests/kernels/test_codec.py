"""The order inside a page: stated, split into digits, learnt through a writer, and checked against it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import (
    CanonicalKV,
    CodecError,
    LayoutError,
    PageCodec,
    PagedCache,
    PageGeometry,
    PageLayout,
    PageWriter,
    SlotMapping,
    check_pages,
    gather_paged,
    learn_codec,
)
from lmcache_kernels.addresses import pieces_of
from lmcache_kernels.codec import Digit, digits_of
from lmcache_kernels.slots import Run
from tests.kernels.made_pages import (
    INTERIORS,
    PERMUTED,
    TOKEN_MAJOR,
    MadePages,
    Sizes,
    Variant,
    assert_same_memory,
    codec_of,
    make_pages,
)

SIZES = Sizes(layers=2, blocks=4, heads=2, block_size=16, head_dim_k=8, head_dim_v=8)


Encode = Callable[[torch.Tensor], torch.Tensor]


def writer_of(variant: Variant, sizes: Sizes, encode: Encode | None = None) -> PageWriter:
    """An engine's writer for that layout, one token and head at a time, with an optional change of representation."""

    def write(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        sides = [keys] if variant.is_latent else [keys, values]
        engine = MadePages(variant, sizes, None, [], [pages if encode else pages.view(torch.int16)])  # type: ignore[arg-type]
        for side, rows in enumerate(sides):
            raw = encode(rows) if encode else rows.view(torch.int16)
            for token, slot in enumerate(slots.tolist()):
                for head in range(rows.shape[1]):
                    block = engine.block(0, side, slot // sizes.block_size, head)
                    at = slot % sizes.block_size
                    block[slice(at, at + 1)] = raw[token, head][None]

    return write


def learn(variant: Variant, write: PageWriter | None = None, sizes: Sizes = SIZES) -> PageCodec:
    made = make_pages(variant, sizes)
    before = made.snapshot()
    codec = learn_codec(made.cache.views[0].tensor, made.cache.geometry, write or writer_of(variant, sizes))
    assert_same_memory(made.snapshot(), before)
    return codec


@pytest.mark.parametrize("interior", INTERIORS)
@pytest.mark.parametrize("layout", PERMUTED, ids=str)
def test_the_order_is_learnt_from_the_writer_alone(layout: PageLayout, interior: str) -> None:
    variant = Variant(layout, "blocks-outermost", interior)
    stated = codec_of(variant, SIZES)
    assert stated is not None
    assert learn(variant).same_as(stated)


def test_an_order_is_learnt_through_a_writer_that_quantises() -> None:
    """What a number looks like in the page is the writer's business: bf16 in, one byte of fp8 out."""
    variant, sizes = Variant(PageLayout.PERMUTED_FUSED, "contiguous", "tiles"), Sizes(heads=3, block_size=32)
    made = make_pages(variant, sizes, torch.uint8)
    write = writer_of(variant, sizes, lambda rows: (rows.float() * 0.5).to(torch.float8_e5m2).view(torch.uint8))
    codec = learn_codec(made.cache.views[0].tensor, made.cache.geometry, write, key_dtype=torch.bfloat16)
    stated = codec_of(variant, sizes)
    assert stated is not None
    assert codec.same_as(stated)


def test_token_major_layouts_have_nothing_to_learn() -> None:
    made = make_pages(Variant(PageLayout.FUSED_HND), SIZES)
    with pytest.raises(LayoutError, match="nothing to learn"):
        learn_codec(made.cache.views[0].tensor, made.cache.geometry, writer_of(made.variant, SIZES))


FUSED = Variant(PageLayout.PERMUTED_FUSED, "contiguous", "transposed")
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def into_another_block(write: Write) -> Write:
    return lambda keys, values, pages, slots: write(keys, values, pages, slots - SIZES.block_size)


def heads_swapped(write: Write) -> Write:
    return lambda keys, values, pages, slots: write(keys.flip(1), values.flip(1), pages, slots)


def one_head_otherwise(write: Write) -> Write:
    def wrapped(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        keys = keys.clone()
        keys[:, 1] = keys[:, 1].flip(-1)
        write(keys, values, pages, slots)

    return wrapped


def values_lost(write: Write) -> Write:
    return lambda keys, values, pages, slots: write(keys, keys, pages, slots)


def an_element_lost(write: Write) -> Write:
    def wrapped(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        keys = keys.clone()
        keys[..., 3] = keys[..., 4]
        write(keys, values, pages, slots)

    return wrapped


def scaled_per_token(write: Write) -> Write:
    def wrapped(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        write(keys * (1 + slots % 2)[:, None, None].to(keys.dtype), values, pages, slots)

    return wrapped


def clipped(write: Write) -> Write:
    return lambda keys, values, pages, slots: write(keys.clamp(max=5), values, pages, slots)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (into_another_block, "changed block 0"),
        (heads_swapped, "another head's part"),
        (one_head_otherwise, "differs between heads"),
        (values_lost, "neither keys nor values alone"),
        (an_element_lost, "a place of its own"),
        (scaled_per_token, "several bit patterns"),
        (clipped, "not told apart"),
    ],
)
def test_a_writer_whose_order_no_codec_can_say_is_refused(fault: Callable[[Write], Write], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        learn(FUSED, fault(writer_of(FUSED, SIZES)))


def test_a_writer_that_treats_partial_blocks_otherwise_is_refused() -> None:
    write = writer_of(FUSED, SIZES)

    def moody(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        whole = len(slots) == SIZES.block_size and bool((slots.diff() == 1).all())
        write(keys if whole else keys.flip(-1), values, pages, slots)

    with pytest.raises(CodecError, match="reads back otherwise"):
        learn(FUSED, moody)


@pytest.mark.parametrize("layout", TOKEN_MAJOR, ids=str)
def test_token_major_pages_are_checked_and_left_as_they_were(layout: PageLayout) -> None:
    sizes = Sizes(heads=1) if layout.is_latent else SIZES
    made = make_pages(Variant(layout, "blocks-outermost"), sizes)
    made.fill()
    before = made.snapshot()
    layer_variant = Variant(
        {
            PageLayout.CROSS_LAYER_NHD: PageLayout.BLOCKS_FIRST_NHD,
            PageLayout.CROSS_LAYER_HND: PageLayout.BLOCKS_FIRST_HND,
        }.get(layout, layout)
    )
    for layer in range(2):
        check_pages(made.cache, layer, writer_of(layer_variant, sizes))
    assert_same_memory(made.snapshot(), before)


@pytest.mark.parametrize(
    ("declared", "real"),
    [
        (PageLayout.KV_FIRST_NHD, PageLayout.BLOCKS_FIRST_NHD),
        (PageLayout.KV_FIRST_HND, PageLayout.KV_FIRST_NHD),
        (PageLayout.BLOCKS_FIRST_NHD, PageLayout.BLOCKS_FIRST_HND),
        (PageLayout.FUSED_HND, PageLayout.FUSED_NHD),
    ],
)
def test_a_layout_that_only_its_shape_makes_plausible_is_caught_by_the_probe(
    declared: PageLayout, real: PageLayout
) -> None:
    """Two blocks, two heads, two tokens: every shape agrees, and the engine's writer does not."""
    sizes = Sizes(layers=1, blocks=2, heads=2, block_size=2)
    made = make_pages(Variant(declared), sizes)
    made.fill()
    before = made.snapshot()
    with pytest.raises(CodecError, match="not how this engine writes"):
        check_pages(made.cache, 0, writer_of(Variant(real), sizes))
    assert_same_memory(made.snapshot(), before)


def test_a_wrong_codec_is_caught_by_the_probe() -> None:
    made = make_pages(Variant(PageLayout.PERMUTED_FUSED, "contiguous", "tiles"), SIZES)
    with pytest.raises(CodecError, match=r"layer 1, key: .* not how this engine writes its pages"):
        check_pages(made.cache, 1, writer_of(FUSED, SIZES))


def test_a_token_major_reading_of_permuted_pages_is_caught_by_the_probe() -> None:
    made = make_pages(Variant(PageLayout.FUSED_HND), SIZES)
    with pytest.raises(CodecError, match="not how this engine writes"):
        check_pages(made.cache, 0, writer_of(FUSED, SIZES))


@pytest.mark.parametrize("shape", [((2, 4), (2, 4)), ((2, 4), (3, 4)), ((8,), (8,))])
def test_an_order_must_reach_every_element_once(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(CodecError):
        PageCodec.of(np.zeros(shape[0], dtype=int), np.zeros(shape[1], dtype=int), shares_run=True)


@pytest.mark.parametrize(
    ("offsets", "digits"),
    [
        ([0], (Digit(1, 0),)),
        ([0, 3, 6, 9], (Digit(4, 3),)),
        ([0, 1, 8, 9, 16, 17], (Digit(2, 1), Digit(3, 8))),
        ([0, 1, 10, 11, 4, 5, 14, 15], (Digit(2, 1), Digit(2, 10), Digit(2, 4))),
        ([0, 1, 2, 9], None),
        ([0, 1, 5, 7], None),
    ],
)
def test_offsets_are_split_into_digits_where_they_can_be(offsets: list[int], digits: tuple[Digit, ...] | None) -> None:
    assert digits_of(offsets) == digits


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), min_size=1, max_size=4), st.data())
def test_pieces_of_a_run_reach_exactly_its_slots(made: list[tuple[int, int]], data: st.DataObject) -> None:
    digits = [Digit(size, stride) for size, stride in made]
    offsets = [0]
    for digit in digits:
        offsets = [value * digit.stride + offset for value in range(digit.size) for offset in offsets]
    start = data.draw(st.integers(0, len(offsets) - 1))
    stop = data.draw(st.integers(start, len(offsets)))
    found = []
    for piece in pieces_of(Run(100 + start, start, stop - start), digits):
        reached = [piece.offset]
        for digit in piece.tokens:
            reached = [value * digit.stride + offset for value in range(digit.size) for offset in reached]
        assert len(reached) == piece.num_tokens
        found += list(zip(range(piece.token, piece.token + piece.num_tokens), reached, strict=True))
    assert found == [(100 + slot, offsets[slot]) for slot in range(start, stop)]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["vec", "amx", "vec16"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        (torch.bfloat16, "auto"),
        (torch.float16, "auto"),
        (torch.float32, "auto"),
        (torch.uint8, "fp8_e4m3"),
        (torch.uint8, "fp8_e5m2"),
    ],
    ids=str,
)
def test_vllm_cpu_pages_are_learnt_whatever_the_instruction_set(
    isa: str, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed: scripts/setup --vllm")
    if isa == "vec16" and dtype == torch.uint8:
        pytest.skip("vLLM has no fp8 pages for vec16")
    heads, size, dim = 3, 64, 64

    def write(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        key_cache, value_cache = pages.view(pages.shape[0], heads, 2 * size, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa, 1.0, 1.0, kv_cache_dtype)

    key_dtype = torch.bfloat16 if dtype == torch.uint8 else dtype
    memory = torch.zeros((2, 5, heads, size, 2 * dim), dtype=dtype)
    geometry = PageGeometry(PageLayout.PERMUTED_FUSED, size, heads, dim, dim, dtype)
    codec = learn_codec(memory[0], geometry, write, key_dtype=key_dtype)
    assert codec.keys.digits is not None, "known orders are moved by strided copies, not by index"
    assert codec.values.digits is not None
    cache = PagedCache.of_layers(list(memory.unbind()), geometry, codec)
    for layer in range(2):
        check_pages(cache, layer, write, key_dtype=key_dtype)
    assert int(memory.view(torch.uint8).count_nonzero()) == 0

    if dtype != torch.uint8:
        keys, values = (torch.randn(2, size * 2, heads, dim).to(dtype) for _ in range(2))
        slots = torch.arange(size, size * 3).flip(0)
        for layer in range(2):
            write(keys[layer], values[layer], memory[layer], slots)
        found = torch.zeros((2, 2, heads, size * 2, dim), dtype=dtype)
        gather_paged(cache, SlotMapping.of(slots), CanonicalKV(found[0], found[1]))
        assert torch.equal(found[0], keys.transpose(1, 2))
        assert torch.equal(found[1], values.transpose(1, 2))
