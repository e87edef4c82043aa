"""gather_paged on the host: whole runs of tokens, all layers of a slab at once, as strided copies."""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.copy_strided import copy_strided
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.moves import Pair, agree, pairs_of, side_moves
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.slots import SlotMapping


def gather_paged(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, *, heads: HeadRange | None = None) -> None:
    """See the package."""
    heads = agree(cache, slots, chunk, heads)
    for move in side_moves(cache, chunk, heads):
        for pair in pairs_of(move, slots):
            if isinstance(pair, Pair):
                copy_strided(pair.chunk, pair.pages)
            else:
                pair.chunk[:, pair.tokens] = pair.pages.take(pair.addresses)
