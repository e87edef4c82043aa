"""The Triton kernels equal their references bit for bit, interpreted on the CPU in a process of their own."""

import json

import pytest
import torch

from lmcache_kernels import HeadRange, PageLayout
from lmcache_kernels.launches import TILE_ELEMENTS, launches_of
from tests.kernels.interpreter import run_python
from tests.kernels.made_pages import Sizes, Variant, make_pages, poisoned_chunk


@pytest.mark.slow
def test_interpreted_kernels_equal_their_references() -> None:
    run = run_python("-m", "tests.kernels.kernel_checks", timeout_s=500, TRITON_INTERPRET="1")
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) > 150
    assert [each for each in results if each["error"]] == []
    assert run.returncode == 0, run.stderr


def test_a_launch_describes_a_slab_in_elements_of_its_storage() -> None:
    made = make_pages(Variant(PageLayout.FUSED_HND, "blocks-outermost"), Sizes(layers=3, heads=4, head_dim_v=16))
    chunk = poisoned_chunk(5, Sizes(layers=3, head_dim_v=16), torch.bfloat16, latent=False, heads=2)
    keys, values = launches_of(made.cache, chunk, HeadRange(1, 0, 2))
    assert (keys.num_layers, keys.num_heads, keys.width, values.width) == (3, 2, 8, 16)
    page, head, token = 4 * 16 * 24, 16 * 24, 24
    assert keys.page_strides == values.page_strides == (page, head, 3 * page, token, 1)
    assert (keys.page_offset, values.page_offset) == (head, head + 8)


@pytest.mark.parametrize("width", [1, 63, 64, 576, 5000])
def test_a_tile_holds_all_dims_of_some_tokens(width: int) -> None:
    sizes = Sizes(layers=1, head_dim_k=width, heads=1)
    made = make_pages(Variant(PageLayout.LATENT), sizes)
    (launch,) = launches_of(
        made.cache, poisoned_chunk(5, sizes, torch.bfloat16, latent=True, heads=1), HeadRange(0, 0, 1)
    )
    assert launch.tile_dims >= width
    assert launch.tile_dims < 2 * width or width == 1
    assert launch.tile_tokens >= 1
    assert launch.tile_tokens * launch.tile_dims <= max(TILE_ELEMENTS, launch.tile_dims)


WITHOUT_TRITON = """
import sys

sys.modules["triton"] = None
import torch

from lmcache_kernels import (
    CanonicalKV, KernelUnavailable, PagedCache, PageGeometry, PageLayout, SlotMapping, gather_paged, scatter_paged
)

with torch.device("meta"):  # any device that is not the host
    geometry = PageGeometry(PageLayout.FUSED_HND, 2, 2, 4, 4, torch.bfloat16)
    cache = PagedCache.of_layers([torch.zeros(3, 2, 2, 8, dtype=torch.bfloat16)], geometry)
    side = torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16)
for operation in (gather_paged, scatter_paged):
    try:
        operation(cache, SlotMapping.of([0, 1, 2, 3]), CanonicalKV(side, side.clone()))
    except KernelUnavailable as error:
        sys.stdout.write(f"{error}\\n")
"""


@pytest.mark.slow
def test_without_triton_the_package_imports_and_only_a_device_is_refused() -> None:
    run = run_python("-c", WITHOUT_TRITON)
    assert run.stdout.splitlines() == ["pages are on meta and need Triton: pip install triton"] * 2, run.stderr
