"""gather_paged, said plainly: one token, one head, one layer at a time."""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.moves import agree
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.slots import SlotMapping
from lmcache_kernels.words import as_integers


def gather_paged(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, *, heads: HeadRange | None = None) -> None:
    """See the package: this defines what the others must equal, bit for bit."""
    heads = agree(cache, slots, chunk, heads)
    for side, out in zip(cache.geometry.sides, chunk.sides, strict=True):
        for layer, view in enumerate(cache.views):
            for token, slot in enumerate(slots.slots.tolist()):
                if slot < 0:
                    continue
                block, position = divmod(slot, cache.geometry.block_size)
                for i in range(heads.count):
                    memory, elements = view.vector(side, block, heads.page_head + i, position)
                    as_integers(out)[layer, heads.chunk_head + i, token] = memory[elements]
