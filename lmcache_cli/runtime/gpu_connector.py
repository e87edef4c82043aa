"""Between an engine's memory and chunks: the interface the field knows, and its paged implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .memory import MemoryObj
from .pages import Pages


class GPUConnectorInterface(Protocol):
    """Moves chunks `[start, end)` of a sequence. Blocking. What else it has to know comes by keyword."""

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Write a chunk to the engine's memory."""
        ...

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Fill a chunk from the engine's memory."""
        ...

    def batched_to_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Write several chunks."""
        ...

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """Fill several chunks."""
        ...


class PagedGPUConnector:
    """Over pages. The keyword `slot_mapping` holds the slot of every token of the sequence; negative ones are not
    written."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See the interface."""
        self._pages.scatter(memory_obj.buffer, _slots(kwargs, start, end))

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """See the interface. Raises `ValueError` for a token without a slot."""
        slots = _slots(kwargs, start, end)
        if min(slots, default=0) < 0:
            raise ValueError(f"tokens {start} to {end} have no slot, all of them are needed to save a chunk")
        self._pages.gather(slots, memory_obj.buffer)

    def batched_to_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """See the interface."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """See the interface."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)


def _slots(kwargs: dict[str, Any], start: int, end: int) -> list[int]:
    mapping = kwargs.get("slot_mapping")
    if mapping is None or len(mapping) < end:
        found = "none" if mapping is None else f"{len(mapping)} slots"
        raise ValueError(f"slot_mapping must hold a slot for each of {end} tokens; found {found}")
    return [int(slot) for slot in mapping[start:end]]
