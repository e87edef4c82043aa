"""`LMCacheStoreConnector`: vLLM's hooks, each one line to the halves that do the work.

vLLM imports this module in every process, so that everything heavy is imported when a half is built.
"""

from __future__ import annotations

import logging
import sys
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from .engine_log import join_engine_log
from .options import ConnectorOptions
from .plan import StepPlan, StepReport
from .steps import BlockTables
from .versions import require_version

if TYPE_CHECKING:
    from lmcache_cli.integration.acceptance import AcceptedNamespaces
    from lmcache_cli.runtime.namespaces import Namespaces
    from lmcache_cli.store import Namespace, Store
    from lmcache_cli.store.chain import StoreChain
    from lmcache_format.geometry import Part
    from lmcache_format.identity import Identity

    from .caching import Prefixes
    from .scheduling import StoreScheduler
    from .worker import StoreWorker

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
except ImportError:  # before 0.18; such versions are refused below
    KVConnectorWorkerMetadata = KVConnectorMetadata  # type: ignore[misc,assignment]

_LOG = logging.getLogger("lmcache.vllm")
NAME = "LMCacheStoreConnector"


@dataclass
class StoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The plan of one step on its way to the workers."""

    plan: StepPlan


@dataclass
class StoreWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The ranks' report of one step on its way back."""

    report: StepReport

    def aggregate(self, other: Any) -> StoreWorkerMetadata:
        """Two ranks' reports as one."""
        return StoreWorkerMetadata(self.report.merged(other.report))


class LMCacheStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads KV of known prefixes from a store and saves new ones to it. Options: `options.ConnectorOptions`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None, **kwargs: Any) -> None:
        join_engine_log()
        require_version(_vllm_version(), has_cache_config=kv_cache_config is not None)
        super().__init__(vllm_config, role, kv_cache_config)
        options = ConnectorOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        self.options = options if options.digest_cache else replace(options, digest_cache=_digest_cache())
        self.scheduler: StoreScheduler | None = None
        self.worker: StoreWorker | None = None
        self._namespaces: Namespaces | None = None
        self._accepted: AcceptedNamespaces | None = None
        self._identity = _engine_identity(vllm_config, kv_cache_config, self.options)
        self._told: Counter[str] = Counter()
        self._tables = BlockTables()
        if role == KVConnectorRole.SCHEDULER:
            self._build_scheduler(vllm_config)

    # ---- building ---------------------------------------------------------------------------------------------

    def _build_scheduler(self, vllm_config: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from lmcache_cli.integration.acceptance import AcceptedNamespaces
        from lmcache_format.geometry import whole_part

        from .identity import RequestReader, consumer, ranks_of, writes_part
        from .scheduling import SchedulingOptions, StoreScheduler

        options = self.options
        store = self._open_store()
        self._namespaces = self._open_namespaces(store, whole_part(self._identity), is_writer=False)
        is_near = store.backend.capabilities.cheap_stat and not options.archive
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        on_cpu, ranks = _is_cpu(), ranks_of(vllm_config)
        prefixes_of: Callable[[str | None], Prefixes] = self._namespaces.of
        if not options.accept_unprobed:
            self._accepted = AcceptedNamespaces(store, self._namespaces.of, consumer())
            prefixes_of = self._accepted.of
        self.scheduler = StoreScheduler(
            prefixes_of,
            RequestReader(options),
            SchedulingOptions(
                block_size=spec.block_size,
                chunk_tokens=self._identity.chunk_tokens,
                num_ranks=ranks.num_ranks,
                hold_saves=options.hold_saves,
                num_writers=sum(writes_part(self._identity, ranks, rank) for rank in range(ranks.num_ranks)),
                events=_wants_events(vllm_config),
                load=options.load,
                save=options.save,
                load_async=(not on_cpu) if options.load_async is None else options.load_async,
                save_decode=options.save_decode,
                partial_chunks=options.partial_chunks,
                lookup_timeout_s=options.lookup_timeout_s,
            ),
            background=None if is_near else ThreadPoolExecutor(2, thread_name_prefix="lmcache-lookup"),
        )
        _LOG.info("store %s, namespace %s (%s)", store.url, self._identity.fingerprint, self._identity.model)

    def register_kv_caches(self, kv_caches: dict[str, Any], **kwargs: Any) -> None:
        """Learn and check the pages, and build the worker's half. Raises: an engine that cannot be served must not
        start."""
        from lmcache_cli.runtime.loading import Loader
        from lmcache_cli.runtime.memory import MemoryPool
        from lmcache_cli.runtime.threads import parent_cores

        from .identity import part_of_rank, ranks_of, writes_part
        from .paging import layer_numbers, open_pages, supported_group
        from .worker import StoreWorker

        config, options, identity = self._vllm_config, self.options, self._identity
        ranks, rank = ranks_of(config), _rank(config)
        numbers = list(layer_numbers(list(supported_group(self._kv_cache_config).layer_names)))
        part = part_of_rank(identity, ranks, rank, (numbers[0], numbers[-1] + 1))
        pages = open_pages(config, self._kv_cache_config, kv_caches, identity, part)
        store = self._open_store()
        self._namespaces = self._open_namespaces(store, part, is_writer=options.save)
        pools = [MemoryPool(identity, part, 8) for _ in range(2)]
        cores = parent_cores() if _is_cpu() else None
        self.worker = StoreWorker(
            self._readable_of(store),
            pages,
            loader=Loader(pages, pools[0], timeout_s=options.load_timeout_s, cores=cores),
            async_loader=Loader(pages, pools[1], timeout_s=options.load_timeout_s, cores=cores),
            save_pool=MemoryPool(identity, part, options.max_pending_saves),
            saves=options.save and writes_part(identity, ranks, rank),
            holds_saves=options.hold_saves or ranks.num_ranks > 1,
            tells_stored=_wants_events(config),
            cores=cores,
            is_near=store.backend.capabilities.cheap_stat,
        )

    def _readable_of(self, store: Store | StoreChain) -> Callable[[str | None], Namespace]:
        """Where the worker reads and writes; what an archive gives is held to what the scheduler's half accepts."""
        from lmcache_cli.integration.acceptance import AcceptedNamespaces

        from .identity import consumer

        assert self._namespaces is not None
        if self.options.accept_unprobed or not self.options.archive:
            return self._namespaces.of
        accepted = AcceptedNamespaces(store, self._namespaces.of, consumer())
        return lambda adapter: accepted.of(adapter).namespace

    def _open_store(self) -> Store | StoreChain:
        from lmcache_cli.store.chain import StoreChain

        store, options = self._open_first(), self.options
        return StoreChain(store, options.archive, options.chain_options) if options.archive else store

    def _open_first(self) -> Store:
        from lmcache_cli.store import NoStore, Store, StoreExists

        try:
            return Store.open(self.options.store)
        except NoStore:
            if not self.options.create_store:
                raise
        try:
            return Store.create(self.options.store)
        except StoreExists:  # another rank was faster
            return Store.open(self.options.store)

    def _open_namespaces(self, store: Store | StoreChain, need: Part, *, is_writer: bool) -> Namespaces:
        from lmcache_cli.runtime.namespaces import Namespaces
        from lmcache_cli.store import WriterOptions

        from .identity import producer

        options = self.options
        writer = WriterOptions(
            durability=options.durability_level, encoding=options.encoding, producer=producer(self._vllm_config)
        )
        return Namespaces(
            store,
            self._identity,
            need=need,
            writer=writer if is_writer else None,
            allow_unverified=options.allow_unverified,
            allow_lossy=options.allow_lossy,
        )

    # ---- the worker's hooks: never raise ----------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the coming forward needs; begin what waits."""
        plan = self._plan
        if self.worker is not None and plan is not None:
            self.worker.start_loads(plan)

    def wait_for_layer_load(self, layer_name: str, **kwargs: Any) -> None:
        """Nothing to wait for: loads that a forward needs are through before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are copied at once, when the step is through."""

    def wait_for_save(self, **kwargs: Any) -> None:
        """Copy out what this step completed; it is written in the background."""
        plan = self._plan
        if self.worker is not None and plan is not None:
            self.worker.finish_step(plan, is_sound=sys.exc_info()[0] is None)

    def get_finished(self, finished_req_ids: set[str], **kwargs: Any) -> tuple[set[str] | None, set[str] | None]:
        """Async loads that are over, each once; saves never hold blocks back."""
        finished = self.worker.take_finished() if self.worker is not None else set()
        return None, finished or None

    def get_block_ids_with_load_errors(self, **kwargs: Any) -> set[int]:
        """Blocks that do not hold what was to be loaded."""
        return self.worker.take_bad_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self, **kwargs: Any) -> StoreWorkerMetadata | None:
        """What the scheduler's half must hear of this step."""
        report = self.worker.take_report() if self.worker is not None else None
        return None if report is None else StoreWorkerMetadata(report)

    @property
    def _plan(self) -> StepPlan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, StoreMetadata) else None

    # ---- the scheduler's hooks --------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss, no error."""
        return False

    def on_new_request(self, request: Any, **kwargs: Any) -> None:
        """Begin the lookup where it takes time."""
        if self.scheduler is not None:
            try:
                self.scheduler.add(request)
            except (Exception, CancelledError):  # noqa: BLE001  the serving path: a lookup may fail, the engine may not
                _LOG.exception("request %s is not looked up", request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, **kwargs: Any
    ) -> tuple[int | None, bool]:
        """See `StoreScheduler.matched`."""
        if self.scheduler is None:
            return 0, False
        try:
            return self.scheduler.matched(request, num_computed_tokens)
        except (Exception, CancelledError):  # noqa: BLE001  the serving path: a lookup may fail, the engine may not
            _LOG.exception("request %s is not looked up", request.request_id)
            return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int, **kwargs: Any) -> None:
        """The request has its blocks."""
        if self.scheduler is not None:
            table = blocks.get_block_ids()[0]
            self._tables.set(request.request_id, table)
            self.scheduler.allocated(request, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any, **kwargs: Any) -> StoreMetadata:
        """The plan of the step that is about to run."""
        assert self.scheduler is not None, "a worker's half was asked for a plan"
        rows = list(self._tables.rows(scheduler_output))
        preempted = getattr(scheduler_output, "preempted_req_ids", None) or ()
        return StoreMetadata(self.scheduler.plan(rows, preempted))

    def update_connector_output(self, connector_output: Any, **kwargs: Any) -> None:
        """What the ranks have to say about a step."""
        if self.scheduler is None:
            return
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        report = metadata.report if isinstance(metadata, StoreWorkerMetadata) else _NO_REPORT
        if getattr(connector_output, "invalid_block_ids", None):  # of whichever connector
            report = report.merged(StepReport(failed=frozenset(report.done)))
        self.scheduler.heard(report)

    def request_finished(self, request: Any, block_ids: Any, **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: what is saved was copied out."""
        if self.scheduler is not None:
            self._tables.forget(request.request_id)
            self.scheduler.finished(request.request_id)
        return False, None

    def take_events(self, **kwargs: Any) -> Iterable[Any]:
        """A `BlockStored` of medium `STORAGE` for every chunk that came into the store, keyed by the store's keys."""
        stored = self.scheduler.take_stored() if self.scheduler is not None else []
        if not stored:
            return ()
        from vllm.distributed.kv_events import BlockStored

        size = self._identity.chunk_tokens
        return [
            BlockStored(
                block_hashes=[chunk.key],
                parent_block_hash=chunk.parent,
                token_ids=list(chunk.tokens),
                block_size=size,
                lora_id=None,
                medium="STORAGE",
                lora_name=None,
            )
            for chunk in stored
        ]

    def has_pending_push_work(self, **kwargs: Any) -> bool:
        """Keep stepping until every rank knows which of its saves may be written."""
        return self.scheduler is not None and self.scheduler.awaits_confirmation

    def reset_cache(self, **kwargs: Any) -> bool | None:
        """Begin a generation: what the store holds is kept, and no longer found by this engine."""
        if self.scheduler is not None:
            self.scheduler.reset()
        return True

    # ---- both -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self, **kwargs: Any) -> Any:
        """What was counted since the last call; None where that is nothing."""
        from .stats import StoreStats

        counts: Counter[str] = Counter()
        for half in (self.scheduler, self.worker, self._accepted):
            counts.update(half.counts if half is not None else {})
        if self.worker is not None:
            counts.update(self.worker.writer.counts)
        if self._namespaces is not None:
            counts.update(self._namespaces.archive_counts())
        fresh = {name: count - self._told[name] for name, count in counts.items() if count > self._told[name]}
        self._told = counts
        return StoreStats(data=fresh) if fresh else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Stats that came over the wire."""
        from .stats import StoreStats

        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any, **kwargs: Any
    ) -> Any:
        """Counters for the metrics endpoint."""
        from .stats import StorePromMetrics

        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self, **kwargs: Any) -> None:
        """Write what is pending and close the store."""
        if self.worker is not None:
            self.worker.close()
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None


_NO_REPORT = StepReport()


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def _engine_identity(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> Identity:
    from .identity import UnsupportedEngine, engine_identity, ranks_of
    from .paging import layer_numbers, supported_group

    ranks = ranks_of(vllm_config)
    identity = engine_identity(vllm_config, options)
    numbers = list(layer_numbers(list(supported_group(kv_cache_config).layer_names)))
    if ranks.pipeline == 1 and (numbers[0], numbers[-1] + 1) != (0, identity.layers):
        raise UnsupportedEngine(
            f"the engine has KV of layers {numbers[0]} to {numbers[-1]}, the model has {identity.layers}: "
            "draft models and layers without KV are not supported"
        )
    return identity


def _rank(vllm_config: Any) -> int:
    """This process's number among those that hold a part each; tensor ranks count first."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor_size = int(vllm_config.parallel_config.tensor_parallel_size)
    return int(get_pp_group().rank_in_group) * tensor_size + int(get_tp_group().rank_in_group)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _wants_events(vllm_config: Any) -> bool:
    events = getattr(vllm_config, "kv_events_config", None)
    return bool(events is not None and events.enable_kv_cache_events)


def _digest_cache() -> str:
    """Where digests of weights are remembered, so that a start does not read all of them again."""
    from vllm import envs

    return str(Path(envs.VLLM_CACHE_ROOT) / "lmcache-toolkit")


def _register() -> None:
    """Make the name known to vLLM: MultiConnector looks its children's statistics up by name."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    except (ImportError, AttributeError, ValueError):  # an older vLLM, or registered already
        pass


_register()
