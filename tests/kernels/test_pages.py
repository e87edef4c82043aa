"""What is not what was declared is refused when the cache is described, never when bytes move."""

import numpy as np
import pytest
import torch

from lmcache_kernels import LayoutError, PageCodec, PagedCache, PageGeometry, PageLayout, PageView
from tests.kernels.made_pages import PERMUTED, Sizes, Variant, make_pages, shape_of


def geometry(layout: PageLayout, **changes: object) -> PageGeometry:
    values: dict[str, object] = {
        "block_size": 2,
        "heads": 2,
        "head_dim_k": 8,
        "head_dim_v": 8,
        "dtype": torch.bfloat16,
        **changes,
    }
    return PageGeometry(layout, **values)  # type: ignore[arg-type]


def pages(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_an_unknown_layout_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LayoutError, match=r"'nhd' is not known; declare one of: kv-first-nhd, "):
        PageLayout.parse("nhd")
    assert PageLayout.parse("fused-hnd") is PageLayout.FUSED_HND


def test_a_layout_that_is_no_enum_value_is_refused() -> None:
    with pytest.raises(LayoutError, match="declared as a PageLayout"):
        geometry("fused-hnd")  # type: ignore[arg-type]


def test_every_layout_names_its_axes_and_no_two_permuted_ones_pass_for_token_order() -> None:
    for layout in PageLayout:
        assert len(shape_of(layout, Sizes())) == len(layout.axes)
        assert layout.axes.count("B") == 1


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (PageLayout.KV_FIRST_NHD, (4, 2, 2, 2, 8)),
        (PageLayout.BLOCKS_FIRST_NHD, (2, 4, 2, 2, 8)),
        (PageLayout.FUSED_HND, (4, 2, 2, 8)),
        (PageLayout.FUSED_HND, (4, 2, 2, 16, 1)),
        (PageLayout.FUSED_NHD, (4, 4, 2, 16)),
        (PageLayout.PERMUTED_FLAT, (2, 4, 31)),
    ],
)
def test_a_shape_other_than_declared_is_refused(layout: PageLayout, shape: tuple[int, ...]) -> None:
    codec = None
    if layout.is_permuted:
        codec = PageCodec.of(np.arange(16).reshape(2, 8), np.arange(16).reshape(2, 8), shares_run=False)
    with pytest.raises(LayoutError, match=f"layout {layout.value} expects"):
        PageView.of(pages(*shape), geometry(layout), codec)


def test_the_message_shows_axes_and_shape() -> None:
    with pytest.raises(LayoutError, match=r"expects \[B, H=2, N=2, C=16\] torch.bfloat16; found \(4, 3, 2, 16\)"):
        PageView.of(pages(4, 3, 2, 16), geometry(PageLayout.FUSED_HND))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"found \(4, 2, 2, 16\) torch.float16"):
        PageView.of(pages(4, 2, 2, 16, dtype=torch.float16), geometry(PageLayout.FUSED_HND))
    with pytest.raises(LayoutError, match=r"dtype torch\.int64 is not supported"):
        geometry(PageLayout.FUSED_HND, dtype=torch.int64)


def test_views_that_reach_an_address_twice_are_refused() -> None:
    with pytest.raises(LayoutError, match="some address twice"):
        PageView.of(pages(1, 2, 2, 16).expand(4, 2, 2, 16), geometry(PageLayout.FUSED_HND))


@pytest.mark.parametrize(
    "changes", [{"heads": 0}, {"block_size": 0}, {"head_dim_k": 0}, {"head_dim_v": 0}, {"head_dim_v": -1}]
)
def test_sizes_must_be_positive(changes: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        geometry(PageLayout.FUSED_HND, **changes)


def test_only_fused_pages_have_two_head_dims() -> None:
    geometry(PageLayout.FUSED_HND, head_dim_v=4)
    with pytest.raises(LayoutError, match="declare a fused layout"):
        geometry(PageLayout.KV_FIRST_NHD, head_dim_v=4)


def test_latent_pages_have_one_head_and_no_values() -> None:
    assert PageGeometry.latent(PageLayout.LATENT, block_size=16, width=576, dtype=torch.bfloat16).heads == 1
    with pytest.raises(LayoutError, match="one head and no values"):
        geometry(PageLayout.LATENT)


@pytest.mark.parametrize("layout", PERMUTED, ids=str)
def test_permuted_pages_are_refused_without_a_codec(layout: PageLayout) -> None:
    sizes = Sizes(heads=2, block_size=2)
    with pytest.raises(LayoutError, match="learn it with learn_codec"):
        PageView.of(pages(*shape_of(layout, sizes)), geometry(layout))


def test_token_major_pages_take_no_codec_and_a_codec_must_fit() -> None:
    codec = PageCodec.of(np.arange(16).reshape(2, 8), np.arange(16, 32).reshape(2, 8), shares_run=True)
    with pytest.raises(LayoutError, match="take no codec"):
        PageView.of(pages(4, 2, 2, 16), geometry(PageLayout.FUSED_HND), codec)
    with pytest.raises(LayoutError, match="the codec is for tables"):
        PageView.of(pages(4, 2, 4, 16), geometry(PageLayout.PERMUTED_FUSED, block_size=4), codec)
    with pytest.raises(LayoutError, match="the codec is for tables"):
        PageView.of(pages(2, 4, 2, 2, 8), geometry(PageLayout.PERMUTED_KV_FIRST), codec)


def test_permuted_pages_must_be_contiguous_inside_a_block_and_head() -> None:
    codec = PageCodec.of(np.arange(16).reshape(2, 8), np.arange(16, 32).reshape(2, 8), shares_run=True)
    with pytest.raises(LayoutError, match="contiguous inside a block and head"):
        PageView.of(pages(4, 2, 2, 16).permute(0, 2, 1, 3), geometry(PageLayout.PERMUTED_FUSED), codec)


def test_one_tensor_of_all_layers_and_one_a_layer_are_not_mixed_up() -> None:
    with pytest.raises(LayoutError, match="of_cross_layer"):
        PageView.of(pages(4, 3, 2, 2, 2, 8), geometry(PageLayout.CROSS_LAYER_NHD))
    with pytest.raises(LayoutError, match="of_layers"):
        PagedCache.of_cross_layer(pages(4, 2, 2, 16), geometry(PageLayout.FUSED_HND))


def test_layers_must_agree_in_blocks() -> None:
    with pytest.raises(LayoutError, match="agree in blocks"):
        PagedCache.of_layers([pages(4, 2, 2, 16), pages(5, 2, 2, 16)], geometry(PageLayout.FUSED_HND))
    with pytest.raises(LayoutError, match="at least one layer"):
        PagedCache.of_layers([], geometry(PageLayout.FUSED_HND))


def test_layers_beyond_the_cache_are_refused() -> None:
    cache = make_pages(Variant(PageLayout.FUSED_HND), Sizes(layers=2)).cache
    assert cache.slice_layers(1, 2).num_layers == 1
    with pytest.raises(LayoutError, match="not within the 2"):
        cache.slice_layers(1, 3)
