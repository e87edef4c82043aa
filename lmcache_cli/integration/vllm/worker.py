"""A rank's half: executes plans on its own pages and its own part of every chunk. Knows neither vLLM nor torch.

No method raises for what the store, the memory or a plan holds; what goes wrong is counted, reported to the scheduler's
half, and told the engine as blocks that were not loaded. Nothing is stored that was computed on a load that failed:
saves of the same epoch are dropped here, and where several ranks compute together, they wait until all loaded well.
"""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from lmcache_cli.runtime.loading import Loader, LoadOutcome, LoadRequest
from lmcache_cli.runtime.memory import MemoryPool
from lmcache_cli.runtime.pages import NULL_BLOCK, Pages
from lmcache_cli.runtime.saving import BackgroundWriter, SaveJob
from lmcache_cli.runtime.threads import settled
from lmcache_cli.store import ChunkRef, Namespace
from lmcache_format.keys import ChunkKey, KeyList

from .plan import DroppedSave, LoadOp, SaveOp, StepPlan, StepReport

_LOG = logging.getLogger("lmcache.vllm")


class StoreWorker:
    """See the module. `loader` is used by the engine's thread alone, `async_loader` by a thread of this worker.

    `saves` is False for a rank whose part another one writes. `holds_saves`: gathered chunks wait for their step to be
    confirmed by a later plan. `tells_stored`: report which chunks were written. `cores`: where the writer and async
    loads run. `is_near`: the header of a shard is read in no time.
    """

    def __init__(
        self,
        namespace_of: Callable[[str | None], Namespace],
        pages: Pages,
        *,
        loader: Loader,
        async_loader: Loader,
        save_pool: MemoryPool,
        saves: bool = True,
        holds_saves: bool = False,
        tells_stored: bool = False,
        cores: Collection[int] | None = None,
        is_near: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.writer = BackgroundWriter(on_saved=self._note_stored if tells_stored else None, cores=cores)
        self._namespace_of = namespace_of
        self._pages = pages
        self._loader = loader
        self._async_loader = async_loader
        self._save_pool = save_pool
        self._saves = saves
        self._holds_saves = holds_saves
        self._is_near = is_near
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="lmcache-async-load", initializer=settled(cores=cores)
        )
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._dropped: dict[str, DroppedSave] = {}
        self._blocked: dict[str, int] = {}
        self._failed_steps: set[int] = set()
        self._done_steps: set[int] = set()
        self._tainted = -1
        self._started = 0
        self._stored: Counter[bytes] = Counter()
        self._unreadable: set[ChunkKey] = set()
        self._held: dict[int, list[SaveJob]] = {}

    # ---- the engine's step ------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Load what this step's forward needs, and begin what waits. Blocks for the former. A second call for the same
        step does nothing."""
        if plan.step <= self._started:
            return
        self._started = plan.step
        for op in plan.loads:
            if op.is_async:
                self._begin(op)
        for op in plan.loads:
            if not op.is_async and not self._load(op, self._loader):
                self._tainted = plan.epoch
                self._failed_steps.add(plan.step)

    def finish_step(self, plan: StepPlan, *, is_sound: bool = True) -> None:
        """The forward is through: copy out what is to be saved. `is_sound` is False where the forward has failed."""
        if plan.step > self._started:
            self._miss_loads(plan)
        self._settle(plan)
        if plan.saves and self._saves:
            is_tainted = plan.epoch <= self._tainted or not is_sound
            jobs: list[SaveJob] = []
            for op in plan.saves:
                if is_tainted:
                    self._drop(op, op.chunks[0].depth, "save_tainted", len(op.chunks))
                else:
                    self._gather(op, jobs)
            if self._holds_saves and jobs:
                self._held[plan.step] = jobs
            else:
                for job in jobs:
                    self.writer.submit(job)
        if self._holds_saves and plan.saves:
            self._done_steps.add(plan.step)

    def take_finished(self) -> set[str]:
        """Requests whose async load is over, well or not; each is told once."""
        with self._lock:
            finished, self._finished = self._finished, set()
            return finished

    def take_bad_blocks(self) -> set[int]:
        """Blocks that do not hold what was to be loaded."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
            return bad

    def take_report(self) -> StepReport | None:
        """What the scheduler's half must hear; None where there is nothing."""
        with self._lock:
            dropped, self._dropped = self._dropped, {}
            stored, self._stored = self._stored, Counter()
            unreadable, self._unreadable = frozenset(self._unreadable), set()
        if not (dropped or stored or unreadable or self._failed_steps or self._done_steps):
            return None
        done = dict.fromkeys(self._done_steps | self._failed_steps, 1)
        report = StepReport(done, frozenset(self._failed_steps), dropped, dict(stored), unreadable)
        self._done_steps, self._failed_steps = set(), set()
        return report

    @property
    def num_async_loads(self) -> int:
        """Async loads not yet reported as finished."""
        with self._lock:
            return len(self._pending) + len(self._finished)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is pending, for `timeout_s` at most. What waits for a confirmation is forgotten."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        for jobs in self._held.values():
            for job in jobs:
                job.memory.release()
        self._held.clear()
        self.writer.close(timeout_s)
        self._loader.close()
        self._async_loader.close()

    # ---- loads ------------------------------------------------------------------------------------------------

    def _begin(self, op: LoadOp) -> None:
        with self._lock:
            if op.request_id in self._pending or op.request_id in self._finished:
                return
            self._pending.add(op.request_id)
        try:
            self._executor.submit(self._run, op)
        except RuntimeError:  # closed
            self._end(op, _bad_blocks(op, op.start))

    def _run(self, op: LoadOp) -> None:
        if not op.is_cancelled:
            self._load(op, self._async_loader)
        self._end(op, set())

    def _end(self, op: LoadOp, bad_blocks: set[int]) -> None:
        with self._lock:
            self._bad_blocks |= bad_blocks
            self._pending.discard(op.request_id)
            self._finished.add(op.request_id)

    def _miss_loads(self, plan: StepPlan) -> None:
        """The engine ran its forward without asking for this step's loads: none that it needed is there."""
        self._started = plan.step
        for op in plan.loads:
            if op.is_async:
                self._begin(op)
                continue
            self._tainted = plan.epoch
            self._failed_steps.add(plan.step)
            with self._lock:
                self._bad_blocks |= _bad_blocks(op, op.start)

    def _load(self, op: LoadOp, loader: Loader) -> bool:
        try:
            request = LoadRequest(op.chunks, op.start, op.stop, op.span)
            outcome = loader.load(self._namespace_of(op.adapter), request)
        except (Exception, CancelledError) as problem:  # noqa: BLE001  the serving path: a load may fail, the engine may not
            _LOG.exception("a load failed")
            outcome = LoadOutcome(op.start, 0, str(problem), op.chunks[0].depth if op.chunks else 0)
        self.counts["bytes_loaded"] += outcome.bytes_read
        self.counts["tokens_loaded"] += outcome.good_stop - op.start
        if outcome.good_stop >= op.stop:
            return True
        self.counts["load_failed"] += 1
        _LOG.warning("request %s: %d of %d tokens loaded: %s", op.request_id, outcome.good_stop - op.start,
                     op.stop - op.start, outcome.reason or "the chunks end before")  # fmt: skip
        depth = outcome.failed_depth if outcome.failed_depth is not None else 0
        with self._lock:
            self._unreadable.update(chunk.key for chunk in op.chunks if chunk.depth == depth)
            self._bad_blocks |= _bad_blocks(op, outcome.good_stop)
            self._note_dropped(op.request_id, DroppedSave(op.epoch, depth, is_load=True))
        return False

    # ---- saves ------------------------------------------------------------------------------------------------

    def _gather(self, op: SaveOp, jobs: list[SaveJob]) -> None:
        """Copy the chunks that the store lacks to memory of ours. Where there is none left, the rest is dropped: a
        chunk without its parent would never be found."""
        blocked = self._blocked.get(op.request_id, -1)
        if op.epoch <= blocked:
            if blocked < _FOR_GOOD:
                self._drop(op, op.chunks[0].depth, "save_blocked", len(op.chunks))
            return
        try:
            namespace = self._namespace_of(op.adapter)
            listed = present = 0
            if not op.is_suspect:
                listed = namespace.num_kept(KeyList(b"".join(chunk.key for chunk in op.chunks)))
                present = self._num_readable(namespace, op.chunks[:listed])
            self.counts["save_present"] += present
            for number, chunk in enumerate(op.chunks[present:], present):
                start = chunk.depth * namespace.identity.chunk_tokens
                stop = start + chunk.num_tokens
                memory = None
                if not op.span.has_null(start, stop):
                    memory = self._save_pool.lease(namespace.identity, chunk.num_tokens)
                if memory is None:
                    self._drop(op, chunk.depth, "save_no_memory", len(op.chunks) - number)
                    return
                try:
                    self._pages.gather(op.span.slots(start, stop), memory.buffer)
                except BaseException:
                    memory.release()
                    raise
                jobs.append(SaveJob(namespace, chunk, memory, op.is_suspect or number < listed))
        except Exception:  # noqa: BLE001  the serving path: a save may fail, the engine may not
            _LOG.exception("request %s is saved no further", op.request_id)
            self.counts["save_failed"] += 1
            self._blocked[op.request_id] = _FOR_GOOD

    def _num_readable(self, namespace: Namespace, chunks: Sequence[ChunkRef]) -> int:
        """How many of these, which the index lists and the scheduler's half has not found, have headers that can be
        read. Not asked for where that takes long."""
        if not self._is_near:
            return len(chunks)
        shards = [(chunk, entry) for chunk in chunks for entry in namespace.shards(chunk.key)]
        headers = namespace.headers(shards)
        lost = {chunk.depth for (chunk, _), header in zip(shards, headers, strict=True) if header is None}
        return next((number for number, chunk in enumerate(chunks) if chunk.depth in lost), len(chunks))

    def _settle(self, plan: StepPlan) -> None:
        for step in plan.confirmed:
            for job in self._held.pop(step, ()):
                self.writer.submit(job)
        for step in plan.refused:
            for job in self._held.pop(step, ()):
                self.counts["save_tainted"] += 1
                job.memory.release()

    def _drop(self, op: SaveOp, depth: int, why: str, num_chunks: int) -> None:
        self.counts[why] += num_chunks
        self._blocked[op.request_id] = max(op.epoch, self._blocked.get(op.request_id, -1))
        while len(self._blocked) > _BLOCKED_REMEMBERED:
            del self._blocked[next(iter(self._blocked))]
        with self._lock:
            self._note_dropped(op.request_id, DroppedSave(op.epoch, depth, op.is_suspect))

    def _note_stored(self, chunk: ChunkRef) -> None:
        with self._lock:
            self._stored[chunk.key] = 1

    def _note_dropped(self, request_id: str, drop: DroppedSave) -> None:
        self._dropped[request_id] = drop.merged(self._dropped.get(request_id, drop))


_BLOCKED_REMEMBERED = 4096
_FOR_GOOD = 1 << 62


def _bad_blocks(op: LoadOp, good_stop: int) -> set[int]:
    """Blocks of a load that hold any token from `good_stop` on."""
    return set(op.span.blocks(good_stop, op.stop)) - {NULL_BLOCK}
