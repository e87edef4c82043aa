"""An engine without a model: a scheduler with blocks and a prefix cache, ranks with pages, KV that shows its place.

It follows the order of calls of a real vLLM step, chunked prefill, preemption and both ways to load included. The fake
forward reads every slot before the tokens it computes: where one does not hold what the prefix says, what it computes
is poison, and the step must have reported blocks that were not loaded. Steps may be heard of one step late, as with
asynchronous scheduling (`overlap`). Plans and reports travel pickled.
"""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from lmcache_cli.integration.vllm.caching import Caching
from lmcache_cli.integration.vllm.identity import Ranks, writes_part
from lmcache_cli.integration.vllm.plan import StepPlan, StepReport
from lmcache_cli.integration.vllm.scheduling import Scheduled, SchedulingOptions, StoreScheduler
from lmcache_cli.integration.vllm.worker import StoreWorker
from lmcache_cli.runtime.loading import Loader
from lmcache_cli.runtime.memory import MemoryPool
from lmcache_cli.runtime.namespaces import Namespaces
from lmcache_cli.runtime.pages import Pages
from lmcache_cli.store import ChunkBuffer, Store, WriterOptions
from lmcache_format.geometry import Part, part_tensors, rank_part, whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import pattern

SENTINEL = 0xDEAD


class Status(Enum):
    WAITING = 1
    LOADING = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5
    ERROR = 6
    ABORTED = 7

    @property
    def is_over(self) -> bool:
        return self.value >= Status.FINISHED.value


@dataclass(eq=False)
class FakeRequest:
    """A request as the engine keeps it."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 1
    cache_salt: str | None = None
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    redone: int = 0
    promised: list[int] = field(default_factory=list)
    is_loaded: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def all_token_ids(self) -> Sequence[int]:
        return [*self.prompt, *self.output]


class ArrayPages:
    """Pages as plain arrays `[H, slot, D]`, filled with a sentinel; keeps which slots were written by loads."""

    def __init__(self, identity: Identity, part: Part, num_slots: int) -> None:
        self.identity = identity
        self.part = part
        self.arrays: dict[str, Any] = {}
        for spec in part_tensors(identity, part, 1):
            shape = (*spec.shape[:-2], num_slots, spec.shape[-1])
            self.arrays[spec.name] = np.full(shape, SENTINEL & ((1 << 8 * spec.dtype.itemsize) - 1), spec.dtype.numpy)
        self.loaded: set[int] = set()

    def scatter(self, buffer: ChunkBuffer, slots: Sequence[int]) -> None:
        where = np.asarray(slots)
        kept = where >= 0
        self.write({name: array[..., kept, :] for name, array in buffer.tensors.items()}, where[kept])
        self.loaded.update(int(slot) for slot in where[kept])

    def gather(self, slots: Sequence[int], buffer: ChunkBuffer) -> None:
        for name, array in self.arrays.items():
            buffer.tensors[name][...] = array[..., np.asarray(slots), :]

    def write(self, tensors: dict[str, Any], slots: Any) -> None:
        for name, array in self.arrays.items():
            array[..., slots, :] = tensors[name]

    def holds(self, tensors: dict[str, Any], slots: Any) -> bool:
        return all(np.array_equal(array[..., slots, :], tensors[name]) for name, array in self.arrays.items())


class Blocks:
    """Block ids 1 … n with a prefix cache: a block that holds a known prefix can be taken by another request."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks + 1))
        self._uses: dict[int, int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._name: dict[int, tuple[Any, ...]] = {}
        self._prefix_caching = prefix_caching

    @property
    def num_free(self) -> int:
        return len(self._free)

    def hit(self, request: FakeRequest) -> list[int]:
        found: list[int] = []
        size = self.block_size
        while self._prefix_caching and (len(found) + 1) * size < request.num_tokens:
            block = self._known.get(self._key(request, len(found)))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        fresh = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in fresh:
            self.forget(block)
            self._uses[block] = 1
        return fresh

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._uses[block] -= 1
            assert self._uses[block] >= 0
            if not self._uses[block]:
                self._free[block] = None

    def learn(self, request: FakeRequest, num_tokens: int) -> None:
        for index in range(num_tokens // self.block_size if self._prefix_caching else 0):
            key, block = self._key(request, index), request.blocks[index]
            if key not in self._known and block not in self._name:
                self._known[key], self._name[block] = block, key

    def forget(self, block: int) -> None:
        key = self._name.pop(block, None)
        if key is not None:
            self._known.pop(key, None)

    def clear(self) -> None:
        self._known.clear()
        self._name.clear()

    def _key(self, request: FakeRequest, index: int) -> tuple[Any, ...]:
        return (request.cache_salt, *request.all_token_ids[: (index + 1) * self.block_size])


@dataclass
class Rank:
    worker: StoreWorker
    pages: Any
    namespaces: Namespaces
    pools: list[MemoryPool]


@dataclass
class _Row:
    request: FakeRequest
    start: int
    stop: int
    redone: int
    is_sound: bool = True


@dataclass
class _Output:
    rows: list[_Row]
    bad_blocks: set[int]
    received: list[set[str]]
    report: bytes | None


class FakeEngine:
    """See the module."""

    def __init__(
        self,
        store_url: str | Any,
        identity: Identity,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        tp: int = 1,
        pp: int = 1,
        load_async: bool = False,
        worker_backend: Any = None,
        policy: str = "recompute",
        overlap: bool = False,
        prefix_caching: bool = True,
        budget: int = 1 << 30,
        describe: Any = None,
        pages: Any = None,
        save_buffers: int = 8,
        load_timeout_s: float = 20.0,
        clock: Any = None,
        settles: bool = False,
        open_store: Callable[[Any], Any] = Store.open,
        **options: Any,
    ) -> None:
        self.identity = identity
        self.policy = policy
        self.worker_backend = worker_backend or (lambda: store_url)
        self.settles = settles
        self.overlap = overlap
        self.budget = budget
        self.blocks = Blocks(num_blocks, block_size, prefix_caching)
        self.open_store = open_store
        self.store = open_store(store_url)
        self.scheduler_namespaces = Namespaces(self.store, identity, need=whole_part(identity))
        self.scheduler = StoreScheduler(
            self.scheduler_namespaces.of,
            describe or (lambda request: Caching(adapter=None, salt=request.cache_salt, items=())),
            SchedulingOptions(
                block_size=block_size,
                chunk_tokens=identity.chunk_tokens,
                num_ranks=tp * pp,
                num_writers=sum(writes_part(identity, Ranks(tp, pp), number) for number in range(tp * pp)),
                load_async=load_async,
                **{"recheck_s": 1e9, **options},
            ),
            **({"clock": clock} if clock else {}),
        )
        self.ranks = [
            self._rank(number, tp, pp, pages or ArrayPages, save_buffers, load_timeout_s, options)
            for number in range(tp * pp)
        ]
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.received: dict[str, int] = {}
        self.outputs: deque[_Output] = deque()
        self.preempted: set[str] = set()
        self.poisoned_forwards = 0
        self.undetected = 0
        self.is_closed = False
        self.loaded_tokens = 0
        self.bad_blocks_seen: list[set[int]] = []

    def _rank(
        self, number: int, tp: int, pp: int, pages_of: Any, save_buffers: int, timeout_s: float, options: Any
    ) -> Rank:
        identity = self.identity
        share = identity.layers // pp
        stage = number // tp
        layers = (stage * share, (stage + 1) * share if stage + 1 < pp else identity.layers)
        part = rank_part(identity, number % tp, tp, layers)
        num_slots = (self.blocks.num_blocks + 1) * self.blocks.block_size
        pages: Pages = pages_of(identity, part, num_slots)
        namespaces = Namespaces(self.open_store(self.worker_backend()), identity, need=part, writer=WriterOptions())
        pools = [MemoryPool(identity, part, 4), MemoryPool(identity, part, 4), MemoryPool(identity, part, save_buffers)]
        worker = StoreWorker(
            namespaces.of,
            pages,
            loader=Loader(pages, pools[0], timeout_s=timeout_s),
            async_loader=Loader(pages, pools[1], timeout_s=timeout_s),
            save_pool=pools[2],
            saves=writes_part(identity, Ranks(tp, pp), number),
            holds_saves=tp * pp > 1 or bool(options.get("hold_saves")),
            tells_stored=bool(options.get("events")),
        )
        return Rank(worker, pages, namespaces, pools)

    # ---- what a test does -------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], **fields: Any) -> FakeRequest:
        request = FakeRequest(request_id, list(prompt), **fields)
        self.requests[request_id] = request
        self.waiting.append(request)
        self.scheduler.add(request)
        return request

    def run(self, request_id: str, prompt: Sequence[int], **fields: Any) -> FakeRequest:
        """One request from arrival to end, everything written after."""
        request = self.add(request_id, prompt, **fields)
        self.until_idle()
        return request

    def until_idle(self, max_steps: int = 20_000) -> None:
        steps = 0
        while self.waiting or self.running or self.outputs or self.requests or self.scheduler.awaits_confirmation:
            self.step()
            steps += 1
            if any(rank.worker.num_async_loads for rank in self.ranks):
                time.sleep(0.001)
            assert steps < max_steps, "the engine does not come to rest"
        self.step()  # the empty step after the last request
        self.settle()

    def settle(self) -> None:
        for rank in self.ranks:
            assert rank.worker.writer.wait_idle(20.0)

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status.is_over:
            return
        was_loading = request.status is Status.LOADING and not request.is_loaded
        self._leave(request)
        request.status = Status.ABORTED
        self.scheduler.finished(request_id)
        if not was_loading:  # a load under way still writes to the blocks
            self._free(request)

    def preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self.blocks.release(request.blocks)
        request.blocks, request.num_computed, request.status = [], 0, Status.PREEMPTED
        request.redone += 1
        self.preempted.add(request.request_id)
        self.waiting.insert(0, request)

    def reset(self) -> None:
        self.blocks.clear()
        self.scheduler.reset()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for rank in self.ranks:
            rank.worker.close()
            rank.namespaces.close()
        self.scheduler_namespaces.close()

    def assert_at_rest(self) -> None:
        """Nothing is leased, remembered or waited for."""
        assert self.blocks.num_free == self.blocks.num_blocks
        assert (self.scheduler.num_requests, self.scheduler.num_loads) == (0, 0)
        for rank in self.ranks:
            assert rank.worker.num_async_loads == 0
            deadline = time.monotonic() + 10.0  # a read that was given up gives its memory back when it is over
            while any(pool.num_leased for pool in rank.pools) and time.monotonic() < deadline:
                time.sleep(0.002)
            assert [pool.num_leased for pool in rank.pools] == [0, 0, 0]
            assert rank.worker.writer.num_pending == 0

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        rows = self._schedule()
        scheduled = [
            Scheduled(row.request.request_id, list(row.request.blocks), row.start, row.stop - row.start) for row in rows
        ]
        preempted, self.preempted = self.preempted, set()
        plan: StepPlan = pickle.loads(pickle.dumps(self.scheduler.plan(scheduled, preempted)))
        self._load(plan)
        self._forward(rows)
        self.outputs.append(self._finish(plan, rows))
        if self.settles:
            self.settle()
        if not self.overlap or not rows:
            while self.outputs:
                self._hear(self.outputs.popleft())
        while len(self.outputs) > 1:
            self._hear(self.outputs.popleft())

    def _load(self, plan: StepPlan) -> None:
        for rank in self.ranks:
            if any(not op.is_async for op in plan.loads):
                rank.worker.start_loads(plan)

    def _finish(self, plan: StepPlan, rows: list[_Row]) -> _Output:
        received, bad, report = [], set(), None
        for rank in self.ranks:
            rank.worker.start_loads(plan)
            rank.worker.finish_step(plan)
            received.append(rank.worker.take_finished())
            bad |= rank.worker.take_bad_blocks()
            own = rank.worker.take_report()
            if own is not None:
                report = own if report is None else report.merged(own)
        for row in rows:
            if not row.is_sound:
                self.undetected += not bad & set(row.request.blocks)
        return _Output(rows, bad, received, None if report is None else pickle.dumps(report))

    def _forward(self, rows: list[_Row]) -> None:
        """Every request of the step attends to its prefix as the pages hold it."""
        for row in rows:
            tokens = list(row.request.all_token_ids[: row.stop])
            before, fresh = self._slots(row.request, 0, row.start), self._slots(row.request, row.start, row.stop)
            row.is_sound = all(
                rank.pages.holds(kv_of(self.identity, rank.pages.part, tokens[: row.start], 0), before)
                for rank in self.ranks
                if row.start
            )
            self.poisoned_forwards += not row.is_sound
            for rank in self.ranks:
                own = kv_of(self.identity, rank.pages.part, tokens[row.start :], row.start)
                if not row.is_sound:
                    own = {name: array ^ array.dtype.type(0x55) for name, array in own.items()}
                rank.pages.write(own, fresh)

    def _slots(self, request: FakeRequest, start: int, stop: int) -> Any:
        tokens = np.arange(start, stop)
        size = self.blocks.block_size
        return np.asarray(request.blocks, np.int64)[tokens // size] * size + tokens % size

    def _schedule(self) -> list[_Row]:
        rows: list[_Row] = []
        budget = self.budget
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed, budget)
            if count <= 0 or request not in self.running:
                continue
            while not self._grow(request, request.num_computed + count):
                victim = self.running[-1]
                rows = [row for row in rows if row.request is not victim]
                self.preempt(victim)
                if victim is request:
                    break
            if request in self.running:
                rows.append(_Row(request, request.num_computed, request.num_computed + count, request.redone))
                budget -= count
        if not self.preempted:
            for request in list(self.waiting):
                row = self._admit(request, budget)
                if row is not None:
                    rows.append(row)
                    budget -= row.stop - row.start
        for row in rows:
            row.request.num_computed = row.stop
            self.blocks.learn(row.request, row.stop)
        return rows

    def _admit(self, request: FakeRequest, budget: int) -> _Row | None:
        if request.status is Status.LOADING and not request.is_loaded:
            return None
        external, is_async, local = 0, False, []
        computed = request.num_computed
        if computed == 0:
            local = self.blocks.hit(request)
            num_local = len(local) * self.blocks.block_size
            found, is_async = self.scheduler.matched(request, num_local)
            if found is None:
                return None
            external = found
            assert num_local + external < request.num_tokens, "nothing would be left to compute"
            assert not (is_async and external == 0)
            computed = num_local + external
        count = min(request.num_tokens - computed, budget)
        if count <= 0 and not is_async:
            return None
        needed = -(-(computed + (0 if is_async else count)) // self.blocks.block_size)
        if request.blocks:
            fresh = self.blocks.allocate(max(0, needed - len(request.blocks)))
        else:
            self.blocks.take(local)
            fresh = self.blocks.allocate(needed - len(local))
            if fresh is None:
                self.blocks.release(local)
        if fresh is None:
            return None
        request.blocks = [*(request.blocks or local), *fresh]
        self.scheduler.allocated(request, list(request.blocks), external)
        if external:
            self.loaded_tokens += external
            request.promised.append(external)
        if is_async:
            request.status, request.num_computed, request.is_loaded = Status.LOADING, computed, False
            return None
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        return _Row(request, computed, computed + count, request.redone)

    def _grow(self, request: FakeRequest, num_tokens: int) -> bool:
        needed = -(-num_tokens // self.blocks.block_size) - len(request.blocks)
        fresh = self.blocks.allocate(max(0, needed))
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    # ---- what comes back --------------------------------------------------------------------------------------

    def _hear(self, output: _Output) -> None:
        failed = self._handle_bad_blocks(output)
        for row in output.rows:
            request = row.request
            if request.status is not Status.RUNNING or row.redone != request.redone or request in failed:
                continue
            if row.stop == request.num_tokens:
                request.output.append(_next_token(request, row.is_sound))
                if len(request.output) >= request.max_tokens:
                    self._end(request, Status.FINISHED)
        if output.report is not None:
            report: StepReport = pickle.loads(output.report)
            self.scheduler.heard(report)
        for received in output.received:
            for request_id in received:
                self.received[request_id] = self.received.get(request_id, 0) + 1
                assert self.received[request_id] <= len(self.ranks), "an id was reported twice"
                if self.received[request_id] == len(self.ranks):
                    del self.received[request_id]
                    self._loaded(self.requests[request_id])

    def _loaded(self, request: FakeRequest) -> None:
        if request.status.is_over:
            self._free(request)
            return
        assert request.status is Status.LOADING, "an id was reported that is not awaited"
        request.is_loaded = True
        request.status = Status.WAITING
        if request.num_computed == 0:
            self.blocks.release(request.blocks)
            request.blocks = []
        self.blocks.learn(request, request.num_computed)

    def _handle_bad_blocks(self, output: _Output) -> set[FakeRequest]:
        if not output.bad_blocks:
            return set()
        self.bad_blocks_seen.append(set(output.bad_blocks))
        failed = set()
        for request in list(self.requests.values()):
            first = next((n for n, block in enumerate(request.blocks) if block in output.bad_blocks), None)
            if first is None or request.status.is_over:
                continue
            failed.add(request)
            if self.policy == "fail":
                was_loading = request.status is Status.LOADING
                self._leave(request)
                request.status = Status.ERROR
                self.scheduler.finished(request.request_id)
                if not was_loading:
                    self._free(request)
                continue
            request.num_computed = min(request.num_computed, first * self.blocks.block_size)
            request.redone += 1
        for block in output.bad_blocks:
            self.blocks.forget(block)
        return failed

    def _end(self, request: FakeRequest, status: Status) -> None:
        self._leave(request)
        request.status = status
        self.scheduler.finished(request.request_id)
        self._free(request)

    def _leave(self, request: FakeRequest) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def _free(self, request: FakeRequest) -> None:
        self.blocks.release(request.blocks)
        request.blocks = []
        self.requests.pop(request.request_id, None)


def _next_token(request: FakeRequest, is_sound: bool) -> int:
    return (sum(request.all_token_ids) * 31 + request.num_tokens) % 997 + (0 if is_sound else 100_000)


def kv_of(identity: Identity, part: Part, tokens: Sequence[int], start: int) -> dict[str, Any]:
    """The pattern for any number of tokens."""
    size = identity.chunk_tokens
    pieces = [pattern(identity, part, tokens[at : at + size], start + at) for at in range(0, len(tokens), size)]
    return {name: np.concatenate([piece[name] for piece in pieces], axis=-2) for name in pieces[0]}
