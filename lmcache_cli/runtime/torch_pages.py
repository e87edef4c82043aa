"""Real pages: chunks between host buffers and an engine's paged tensors, on the host or on a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lmcache_cli.store import ChunkBuffer
from lmcache_format.dtypes import Dtype
from lmcache_kernels import CanonicalKV, PagedCache, SlotMapping, gather_paged, scatter_paged

TORCH_DTYPES = {
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.F32: torch.float32,
    Dtype.F8_E4M3: torch.float8_e4m3fn,
    Dtype.F8_E5M2: torch.float8_e5m2,
    Dtype.U8: torch.uint8,
    Dtype.I8: torch.int8,
}


class TorchPages:
    """`runtime.pages.Pages` over a `PagedCache` that holds exactly the layers and heads of the buffers' part.

    On a device a chunk goes through one staging tensor there; both ways end synchronised, so that the buffer is free
    on return. Safe from several threads.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._staging: torch.Tensor | None = None

    def scatter(self, buffer: ChunkBuffer, slots: Sequence[int]) -> None:
        """See `Pages.scatter`."""
        mapping = SlotMapping.of(slots)
        if self._cache.device.type == "cpu":
            scatter_paged(self._cache, mapping, self._chunk(buffer, _bytes_of(buffer)))
            return
        with self._lock:
            staging = self._stage(buffer)
            staging.copy_(_bytes_of(buffer))
            scatter_paged(self._cache, mapping, self._chunk(buffer, staging))
            torch.cuda.current_stream(self._cache.device).synchronize()

    def gather(self, slots: Sequence[int], buffer: ChunkBuffer) -> None:
        """See `Pages.gather`."""
        mapping = SlotMapping.of(slots)
        if self._cache.device.type == "cpu":
            gather_paged(self._cache, mapping, self._chunk(buffer, _bytes_of(buffer)))
            return
        with self._lock:
            staging = self._stage(buffer)
            gather_paged(self._cache, mapping, self._chunk(buffer, staging))
            _bytes_of(buffer).copy_(staging)

    def _stage(self, buffer: ChunkBuffer) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < buffer.size_bytes:
            self._staging = torch.empty(buffer.size_bytes, dtype=torch.uint8, device=self._cache.device)
        return self._staging[: buffer.size_bytes]

    @staticmethod
    def _chunk(buffer: ChunkBuffer, data: torch.Tensor) -> CanonicalKV:
        identity, part = buffer.identity, buffer.part
        return CanonicalKV.in_buffer(
            data,
            layers=part.num_layers,
            heads=part.num_heads,
            tokens=buffer.num_tokens,
            head_dim_k=identity.head_dim_k,
            head_dim_v=identity.head_dim_v,
            dtype=TORCH_DTYPES[identity.dtype],
        )


def _bytes_of(buffer: ChunkBuffer) -> torch.Tensor:
    return torch.frombuffer(buffer.memory, dtype=torch.uint8)
