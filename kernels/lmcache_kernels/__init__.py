"""Tensors to tensors: an engine's paged KV cache ↔ canonical `[H, T, D]` per layer. No files, no network, no
environment.

May import torch and numpy; triton only in `*/kernel.py`, and only when pages live on a device. One folder an operation
(`gather_paged`, `scatter_paged`): contract and dispatch in `__init__`, a plain reference, host copies, a Triton kernel.
"""

from lmcache_kernels.chunks import CanonicalKV
from lmcache_kernels.codec import PageCodec
from lmcache_kernels.errors import (
    ChunkError,
    CodecError,
    HeadsError,
    KernelError,
    KernelUnavailable,
    LayoutError,
    SlotError,
)
from lmcache_kernels.gather_paged import gather_paged
from lmcache_kernels.heads import HeadRange, heads_of_rank, shared_heads
from lmcache_kernels.layouts import PageLayout
from lmcache_kernels.pages import PagedCache, PageGeometry, PageView
from lmcache_kernels.probe import PageWriter, check_pages, learn_codec
from lmcache_kernels.scatter_paged import scatter_paged
from lmcache_kernels.slots import SlotMapping, slots_of

__all__ = [
    "CanonicalKV",
    "ChunkError",
    "CodecError",
    "HeadRange",
    "HeadsError",
    "KernelError",
    "KernelUnavailable",
    "LayoutError",
    "PageCodec",
    "PageGeometry",
    "PageLayout",
    "PageView",
    "PageWriter",
    "PagedCache",
    "SlotError",
    "SlotMapping",
    "check_pages",
    "gather_paged",
    "heads_of_rank",
    "learn_codec",
    "scatter_paged",
    "shared_heads",
    "slots_of",
]
