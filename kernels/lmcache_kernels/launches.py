"""What a kernel launch moves: one side of one slab, as pointers and strides. No Triton here, so that it is checked
without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.errors import LayoutError
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.moves import SideMove, side_moves
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.words import all_words

TILE_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """Strides in elements: pages by (layer, head, block, token, dim), chunk by (layer, head, token, dim).

    `pages` begins where the storage does, hence the offset; `chunk` begins at its first element.
    """

    pages: torch.Tensor
    chunk: torch.Tensor
    num_layers: int
    num_heads: int
    width: int
    block_size: int
    page_offset: int
    page_strides: tuple[int, int, int, int, int]
    chunk_strides: tuple[int, ...]

    @property
    def tile_dims(self) -> int:
        """Dims a program moves: all of them, as a power of two."""
        return int(1 << (self.width - 1).bit_length())

    @property
    def tile_tokens(self) -> int:
        """Tokens a program moves."""
        return max(1, TILE_ELEMENTS // self.tile_dims)


def launches_of(cache: PagedCache, chunk: CanonicalKV, heads: HeadRange) -> Iterator[Launch]:
    """One launch for each (side, slab) that holds anything. Raises `LayoutError` for permuted pages."""
    if cache.geometry.layout.is_permuted:
        raise LayoutError(f"{cache.geometry.layout.value} pages are a CPU engine's: there is no kernel for them")
    for move in side_moves(cache, chunk, heads):
        if move.chunk.numel():
            yield _launch_of(move, cache.geometry.block_size)


def _launch_of(move: SideMove, block_size: int) -> Launch:
    digits = move.slab.addresses.digits
    assert digits is not None, "token-major pages always have digits"
    (token,), (dim,) = digits.tokens, digits.dims
    return Launch(
        pages=all_words(move.slab.memory, move.chunk.element_size()),
        chunk=move.chunk,
        num_layers=move.chunk.shape[0],
        num_heads=move.chunk.shape[1],
        width=move.chunk.shape[3],
        block_size=block_size,
        page_offset=move.offset + digits.offset,
        page_strides=(
            move.slab.layer.stride,
            move.heads.stride,
            move.slab.addresses.block.stride,
            token.stride,
            dim.stride,
        ),
        chunk_strides=move.chunk.stride(),
    )
