"""gather_paged: an engine's pages → canonical `[H, T, D]` per layer, K and V.

Contract, the same for the reference, the host copies and the kernel:
- `chunk.keys[l, c + i, t] = K(layer l, head p + i, slot slots[t])` for i below `heads.count`, with c, p the range's
  first heads; V alike.
- A hole (negative slot), and chunk heads outside the range, are left as they were.
- Bit-exact for every dtype. Blocking on the host; stream-ordered on a GPU. The caller owns all memory.
- `LayoutError`, `ChunkError`, `SlotError`, `HeadsError` before anything is written.

Dispatch is one rule: pages on the host are moved by strided copies, pages on a device by the Triton kernel.
"""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.errors import KernelUnavailable
from lmcache_kernels.gather_paged import copies
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.slots import SlotMapping

__all__ = ["gather_paged"]


def gather_paged(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, *, heads: HeadRange | None = None) -> None:
    """Copy the tokens of a slot mapping out of the pages into a canonical chunk (contract above)."""
    if cache.device.type == "cpu":
        copies.gather_paged(cache, slots, chunk, heads=heads)
    else:
        try:
            from lmcache_kernels.gather_paged import kernel
        except ImportError as error:
            raise KernelUnavailable(f"pages are on {cache.device} and need Triton: pip install triton") from error
        kernel.gather_paged(cache, slots, chunk, heads=heads)
