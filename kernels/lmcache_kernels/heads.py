"""Which kv heads go where when a model is cut over ranks (tensor parallelism)."""

from dataclasses import dataclass

from lmcache_kernels.errors import HeadsError


@dataclass(frozen=True, slots=True)
class HeadRange:
    """`count` heads: from `page_head` on in the pages, from `chunk_head` on in the canonical chunk."""

    page_head: int
    chunk_head: int
    count: int

    def __post_init__(self) -> None:
        if self.page_head < 0 or self.chunk_head < 0 or self.count < 0:
            raise HeadsError(f"a head range counts from zero; found {self}")


def heads_of_rank(total_heads: int, ranks: int, rank: int) -> range:
    """The global kv heads that rank `rank` of `ranks` holds: `max(1, H / ranks)` of them, replicated when ranks
    outnumber heads.

    Raises `HeadsError` where heads and ranks do not divide (3 heads over 2 ranks).
    """
    if total_heads < 1 or not 0 <= rank < ranks:
        raise HeadsError(f"expected at least one head and a rank below {ranks}; found {total_heads} heads, rank {rank}")
    if total_heads % ranks == 0:
        share = total_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % total_heads == 0:
        head = rank // (ranks // total_heads)
        return range(head, head + 1)
    raise HeadsError(
        f"{total_heads} kv heads cannot be divided over {ranks} ranks: one must be a multiple of the other"
    )


def shared_heads(pages: range, chunk: range) -> HeadRange | None:
    """The overlap of two ranges of global heads, as positions in the pages and in the chunk; None where they share
    none.
    """
    first, stop = max(pages.start, chunk.start), min(pages.stop, chunk.stop)
    if first >= stop:
        return None
    return HeadRange(page_head=first - pages.start, chunk_head=first - chunk.start, count=stop - first)
