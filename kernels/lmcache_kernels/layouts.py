"""The page layouts we know, each a named value that the caller declares.

A layout names the axes of the tensor an engine hands over, outermost first. The physical order is in the tensor's
strides, so `FUSED_HND` serves a contiguous `[B, H, N, C]` as well as a view of it whose memory runs tokens first, or
layers inside blocks.

Axis letters: L layers, B blocks, H kv heads, N tokens per block, D head dim, 2 the K/V pair, C = D_k + D_v fused
content, R latent width (MLA), F = H·N·D flat, 1 an axis of size one.
"""

from enum import Enum

from lmcache_kernels.errors import LayoutError


class PageLayout(Enum):
    """What the axes of a tensor of pages mean; never guessed from a shape."""

    KV_FIRST_NHD = "kv-first-nhd"
    KV_FIRST_HND = "kv-first-hnd"
    BLOCKS_FIRST_NHD = "blocks-first-nhd"
    BLOCKS_FIRST_HND = "blocks-first-hnd"
    FUSED_HND = "fused-hnd"
    FUSED_NHD = "fused-nhd"
    CROSS_LAYER_NHD = "cross-layer-nhd"
    CROSS_LAYER_HND = "cross-layer-hnd"
    LATENT = "latent"
    LATENT_ONE_HEAD = "latent-one-head"
    PERMUTED_FUSED = "permuted-fused"
    PERMUTED_KV_FIRST = "permuted-kv-first"
    PERMUTED_FLAT = "permuted-flat"

    @classmethod
    def parse(cls, name: str) -> "PageLayout":
        """Return the layout of that name; raise `LayoutError` with the known names for any other."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(layout.value for layout in cls)
            raise LayoutError(f"page layout {name!r} is not known; declare one of: {known}") from None

    @property
    def axes(self) -> str:
        """One letter an axis, outermost first."""
        return _AXES[self]

    @property
    def spans_layers(self) -> bool:
        """One tensor holds every layer."""
        return "L" in self.axes

    @property
    def is_latent(self) -> bool:
        """One vector a token and no heads (MLA)."""
        return "R" in self.axes

    @property
    def is_permuted(self) -> bool:
        """The order inside a page is the engine's own: a `PageCodec` is needed to address it."""
        return self in _PERMUTED


_AXES = {
    PageLayout.KV_FIRST_NHD: "2BNHD",
    PageLayout.KV_FIRST_HND: "2BHND",
    PageLayout.BLOCKS_FIRST_NHD: "B2NHD",
    PageLayout.BLOCKS_FIRST_HND: "B2HND",
    PageLayout.FUSED_HND: "BHNC",
    PageLayout.FUSED_NHD: "BNHC",
    PageLayout.CROSS_LAYER_NHD: "BL2NHD",
    PageLayout.CROSS_LAYER_HND: "BHL2ND",
    PageLayout.LATENT: "BNR",
    PageLayout.LATENT_ONE_HEAD: "B1NR",
    PageLayout.PERMUTED_FUSED: "BHNC",
    PageLayout.PERMUTED_KV_FIRST: "2BHND",
    PageLayout.PERMUTED_FLAT: "2BF",
}
_PERMUTED = frozenset({PageLayout.PERMUTED_FUSED, PageLayout.PERMUTED_KV_FIRST, PageLayout.PERMUTED_FLAT})
