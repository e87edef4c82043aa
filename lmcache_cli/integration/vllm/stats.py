"""Counters of the connector on their way to vLLM's log and metrics endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

EXPORTED = {
    "lookups": "Lookups of requests in the store.",
    "lookup_timeouts": "Lookups that were given up.",
    "lookups_unaccepted": "Lookups that ended before a chunk of another engine which no probe has accepted.",
    "load_requests": "Requests of which a prefix was to be loaded.",
    "tokens_loaded": "Tokens whose KV was loaded and verified, on every rank.",
    "bytes_loaded": "Bytes read for that.",
    "load_failed": "Loads of which some part failed.",
    "saved": "Chunks written.",
    "save_present": "Chunks that were to be saved and are there already.",
    "save_dropped": "Chunks given up in the writer: device full, parent missing, shutting down.",
    "save_failed": "Chunks whose write failed.",
    "save_no_memory": "Chunks put off because all buffers wait to be written.",
    "save_tainted": "Chunks not saved because a load failed that they rest on.",
    "far_read": "Chunks read from an archive.",
    "far_bytes_read": "Bytes read for that.",
    "far_unavailable": "Reads from an archive that failed or took too long.",
    "promoted": "Chunks copied from an archive to the store.",
    "promotion_skipped": "Chunks not copied: no room, or more than may wait.",
    "promotion_failed": "Chunks whose copy failed.",
    "uncached_adapter": "Requests left uncached: their adapter has no digest.",
    "uncached_no_salt": "Requests left uncached: no cache_salt.",
    "uncached_prompt_embeds": "Requests left uncached: prompt embeddings.",
    "uncached_session": "Requests left uncached: they are part of a session that may take tokens back.",
    "uncached_multimodal": "Requests left uncached: an item has no identifier.",
}


@dataclass
class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the last step. `data` maps a counter's name to a number."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: Any) -> StoreStats:
        """The sum of both."""
        return StoreStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: count for name, count in self.data.items() if count}

    def is_empty(self) -> bool:
        """Whether there is anything to tell."""
        return not any(self.data.values())


class StorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A Prometheus counter for each name in `EXPORTED`, called `vllm:lmcache_store_<name>`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(name=f"vllm:lmcache_store_{name}", documentation=text, labelnames=labelnames)
            for name, text in EXPORTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what a step counted."""
        for name, counter in self._counters.items():
            count = transfer_stats_data.get(name, 0)
            if count:
                counter.labels(*self.per_engine_labelvalues[engine_idx]).inc(count)
