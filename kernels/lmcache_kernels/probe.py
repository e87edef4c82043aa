"""Writing through the engine's own writer and reading back: to learn the order inside a page, and to check any layout.

What is written are the numbers 0 … 7, exact in every dtype a page may have, also after a quantising writer: which bit
pattern stands for which number is observed first. Elements are told apart by their number's octal digits, one write
per digit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.codec import PageCodec
from lmcache_kernels.errors import CodecError, LayoutError
from lmcache_kernels.gather_paged import gather_paged
from lmcache_kernels.layouts import PageLayout
from lmcache_kernels.pages import PagedCache, PageGeometry, Side, check_runs, check_shape
from lmcache_kernels.slots import SlotMapping
from lmcache_kernels.words import as_integers, integer_of

PageWriter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`write(keys [T, H, D_k], values [T, H, D_v], pages, slots [T] int64)`: the engine's writer, into pages of the
engine's shape.
"""

_BASE = 8
_SENTINEL_BYTE = 0xA5
_SCRATCH_BLOCKS = 3
_PROBED_BLOCK = 1


def learn_codec(
    pages: torch.Tensor, geometry: PageGeometry, write: PageWriter, *, key_dtype: torch.dtype | None = None
) -> PageCodec:
    """Learn the order inside the pages of a permuted layout, and verify it with a second write to scattered slots.

    Works on scratch pages of the same shape and strides: `pages` itself is neither read nor written. `key_dtype` is
    what the writer takes (the model's dtype), the pages' own by default. Raises `CodecError` if the writer leaves the
    block, mixes heads, loses elements, or does not treat all heads alike; `LayoutError` if the layout is not a
    permuted one.
    """
    if not geometry.layout.is_permuted:
        raise LayoutError(f"{geometry.layout.value} pages are in token order: there is nothing to learn")
    check_shape(pages, geometry)
    check_runs(pages, geometry.layout)
    bench = _Bench(_scratch_like(pages, geometry), geometry, write, key_dtype or geometry.dtype)
    codec = _codec_from(bench, _owners(bench))
    check_pages(PagedCache.of_layers([bench.scratch], geometry, codec), 0, write, key_dtype=key_dtype)
    return codec


def check_pages(
    cache: PagedCache,
    layer: int,
    write: PageWriter,
    *,
    key_dtype: torch.dtype | None = None,
    blocks: Sequence[int] | None = None,
) -> None:
    """Write a few slots of one layer through the engine's writer and read them back through the layout: the two must
    agree.

    Uses `blocks` (default: the last two), saves and restores their bytes, and also checks that no other slot of them
    changed. Run it before the engine serves. Raises `CodecError` with the first disagreement.
    """
    one = cache.slice_layers(layer, layer + 1)
    tensor, geometry = one.views[0].tensor, one.geometry
    probed = list(blocks) if blocks is not None else list(range(max(0, one.num_blocks - 2), one.num_blocks))
    axis = geometry.layout.axes.index("B")
    index = torch.tensor(probed, device=tensor.device)
    integers = as_integers(tensor)
    saved = integers.index_select(axis, index)
    try:
        _compare(one, write, key_dtype or geometry.dtype, probed, f"layer {layer}")
    finally:
        integers.index_copy_(axis, index, saved)


def _compare(cache: PagedCache, write: PageWriter, key_dtype: torch.dtype, blocks: Sequence[int], where: str) -> None:
    geometry, size = cache.geometry, cache.geometry.block_size
    slots = np.concatenate([np.arange(block * size, (block + 1) * size) for block in blocks])
    shuffled = np.random.default_rng(0).permutation(slots)
    written, spared = shuffled[: -(-len(slots) // 3)], shuffled[-(-len(slots) // 3) :]
    numbers = [
        torch.from_numpy(
            np.random.default_rng(1 + side).integers(0, _BASE, (len(written), geometry.heads, geometry.head_dim(side)))
        )
        for side in (Side.KEY, Side.VALUE)
    ]
    books = [_read_book(cache, write, key_dtype, written, side, where) for side in geometry.sides]
    before = _read(cache, spared)
    _write(write, cache.views[0].tensor, key_dtype, numbers[0], numbers[1], written)
    for side, found, book in zip(geometry.sides, _read(cache, written), books, strict=True):
        expected = book[numbers[side]].permute(1, 0, 2)[None]
        _require_equal(found, expected, written, f"{where}, {side.name.lower()}: a written slot reads back otherwise")
    for side, found, expected in zip(geometry.sides, _read(cache, spared), before, strict=True):
        _require_equal(found, expected, spared, f"{where}, {side.name.lower()}: a slot that was not named has changed")


def _read_book(
    cache: PagedCache, write: PageWriter, key_dtype: torch.dtype, slots: npt.NDArray[np.int64], side: Side, where: str
) -> torch.Tensor:
    """The bit pattern that stands for each number, `[8]`."""
    geometry, patterns = cache.geometry, []
    for number in range(_BASE):
        keys, values = (
            torch.full((len(slots), geometry.heads, geometry.head_dim(each)), number) for each in (Side.KEY, Side.VALUE)
        )
        _write(write, cache.views[0].tensor, key_dtype, keys, values, slots)
        found = _read(cache, slots)[side]
        if not bool((found == found.flatten()[0]).all()):
            raise CodecError(
                f"{where}, {side.name.lower()}: wrote {number} to {len(slots)} slots, read several values back: "
                f"{cache.geometry.layout.value} is not how this engine writes its pages"
            )
        patterns.append(found.flatten()[0])
    return _distinct(torch.stack(patterns), where)


def _read(cache: PagedCache, slots: npt.NDArray[np.int64]) -> list[torch.Tensor]:
    geometry = cache.geometry
    shape = (1, geometry.heads, len(slots))
    sides = [
        torch.zeros((*shape, geometry.head_dim(side)), dtype=integer_of(geometry.dtype.itemsize), device=cache.device)
        for side in geometry.sides
    ]
    typed = [side.view(geometry.dtype) for side in sides]
    gather_paged(cache, SlotMapping.of(slots), CanonicalKV(typed[0], typed[1] if len(typed) > 1 else None))
    return [side.cpu() for side in sides]


def _require_equal(found: torch.Tensor, expected: torch.Tensor, slots: npt.NDArray[np.int64], what: str) -> None:
    if not torch.equal(found, expected):
        _, head, token, dim = (found != expected).nonzero()[0].tolist()
        raise CodecError(
            f"{what}: slot {slots[token]}, head {head}, dim {dim}; the layout is not how this engine writes its pages"
        )


@dataclass(frozen=True, slots=True)
class _Bench:
    """Three scratch blocks, of which the middle one is written."""

    scratch: torch.Tensor
    geometry: PageGeometry
    write: PageWriter
    key_dtype: torch.dtype

    def written(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write numbers to all slots of the middle block and return its content `[H, P]` as integers."""
        size, integers = self.geometry.block_size, as_integers(self.scratch)
        integers.view(torch.uint8).fill_(_SENTINEL_BYTE)
        sentinel = integers.flatten()[0].item()
        slots = np.arange(_PROBED_BLOCK * size, (_PROBED_BLOCK + 1) * size)
        _write(self.write, self.scratch, self.key_dtype, keys, values, slots)
        axis = self.geometry.layout.axes.index("B")
        for block in (0, 2):
            if bool((integers.select(axis, block) != sentinel).any()):
                raise CodecError(f"the writer was given slots of block {_PROBED_BLOCK} and changed block {block}")
        return self._content(integers.select(axis, _PROBED_BLOCK))

    def _content(self, block: torch.Tensor) -> torch.Tensor:
        heads = self.geometry.heads
        if self.geometry.layout is PageLayout.PERMUTED_FUSED:
            return block.reshape(heads, -1).clone()
        return torch.cat([side.reshape(heads, -1) for side in block], dim=1)

    def numbers(self, side: Side, fill: int = 0) -> torch.Tensor:
        """A constant side `[N, H, D]`."""
        return torch.full((self.geometry.block_size, self.geometry.heads, self.geometry.head_dim(side)), fill)


def _owners(bench: _Bench) -> torch.Tensor:
    """Which element lies at each position of the block: `[H, P]` of element numbers, keys first, then values."""
    numbers = [bench.numbers(Side.KEY), bench.numbers(Side.VALUE)]
    constants = [bench.written(numbers[0] + each, numbers[1] + (_BASE - 1 - each)) for each in range(_BASE)]
    keys_at = _positions_of_keys(bench)
    books = [
        _book(constants, keys_at, list(range(_BASE)), "keys"),
        _book(constants, ~keys_at, list(reversed(range(_BASE))), "values"),
    ]
    total = numbers[0].numel() + numbers[1].numel()
    order = torch.arange(total)
    elements = [order[: numbers[0].numel()].view_as(numbers[0]), order[numbers[0].numel() :].view_as(numbers[1])]
    owners = torch.zeros(constants[0].shape, dtype=torch.int64)
    place = 1
    while place < total:
        found = bench.written(elements[0] // place % _BASE, elements[1] // place % _BASE)
        owners += place * torch.where(keys_at, _decode(found, books[0], keys_at), _decode(found, books[1], ~keys_at))
        place *= _BASE
    if not torch.equal(owners.flatten().sort().values, order):
        raise CodecError(
            "the writer does not put each element in a place of its own within the block: the order cannot be learnt"
        )
    return owners


def _positions_of_keys(bench: _Bench) -> torch.Tensor:
    """The positions that change when keys alone change."""
    zero = bench.written(bench.numbers(Side.KEY), bench.numbers(Side.VALUE))
    keys_at = bench.written(bench.numbers(Side.KEY, 1), bench.numbers(Side.VALUE)) != zero
    values_at = bench.written(bench.numbers(Side.KEY), bench.numbers(Side.VALUE, 1)) != zero
    if not bool((keys_at ^ values_at).all()) or int(keys_at.sum()) != bench.numbers(Side.KEY).numel():
        raise CodecError(
            "some positions of the page follow neither keys nor values alone: this writer's order cannot be learnt"
        )
    return keys_at


def _book(constants: list[torch.Tensor], at: torch.Tensor, numbers: list[int], side: str) -> torch.Tensor:
    patterns: dict[int, torch.Tensor] = {}
    for number, page in zip(numbers, constants, strict=True):
        values = page[at]
        if not bool((values == values[0]).all()):
            raise CodecError(
                f"{side}: one number is written as several bit patterns; per-token scales cannot be moved by a codec"
            )
        patterns[number] = values[0]
    return _distinct(torch.stack([patterns[number] for number in range(_BASE)]), side)


def _distinct(patterns: torch.Tensor, where: str) -> torch.Tensor:
    if len(set(patterns.tolist())) != _BASE:
        raise CodecError(
            f"{where}: the numbers 0 to {_BASE - 1} are not told apart in the pages (patterns {patterns.tolist()})"
        )
    return patterns


def _decode(found: torch.Tensor, book: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    matches = found[..., None] == book
    if not bool(matches.any(-1)[at].all()):
        raise CodecError(
            "the page holds a bit pattern that stands for no written number: this writer's order cannot be learnt"
        )
    return matches.to(torch.uint8).argmax(-1)


def _codec_from(bench: _Bench, owners: torch.Tensor) -> PageCodec:
    geometry = bench.geometry
    places = _invert(owners)
    split = geometry.block_size * geometry.heads * geometry.head_dim_k
    run = owners.shape[1]
    tables = []
    for side, part in ((Side.KEY, places[:split]), (Side.VALUE, places[split:])):
        by_head = part.view(geometry.block_size, geometry.heads, geometry.head_dim(side)).permute(1, 0, 2)
        expected_head = torch.arange(geometry.heads)[:, None, None]
        if not torch.equal(by_head // run, expected_head.expand_as(by_head)):
            raise CodecError(
                f"{side.name.lower()}: the writer puts a head's elements into another head's part of the page"
            )
        within = by_head % run
        if not torch.equal(within, within[:1].expand_as(within)):
            raise CodecError(f"{side.name.lower()}: the order inside the page differs between heads")
        tables.append(within[0].numpy())
    shares_run = geometry.layout is PageLayout.PERMUTED_FUSED
    if not shares_run:
        tables[1] = tables[1] - run // 2
    return PageCodec.of(tables[0], tables[1], shares_run=shares_run)


def _invert(owners: torch.Tensor) -> torch.Tensor:
    flat = owners.flatten()
    places = torch.empty_like(flat)
    places[flat] = torch.arange(flat.numel())
    return places


def _write(
    write: PageWriter,
    pages: torch.Tensor,
    dtype: torch.dtype,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: npt.NDArray[np.int64],
) -> None:
    device = pages.device
    write(keys.to(dtype).to(device), values.to(dtype).to(device), pages, torch.from_numpy(slots).to(device))


def _scratch_like(pages: torch.Tensor, geometry: PageGeometry) -> torch.Tensor:
    """Fresh pages of three blocks, contiguous: inside a block and head they are as the engine's."""
    shape = list(pages.shape)
    shape[geometry.layout.axes.index("B")] = _SCRATCH_BLOCKS
    return torch.zeros(shape, dtype=integer_of(geometry.dtype.itemsize), device=pages.device).view(geometry.dtype)
