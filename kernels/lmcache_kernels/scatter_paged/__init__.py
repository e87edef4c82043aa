"""scatter_paged: canonical `[H, T, D]` per layer, K and V → an engine's pages.

Contract, the same for the reference, the host copies and the kernel:
- K(layer l, head p + i, slot slots[t]) `= chunk.keys[l, c + i, t]` for i below `heads.count`, with c, p the range's
  first heads; V alike.
- No other byte of the pages changes: not another slot, not another head, not a hole's.
- Bit-exact for every dtype. Blocking on the host; stream-ordered on a GPU. The caller owns all memory.
- `LayoutError`, `ChunkError`, `SlotError` (also for a slot named twice), `HeadsError` before anything is written.

Dispatch is one rule: pages on the host are moved by strided copies, pages on a device by the Triton kernel.
"""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.errors import KernelUnavailable
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.scatter_paged import copies
from lmcache_kernels.slots import SlotMapping

__all__ = ["scatter_paged"]


def scatter_paged(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, *, heads: HeadRange | None = None) -> None:
    """Copy a canonical chunk into the slots its tokens are mapped to (contract above)."""
    if cache.device.type == "cpu":
        copies.scatter_paged(cache, slots, chunk, heads=heads)
    else:
        try:
            from lmcache_kernels.scatter_paged import kernel
        except ImportError as error:
            raise KernelUnavailable(f"pages are on {cache.device} and need Triton: pip install triton") from error
        kernel.scatter_paged(cache, slots, chunk, heads=heads)
