"""Runs both Triton kernels against their references: `python -m tests.kernels.kernel_checks [--device cuda]`.

On the CPU they are interpreted. A process of its own, because Triton decides at import whether it interprets. Prints
one JSON line a case, `{"case": …, "error": …}`; exit status 1 if any case has an error.
"""

# ruff: noqa: E402  # what decides comes before the imports

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator

ON_DEVICE = "cuda" in sys.argv[1:]
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from lmcache_kernels import CanonicalKV, HeadRange, LayoutError, PagedCache, PageGeometry, PageLayout, SlotMapping
from lmcache_kernels.gather_paged import kernel as gather_kernel
from lmcache_kernels.gather_paged import reference as gather_reference
from lmcache_kernels.scatter_paged import kernel as scatter_kernel
from lmcache_kernels.scatter_paged import reference as scatter_reference
from tests.kernels.made_pages import (
    DTYPES,
    VARIANTS,
    Sizes,
    Variant,
    assert_same_bits,
    assert_same_memory,
    make_pages,
    poisoned_chunk,
)

Case = tuple[str, Callable[[], None]]
TOKENS = (1, 63, 1000)


def cases() -> Iterator[Case]:
    for variant in VARIANTS:
        if variant.layout.is_permuted:
            continue  # a CPU's
        heads = 1 if variant.is_latent else 4
        for tokens, block_size in zip(TOKENS, (2, 16, 128), strict=True):
            sizes = Sizes(2, -(-(tokens + 2) // block_size), heads, block_size, 5, 5)
            yield (
                f"{variant} T={tokens} N={block_size}",
                lambda v=variant, s=sizes, t=tokens: check(v, s, t, torch.bfloat16),
            )
    for dtype, heads in itertools.product(DTYPES, (1, 2, 8)):
        sizes = Sizes(2, 5, heads, 32, 24, 9)
        variant = VARIANTS[[str(each) for each in VARIANTS].index("fused-hnd+blocks-outermost")]
        yield f"{dtype} H={heads}", lambda v=variant, s=sizes, d=dtype: check(v, s, 70, d)
    yield "addresses beyond 2**31 elements", check_far_addresses
    for variant in (each for each in VARIANTS if each.layout.is_permuted and each.memory == "contiguous"):
        yield f"{variant} is refused", lambda v=variant: check_refused(v)


def check(variant: Variant, sizes: Sizes, tokens: int, dtype: torch.dtype) -> None:
    slots = SlotMapping.of(slots_with_holes(tokens, sizes.slots))
    for heads, chunk_heads in ((None, sizes.heads), (HeadRange(sizes.heads - 1, 1, 1), 3)):
        pages = make_pages(variant, sizes, dtype)
        pages.fill()
        found, expected = (
            poisoned_chunk(tokens, sizes, dtype, latent=variant.is_latent, heads=chunk_heads) for _ in range(2)
        )
        gather_kernel.gather_paged(pages.cache, slots, found, heads=heads)
        gather_reference.gather_paged(pages.cache, slots, expected, heads=heads)
        assert_same_bits(found, expected)

        one, other = make_pages(variant, sizes, dtype), make_pages(variant, sizes, dtype)
        scatter_kernel.scatter_paged(one.cache, slots, expected, heads=heads)
        scatter_reference.scatter_paged(other.cache, slots, expected, heads=heads)
        assert_same_memory(one.snapshot(), other.snapshot())


def check_far_addresses() -> None:
    """The last blocks of 2 GiB of pages, of which nothing else is touched."""
    blocks, size, dim = (1 << 31) // 256 + 4, 16, 8
    pages = torch.empty((blocks, 1, size, 2 * dim), dtype=torch.uint8)
    geometry = PageGeometry(PageLayout.FUSED_HND, size, 1, dim, dim, torch.uint8)
    cache = PagedCache.of_layers([pages], geometry)
    last = torch.arange(size * 2 * dim, dtype=torch.int64).to(torch.uint8).view(size, 2 * dim)
    pages[-1, 0], pages[-2, 0] = last, 0
    chunk = CanonicalKV(*(torch.zeros((1, 1, size, dim), dtype=torch.uint8) for _ in range(2)))
    gather_kernel.gather_paged(cache, SlotMapping.of(range((blocks - 1) * size, blocks * size)), chunk)
    scatter_kernel.scatter_paged(cache, SlotMapping.of(range((blocks - 2) * size, (blocks - 1) * size)), chunk)
    assert torch.equal(chunk.keys[0, 0], last[:, :dim])
    assert torch.equal(pages[-2, 0], last)


def slots_with_holes(tokens: int, num_slots: int) -> list[int]:
    shuffled = torch.randperm(num_slots, generator=torch.Generator().manual_seed(tokens), device="cpu")[
        :tokens
    ].tolist()
    return [-1 if token % 7 == 3 else slot for token, slot in enumerate(shuffled)]


def check_refused(variant: Variant) -> None:
    pages = make_pages(variant, Sizes())
    chunk = poisoned_chunk(2, Sizes(), torch.bfloat16, latent=False, heads=2)
    for operation in (gather_kernel.gather_paged, scatter_kernel.scatter_paged):
        try:
            operation(pages.cache, SlotMapping.of([0, 1]), chunk)
        except LayoutError:
            continue
        raise AssertionError("a kernel took permuted pages")


def main() -> int:
    torch.set_num_threads(1)
    torch.set_default_device("cuda" if ON_DEVICE else "cpu")
    failed = 0
    for name, run in cases():
        error = None
        try:
            run()
        except Exception:
            error = traceback.format_exc()
            failed += 1
        sys.stdout.write(json.dumps({"case": name, "error": error}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
