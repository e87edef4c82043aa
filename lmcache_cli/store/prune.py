"""Prune: plan, mark, and sweep what earlier runs marked (SPEC §12.3).

A plan changes nothing. Marking takes shards out of the index, naming the write (nonce) and the object's version;
readers miss them from then on, writers write anew. Sweeping deletes, after a grace time on the store's own clock,
exactly the versions that were marked. Any process may sweep; one that dies leaves marks, never half a deletion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend, BackendError, Durability, NotFound, VersionChanged
from lmcache_format.errors import BadName, FormatError
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import Fingerprint
from lmcache_format.names import ShardName, chunks_directory, new_writer_id
from lmcache_format.segment import RemoveFlags, RemoveReason
from lmcache_format.superblock import Operation

from .chunk_table import ChunkTable, chunk_table
from .errors import IncompleteListing
from .index import Index
from .manifest import DAY_MS, DEFAULT_GRACE_MS, Pending, Remove, segment_of_pending
from .namespace import is_lossless_label
from .objects import chosen_namespaces, find_identity
from .reading import read_header
from .state import Entry
from .store import Store
from .victims import Candidates, choose_excess, choose_old, find_chunks, superseded_rows

Rows = npt.NDArray[np.int64]
_ONE_BY_ONE = 2048
"""Up to so many shards are looked up in their own directories; for more, everything is listed once."""

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PruneRules:
    """What is to go. Ages in ms; limits are on what is left of all namespaces chosen. Nothing set: nothing goes.

    `key`: chunks whose key begins so, with all after them. `everything`: the whole of the namespaces chosen.
    """

    older_than_ms: int | None = None
    unused_for_ms: int | None = None
    max_bytes: int | None = None
    max_chunks: int | None = None
    superseded: bool = False
    key: str | None = None
    everything: bool = False
    namespaces: tuple[Fingerprint, ...] | None = None
    stale_models: bool = False


@dataclass(frozen=True, slots=True)
class Victim:
    """One shard of a plan. `rule` says what chose it."""

    namespace: Fingerprint
    entry: Entry
    rule: str


@dataclass(slots=True)
class PrunePlan:
    """What a prune would mark now, and what it would sweep of earlier marks. `unreadable` namespaces are left alone."""

    victims: list[Victim] = field(default_factory=list)
    kept_bytes: int = 0
    kept_shards: int = 0
    num_pinned: int = 0
    awaiting_sweep: int = 0
    due_for_sweep: int = 0
    unreadable: list[tuple[Fingerprint, str]] = field(default_factory=list)
    indexes: dict[Fingerprint, Index] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all victims."""
        return sum(victim.entry.size_bytes for victim in self.victims)

    @property
    def num_chunks(self) -> int:
        """Chunks of which anything would go."""
        return len({(victim.namespace, victim.entry.key) for victim in self.victims})


@dataclass(slots=True)
class PruneResult:
    """What was done. `num_changed` objects were found rewritten since they were marked, and stay."""

    num_marked: int = 0
    marked_bytes: int = 0
    num_swept: int = 0
    swept_bytes: int = 0
    num_gone: int = 0
    num_changed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Add what became of one marked object."""
        match outcome.fate:
            case Fate.DELETED:
                self.num_swept += 1
                self.swept_bytes += outcome.size_bytes
            case Fate.GONE:
                self.num_gone += 1
            case Fate.CHANGED:
                self.num_changed += 1
            case Fate.UNKNOWN:
                self.failures.append((outcome.path, outcome.reason))


class Fate(Enum):
    """What became of an object that was to be swept. Of an unknown one nothing may be concluded: its mark stays."""

    DELETED = "deleted"
    GONE = "gone"
    CHANGED = "changed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One object of a sweep."""

    fate: Fate
    size_bytes: int = 0
    path: str = ""
    reason: str = ""


def plan_prune(store: Store, rules: PruneRules, *, grace_ms: int = DEFAULT_GRACE_MS) -> PrunePlan:
    """Choose the victims. Reads the index alone. Raises `StoreTooNew`, `BackendError`."""
    store.check(Operation.PRUNE)
    now_ms = store.backend.now_ms()
    plan = PrunePlan()
    chosen = _open_namespaces(store, rules, plan, now_ms)
    marks = _choose(chosen, rules, now_ms)
    for one, mark in zip(chosen, marks, strict=True):
        chunk_rows = np.repeat(mark, one.table.stops - one.table.starts)
        dispensable = superseded_rows(one.table, one.is_lossless) if rules.superseded else np.zeros_like(chunk_rows)
        dispensable &= ~np.repeat(one.candidates.is_kept & ~one.table.is_whole, one.table.stops - one.table.starts)
        for row in np.flatnonzero(chunk_rows | dispensable):
            rule = one.rule if chunk_rows[row] else "superseded"
            plan.victims.append(Victim(one.fingerprint, one.table.state.entry(int(row)), rule))
        gone = chunk_rows | dispensable
        plan.kept_shards += int((~gone).sum())
        plan.kept_bytes += int(one.table.state.adds["size_bytes"][~gone].sum())
        plan.num_pinned += int(one.candidates.is_kept.sum())
        waiting, due = _marks(one.table, now_ms - grace_ms)
        plan.awaiting_sweep += waiting
        plan.due_for_sweep += due
    return plan


def mark(
    store: Store, plan: PrunePlan, *, max_bytes: int | None = None, advance: Advance = lambda n, size: None
) -> PruneResult:
    """Take the victims out of the index, deepest first, at most `max_bytes` of them.

    Raises `IncompleteListing` where the store's listing leaves out what is there, and `Unavailable` where a victim's
    version cannot be known: nothing is marked then.
    """
    store.check(Operation.PRUNE)
    result = PruneResult()
    ordered = sorted(plan.victims, key=lambda victim: -victim.entry.depth)
    taken = list(_within(ordered, max_bytes))
    now_ms = store.backend.now_ms()
    for fingerprint in {victim.namespace for victim in taken}:
        entries = [victim.entry for victim in taken if victim.namespace == fingerprint]
        rules = {victim.entry.nonce: victim.rule for victim in taken if victim.namespace == fingerprint}
        found = find_objects(store.backend, fingerprint, entries)
        removes = [
            Remove(
                entry,
                _reason(rules[entry.nonce]) if entry.nonce in found else RemoveReason.MISSING,
                now_ms,
                found[entry.nonce].version if entry.nonce in found else None,
                is_swept=entry.nonce not in found,
            )
            for entry in entries
        ]
        _write(store, plan.indexes[fingerprint], fingerprint, removes)
        result.num_marked += len(removes)
        result.marked_bytes += sum(entry.size_bytes for entry in entries)
        for entry in entries:
            advance(1, entry.size_bytes)
    return result


def sweep(
    store: Store,
    *,
    grace_ms: int = DEFAULT_GRACE_MS,
    namespaces: Sequence[Fingerprint] | None = None,
    threads: int = 4,
    result: PruneResult | None = None,
    advance: Advance = lambda n, size: None,
) -> PruneResult:
    """Delete what was marked at least `grace_ms` ago, each object only in the version that was marked.

    An object that cannot be reached is told in `failures` and stays marked. Raises `BackendError` where the index or a
    listing cannot be read.
    """
    store.check(Operation.PRUNE)
    done = result or PruneResult()
    now_ms = store.backend.now_ms()
    for found in chosen_namespaces(store, None):
        if namespaces is not None and found not in namespaces:
            continue
        index = Index(store.backend, found)
        due = list(_due(index, now_ms - grace_ms))
        if not due:
            continue
        places = find_objects(store.backend, found, [gone.entry for gone in due])
        with ThreadPoolExecutor(threads) as pool:
            outcomes = list(pool.map(partial(_delete, store.backend, places), due))
        for outcome in outcomes:
            done.count(outcome)
            advance(1, outcome.size_bytes)
        swept = [gone for gone, outcome in zip(due, outcomes, strict=True) if outcome.fate is not Fate.UNKNOWN]
        _write(store, index, found, [_as_swept(gone) for gone in swept])
    return done


@dataclass(frozen=True, slots=True)
class FoundObject:
    """Where a shard of the index lies, and in which version."""

    path: str
    version: str
    size_bytes: int


def find_objects(backend: Backend, fingerprint: Fingerprint, entries: Sequence[Entry]) -> dict[str, FoundObject]:
    """The objects of index entries, by nonce; absent ones are surely absent.

    The index keeps half of a key, so names come from listings. Raises `IncompleteListing` where a listing leaves out an
    object that is there, `Unavailable` where that cannot be known.
    """
    wanted = {(entry.key, entry.part, entry.encoding): entry.nonce for entry in entries}
    found: dict[str, FoundObject] = {}
    listings = _directories(fingerprint, entries) if len(entries) <= _ONE_BY_ONE else [chunks_directory(fingerprint)]
    for directory in listings:
        for info in backend.list(directory, recursive=len(entries) > _ONE_BY_ONE):
            if info.is_prefix:
                continue
            try:
                name = ShardName.parse(info.name)
            except BadName:
                continue
            nonce = wanted.get((name.key[:16], name.part, name.encoding))
            if nonce is not None:
                found[nonce] = FoundObject(info.name, info.version, info.size_bytes)
    if len(entries) > _ONE_BY_ONE and len(found) < len(entries):
        _refuse_partial_listing(backend, fingerprint, [entry for entry in entries if entry.nonce not in found])
    return found


def _refuse_partial_listing(backend: Backend, fingerprint: Fingerprint, absent: Sequence[Entry]) -> None:
    """Look again, in its own directory, for a sample of what a long listing did not have."""
    step = max(1, len(absent) // 256)
    sample = absent[::step]
    again = find_objects(backend, fingerprint, sample)
    if again:
        raise IncompleteListing(
            f"a listing of {chunks_directory(fingerprint)} left out at least {len(again)} of {len(absent)} shards that"
            " are there; nothing was done",
            next_step="run it again; if it stays so, the back-end's listing cannot be trusted",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Namespace:
    fingerprint: Fingerprint
    table: ChunkTable
    candidates: Candidates
    is_lossless: tuple[bool, ...]
    rule: str


def _open_namespaces(store: Store, rules: PruneRules, plan: PrunePlan, now_ms: int) -> list[_Namespace]:
    opened = []
    stale = _stale_models(store) if rules.stale_models else None
    for fingerprint in chosen_namespaces(store, None):
        if rules.namespaces is not None and fingerprint not in rules.namespaces:
            continue
        if stale is not None and fingerprint not in stale:
            continue
        found = find_identity(store, fingerprint)
        if found.identity is None:
            plan.unreadable.append((fingerprint, found.problem or "its identity cannot be read"))
            continue
        index = Index(store.backend, fingerprint)
        if index.problems and any(not problem.is_newer for problem in index.problems):
            plan.unreadable.append(
                (fingerprint, f"its index is damaged ({index.problems[0].path}); run: lmcache repair")
            )
            continue
        if index.problems:
            plan.unreadable.append((fingerprint, f"its index is of a newer release ({index.problems[0].path})"))
            continue
        plan.indexes[fingerprint] = index
        table = chunk_table(index.state, whole_part(found.identity))
        lossless = tuple(map(is_lossless_label, index.state.encodings))
        opened.append(_Namespace(fingerprint, table, Candidates.of(table, now_ms), lossless, _rule_text(rules)))
    return opened


def _stale_models(store: Store) -> set[Fingerprint]:
    """Namespaces whose model has another namespace, of the same name, dtype and chunk size, that was used later."""
    latest: dict[tuple[object, ...], tuple[int, Fingerprint]] = {}
    everyone: dict[Fingerprint, tuple[object, ...]] = {}
    for fingerprint in chosen_namespaces(store, None):
        identity = find_identity(store, fingerprint).identity
        if identity is None:
            continue
        kind = (identity.model, identity.adapter, identity.dtype, identity.chunk_tokens)
        state = Index(store.backend, fingerprint).state
        used = max(int(state.touches["day"].max(initial=0)), int(state.adds["created_ms"].max(initial=0)) // DAY_MS)
        everyone[fingerprint] = kind
        latest[kind] = max(latest.get(kind, (-1, fingerprint)), (used, fingerprint))
    return {fingerprint for fingerprint, kind in everyone.items() if latest[kind][1] != fingerprint}


def _choose(namespaces: Sequence[_Namespace], rules: PruneRules, now_ms: int) -> list[npt.NDArray[np.bool_]]:
    chosen = []
    for one in namespaces:
        kept = one.candidates.is_kept
        mark = np.zeros(len(one.table), np.bool_)
        if rules.everything or rules.stale_models:
            mark |= ~kept
        if rules.key is not None:
            mark |= one.candidates.family.with_descendants(find_chunks(one.table.state, one.table, rules.key)) & ~kept
        if rules.older_than_ms is not None or rules.unused_for_ms is not None:
            mark |= choose_old(
                one.candidates,
                created_before_ms=None if rules.older_than_ms is None else now_ms - rules.older_than_ms,
                used_before_ms=None if rules.unused_for_ms is None else now_ms - rules.unused_for_ms,
            )
        chosen.append(mark)
    if rules.max_bytes is None and rules.max_chunks is None:
        return chosen
    return choose_excess(
        [one.candidates for one in namespaces], chosen, max_bytes=rules.max_bytes, max_chunks=rules.max_chunks
    )


def _rule_text(rules: PruneRules) -> str:
    if rules.key is not None:
        return "key"
    if rules.everything:
        return "namespace"
    if rules.stale_models:
        return "stale model"
    if rules.unused_for_ms is not None or rules.older_than_ms is not None:
        return "age"
    return "limit"


def _reason(rule: str) -> RemoveReason:
    return RemoveReason.REPLACED if rule == "superseded" else RemoveReason.PRUNED


def _within(victims: Sequence[Victim], max_bytes: int | None) -> Iterator[Victim]:
    left = float("inf") if max_bytes is None else max_bytes
    for victim in victims:
        left -= victim.entry.size_bytes
        if left < 0:
            return
        yield victim


def _marks(table: ChunkTable, due_before_ms: int) -> tuple[int, int]:
    """How many removes wait for a sweep, and how many of them long enough."""
    removes = table.state.removes
    waiting = (removes["flags"] & RemoveFlags.SWEPT) == 0
    waiting &= (removes["reason"] == RemoveReason.PRUNED) | (removes["reason"] == RemoveReason.REPLACED)
    return int(waiting.sum()), int((waiting & (removes["marked_ms"].astype(np.int64) <= due_before_ms)).sum())


def _due(index: Index, before_ms: int) -> Iterator[Remove]:
    """Marks of shards that were pruned or replaced, made before a time and not swept."""
    state = index.state
    for record in state.removes:
        reason = RemoveReason(int(record["reason"]))
        is_swept = bool(int(record["flags"]) & RemoveFlags.SWEPT)
        if is_swept or reason not in (RemoveReason.PRUNED, RemoveReason.REPLACED):
            continue
        if int(record["marked_ms"]) > before_ms:
            continue
        version = int(record["version"])
        entry = Entry(
            key=int(record["key"]).to_bytes(8, "big") + int(record["key_rest"]).to_bytes(8, "big"),
            parent=0,
            depth=0,
            num_tokens=1,
            part=Part.parse(state.remove_parts[int(record["part"])]),
            encoding=state.remove_encodings[int(record["encoding"])],
            nonce=f"{int(record['nonce']):016x}",
            size_bytes=0,
            created_ms=0,
        )
        known = state.remove_versions[version] if version < len(state.remove_versions) else None
        yield Remove(entry, reason, int(record["marked_ms"]), known)


def _as_swept(gone: Remove) -> Remove:
    return Remove(gone.entry, gone.reason, gone.marked_ms, gone.version, is_swept=True)


def _delete(backend: Backend, places: Mapping[str, FoundObject], gone: Remove) -> Outcome:
    """Delete one marked object, if it still is the one that was marked."""
    place = places.get(gone.entry.nonce)
    if place is None:
        return Outcome(Fate.GONE)
    try:
        if not _is_marked_write(backend, place, gone):
            return Outcome(Fate.CHANGED)
        is_deleted = backend.delete(place.path, version=place.version)
        return Outcome(Fate.DELETED, place.size_bytes) if is_deleted else Outcome(Fate.GONE)
    except VersionChanged:
        return Outcome(Fate.CHANGED)
    except NotFound:
        return Outcome(Fate.GONE)
    except BackendError as problem:
        return Outcome(Fate.UNKNOWN, path=place.path, reason=str(problem))


def _is_marked_write(backend: Backend, place: FoundObject, gone: Remove) -> bool:
    """True where the object is the write that was marked: by its version, else by the nonce in its header."""
    if gone.version is not None and gone.version == place.version:
        return True
    with backend.open_read(place.path) as handle:
        try:
            return read_header(handle).meta.nonce == gone.entry.nonce and handle.version == place.version
        except FormatError:
            return False


def _write(store: Store, index: Index, fingerprint: Fingerprint, removes: Sequence[Remove]) -> None:
    if not removes:
        return
    pending = Pending(removes=list(removes))
    segment = segment_of_pending(fingerprint, pending, new_writer_id(), store.backend.now_ms())
    index.manifest.write(segment, Durability.FULL)


def _directories(fingerprint: Fingerprint, entries: Sequence[Entry]) -> list[str]:
    texts = sorted({entry.key.hex()[:4] for entry in entries})
    return [f"{chunks_directory(fingerprint)}/{text[:2]}/{text[2:]}" for text in texts]
