"""Copy shards between any two stores: only what the target lacks, verified on the way, the source only then removed.

Shards are copied byte for byte, header and nonce included, unless another encoding or other parts are asked for. With
`delete_source` a shard goes when its copy was read back in full, the target's index that lists it is published, and
the source's index says that it goes; then exactly the version that was read is deleted. Whatever ends a run, source and
target together hold every chunk, and the same run again goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import BackendError, Unavailable, VersionChanged
from lmcache_format.errors import FormatError
from lmcache_format.geometry import Part
from lmcache_format.names import ShardName, is_lossless_label
from lmcache_format.segment import RemoveReason, key_number

from .acceptances import copy_acceptances
from .checking import Health, check_shard
from .copying import SourceFault, WholeShard, copy_bytes, read_whole, standing_write
from .errors import StoreError
from .index import ABSENT_ROW, rows_of
from .ledger import Ledger
from .migration import (
    EVERYTHING,
    Fate,
    MigrateOptions,
    MigratePlan,
    MigrateResult,
    NamespacePlan,
    Notice,
    Outcome,
    Removable,
    plan_migrate,
    target_label,
)
from .pace import Deadline, Pace, in_parallel
from .reading import ReadFault
from .recoding import entry_of_header, read_decoded, recoded_meta, write_encoded
from .resharding import Recut, recut
from .selection import ListedShard, chunk_groups, listed_shards
from .state import State
from .store import Store
from .verify import Advance

__all__ = [
    "EVERYTHING",
    "Fate",
    "MigrateOptions",
    "MigratePlan",
    "MigrateResult",
    "NamespacePlan",
    "Notice",
    "Outcome",
    "apply_migrate",
    "plan_migrate",
]

Keys = npt.NDArray[np.uint64]
_DELETED_AT_ONCE = 512


def _ignore(num_shards: int, num_bytes: int) -> None: ...


def apply_migrate(
    source: Store,
    target: Store,
    plan: MigratePlan,
    result: MigrateResult | None = None,
    advance: Advance = _ignore,
) -> MigrateResult:
    """Carry a plan out. `result` is counted up as it goes, so that it tells what was done when an error ends the run.

    Raises `NoSpace`, `Unavailable`: nothing is deleted any more then.
    """
    done = MigrateResult() if result is None else result
    deadline, pace = Deadline(plan.options.max_duration_s), Pace(plan.options.bytes_per_s)
    for namespace in plan.namespaces:
        run = _Run(source, target, plan.options, namespace, done, deadline, pace, advance)
        run.run()
    return done


class _Run:
    """One namespace."""

    def __init__(
        self,
        source: Store,
        target: Store,
        options: MigrateOptions,
        plan: NamespacePlan,
        result: MigrateResult,
        deadline: Deadline,
        pace: Pace,
        advance: Advance,
    ) -> None:
        self._from, self._to = source.backend, target.backend
        self._store = target
        self._options, self._plan, self._result = options, plan, result
        self._deadline, self._pace, self._advance = deadline, pace, advance
        self._source = Ledger(self._from, plan.fingerprint, plan.source)
        self._target = Ledger(self._to, plan.fingerprint, plan.target)
        self._removable: list[Removable] = []
        self._added: set[int] = set()
        self._seen = 0

    def run(self) -> None:
        if not (self._plan.rows.any() or len(self._plan.target.state) or self._has_unlisted()):
            return
        try:
            self._store.namespace(self._plan.identity, create=True, allow_unverified=True).close()  # ns.json first
            copy_acceptances(self._from, self._to, self._plan.fingerprint, self._store.events)
            self._carry_over(self._target.state.keys)
            threads, abandon = self._options.concurrency, self._pace.abandon
            with closing(in_parallel(self._work, self._jobs(), threads, abandon)) as outcomes:
                for shards, outcome in outcomes:
                    self._take(shards, outcome)
            self._settle()
            self._source.flush()
            self._tell_missing()
        except BaseException:
            with suppress(BackendError, StoreError):
                self._target.flush()
            raise
        finally:
            self._result.num_left += max(0, self._num_planned - self._seen)

    @property
    def _num_planned(self) -> int:
        """Indexed shards that there is a job for."""
        skips = self._plan.present & (np.bool_(not self._options.delete_source) | self._plan.kept)
        return int((self._plan.rows & ~skips).sum())

    def _has_unlisted(self) -> bool:
        return any(True for _ in self._groups())

    # ---- jobs ----

    def _groups(self) -> Iterator[list[ListedShard]]:
        """What to copy: shard by shard, or chunk by chunk where parts are cut anew."""
        fingerprint, state = self._plan.fingerprint, self._plan.source.state
        if self._plan.parts is None:
            groups: Iterator[list[ListedShard]] = ([one] for one in listed_shards(self._from, fingerprint, state))
        else:
            groups = chunk_groups(self._from, fingerprint, state)
        for group in groups:
            if wanted := [shard for shard in group if self._is_wanted(shard)]:
                yield wanted

    def _jobs(self) -> Iterator[list[ListedShard]]:
        for group in self._groups():
            if self._is_done(group):
                self._result.num_present += 1
                self._seen += sum(shard.is_indexed for shard in group) if self._plan.parts else 0
                continue
            if self._deadline.is_over:
                return
            yield group

    def _is_wanted(self, shard: ListedShard) -> bool:
        if shard.is_indexed:
            return bool(self._plan.rows[shard.row])
        selection = self._options.selection
        return selection.has_encoding(shard.name.encoding) and not selection.has_age

    def _is_done(self, group: list[ListedShard]) -> bool:
        """True where the target's index is all that has to be asked."""
        if self._plan.parts is not None:
            return not self._options.delete_source and self._is_cut(group, self._plan.parts)
        shard = group[0]
        if not shard.is_indexed or not self._plan.present[shard.row]:
            return False
        return not self._options.delete_source or bool(self._plan.kept[shard.row])

    def _is_cut(self, group: list[ListedShard], parts: tuple[Part, ...]) -> bool:
        lossless = next((one.name.encoding for one in group if is_lossless_label(one.name.encoding)), None)
        if lossless is None:
            return False
        label, name = target_label(lossless, self._options.encoding), group[0].name
        wanted = [ShardName(name.fingerprint, name.key, part, label) for part in parts]
        return bool((rows_of(self._plan.target.state, wanted) != ABSENT_ROW).all())

    # ---- work, in several threads ----

    def _work(self, shards: list[ListedShard]) -> tuple[list[ListedShard], Outcome]:
        path = shards[0].name.path
        try:
            if self._plan.parts is not None:
                return shards, self._recut(shards)
            return shards, self._copy(shards[0])
        except SourceFault as fault:
            fates = {Health.GONE: Fate.GONE, Health.NEWER: Fate.NEWER}
            return shards, Outcome(fates.get(fault.health, Fate.DAMAGED), path, fault.reason)
        except ReadFault as fault:
            return shards, Outcome(Fate.DAMAGED, fault.path, fault.reason)
        except (StoreError, FormatError) as problem:
            return shards, Outcome(Fate.FAILED, path, str(problem))

    def _copy(self, shard: ListedShard) -> Outcome:
        name = shard.name
        self._pace.take(shard.info.size_bytes)
        if target_label(name.encoding, self._options.encoding) != name.encoding:
            return self._recode(shard)
        is_listed = shard.is_indexed and bool(self._plan.present[shard.row])
        standing = None
        if is_listed:  # read before the source is: one shard in memory at a time
            standing = standing_write(self._to, name, self._plan.identity, self._target.is_removed)
        whole = read_whole(self._from, name, self._plan.identity)
        if self._source.is_removed(whole.header.meta.nonce):
            return Outcome(Fate.GONE, name.path)
        copied = copy_bytes(
            self._to,
            name,
            self._plan.identity,
            self._in_format(whole),
            is_removed=self._target.is_removed,
            read_back=self._options.delete_source,
            standing=standing,
        )
        fate = Fate.COPIED if copied.is_new else Fate.CONFLICT if copied.is_other_write else Fate.PRESENT
        reason = f"another sound write stands there ({copied.header.meta.nonce})" if copied.is_other_write else ""
        return Outcome(
            fate,
            name.path,
            reason,
            whole.header.file_bytes,
            () if is_listed and not copied.is_new else (entry_of_header(copied.header, copied.crc32c),),
            (Removable(shard, entry_of_header(whole.header), whole.version, (copied.header.meta.nonce,)),),
            (copied.quarantined,) if copied.quarantined else (),
        )

    def _in_format(self, shard: WholeShard) -> WholeShard:
        wanted = self._options.to_format
        return shard if wanted is None else wanted.convert(shard)

    def _recode(self, shard: ListedShard) -> Outcome:
        encoding, identity = self._options.encoding, self._plan.identity
        assert encoding is not None
        checked = check_shard(self._from, shard.name, identity, with_data=False)
        if checked.health is Health.UNKNOWN:
            raise Unavailable(f"{shard.name.path}: {checked.reason}", name=shard.name.path)
        if checked.health is not Health.SOUND or checked.header is None:
            raise SourceFault(checked.health, checked.reason)
        header = checked.header
        if self._source.is_removed(header.meta.nonce):
            return Outcome(Fate.GONE, shard.name.path)
        chunk = read_decoded(self._from, header, identity)
        meta = recoded_meta(header, encoding, self._target.writer)
        written = write_encoded(self._to, meta, chunk, encoding, is_removed=self._target.is_removed)
        return Outcome(
            Fate.COPIED if written.is_ours else Fate.PRESENT,
            shard.name.path,
            "",
            written.entry.size_bytes,
            (written.entry,),
            (Removable(shard, entry_of_header(header), checked.version, (written.entry.nonce,)),),
            (written.quarantined,) if written.quarantined else (),
        )

    def _recut(self, shards: list[ListedShard]) -> Outcome:
        assert self._plan.parts is not None
        self._pace.take(sum(shard.info.size_bytes for shard in shards))
        job = Recut(self._plan.identity, self._plan.parts, self._options.encoding, self._target.writer)
        done = recut(self._from, self._to, job, shards, self._source.is_removed, self._target.is_removed)
        nonces = tuple(entry.nonce for entry in done.entries)
        removable = tuple(Removable(*one, nonces) for one in done.sources)
        fate = Fate.COPIED if done.is_new else Fate.PRESENT
        size_bytes = sum(entry.size_bytes for entry in done.entries)
        return Outcome(fate, shards[0].name.path, "", size_bytes, done.entries, removable, done.quarantined)

    # ---- what follows, in one thread ----

    def _take(self, shards: list[ListedShard], outcome: Outcome) -> None:
        self._seen += sum(shard.is_indexed for shard in shards)
        self._advance(len(shards), sum(shard.info.size_bytes for shard in shards))
        if outcome.fate is Fate.GONE and not any(shard.is_indexed for shard in shards):
            return  # waits for a sweep
        self._result.count(outcome)
        for entry in outcome.added:
            self._target.add(entry)
            self._added.add(key_number(entry.key))
        if self._options.delete_source and outcome.fate.is_at_target:
            free = [one for one in outcome.removable if not self._is_kept(one.shard)]
            self._result.num_kept += len(outcome.removable) - len(free)
            self._removable += free
        if self._target.is_due or len(self._removable) >= _DELETED_AT_ONCE:
            self._settle()

    def _tell_missing(self) -> None:
        missing = self._num_planned - self._seen
        if missing > 0 and not self._deadline.is_over:
            reason = f"{missing} shards of the index are not in the listing; run 'lmcache verify' on the source"
            self._result.tell(Notice("missing", f"ns/{self._plan.fingerprint}/c", reason, True))

    def _is_kept(self, shard: ListedShard) -> bool:
        return shard.is_indexed and bool(self._plan.kept[shard.row])

    def _settle(self) -> None:
        """Publish what the target has; then say at the source what goes; then delete it."""
        added, self._added = self._added, set()
        self._carry_over(np.array(sorted(added), np.uint64))
        self._target.flush()
        verified, self._removable = self._removable, []
        if not verified:
            return
        self._target.refresh()
        removable = [one for one in verified if not any(map(self._target.is_removed, one.copies))]
        for one in removable:
            if one.shard.is_indexed and not self._source.lists(one.entry.nonce, one.shard.row):
                overwritten = self._source.state.entry(one.shard.row)
                self._source.remove(overwritten, RemoveReason.PRUNED, is_swept=True)
            self._source.remove(one.entry, RemoveReason.PRUNED, one.version)
        self._source.flush()
        with ThreadPoolExecutor(self._options.concurrency) as pool:
            for one, is_deleted in zip(removable, pool.map(self._delete, removable), strict=True):
                if not is_deleted:
                    self._result.num_changed += 1
                    reason = "was written anew at the source meanwhile, and stays there"
                    self._result.tell(Notice("changed", one.shard.name.path, reason, True))
                    continue
                self._source.remove(one.entry, RemoveReason.PRUNED, one.version, is_swept=True)
                self._result.num_deleted += 1
                self._result.deleted_bytes += one.entry.size_bytes

    def _delete(self, one: Removable) -> bool:
        try:
            self._from.delete(one.shard.name.path, version=one.version)
        except VersionChanged:
            return False
        return True

    def _carry_over(self, keys: Keys) -> None:
        """Labels, pins and touches of chunks that the target has, by the first half of their keys, in order, where the
        source says more of them than the target knows."""
        here, there = self._plan.source.state, self._plan.target.state
        known = {(label.name, label.key): label.created_ms for label in there.labels}
        labels = [
            label
            for label in here.labels
            if _holds(keys, label.key) and known.get((label.name, label.key), -1) < label.created_ms
        ]
        pinned = {pin.key: pin.created_ms for pin in there.pins}
        pins = [pin for pin in here.pins if _holds(keys, pin.key) and pinned.get(pin.key, -1) < pin.created_ms]
        self._target.note(labels, pins, _newer_touches(here, there, keys))


def _holds(keys: Keys, key: bytes) -> bool:
    number = np.uint64(key_number(key))
    at = int(np.searchsorted(keys, number))
    return at < len(keys) and bool(keys[at] == number)


def _newer_touches(here: State, there: State, keys: Keys) -> list[tuple[int, int, int]]:
    mine = here.touches[np.isin(here.touches["key"], keys)]
    at = np.searchsorted(there.touches["key"], mine["key"])
    days, hits = np.zeros(len(mine), np.int64), np.zeros(len(mine), np.int64)
    if len(there.touches):
        at = np.minimum(at, len(there.touches) - 1)
        is_known = there.touches["key"][at] == mine["key"]
        days[is_known] = there.touches["day"][at[is_known]]
        hits[is_known] = there.touches["hits"][at[is_known]]
    says_more = (mine["day"] > days) | (mine["hits"] > hits)
    more = zip(mine["key"], np.maximum(mine["day"], days), np.maximum(mine["hits"], hits), says_more, strict=True)
    return [(int(key), int(day), int(count)) for key, day, count, is_more in more if is_more]
