"""vLLM's scheduler output as rows that the scheduler's half understands, for either of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .scheduling import Scheduled


class BlockTables:
    """The whole block table of every request under way, pieced together from what each step adds."""

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def set(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The request's table is now this one."""
        self._tables[request_id] = list(block_ids)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._tables.pop(request_id, None)

    def rows(self, output: Any) -> Iterator[Scheduled]:
        """What this step computes. A request that comes back after it was preempted has a new table: one runner lists
        it among the new ones, the other among the cached ones, marked as resumed."""
        counts = output.num_scheduled_tokens
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            self._tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.set(new.req_id, new.block_ids[0])
            yield Scheduled(new.req_id, self._tables[new.req_id], new.num_computed_tokens, counts[new.req_id])
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None) or ()
        for number, request_id in enumerate(cached.req_ids):
            added = cached.new_block_ids[number]
            if added is not None:
                if request_id in resumed:
                    self.set(request_id, added[0])
                else:
                    self._tables.setdefault(request_id, []).extend(added[0])
            table = self._tables.get(request_id, [])
            yield Scheduled(request_id, table, cached.num_computed_tokens[number], counts.get(request_id, 0))
