"""Prune: plan, and mark what is to go (SPEC §12.3); `sweep` deletes later what was marked.

A plan changes nothing. Marking takes shards out of the index, naming the write (nonce) and the object's version;
readers miss them from then on, writers write anew. What is marked is chosen again on the index as it is then, and of
that only what the plan had: what was written, used or pinned since the plan was made stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.keys import ChunkKey, root_key
from lmcache_format.segment import RemoveReason
from lmcache_format.superblock import Operation

from .chunk_table import Bools, ChunkTable, Ints, chunk_table
from .clocks import MAX_SKEW_MS, checked_now_ms
from .index import Index
from .manifest import DAY_MS, DEFAULT_GRACE_MS, Remove
from .objects import chosen_namespaces, find_identity
from .places import FoundObject, SlotName, refuse_mostly_absent, slot_of
from .places import find_objects as find_objects
from .state import Entry, State
from .store import Store
from .sweep import Advance, due, marked, write_removes
from .victims import (
    Candidates,
    choose_excess,
    choose_old,
    choose_prompt,
    find_chunks,
    pinned_chunks,
    sizes_without,
    superseded_rows,
    under_root,
)

_MARKS_A_SEGMENT = 65_536


class Rule(IntEnum):
    """What chose a chunk; where several did, the first."""

    NONE = 0
    PROMPT = 1
    KEY = 2
    EVERYTHING = 3
    STALE_MODEL = 4
    AGE = 5
    LIMIT = 6
    SUPERSEDED = 7

    @property
    def text(self) -> str:
        """As people read it."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """A prompt whose own chunks are to go. `words`: token ids, u32 `[T]`."""

    root: ChunkKey
    words: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PruneRules:
    """What is to go: the union of what the rules choose within the scope. Nothing set: nothing goes.

    Ages in ms; `older_than_ms` and `unused_for_ms` together mean both. Limits are on what is left of the scope. `key`:
    chunks whose key begins so, with all after them. `everything`: all of the scope. The scope is the whole store unless
    `namespaces`, `models` (shell patterns) or `salt` (the chunks of that tenant) narrow it. `max_delete_bytes` bounds
    what one run takes.
    """

    older_than_ms: int | None = None
    unused_for_ms: int | None = None
    max_bytes: int | None = None
    max_chunks: int | None = None
    superseded: bool = False
    stale_models: bool = False
    key: str | None = None
    prompt: PromptChunks | None = None
    everything: bool = False
    namespaces: tuple[Fingerprint, ...] | None = None
    models: tuple[str, ...] = ()
    salt: str | None = None
    max_delete_bytes: int | None = None

    @property
    def has_rule(self) -> bool:
        """True where anything besides the scope is given."""
        given = (self.older_than_ms, self.unused_for_ms, self.max_bytes, self.max_chunks, self.key, self.prompt)
        return any(one is not None for one in given) or self.superseded or self.stale_models or self.everything

    @property
    def has_age(self) -> bool:
        """True where age or last use decide."""
        return self.older_than_ms is not None or self.unused_for_ms is not None


@dataclass(frozen=True, slots=True, eq=False)
class NamespacePlan:
    """The victims of one namespace: rows of the index's state, such that every beginning of them is closed downwards.

    `rules[i]` is what chose row `rows[i]`, `last_used_ms[i]` when its chunk was used.
    """

    identity: Identity
    index: Index
    candidates: Candidates
    rows: Ints
    rules: Ints
    last_used_ms: Ints

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the namespace."""
        return self.identity.fingerprint

    @property
    def sizes(self) -> Ints:
        """Bytes of every victim."""
        sizes: Ints = self.index.state.adds["size_bytes"][self.rows].astype(np.int64)
        return sizes

    @property
    def nonces(self) -> npt.NDArray[np.uint64]:
        """Which writes go."""
        nonces: npt.NDArray[np.uint64] = self.index.state.adds["nonce"][self.rows]
        return nonces


@dataclass(frozen=True, slots=True)
class VictimGroup:
    """What one rule takes of one namespace."""

    namespace: Fingerprint
    model: str
    rule: str
    num_chunks: int
    num_shards: int
    size_bytes: int
    first_used_ms: int
    last_used_ms: int


@dataclass(slots=True)
class PrunePlan:
    """What a prune would mark now, and what earlier ones marked. `unreadable` namespaces are left alone.

    `num_left_out` shards of `left_out_bytes` are beyond what one run may take. `excess_bytes` and `excess_chunks` are
    by how much the limits are missed all the same, because of pins.
    """

    rules: PruneRules
    namespaces: list[NamespacePlan] = field(default_factory=list)
    kept_bytes: int = 0
    kept_chunks: int = 0
    num_pinned: int = 0
    num_left_out: int = 0
    left_out_bytes: int = 0
    excess_bytes: int = 0
    excess_chunks: int = 0
    num_marked: int = 0
    num_due: int = 0
    unreadable: list[tuple[Fingerprint, str]] = field(default_factory=list)
    in_scope: tuple[Fingerprint, ...] = ()

    @property
    def num_shards(self) -> int:
        """Shards that would go."""
        return sum(len(one.rows) for one in self.namespaces)

    @property
    def size_bytes(self) -> int:
        """Their bytes."""
        return sum(int(one.sizes.sum()) for one in self.namespaces)

    @property
    def num_chunks(self) -> int:
        """Chunks of which anything would go."""
        return sum(len(np.unique(_chunk_numbers(one.candidates.family.table)[one.rows])) for one in self.namespaces)

    def groups(self) -> Iterator[VictimGroup]:
        """The victims by namespace and rule."""
        for one in self.namespaces:
            chunks = _chunk_numbers(one.candidates.family.table)[one.rows]
            for rule in np.unique(one.rules).tolist():
                here = one.rules == rule
                yield VictimGroup(
                    one.fingerprint,
                    one.identity.model,
                    Rule(rule).text,
                    len(np.unique(chunks[here])),
                    int(here.sum()),
                    int(one.sizes[here].sum()),
                    int(one.last_used_ms[here].min()),
                    int(one.last_used_ms[here].max()),
                )


@dataclass(slots=True)
class MarkResult:
    """What was marked. `num_spared` shards of the plan stay: written, used or pinned since, or young on the store's own
    clock although their writer dated them otherwise."""

    num_marked: int = 0
    marked_bytes: int = 0
    num_spared: int = 0
    marked_ms: int = 0


def plan_prune(
    store: Store, rules: PruneRules, *, grace_ms: int = DEFAULT_GRACE_MS, host_ms: int | None = None
) -> PrunePlan:
    """Choose the victims. Reads the indexes alone; `host_ms` is this machine's clock (None: ask it).

    Raises `Refused` where the clocks disagree, `StoreTooNew`, `BackendError`.
    """
    store.check(Operation.PRUNE)
    now_ms = checked_now_ms(store.backend, host_ms)
    plan = PrunePlan(rules)
    opened = list(_open_namespaces(store, rules, plan, now_ms, now_ms - grace_ms))
    plan.in_scope = tuple(one.identity.fingerprint for one in opened)
    chosen = _choose(opened, rules, now_ms)
    _summarise(plan, opened, chosen)
    plan.namespaces = [_in_order(one, rows, codes) for one, (rows, codes) in zip(opened, chosen, strict=True)]
    if rules.max_delete_bytes is not None:
        _cut(plan, rules.max_delete_bytes)
    plan.namespaces = [one for one in plan.namespaces if len(one.rows)]
    return plan


def mark(
    store: Store,
    plan: PrunePlan,
    *,
    host_ms: int | None = None,
    advance: Advance = lambda num_shards, num_bytes: None,
    result: MarkResult | None = None,
) -> MarkResult:
    """Take the victims out of the index; `result` is counted up as it goes.

    Raises `IncompleteListing` where the store's listing leaves out what is there, `BackendError` where something cannot
    be known, and what `plan_prune` raises; where that happens before the first mark, nothing was changed.
    """
    done = MarkResult() if result is None else result
    fresh = {one.fingerprint: one for one in plan_prune(store, plan.rules, host_ms=host_ms).namespaces}
    prepared = []
    for planned in plan.namespaces:
        now = fresh.get(planned.fingerprint)
        one = None if now is None else _prepared(store.backend, now, planned, plan.rules)
        done.num_spared += len(planned.rows) - (0 if one is None else len(one.rows))
        if one is not None:
            prepared.append(one)
    for one in prepared:
        _mark_rows(store.backend, one, done, advance)
    return done


# ---- plan -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    identity: Identity
    index: Index
    table: ChunkTable
    candidates: Candidates
    num_pinned: int


def _open_namespaces(store: Store, rules: PruneRules, plan: PrunePlan, now_ms: int, due_ms: int) -> Iterator[_Opened]:
    everything = {fingerprint: find_identity(store, fingerprint) for fingerprint in chosen_namespaces(store, None)}
    indexes = {fingerprint: Index(store.backend, fingerprint) for fingerprint in everything}
    known = {name: found.identity for name, found in everything.items() if found.identity is not None}
    stale = _stale_models(known, indexes, now_ms) if rules.stale_models else None
    for fingerprint, found in everything.items():
        index = indexes[fingerprint]
        plan.num_marked += int(marked(index.state).sum())
        plan.num_due += int(due(index.state, due_ms).sum())
        if rules.namespaces is not None and fingerprint not in rules.namespaces:
            continue
        problem = found.problem or _index_problem(index)
        if found.identity is None or problem:
            plan.unreadable.append((fingerprint, problem or "its identity cannot be read"))
            continue
        if rules.models and not any(fnmatchcase(found.identity.model, pattern) for pattern in rules.models):
            continue
        table = chunk_table(index.state, whole_part(found.identity))
        candidates = Candidates.of(table, now_ms)
        if stale is not None and fingerprint not in stale:
            candidates = candidates.within(np.zeros(len(table), np.bool_))
        if rules.salt is not None:
            candidates = candidates.within(under_root(candidates.family, root_key(fingerprint, rules.salt)))
        num_pinned = int(candidates.family.with_ancestors(pinned_chunks(table, now_ms)).sum())
        yield _Opened(found.identity, index, table, candidates, num_pinned)


def _index_problem(index: Index) -> str:
    """Why the index does not tell all there is: pins or adds may be in what cannot be read."""
    for problem in index.problems:
        if problem.is_newer:
            return f"its index is of a newer release ({problem.path})"
        return f"its index is damaged ({problem.path}); run: lmcache repair"
    return ""


def _stale_models(
    known: dict[Fingerprint, Identity], indexes: dict[Fingerprint, Index], now_ms: int
) -> set[Fingerprint]:
    """Namespaces beside which there is one of the same model with other weights that was written to later, and used on
    a later day."""
    kinds: dict[tuple[object, ...], list[tuple[Fingerprint, str, int, int]]] = {}
    for fingerprint, identity in known.items():
        state = indexes[fingerprint].state
        if not len(state):
            continue
        written_ms = min(int(state.adds["created_ms"].max()), now_ms)
        used_day = min(max(int(state.touches["day"].max(initial=0)), written_ms // DAY_MS), now_ms // DAY_MS)
        kind = (identity.model, identity.adapter, identity.dtype, identity.scale, identity.chunk_tokens)
        kinds.setdefault(kind, []).append((fingerprint, identity.weights, written_ms, used_day))
    return {
        fingerprint
        for same in kinds.values()
        for fingerprint, weights, written_ms, used_day in same
        if any(
            other_weights != weights and other_ms > written_ms and other_day > used_day
            for _, other_weights, other_ms, other_day in same
        )
    }


def _choose(opened: Sequence[_Opened], rules: PruneRules, now_ms: int) -> list[tuple[Bools, Ints]]:
    """For every namespace which rows go, and the rule of each."""
    codes = [_rule_codes(one, rules, now_ms) for one in opened]
    chosen = [code > Rule.NONE for code in codes]
    extra = [_superseded(one, rules, gone) for one, gone in zip(opened, chosen, strict=True)]
    if rules.max_bytes is not None or rules.max_chunks is not None:
        more = choose_excess(
            [one.candidates for one in opened],
            chosen,
            max_bytes=rules.max_bytes,
            max_chunks=rules.max_chunks,
            sizes=[sizes_without(one.table, rows) for one, rows in zip(opened, extra, strict=True)],
        )
        for code, gone in zip(codes, more, strict=True):
            code[gone & (code == Rule.NONE)] = Rule.LIMIT
    result = []
    for one, code, rows in zip(opened, codes, extra, strict=True):
        by_row = code[_chunk_numbers(one.table)]
        by_row[rows & (by_row == Rule.NONE)] = Rule.SUPERSEDED
        result.append((by_row > Rule.NONE, by_row))
    return result


def _rule_codes(one: _Opened, rules: PruneRules, now_ms: int) -> Ints:
    candidates, codes = one.candidates, np.zeros(len(one.table), np.int64)
    free = ~candidates.is_kept

    def take(rule: Rule, chosen: Bools) -> None:
        codes[chosen & free & (codes == Rule.NONE)] = rule

    if rules.prompt is not None:
        words = rules.prompt.words
        take(Rule.PROMPT, choose_prompt(candidates, rules.prompt.root, words, one.identity.chunk_tokens))
    if rules.key is not None:
        found = find_chunks(one.table.state, one.table, rules.key)
        take(Rule.KEY, candidates.family.with_descendants(found))
    if rules.everything:
        take(Rule.EVERYTHING, free)
    if rules.stale_models:
        take(Rule.STALE_MODEL, free)
    if rules.has_age:
        old = choose_old(
            candidates,
            created_before_ms=None if rules.older_than_ms is None else now_ms - rules.older_than_ms,
            used_before_ms=None if rules.unused_for_ms is None else now_ms - rules.unused_for_ms,
        )
        take(Rule.AGE, old)
    return codes


def _superseded(one: _Opened, rules: PruneRules, gone: Bools) -> Bools:
    """Rows that go although their chunk, or its beginning, stays. A pinned tail stays as well, and of a pinned chunk
    with a part missing everything."""
    if not rules.superseded:
        return np.zeros(len(one.table.state), np.bool_)
    table, candidates = one.table, one.candidates
    rows = superseded_rows(table, one.identity.chunk_tokens)
    needed = candidates.is_kept & (~table.is_whole | (table.num_tokens < one.identity.chunk_tokens))
    stays = needed | ~candidates.is_counted | gone
    return rows & ~stays[_chunk_numbers(table)]


def _summarise(plan: PrunePlan, opened: Sequence[_Opened], chosen: Sequence[tuple[Bools, Ints]]) -> None:
    for one, (rows, _) in zip(opened, chosen, strict=True):
        counted = one.candidates.is_counted
        left = np.zeros(len(one.table), np.bool_)
        numbers = _chunk_numbers(one.table)
        left[numbers[~rows]] = True
        plan.kept_chunks += int((left & counted).sum())
        plan.kept_bytes += int(one.table.state.adds["size_bytes"][~rows & counted[numbers]].sum())
        plan.num_pinned += one.num_pinned
    rules = plan.rules
    plan.excess_bytes = 0 if rules.max_bytes is None else max(0, plan.kept_bytes - rules.max_bytes)
    plan.excess_chunks = 0 if rules.max_chunks is None else max(0, plan.kept_chunks - rules.max_chunks)


def _in_order(one: _Opened, chosen: Bools, codes: Ints) -> NamespacePlan:
    """The chosen rows, those of the chunk used longest ago first, children before parents."""
    numbers = _chunk_numbers(one.table)
    place = np.empty(len(one.table), np.int64)
    place[one.candidates.order] = np.arange(len(one.table))
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(place[numbers[rows]], kind="stable")]
    used = one.candidates.last_used_ms[numbers[rows]]
    return NamespacePlan(one.identity, one.index, one.candidates, rows, codes[rows], used)


def _cut(plan: PrunePlan, max_bytes: int) -> None:
    """Leave only so much of the plan as fits, whole chunks, those used longest ago over all namespaces."""
    used = np.concatenate([one.last_used_ms for one in plan.namespaces] or [np.zeros(0, np.int64)])
    place = np.concatenate([np.arange(len(one.rows)) for one in plan.namespaces] or [used])
    sizes = np.concatenate([one.sizes for one in plan.namespaces] or [used])
    origin = np.repeat(np.arange(len(plan.namespaces)), [len(one.rows) for one in plan.namespaces])
    order = np.lexsort((place, origin, used))
    fits = np.zeros(len(order), np.bool_)
    fits[order] = np.cumsum(sizes[order]) <= max_bytes
    for number, one in enumerate(plan.namespaces):
        here = fits[origin == number]
        chunks = _chunk_numbers(one.candidates.family.table)[one.rows]
        here &= ~np.isin(chunks, chunks[~here])
        plan.num_left_out += int((~here).sum())
        plan.left_out_bytes += int(one.sizes[~here].sum())
        plan.namespaces[number] = NamespacePlan(
            one.identity, one.index, one.candidates, one.rows[here], one.rules[here], one.last_used_ms[here]
        )


# ---- mark -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """Rows to be marked, and where their shards lie."""

    plan: NamespacePlan
    rows: Ints
    places: dict[SlotName, FoundObject]


def _prepared(backend: Backend, now: NamespacePlan, planned: NamespacePlan, rules: PruneRules) -> _Prepared | None:
    """What of the plan would be chosen again on the index as it is now, closed downwards, with its places."""
    again = np.isin(now.nonces, planned.nonces)
    rows = _closed_rows(now, now.rows[again], now.rules[again])
    if not len(rows):
        return None
    entries = [now.index.state.entry(int(row)) for row in rows]
    places = find_objects(backend, now.fingerprint, entries, num_listed=len(now.index.state))
    refuse_mostly_absent(now.fingerprint, len(entries) - len(places), len(entries))
    rows = _without_young(now, rows, entries, places, rules, backend.now_ms())
    return _Prepared(now, rows, places)


def _closed_rows(plan: NamespacePlan, rows: Ints, rules: Ints) -> Ints:
    """Rows without those of chunks that have one after them that stays; superseded rows concern no other chunk."""
    table = plan.candidates.family.table
    numbers = _chunk_numbers(table)
    whole = rules != Rule.SUPERSEDED
    gone = np.bincount(numbers[rows[whole]], minlength=len(table)) == table.stops - table.starts
    gone = plan.candidates.family.closed(gone)
    result: Ints = rows[~whole | gone[numbers[rows]]]
    return result


def _without_young(
    plan: NamespacePlan,
    rows: Ints,
    entries: Sequence[Entry],
    places: dict[SlotName, FoundObject],
    rules: PruneRules,
    now_ms: int,
) -> Ints:
    """Without rows that an age chose by the date of a writer whose clock was wrong: the store dates objects, too.

    A copy of an old shard is young as a file; it counts by its record, which is then more than a clock can be wrong.
    """
    position = {int(row): number for number, row in enumerate(plan.rows.tolist())}
    codes = np.array([int(plan.rules[position[int(row)]]) for row in rows], np.int64)
    if not rules.has_age or not (codes == Rule.AGE).any():
        return rows
    since_ms = now_ms - max(rules.older_than_ms or 0, rules.unused_for_ms or 0)
    young = np.zeros(len(rows), np.bool_)
    for number, entry in enumerate(entries):
        place = places.get(slot_of(entry))
        if codes[number] == Rule.AGE and place is not None and place.modified_ms >= since_ms:
            young[number] = place.modified_ms - entry.created_ms <= MAX_SKEW_MS
    return _closed_rows(plan, rows[~young], codes[~young]) if young.any() else rows


def _mark_rows(backend: Backend, prepared: _Prepared, result: MarkResult, advance: Advance) -> None:
    plan, rows, places = prepared.plan, prepared.rows, prepared.places
    state = plan.index.state
    superseded = set(plan.rows[plan.rules == Rule.SUPERSEDED].tolist())
    shadowed = _shadowed(state)
    for start in range(0, len(rows), _MARKS_A_SEGMENT):
        now_ms = backend.now_ms()
        removes = []
        size = 0
        batch = rows[start : start + _MARKS_A_SEGMENT].tolist()
        for row in batch:
            entry = state.entry(row)
            place = places.get(slot_of(entry))
            reason = RemoveReason.REPLACED if row in superseded else RemoveReason.PRUNED
            version = None if place is None else place.version
            size += entry.size_bytes
            removes.append(Remove(entry, reason, now_ms, version))
            removes += [Remove(hidden, reason, now_ms) for hidden in shadowed.get(slot_of(entry), ())]
        write_removes(backend, plan.index, plan.fingerprint, removes)
        result.num_marked += len(batch)
        result.marked_bytes += size
        result.marked_ms = now_ms
        advance(len(batch), size)


def _shadowed(state: State) -> dict[SlotName, list[Entry]]:
    """Earlier writes of the same names: without a remove of their own they would come forward."""
    found: dict[SlotName, list[Entry]] = {}
    for key, add in zip(state.shadowed_keys, state.shadowed_adds, strict=True):
        entry = _entry(state, int(key), add)
        found.setdefault(slot_of(entry), []).append(entry)
    return found


def _entry(state: State, key: int, add: np.void) -> Entry:
    return Entry(
        key=key.to_bytes(8, "big") + int(add["key_rest"]).to_bytes(8, "big"),
        parent=int(add["parent"]),
        depth=int(add["depth"]),
        num_tokens=int(add["num_tokens"]),
        part=state.parts[int(add["part"])],
        encoding=state.encodings[int(add["encoding"])],
        nonce=f"{int(add['nonce']):016x}",
        size_bytes=int(add["size_bytes"]),
        created_ms=int(add["created_ms"]),
    )


def _chunk_numbers(table: ChunkTable) -> Ints:
    """For every row of the state the number of its chunk."""
    numbers: Ints = np.repeat(np.arange(len(table)), table.stops - table.starts)
    return numbers
