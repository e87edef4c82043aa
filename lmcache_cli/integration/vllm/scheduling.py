"""The scheduler's half: what is looked up, loaded and saved. Knows neither vLLM nor torch.

A lookup is computed once, cached, and changes nothing: the engine asks as often as it likes. Plans follow from what the
engine did (allocated, scheduled, preempted, finished), never from what was asked.

What is wrong with a step is heard of later, perhaps after the next step was planned. So saves carry the epoch in which
they were planned, a failure ends the epoch, and what was planned since is planned again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from lmcache_cli.runtime.pages import BlockSpan
from lmcache_cli.store import ChunkRef, Match
from lmcache_format.keys import ChunkKey

from .caching import BARE, Caching, ChunkChain, Prefixes, Request, Uncached, Words, words_of
from .plan import LoadOp, SaveOp, StepPlan, StepReport, StoredChunk

_LOG = logging.getLogger("lmcache.vllm")
_GENERATION_DOMAIN = b"lmcache-generation-1"
_NO_LIMIT = 1 << 62
_AVOIDED_REMEMBERED = 4096
_PLANNED_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """`num_ranks` writers hold a part each of every chunk; with more than one, or with `hold_saves`, what is saved in a
    step waits in memory until the step is known to have loaded well everywhere. A lookup is made again after
    `recheck_s` while the request still waits; a chunk that could not be loaded is not promised for `avoid_s`.
    `events`: keep what `take_stored` tells; a chunk is stored when `num_writers` ranks have written their part."""

    block_size: int
    chunk_tokens: int
    num_ranks: int = 1
    hold_saves: bool = False
    load: bool = True
    save: bool = True
    load_async: bool = False
    save_decode: bool = False
    partial_chunks: bool = False
    recheck_s: float = 1.0
    avoid_s: float = 30.0
    num_writers: int = 1
    events: bool = False
    lookup_timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step: its whole block table, the tokens computed before, and those this step computes."""

    request_id: str
    block_ids: Sequence[int]
    num_computed: int
    num_scheduled: int


@dataclass(slots=True)
class _Lookup:
    num_tokens: int
    asked_at: float
    match: Match | None = None
    future: Future[Match] | None = None


@dataclass(slots=True)
class _State:
    request: Request
    caching: Caching | Uncached
    salt: bytes | str | None
    chain: ChunkChain
    words: Words | None = None
    lookup: _Lookup | None = None
    local: int = 0
    table: list[int] = field(default_factory=list)
    load: LoadOp | None = None
    saved: int = 0
    is_tail_saved: bool = False
    may_save: bool = True
    epoch: int = 0
    is_suspect: bool = False
    match: Match | None = None
    limit: int = _NO_LIMIT


class StoreScheduler:
    """See the module. `namespace_of` opens the namespace for an adapter's digest, `describe` says what a request may be
    cached under; lookups run in `background` where the back-end is far away, and are asked for again until done."""

    def __init__(
        self,
        namespace_of: Callable[[str | None], Prefixes],
        describe: Callable[[Request], Caching | Uncached],
        options: SchedulingOptions,
        *,
        background: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self._namespace_of = namespace_of
        self._describe = describe
        self._background = background
        self._clock = clock
        self._states: dict[str, _State] = {}
        self._loads: dict[str, LoadOp] = {}
        self._step = 0
        self._epoch = 0
        self._failed_step = 0
        self._generation = b""
        self._in_flight: dict[int, dict[str, int]] = {}
        self._confirmed: list[int] = []
        self._refused: list[int] = []
        self._planned: dict[bytes, StoredChunk] = {}
        self._written: Counter[bytes] = Counter()
        self._stored: list[StoredChunk] = []
        self._avoided: dict[ChunkKey, float] = {}
        self._holds = options.hold_saves or options.num_ranks > 1

    # ---- what the engine asks ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request has arrived; begins a lookup that runs in the background."""
        state = self._state_of(request)
        if self._background is not None:
            self._match(state)

    def matched(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """Tokens to be had from the store beyond the `num_local` the engine has, and whether they come while the
        request waits. None: ask again. At least one token is left to compute."""
        state = self._state_of(request)
        if isinstance(state.caching, Uncached) or not self.options.load:
            return 0, False
        match = self._match(state)
        if match is None:
            return None, False
        state.local = num_local
        match = state.match = self._without_avoided(match.up_to(state.limit))
        found = max(0, min(match.num_tokens, request.num_tokens - 1) - num_local)
        return found, found > 0 and self.options.load_async

    def allocated(self, request: Request, block_ids: Sequence[int], num_external: int) -> None:
        """The engine has given the request blocks; `num_external` of its tokens are to be loaded into them."""
        state = self._state_of(request)
        state.table = list(block_ids)
        match, state.match = state.match, None
        if match is not None:
            state.saved = len(match.keys)
        if num_external <= 0:
            state.lookup = None
            return
        start, stop = state.local, state.local + num_external
        chunks = _chunks_between(match, start, stop, self.options.chunk_tokens)
        span = BlockSpan.of(state.table, self.options.block_size, start, stop)
        adapter = state.caching.adapter if isinstance(state.caching, Caching) else None
        is_async = self.options.load_async
        name = request.request_id
        self._loads[name] = LoadOp(name, state.epoch, adapter, chunks, start, stop, span, is_async)
        state.lookup = None
        self.counts["load_requests"] += 1
        self.counts["load_tokens"] += num_external

    def plan(self, scheduled: Iterable[Scheduled], preempted: Iterable[str] = ()) -> StepPlan:
        """The plan for the step the engine is about to run."""
        self._step += 1
        for request_id in preempted:
            self._preempted(request_id)
        rows = list(scheduled)
        running = {row.request_id for row in rows}
        loads = tuple(op for op in self._loads.values() if op.is_async or op.request_id in running)
        self._loads.clear()
        saves = tuple(op for row in rows if (op := self._try_plan_save(row)) is not None)
        if saves:
            self._in_flight[self._step] = {op.request_id: op.chunks[0].depth for op in saves}
        self._forget_steps()
        confirmed, self._confirmed = tuple(self._confirmed), []
        refused, self._refused = tuple(self._refused), []
        return StepPlan(self._step, self._epoch, loads, saves, confirmed, refused)

    def finished(self, request_id: str) -> None:
        """The request is over, or given up. An async load that was promised to the engine is still reported."""
        self._states.pop(request_id, None)
        load = self._loads.get(request_id)
        if load is not None and load.is_async:
            self._loads[request_id] = replace(load, chunks=(), is_cancelled=True)

    def heard(self, report: StepReport) -> None:
        """What the ranks reported after a step. The engine may have ended a request before it tells of its load."""
        for unreadable in report.unreadable:
            self._avoid(unreadable)
        for request_id, drop in report.dropped.items():
            state = self._states.get(request_id)
            if state is not None and drop.epoch >= state.epoch:
                self._rewind(state, drop.depth)
                if drop.is_load:
                    state.is_suspect = True
                    state.limit = min(state.limit, drop.depth * self.options.chunk_tokens)
        for key, ranks in report.stored.items():
            self._written[key] += ranks
            if self._written[key] >= self.options.num_writers:
                del self._written[key]
                planned = self._planned.pop(key, None)
                if planned is not None:
                    self._stored.append(planned)
        if report.failed:
            self._fail(min(report.failed))
        for step, ranks in report.done.items():
            if ranks < self.options.num_ranks or self._in_flight.pop(step, None) is None:
                continue
            is_good = step not in report.failed and step > self._failed_step
            (self._confirmed if is_good else self._refused).append(step)

    def reset(self) -> None:
        """Begin a generation: nothing stored so far is found any more, and what is stored from now on is found by this
        process alone. Requests under way are saved no further."""
        self._generation = os.urandom(16)
        self._epoch += 1
        for state in self._states.values():
            state.lookup = None
            state.may_save = False
            state.salt = self._salt_of(state.caching)

    def take_stored(self) -> list[StoredChunk]:
        """Chunks that came into the store since the last call."""
        stored, self._stored = self._stored, []
        return stored

    @property
    def awaits_confirmation(self) -> bool:
        """Whether some rank holds saves back until the next plan."""
        return self._holds and bool(self._confirmed or self._in_flight)

    @property
    def num_requests(self) -> int:
        """Requests that something is remembered of."""
        return len(self._states)

    @property
    def num_loads(self) -> int:
        """Loads that no plan has told of yet."""
        return len(self._loads)

    # ---- how --------------------------------------------------------------------------------------------------

    def _state_of(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            caching = self._describe(request)
            if isinstance(caching, Uncached):
                self.counts[f"uncached_{caching.reason}"] += 1
            salt = self._salt_of(caching)
            state = _State(request, caching, salt, self._chain(caching, salt))
            self._states[request.request_id] = state
        state.request = request
        return state

    def _salt_of(self, caching: Caching | Uncached) -> bytes | str | None:
        salt = caching.salt if isinstance(caching, Caching) else None
        if not self._generation:
            return salt
        return b"\0".join([_GENERATION_DOMAIN, self._generation, (salt or "").encode("utf-8", "surrogatepass")])

    def _chain(self, caching: Caching | Uncached, salt: bytes | str | None) -> ChunkChain:
        known = caching if isinstance(caching, Caching) else BARE
        return ChunkChain(self._namespace_of(known.adapter).root(salt), known.items, self.options.chunk_tokens)

    def _match(self, state: _State) -> Match | None:
        """The longest present prefix, from memory where it was asked for just now; None while it is looked for."""
        lookup, now = state.lookup, self._clock()
        num_tokens = state.request.num_tokens
        is_old = lookup is not None and lookup.match is not None and now - lookup.asked_at > self.options.recheck_s
        if lookup is None or lookup.num_tokens != num_tokens or is_old:
            lookup = state.lookup = _Lookup(num_tokens, now)
            caching = state.caching if isinstance(state.caching, Caching) else BARE
            state.words = words_of(state.request, state.words, num_tokens)
            if self._background is None:
                lookup.match = self._find(caching, state.salt, state.words)
            else:
                lookup.future = self._background.submit(self._find, caching, state.salt, state.words)
            self.counts["lookups"] += 1
        if lookup.match is None and lookup.future is not None:
            if lookup.future.done():
                lookup.match = lookup.future.result()
            elif now - lookup.asked_at > self.options.lookup_timeout_s:
                self.counts["lookup_timeouts"] += 1
                lookup.match = self._find(BARE, None, state.words[:0] if state.words is not None else [])
        return lookup.match

    def _find(self, caching: Caching, salt: bytes | str | None, words: Words | list[int]) -> Match:
        return self._namespace_of(caching.adapter).match(words, salt=salt, items=caching.items)

    def _try_plan_save(self, row: Scheduled) -> SaveOp | None:
        try:
            return self._plan_save(row)
        except Exception:  # noqa: BLE001  the serving path: a save may fail, the engine may not
            _LOG.exception("request %s is saved no further", row.request_id)
            self._states[row.request_id].may_save = False
            return None

    def _plan_save(self, row: Scheduled) -> SaveOp | None:
        state = self._states.get(row.request_id)
        if state is None:
            return None
        state.table = list(row.block_ids)
        if not self.options.save or not state.may_save or not isinstance(state.caching, Caching):
            return None
        size = self.options.chunk_tokens
        request = state.request
        known = len(request.all_token_ids) if self.options.save_decode else request.num_prompt_tokens
        limit = min(row.num_computed + row.num_scheduled, known, len(state.table) * self.options.block_size)
        full = limit // size
        wants_tail = (
            self.options.partial_chunks
            and not state.is_tail_saved
            and limit % size > 0
            and limit >= request.num_prompt_tokens
        )
        if full <= state.saved and not wants_tail:
            return None
        state.words = words_of(request, state.words, limit)
        first = min(state.saved, full)
        chunks = state.chain.full(state.words, first, full)
        if wants_tail:
            chunks += (state.chain.tail(state.words, limit),)
            state.is_tail_saved = True
        state.saved = full
        span = BlockSpan.of(state.table, self.options.block_size, first * size, limit)
        for chunk in chunks if self._avoided else ():
            self._avoided.pop(chunk.key, None)
        for chunk in chunks if self.options.events else ():
            self._announce(chunk, state.words)
        is_suspect, state.is_suspect = state.is_suspect, False
        return SaveOp(row.request_id, state.epoch, state.caching.adapter, chunks, span, is_suspect)

    def _preempted(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:
            state.table, state.lookup = [], None
        load = self._loads.get(request_id)
        if load is not None and not load.is_async:
            del self._loads[request_id]

    def _rewind(self, state: _State, depth: int) -> None:
        state.epoch += 1
        state.saved = min(state.saved, depth)
        state.is_tail_saved = False
        state.lookup = None

    def _avoid(self, key: ChunkKey) -> None:
        """A chunk could not be loaded, whatever the index says: never promise it again to the request that met it, and
        to others only when it was saved anew, or after a while."""
        self._avoided[key] = self._clock() + self.options.avoid_s
        while len(self._avoided) > _AVOIDED_REMEMBERED:
            del self._avoided[next(iter(self._avoided))]

    def _announce(self, chunk: ChunkRef, words: Words) -> None:
        start = chunk.depth * self.options.chunk_tokens
        tokens = tuple(int(word) for word in words[start : start + chunk.num_tokens])
        self._planned[chunk.key] = StoredChunk(chunk.key, chunk.parent if chunk.depth else None, tokens)
        while len(self._planned) > _PLANNED_REMEMBERED:
            del self._planned[next(iter(self._planned))]

    def _without_avoided(self, match: Match) -> Match:
        if not self._avoided:
            return match
        now = self._clock()
        for depth, key in enumerate(match.keys):
            if self._avoided.get(key, now) > now:
                return match.up_to(depth * self.options.chunk_tokens)
        return match

    def _fail(self, step: int) -> None:
        """Saves planned in a step whose loads failed, or after it, are not taken: plan them again."""
        self._epoch += 1
        self._failed_step = self._step
        self.counts["load_failures"] += 1
        for later, saves in self._in_flight.items():
            if later < step:
                continue
            for request_id, depth in saves.items():
                state = self._states.get(request_id)
                if state is not None:
                    self._rewind(state, depth)

    def _forget_steps(self) -> None:
        """Steps that long ago are through: a single rank says only what went wrong, and reports can be lost."""
        for step in [step for step in self._in_flight if step < self._step - _STEPS_REMEMBERED]:
            del self._in_flight[step]
            if self._holds:
                self._refused.append(step)


_STEPS_REMEMBERED = 64


def _chunks_between(match: Match | None, start: int, stop: int, size: int) -> tuple[ChunkRef, ...]:
    """The chunks of a match that hold any of the tokens `start` to `stop`."""
    if match is None:
        return ()
    return tuple(
        chunk for chunk in match.chunks() if chunk.depth * size < stop and chunk.depth * size + chunk.num_tokens > start
    )
