"""Moving between pages and chunks on the host: what is paired with what, as strided views or by index.

Both directions are the same pairs: gathering copies pages to chunk, scattering copies chunk to pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch

from lmcache_kernels.addresses import Piece, SideAddresses, Slab, pieces_of
from lmcache_kernels.chunks import CanonicalKV, split_axis
from lmcache_kernels.codec import Digit, RunDigits
from lmcache_kernels.errors import ChunkError, HeadsError
from lmcache_kernels.heads import HeadRange
from lmcache_kernels.pages import PagedCache
from lmcache_kernels.slots import SlotMapping
from lmcache_kernels.words import all_words, as_integers, view_words

WIDEST_WORD_BYTES = 8
MANY_RUNS = 8
MIN_TOKENS_A_RUN = 4  # many runs shorter than this on average: one indexed move is faster than a strided copy for each


@dataclass(frozen=True, slots=True)
class SideMove:
    """One side of one slab against its chunk tensor `[L, H, T, D]`, both cut to the head range, as integers of one
    width.
    """

    slab: Slab
    chunk: torch.Tensor
    first_head: int

    @property
    def heads(self) -> Digit:
        """The heads to move, as they lie in the pages."""
        return Digit(self.chunk.shape[1], self.slab.addresses.head.stride)

    @property
    def offset(self) -> int:
        """The address of the first layer and head to move, in elements of the storage."""
        return self.slab.addresses.offset + self.first_head * self.slab.addresses.head.stride


@dataclass(frozen=True, slots=True)
class Pair:
    """Two views of equal shape: pages and chunk."""

    pages: torch.Tensor
    chunk: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexedPair:
    """One layer: flat `pages[addresses]` holds `chunk[:, tokens]`, both `[H, n, D]`."""

    pages: torch.Tensor
    addresses: torch.Tensor
    chunk: torch.Tensor
    tokens: torch.Tensor


def agree(cache: PagedCache, slots: SlotMapping, chunk: CanonicalKV, heads: HeadRange | None) -> HeadRange:
    """Check that pages, mapping, chunk and heads fit each other; return the head range to move (all heads if none is
    given).
    """
    geometry = cache.geometry
    dims = tuple(geometry.head_dim(side) for side in geometry.sides)
    found = tuple(side.shape[3] for side in chunk.sides)
    if dims != found or chunk.num_layers != cache.num_layers or chunk.num_tokens != len(slots):
        raise ChunkError(
            f"pages of {cache.num_layers} layers, head dims {dims} and a mapping of {len(slots)} tokens "
            f"do not fit a chunk of {chunk.num_layers} layers, head dims {found}, {chunk.num_tokens} tokens"
        )
    raw = chunk.keys.dtype == torch.uint8 and geometry.dtype.itemsize == 1
    if (chunk.keys.dtype != geometry.dtype and not raw) or chunk.keys.device != cache.device:
        raise ChunkError(
            f"pages are {geometry.dtype} on {cache.device}, the chunk is {chunk.keys.dtype} on {chunk.keys.device}: "
            "view or move the chunk first"
        )
    slots.require_below(cache.num_slots)
    return _agree_on_heads(geometry.heads, chunk.num_heads, heads)


def _agree_on_heads(page_heads: int, chunk_heads: int, heads: HeadRange | None) -> HeadRange:
    if heads is None:
        if page_heads != chunk_heads:
            raise HeadsError(f"pages have {page_heads} heads, the chunk {chunk_heads}: say which with a HeadRange")
        return HeadRange(0, 0, page_heads)
    if heads.page_head + heads.count > page_heads or heads.chunk_head + heads.count > chunk_heads:
        raise HeadsError(f"{heads} reaches beyond {page_heads} heads in the pages or {chunk_heads} in the chunk")
    return heads


def side_moves(cache: PagedCache, chunk: CanonicalKV, heads: HeadRange) -> Iterator[SideMove]:
    """Every (side, slab) to move."""
    for side, tensor in zip(cache.geometry.sides, chunk.sides, strict=True):
        cut = as_integers(tensor)[:, heads.chunk_head : heads.chunk_head + heads.count]
        for slab in cache.slabs[side]:
            yield SideMove(slab, cut[slab.first : slab.first + slab.layer.size], heads.page_head)


def pairs_of(move: SideMove, slots: SlotMapping) -> Iterator[Pair | IndexedPair]:
    """The views to copy between for every token that is no hole."""
    if not len(slots.tokens) or not move.chunk.numel():
        return
    digits = move.slab.addresses.digits
    scattered = len(slots.runs) > max(MANY_RUNS, len(slots.tokens) // MIN_TOKENS_A_RUN)
    if digits is None or scattered:
        yield from _indexed_pairs(move, slots)
        return
    worded = _Worded.of(move, digits)
    for run in slots.runs:
        for piece in pieces_of(run, (*worded.tokens, worded.block)):
            yield worded.pair(piece)


@dataclass(frozen=True, slots=True)
class _Worded:
    """A move in the widest words that both sides' strides allow; all strides and offsets count words."""

    memory: torch.Tensor
    word_bytes: int
    offset: int
    layers: Digit
    heads: Digit
    block: Digit
    tokens: tuple[Digit, ...]
    dims: tuple[Digit, ...]
    chunk: torch.Tensor

    @classmethod
    def of(cls, move: SideMove, digits: RunDigits) -> "_Worded":
        words = _elements_a_word(move, digits)
        item, addresses, memory = move.chunk.element_size(), move.slab.addresses, move.slab.memory
        inner, *outer = digits.dims
        chunk = move.chunk
        size = (*chunk.shape[:3], chunk.shape[3] // words)
        stride = tuple(each // words for each in chunk.stride()[:3]) + ((1,) if words > 1 else (chunk.stride(3),))
        return cls(
            memory=memory,
            word_bytes=item * words,
            offset=(move.offset + digits.offset) // words,
            layers=_in_words(move.slab.layer, words),
            heads=_in_words(move.heads, words),
            block=_in_words(addresses.block, words),
            tokens=tuple(_in_words(digit, words) for digit in digits.tokens),
            dims=(
                Digit(inner.size // words, 1 if words > 1 else inner.stride),
                *(_in_words(digit, words) for digit in outer),
            ),
            chunk=view_words(chunk, item * words, chunk.storage_offset() // words, size, stride),
        )

    def pair(self, piece: Piece) -> Pair:
        digits = (self.layers, self.heads, *reversed(piece.tokens), *reversed(self.dims))
        size, stride = tuple(digit.size for digit in digits), tuple(digit.stride for digit in digits)
        pages = view_words(self.memory, self.word_bytes, self.offset + piece.offset, size, stride)
        chunk = self.chunk[:, :, piece.token : piece.token + piece.num_tokens]
        return Pair(pages, split_axis(split_axis(chunk, 3, _sizes(self.dims)), 2, _sizes(piece.tokens)))


def _indexed_pairs(move: SideMove, slots: SlotMapping) -> Iterator[IndexedPair]:
    addresses: SideAddresses = move.slab.addresses
    tokens = torch.from_numpy(slots.tokens)
    filled = torch.from_numpy(slots.slots)[tokens]
    table = torch.from_numpy(addresses.table)
    size = table.shape[0]
    within = (filled // size * addresses.block.stride)[:, None] + table[filled % size]
    heads = torch.arange(move.heads.size) * move.heads.stride
    index = move.offset + heads[:, None, None] + within[None]
    pages = all_words(move.slab.memory, move.chunk.element_size())
    for layer, chunk in enumerate(move.chunk.unbind(0)):
        yield IndexedPair(pages[layer * move.slab.layer.stride :], index, chunk, tokens)


def _elements_a_word(move: SideMove, digits: RunDigits) -> int:
    """How many neighbouring elements may travel as one word: they must be neighbours, and aligned, on both sides."""
    item, chunk, addresses = move.chunk.element_size(), move.chunk, move.slab.addresses
    if digits.dims[0].stride != 1 or chunk.stride(3) != 1:
        return 1
    page_strides = [move.slab.layer, move.heads, addresses.block, *digits.tokens, *digits.dims[1:]]
    together = gcd(
        WIDEST_WORD_BYTES // item,
        digits.dims[0].size,
        move.offset + digits.offset,
        chunk.storage_offset(),
        *(digit.stride for digit in page_strides if digit.size > 1),
        *(stride for stride, size in zip(chunk.stride()[:3], chunk.shape[:3], strict=True) if size > 1),
    )
    while together > 1 and (_start(move.slab.memory) | _start(chunk)) % (together * item):
        together //= 2
    return together


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _in_words(digit: Digit, words: int) -> Digit:
    return Digit(digit.size, digit.stride // words)


def _sizes(digits: tuple[Digit, ...]) -> tuple[int, ...]:
    return tuple(digit.size for digit in reversed(digits))
