"""Make the index agree with the shards again: plan first, then apply. No shard is ever deleted.

From the listing: shards the index does not know are adopted, entries without a shard dropped. `deep`: the header of
every shard is read, and the index written anew as one segment. `read_data`: every byte is read. Damaged shards and
segments are moved to quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from lmcache_cli.backends import AlreadyExists, Backend, BackendError, Durability, NotFound, ObjectInfo
from lmcache_format.identity import Fingerprint
from lmcache_format.names import QUARANTINE, ShardName, identity_path, new_nonce, new_writer_id
from lmcache_format.segment import RemoveReason, Segment
from lmcache_format.superblock import Operation

from . import wall_clock
from .checking import Health, check_shard, contradicts_index
from .errors import IncompleteListing
from .index import ABSENT_ROW, Index, SegmentProblem, shown_path
from .manifest import Pending, Remove, combine, segment_of_pending
from .objects import (
    IDENTITY_ADVICE,
    STAGING_GRACE_MS,
    FoundIdentity,
    Place,
    chosen_namespaces,
    find_identity,
    outside_namespaces,
)
from .state import Entry, State
from .store import Store
from .survey import Level, Survey, Surveyed
from .verify import Advance
from .writing import entry_of

_BATCH = 4096
_LISTED_DROPS = 10_000
_FEW_MISSING = 16


class ActionKind(StrEnum):
    """What a repair does, or cannot do. `advise` changes nothing."""

    ADOPT = "adopt"
    DROP = "drop"
    CORRECT = "correct"
    QUARANTINE = "quarantine"
    REWRITE = "rewrite"
    COLLECT = "collect"
    ADVISE = "advise"


@dataclass(frozen=True, slots=True)
class Action:
    """One line of a plan. `count` shards (or files) of `size_bytes` in all; adoptions are one line a namespace."""

    kind: ActionKind
    path: str
    reason: str
    namespace: Fingerprint | None = None
    count: int = 1
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """`deep` reads all headers and writes the index anew from them; `read_data` reads every byte.
    `accept_missing`: believe it when most of what the index lists is not in the store."""

    deep: bool = False
    read_data: bool = False
    namespace: Fingerprint | None = None
    accept_missing: bool = False
    threads: int = 2


class IndexChanges:
    """Entries to add to and to remove from an index, turned into arrays batch by batch: a tenth of the memory."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.segments: list[Segment] = []
        self.num_added = 0
        self.added_bytes = 0
        self.num_dropped = 0
        self._fingerprint = fingerprint
        self._now_ms = wall_clock.now_ms()
        self._pending = Pending()

    def add(self, entry: Entry) -> None:
        """List a shard that is there."""
        self.num_added += 1
        self.added_bytes += entry.size_bytes
        self._pending.adds.append(entry)
        self._batch(at_least=_BATCH)

    def remove(self, entry: Entry, reason: RemoveReason, *, is_dropped: bool = True) -> None:
        """Take a write out whose bytes are not under its name; `is_dropped` False where it is counted otherwise."""
        self.num_dropped += is_dropped
        self._pending.removes.append(Remove(entry, reason, self._now_ms, is_swept=True))
        self._batch(at_least=_BATCH)

    def close(self) -> list[Segment]:
        """All changes so far."""
        self._batch(at_least=1)
        return self.segments

    def _batch(self, at_least: int) -> None:
        if len(self._pending.adds) + len(self._pending.removes) >= at_least:
            self.segments.append(segment_of_pending(self._fingerprint, self._pending, "", self._now_ms))
            self._pending = Pending()


@dataclass(slots=True)
class NamespacePlan:
    """What is to be done in one namespace."""

    found: FoundIdentity
    index: Index
    changes: IndexChanges
    corrected_rows: list[int] = field(default_factory=list)
    condemned: list[tuple[ShardName, Entry | None]] = field(default_factory=list)
    segments: list[SegmentProblem] = field(default_factory=list)
    num_unchecked: int = 0
    is_rewritten: bool = False

    @property
    def changes_index(self) -> bool:
        """True where a segment is to be written."""
        return bool(self.changes.close() or self.corrected_rows or self.is_rewritten)


@dataclass(slots=True)
class RepairPlan:
    """What a repair would do. `num_unchecked` shards could not be looked at and stay as they are."""

    options: RepairOptions
    actions: list[Action] = field(default_factory=list)
    namespaces: list[NamespacePlan] = field(default_factory=list)
    num_stale_staging: int = 0
    num_unchecked: int = 0

    def count(self, kind: ActionKind) -> int:
        """Shards or files that actions of a kind concern."""
        return sum(action.count for action in self.actions if action.kind is kind)

    @property
    def num_changes(self) -> int:
        """Things to be done; 0 where the store needs no repair."""
        return sum(action.count for action in self.actions if action.kind is not ActionKind.ADVISE)


@dataclass(slots=True)
class RepairResult:
    """What a repair did. `failures`: paths and reasons of what could not be done."""

    num_adopted: int = 0
    num_dropped: int = 0
    num_corrected: int = 0
    num_quarantined: int = 0
    num_rewritten: int = 0
    num_collected: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


def _quiet(num_shards: int, num_bytes: int) -> None: ...


def plan_repair(store: Store, options: RepairOptions = RepairOptions(), advance: Advance = _quiet) -> RepairPlan:
    """Look, and change nothing.

    Raises `IncompleteListing` where the back-end leaves out shards that are there, or most shards are gone and that was
    not accepted; `BackendError` where it does not answer.
    """
    store.check(Operation.WRITE)
    plan = RepairPlan(options)
    for fingerprint in chosen_namespaces(store, options.namespace):
        found = find_identity(store, fingerprint)
        if found.is_newer:
            reason = f"{found.problem}; left alone"
            plan.actions.append(Action(ActionKind.ADVISE, f"ns/{fingerprint}", reason, fingerprint))
            continue
        if found.identity is None:
            reason = f"{found.problem}; {IDENTITY_ADVICE}"
            plan.actions.append(Action(ActionKind.ADVISE, identity_path(fingerprint), reason, fingerprint))
        index = Index(store.backend, fingerprint)
        made = NamespacePlan(found, index, IndexChanges(fingerprint), is_rewritten=options.deep)
        plan.actions += _planned(store.backend, made, options, advance)
        plan.namespaces.append(made)
        plan.num_unchecked += made.num_unchecked
    if options.namespace is None:
        _plan_staging(store.backend, plan)
    return plan


def apply_repair(store: Store, plan: RepairPlan) -> RepairResult:
    """Do what a plan says. A step that fails is told in the result and does not stop the others.

    Writers may have gone on since the plan was made: what was condemned is looked at once more, and index entries are
    added and removed by the nonce of their write.
    """
    store.check(Operation.WRITE)
    result = RepairResult()
    for namespace in plan.namespaces:
        try:
            _apply(store.backend, namespace, result)
        except BackendError as problem:
            result.failures.append((f"ns/{namespace.found.fingerprint}", str(problem)))
    if plan.num_stale_staging:
        try:
            result.num_collected = store.backend.collect_staging(older_than_ms=STAGING_GRACE_MS)
        except BackendError as problem:
            result.failures.append(("tmp", str(problem)))
    return result


# ---- plan -----------------------------------------------------------------------------------------------------------


def _plan_staging(backend: Backend, plan: RepairPlan) -> None:
    stale = [located for located in outside_namespaces(backend) if located.place is Place.STALE_STAGING]
    plan.num_stale_staging = len(stale)
    plan.actions += [
        Action(ActionKind.COLLECT, located.path, located.reason, size_bytes=located.size_bytes) for located in stale
    ]


def _planned(backend: Backend, plan: NamespacePlan, options: RepairOptions, advance: Advance) -> Iterator[Action]:
    index, fingerprint = plan.index, plan.found.fingerprint
    level = Level.FULL if options.read_data else Level.HEADERS if options.deep else Level.QUICK
    survey = Survey(backend, index, plan.found.identity, level, threads=options.threads)
    agreeing = 0
    for one in survey.shards():
        yield from _judged(plan, one)
        advance(1 + survey.num_agreeing - agreeing, one.info.size_bytes)
        agreeing = survey.num_agreeing
    yield from _planned_missing(plan, survey, options)
    num_adopted = plan.changes.num_added - len(plan.corrected_rows)
    if num_adopted:
        reason = "sound, but not in the index"
        yield Action(
            ActionKind.ADOPT, f"ns/{fingerprint}/c", reason, fingerprint, num_adopted, plan.changes.added_bytes
        )
    plan.segments = [problem for problem in index.problems if not problem.is_newer]
    for problem in index.problems:
        kind = ActionKind.ADVISE if problem.is_newer else ActionKind.QUARANTINE
        yield Action(kind, problem.path, problem.reason, fingerprint)
    if options.deep and (len(index.state) or num_adopted):
        yield Action(
            ActionKind.REWRITE, f"ns/{fingerprint}/m", "the index, from the headers of all shards", fingerprint
        )
    elif options.deep:
        plan.is_rewritten = False


def _judged(plan: NamespacePlan, one: Surveyed) -> Iterator[Action]:
    """What to do about one shard that was looked at."""
    checked, fingerprint, path = one.checked, one.name.fingerprint, one.name.path
    match checked.health:
        case Health.UNKNOWN:
            plan.num_unchecked += 1
        case Health.DAMAGED:
            plan.condemned.append((one.name, one.entry))
            yield Action(ActionKind.QUARANTINE, path, checked.reason, fingerprint, size_bytes=one.info.size_bytes)
        case Health.FOREIGN if one.entry is not None:
            plan.changes.remove(one.entry, RemoveReason.DAMAGED)
            reason = f"another file stands in its place, and is left there: {checked.reason}"
            yield Action(ActionKind.DROP, path, reason, fingerprint)
        case Health.GONE if one.entry is not None:
            plan.changes.remove(one.entry, RemoveReason.MISSING)
            yield Action(ActionKind.DROP, path, "in the index, not in the store", fingerprint)
        case Health.SOUND | Health.NEWER if checked.header is not None:
            meta = checked.header.meta
            entry = entry_of(meta, ObjectInfo(path, checked.header.file_bytes, checked.version, 0, one.info.crc32c))
            if one.entry is None or (one.is_other_write and not plan.index.lists(meta.nonce)):
                if plan.index.is_removed(meta.nonce):
                    return
                plan.changes.add(entry)
                if one.entry is not None:
                    plan.changes.remove(one.entry, RemoveReason.REPLACED, is_dropped=False)
            elif not one.is_other_write and (reason := contradicts_index(checked.header, one.entry, one.info.crc32c)):
                if one.row != ABSENT_ROW:
                    plan.corrected_rows.append(one.row)
                plan.changes.add(entry)
                yield Action(ActionKind.CORRECT, path, reason, fingerprint)


def _planned_missing(plan: NamespacePlan, survey: Survey, options: RepairOptions) -> Iterator[Action]:
    fingerprint, state = plan.found.fingerprint, plan.index.state
    unlisted = survey.unlisted()
    if unlisted.left_out:
        raise IncompleteListing(
            f"the back-end listed {survey.num_listed} of {len(state)} shards of {fingerprint}, but "
            f"{len(unlisted.left_out)} of the others are there, such as {unlisted.left_out[0][1].path}",
            next_step="nothing was changed; run it again when the back-end lists everything",
        )
    is_most = len(unlisted.missing) * 2 > len(state) and len(unlisted.missing) > _FEW_MISSING
    if is_most and not options.accept_missing:
        raise IncompleteListing(
            f"{len(unlisted.missing)} of the {len(state)} shards of {fingerprint} are not in the listing",
            next_step="nothing was changed; if they are gone for good, say so with --accept-missing",
        )
    reason = "in the index, not in the store"
    unnamed_bytes = 0
    for number, row in enumerate(unlisted.missing):
        entry = state.entry(row)
        plan.changes.remove(entry, RemoveReason.MISSING)
        if number < _LISTED_DROPS:
            path = shown_path(fingerprint, entry)
            yield Action(ActionKind.DROP, path, reason, fingerprint, size_bytes=entry.size_bytes)
        else:
            unnamed_bytes += entry.size_bytes
    if len(unlisted.missing) > _LISTED_DROPS:
        count = len(unlisted.missing) - _LISTED_DROPS
        yield Action(ActionKind.DROP, f"ns/{fingerprint}/c", reason, fingerprint, count, unnamed_bytes)
    for row, name in unlisted.obstructed:
        plan.condemned.append((name, state.entry(row)))
        yield Action(ActionKind.QUARANTINE, name.path, "a directory stands in its place", fingerprint)


# ---- apply ----------------------------------------------------------------------------------------------------------


def _apply(backend: Backend, plan: NamespacePlan, result: RepairResult) -> None:
    for entry in _condemn(backend, plan, result):
        plan.changes.remove(entry, RemoveReason.DAMAGED, is_dropped=False)
    for problem in plan.segments:
        to = f"{QUARANTINE}/{plan.found.fingerprint}.{problem.path.rpartition('/')[2]}"
        _set_aside(backend, problem.path, to, result)
    if not plan.changes_index:
        return
    plan.index.refresh()
    state = _without(plan.index.state, plan.corrected_rows)
    state = combine(state, plan.found.fingerprint, [*plan.index.late_segments, *plan.changes.close()])
    plan.index.manifest.compact(state, new_writer_id(), Durability.FULL, STAGING_GRACE_MS)
    result.num_adopted += plan.changes.num_added - len(plan.corrected_rows)
    result.num_corrected += len(plan.corrected_rows)
    result.num_dropped += plan.changes.num_dropped
    result.num_rewritten += plan.is_rewritten


def _condemn(backend: Backend, plan: NamespacePlan, result: RepairResult) -> Iterator[Entry]:
    """Move what was found damaged out of the way, unless a writer replaced it meanwhile; what the index had of it."""
    for name, entry in plan.condemned:
        if check_shard(backend, name, plan.found.identity, with_data=True).health in (Health.SOUND, Health.GONE):
            continue
        if _set_aside(backend, name.path, name.quarantine_path, result) and entry is not None:
            yield entry


def _set_aside(backend: Backend, path: str, to: str, result: RepairResult) -> bool:
    try:
        try:
            backend.move(path, to)
        except AlreadyExists:
            backend.move(path, f"{to}.{new_nonce()}")
    except NotFound:
        return True
    except BackendError as problem:
        result.failures.append((path, str(problem)))
        return False
    result.num_quarantined += 1
    return True


def _without(state: State, rows: list[int]) -> State:
    """The state without rows whose contents were wrong; their nonces stay good."""
    if not rows:
        return state
    kept = np.ones(len(state), np.bool_)
    kept[rows] = False
    return replace(state, keys=state.keys[kept], adds=state.adds[kept])
