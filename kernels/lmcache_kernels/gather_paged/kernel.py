"""gather_paged on a device: pages → canonical."""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.moves import agree
from lmcache_kernels.paged_copy import kernel
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.slots import SlotMapping


def gather_paged(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, *, heads: HeadRange | None = None) -> None:
    """See the package. Raises `LayoutError` for permuted pages, which only CPUs have."""
    heads = agree(cache, slots, chunk, heads)
    kernel.copy(cache, slots.on(cache.device), chunk, heads, to_pages=False)
