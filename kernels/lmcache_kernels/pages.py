"""An engine's pages, described once and validated then: what the axes mean, and where every element lies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import torch

from lmcache_kernels.addresses import SideAddresses, Slab, join_layers
from lmcache_kernels.chunks import overlaps_itself
from lmcache_kernels.codec import Digit, PageCodec
from lmcache_kernels.errors import LayoutError
from lmcache_kernels.layouts import PageLayout
from lmcache_kernels.words import as_integers, require_movable


class Side(IntEnum):
    """K or V; a latent page has K alone."""

    KEY = 0
    VALUE = 1


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """What the engine's configuration says about its pages: N tokens a block, H kv heads, D_k and D_v, dtype, layout.

    A latent layout has one head, the latent width as `head_dim_k` and `head_dim_v = 0` (`PageGeometry.latent`).
    """

    layout: PageLayout
    block_size: int
    heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.layout, PageLayout):
            raise LayoutError(f"a layout is declared as a PageLayout; found {self.layout!r}")
        require_movable(self.dtype)
        if min(self.block_size, self.heads, self.head_dim_k) < 1 or self.head_dim_v < 0:
            raise LayoutError(f"block size, heads and head dims must be positive; found {self}")
        if self.layout.is_latent and (self.heads != 1 or self.head_dim_v != 0):
            raise LayoutError(
                f"{self.layout.value} pages have one head and no values; "
                f"found {self.heads} heads, D_v {self.head_dim_v}"
            )
        if not self.layout.is_latent and self.head_dim_v == 0:
            raise LayoutError(f"{self.layout.value} pages hold values; found head_dim_v 0")
        if "2" in self.layout.axes and self.head_dim_k != self.head_dim_v:
            raise LayoutError(
                f"{self.layout.value} has one D for K and V; found {self.head_dim_k} and {self.head_dim_v}: "
                "declare a fused layout"
            )

    @classmethod
    def latent(cls, layout: PageLayout, *, block_size: int, width: int, dtype: torch.dtype) -> "PageGeometry":
        """Pages of MLA latents of `width` elements."""
        return cls(layout, block_size, heads=1, head_dim_k=width, head_dim_v=0, dtype=dtype)

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides a page holds."""
        return (Side.KEY,) if self.layout.is_latent else (Side.KEY, Side.VALUE)

    def head_dim(self, side: Side) -> int:
        """D of one side."""
        return self.head_dim_k if side is Side.KEY else self.head_dim_v

    def axis_size(self, axis: str) -> int | None:
        """The size an axis must have; None for blocks and layers, which the tensor decides."""
        sizes = {
            "H": self.heads,
            "N": self.block_size,
            "D": self.head_dim_k,
            "2": 2,
            "C": self.head_dim_k + self.head_dim_v,
            "R": self.head_dim_k,
            "1": 1,
            "F": self.heads * self.block_size * self.head_dim_k,
        }
        return sizes.get(axis)


@dataclass(frozen=True, slots=True)
class PageView:
    """One layer's pages: the engine's tensor (any strides), its geometry and, for permuted layouts, its codec.

    Build with `of`, which raises `LayoutError` naming the declared axes against the shape found.
    """

    tensor: torch.Tensor
    geometry: PageGeometry
    codec: PageCodec | None

    @classmethod
    def of(cls, tensor: torch.Tensor, geometry: PageGeometry, codec: PageCodec | None = None) -> "PageView":
        """Validate a tensor against what was declared; no bytes are read."""
        if geometry.layout.spans_layers:
            raise LayoutError(
                f"{geometry.layout.value} describes all layers in one tensor: use PagedCache.of_cross_layer"
            )
        check_shape(tensor, geometry)
        _check_codec(tensor, geometry, codec)
        return cls(tensor, geometry, codec)

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.tensor.shape[self.geometry.layout.axes.index("B")]

    def vector(self, side: Side, block: int, head: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where one token's D elements lie, said plainly: a 1-D integer view and the positions in it.

        Slow and obvious: the references read and write through this, the fast paths do not.
        """
        layout, integers = self.geometry.layout, as_integers(self.tensor)
        dims = torch.arange(self.geometry.head_dim(side))
        if self.codec is not None:
            order = self.codec.keys if side is Side.KEY else self.codec.values
            return _page_run(integers, layout, self.geometry.heads, side, block, head), torch.from_numpy(
                order.table[position]
            )
        at = {"2": int(side), "B": block, "H": head, "N": position, "1": 0}
        index = tuple(at[axis] if axis in at else slice(None) for axis in layout.axes)
        shift = self.geometry.head_dim_k if layout.axes.endswith("C") and side is Side.VALUE else 0
        return integers[index], dims + shift

    def addresses(self, side: Side) -> SideAddresses:
        """Where every element of one side lies, as strides."""
        stride = dict(zip(self.geometry.layout.axes, self.tensor.stride(), strict=True))
        offset = int(self.tensor.storage_offset()) + (int(side) * stride["2"] if "2" in stride else 0)
        block = Digit(self.num_blocks, stride["B"])
        if self.codec is not None:
            order = self.codec.keys if side is Side.KEY else self.codec.values
            head_stride = stride["H"] if "H" in stride else self.geometry.block_size * self.geometry.head_dim_k
            return SideAddresses.of_order(offset, Digit(self.geometry.heads, head_stride), block, order)
        content = next(axis for axis in "DCR" if axis in stride)
        if content == "C" and side is Side.VALUE:
            offset += self.geometry.head_dim_k * stride["C"]
        return SideAddresses.of_strides(
            offset,
            head=Digit(self.geometry.heads, stride.get("H", 0)),
            block=block,
            token=Digit(self.geometry.block_size, stride["N"]),
            dim=Digit(self.geometry.head_dim(side), stride[content]),
        )


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Every layer's pages of one geometry. Build with `of_layers` or `of_cross_layer`; `slice_layers` narrows it
    without copying.
    """

    views: tuple[PageView, ...]

    @classmethod
    def of_layers(
        cls,
        tensors: Sequence[torch.Tensor],
        geometry: PageGeometry,
        codecs: Sequence[PageCodec] | PageCodec | None = None,
    ) -> "PagedCache":
        """From one tensor a layer, and a codec for all or one for each where the layout is permuted."""
        each = list(codecs) if isinstance(codecs, Sequence) else [codecs] * len(tensors)
        if not tensors or len(each) != len(tensors):
            raise LayoutError(
                f"expected at least one layer and a codec for each; found {len(tensors)} layers, {len(each)} codecs"
            )
        views = tuple(PageView.of(tensor, geometry, codec) for tensor, codec in zip(tensors, each, strict=True))
        places = {(view.num_blocks, view.tensor.device) for view in views}
        if len(places) > 1:
            raise LayoutError(f"layers must agree in blocks and device; found {sorted(map(str, places))}")
        return cls(views)

    @classmethod
    def of_cross_layer(cls, tensor: torch.Tensor, geometry: PageGeometry) -> "PagedCache":
        """From one tensor that holds every layer."""
        if not geometry.layout.spans_layers:
            raise LayoutError(f"{geometry.layout.value} describes one layer: use PagedCache.of_layers")
        check_shape(tensor, geometry)
        axis = geometry.layout.axes.index("L")
        within = replace(geometry, layout=_WITHIN_CROSS_LAYER[geometry.layout])
        order = [geometry.layout.axes.replace("L", "").index(letter) for letter in within.layout.axes]
        return cls(tuple(PageView.of(layer.permute(order), within) for layer in tensor.unbind(axis)))

    @property
    def geometry(self) -> PageGeometry:
        """What all layers share."""
        return self.views[0].geometry

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.views)

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.views[0].num_blocks

    @property
    def num_slots(self) -> int:
        """B · N."""
        return self.num_blocks * self.geometry.block_size

    @property
    def device(self) -> torch.device:
        """Where the pages live."""
        return self.views[0].tensor.device

    def slice_layers(self, start: int, stop: int) -> "PagedCache":
        """The same pages, layers `[start, stop)` alone (one layer's hook, one pipeline stage)."""
        if not 0 <= start < stop <= self.num_layers:
            raise LayoutError(f"layers [{start}, {stop}) are not within the {self.num_layers} of this cache")
        return PagedCache(self.views[start:stop])

    @cached_property
    def slabs(self) -> dict[Side, tuple[Slab, ...]]:
        """Layers joined where they lie at equal distances in one storage, so that one copy moves them all."""
        memories = [as_integers(view.tensor) for view in self.views]
        return {
            side: join_layers(memories, [view.addresses(side) for view in self.views]) for side in self.geometry.sides
        }


_WITHIN_CROSS_LAYER = {
    PageLayout.CROSS_LAYER_NHD: PageLayout.BLOCKS_FIRST_NHD,
    PageLayout.CROSS_LAYER_HND: PageLayout.BLOCKS_FIRST_HND,
}


def check_shape(tensor: torch.Tensor, geometry: PageGeometry) -> None:
    """Raise `LayoutError` unless the tensor has the declared axes, dtype and distinct addresses."""
    axes = geometry.layout.axes
    expected = [geometry.axis_size(axis) for axis in axes]
    wanted = ", ".join(axis if size is None else f"{axis}={size}" for axis, size in zip(axes, expected, strict=True))
    where = f"layout {geometry.layout.value} expects [{wanted}] {geometry.dtype}"
    fits = tensor.ndim == len(axes) and all(
        size is None or size == found for size, found in zip(expected, tensor.shape, strict=False)
    )
    if not fits or tensor.dtype != geometry.dtype:
        raise LayoutError(f"{where}; found {tuple(tensor.shape)} {tensor.dtype}: declare the layout the engine uses")
    if overlaps_itself(tensor):
        raise LayoutError(f"{where}; strides {tensor.stride()} reach some address twice")


def _check_codec(tensor: torch.Tensor, geometry: PageGeometry, codec: PageCodec | None) -> None:
    layout = geometry.layout
    if not layout.is_permuted:
        if codec is not None:
            raise LayoutError(f"{layout.value} pages are in token order and take no codec")
        return
    if codec is None:
        raise LayoutError(
            f"{layout.value} pages have an order of their own: learn it with learn_codec and pass the codec"
        )
    shapes = (codec.keys.table.shape, codec.values.table.shape)
    expected = ((geometry.block_size, geometry.head_dim_k), (geometry.block_size, geometry.head_dim_v))
    if shapes != expected or codec.shares_run != (layout is PageLayout.PERMUTED_FUSED):
        raise LayoutError(f"the codec is for tables {shapes}; {layout.value} pages here need {expected}")
    check_runs(tensor, layout)


def check_runs(tensor: torch.Tensor, layout: PageLayout) -> None:
    """Raise `LayoutError` unless the memory of one block and head is one contiguous run (permuted layouts)."""
    run_axes = 1 if layout is PageLayout.PERMUTED_FLAT else 2
    sizes, strides = tensor.shape[-run_axes:], tensor.stride()[-run_axes:]
    expected = torch.empty(sizes, device="meta").stride()
    if any(size > 1 and stride != wanted for size, stride, wanted in zip(sizes, strides, expected, strict=True)):
        raise LayoutError(
            f"{layout.value} pages must be contiguous inside a block and head: "
            f"expected inner strides {expected}, found {strides}"
        )


def _page_run(
    integers: torch.Tensor, layout: PageLayout, heads: int, side: Side, block: int, head: int
) -> torch.Tensor:
    """The contiguous memory of one block and head, flat."""
    match layout:
        case PageLayout.PERMUTED_FUSED:
            return integers[block, head].view(-1)
        case PageLayout.PERMUTED_KV_FIRST:
            return integers[side, block, head].view(-1)
        case _:
            return integers[side, block].view(heads, -1)[head]
