"""Check a store: its superblocks, identities, segments and listings, and as much of every shard as is asked for.

Changes nothing. What cannot be checked is told apart from what is damaged, and what is newer or foreign from both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from lmcache_cli.backends import BackendError
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Fingerprint
from lmcache_format.names import identity_path, segment_directory
from lmcache_format.superblock import Operation

from .checking import Health, check_shard, contradicts_index
from .chunk_table import ChunkTable, chunk_table, missing_parts
from .index import ABSENT_ROW, Index, shown_chunk, shown_path
from .manifest import DAY_MS
from .objects import (
    IDENTITY_ADVICE,
    FoundIdentity,
    Place,
    chosen_namespaces,
    find_identity,
    inside_namespace,
    outside_namespaces,
)
from .store import Store
from .survey import Level, Share, Survey, Surveyed

_KEPT_FINDINGS = 10_000


class FindingKind(StrEnum):
    """What a check can find. The first four are problems, and make a report unsound; the others are told for people.

    `damaged`: bytes that are not those that were written. `missing`: in the index, not in the store. `unchecked`: the
    back-end did not answer, so nothing is known. `unsure`: the back-end's listing left things out.
    `unindexed`: sound, but not in the index; readers find it all the same, `repair` lists it. `incomplete`: parts of a
    chunk are missing. `newer`: of a later format or an unknown encoding. `foreign`: not ours. `stale`: left behind by a
    writer that ended.
    """

    DAMAGED = "damaged"
    MISSING = "missing"
    UNCHECKED = "unchecked"
    UNSURE = "unsure"
    UNINDEXED = "unindexed"
    INCOMPLETE = "incomplete"
    NEWER = "newer"
    FOREIGN = "foreign"
    STALE = "stale"


PROBLEMS = (FindingKind.DAMAGED, FindingKind.MISSING, FindingKind.UNCHECKED, FindingKind.UNSURE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth telling. A `*` in `path` stands for the half of a key that the index does not keep."""

    kind: FindingKind
    path: str
    reason: str
    namespace: Fingerprint | None = None
    size_bytes: int | None = None

    @property
    def is_problem(self) -> bool:
        """True where the store has lost something, or may have."""
        return self.kind in PROBLEMS


@dataclass(slots=True)
class VerifyReport:
    """Counts are of shards unless they say otherwise; `findings` holds the first ones, `num_findings` counts all.

    `num_checked` shards were read as far as `level` says (`num_good` of them, or of the listing at level quick, are as
    they should be). `num_awaiting_sweep` shards were removed and are still there. `num_tails_beside_full`: a full chunk
    follows the same parent, and may hold the same tokens.
    """

    level: Level
    share: str | None = None
    num_namespaces: int = 0
    num_segments: int = 0
    num_indexed: int = 0
    num_listed: int = 0
    listed_bytes: int = 0
    num_checked: int = 0
    checked_bytes: int = 0
    num_good: int = 0
    num_chunks: int = 0
    num_damaged: int = 0
    num_missing: int = 0
    num_unchecked: int = 0
    num_unsure: int = 0
    num_unindexed: int = 0
    num_incomplete: int = 0
    num_newer: int = 0
    num_foreign: int = 0
    num_stale: int = 0
    num_quarantined: int = 0
    num_awaiting_sweep: int = 0
    num_tails: int = 0
    num_tails_beside_full: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """True where nothing is damaged, missing or unknown."""
        return not (self.num_damaged or self.num_missing or self.num_unchecked or self.num_unsure)

    @property
    def num_findings(self) -> int:
        """All findings, kept or not."""
        return sum(getattr(self, f"num_{kind.value}") for kind in FindingKind)

    def counts(self) -> dict[str, int]:
        """Every number of the report, by name."""
        return {name: getattr(self, name) for name in type(self).__dataclass_fields__ if name.startswith("num_")} | {
            "listed_bytes": self.listed_bytes,
            "checked_bytes": self.checked_bytes,
        }


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`share` limits what is read of shards; listings and the index are compared in full whatever it is."""

    level: Level = Level.FULL
    share: Share | None = None
    namespace: Fingerprint | None = None
    threads: int = 2


class Advance(Protocol):
    """Told how far a check is: so many more shards and bytes."""

    def __call__(self, num_shards: int, num_bytes: int) -> None: ...


def _quiet(num_shards: int, num_bytes: int) -> None: ...


def verify(store: Store, options: VerifyOptions = VerifyOptions(), advance: Advance = _quiet) -> VerifyReport:
    """Check a store and return what was found. Raises `StoreTooNew`, and `BackendError` where not even the root can be
    listed."""
    verification = Verification(store, options)
    for _ in verification.findings(advance):
        pass
    return verification.report


class Verification:
    """A check that tells its findings one by one; `report` has the counts, right when the last finding was taken.

    Making one reads all indexes, so that `expected_shards` and `expected_bytes` are known before anything is checked.
    """

    def __init__(self, store: Store, options: VerifyOptions = VerifyOptions()) -> None:
        store.check(Operation.VERIFY)
        self._store = store
        self._backend = store.backend
        share = options.share and options.share.on(store.backend.now_ms() // DAY_MS)
        self._options = options
        self._share = share
        self.report = VerifyReport(options.level, share=None if share is None else str(share))
        self._namespaces: list[tuple[FoundIdentity, Index]] = []
        self._unreadable: list[Finding] = []
        for fingerprint in chosen_namespaces(store, options.namespace):
            self._open(fingerprint)
        self.report.num_namespaces = len(self._namespaces)

    @property
    def expected_shards(self) -> int:
        """Shards that the indexes list."""
        return sum(len(index.state) for _, index in self._namespaces)

    @property
    def expected_bytes(self) -> int:
        """Their bytes."""
        return sum(int(index.state.adds["size_bytes"].sum()) for _, index in self._namespaces)

    def _open(self, fingerprint: Fingerprint) -> None:
        try:
            found = find_identity(self._store, fingerprint)
            self._namespaces.append((found, Index(self._backend, fingerprint)))
        except BackendError as problem:
            path = identity_path(fingerprint)
            self._unreadable.append(Finding(FindingKind.UNCHECKED, path, str(problem), fingerprint))

    def findings(self, advance: Advance = _quiet) -> Iterator[Finding]:
        """Every finding as it is made. Take them all: what a namespace lacks is known at its end."""
        report = self.report
        for finding in self._all(advance):
            name = f"num_{finding.kind.value}"
            setattr(report, name, getattr(report, name) + 1)
            if len(report.findings) < _KEPT_FINDINGS:
                report.findings.append(finding)
            yield finding

    def _all(self, advance: Advance) -> Iterator[Finding]:
        yield from self._unreadable
        if self._options.namespace is None:
            yield from self._root()
        for found, index in self._namespaces:
            try:
                yield from self._namespace(found, index, advance)
            except BackendError as problem:
                reason = f"could not go on: {problem}"
                yield Finding(FindingKind.UNCHECKED, f"ns/{found.fingerprint}", reason, found.fingerprint)

    def _root(self) -> Iterator[Finding]:
        kinds = {
            Place.FOREIGN: FindingKind.FOREIGN,
            Place.STALE_STAGING: FindingKind.STALE,
            Place.DAMAGED: FindingKind.DAMAGED,
            Place.NEWER: FindingKind.NEWER,
        }
        try:
            for located in outside_namespaces(self._backend):
                if located.place is Place.QUARANTINED:
                    self.report.num_quarantined += 1
                elif located.place in kinds:
                    yield Finding(kinds[located.place], located.path, located.reason, None, located.size_bytes)
        except BackendError as problem:
            yield Finding(FindingKind.UNCHECKED, "/", str(problem))

    def _namespace(self, found: FoundIdentity, index: Index, advance: Advance) -> Iterator[Finding]:
        fingerprint, report = found.fingerprint, self.report
        report.num_indexed += len(index.state)
        report.num_segments += index.manifest.live_segments
        if found.is_newer:
            yield Finding(FindingKind.NEWER, f"ns/{fingerprint}", found.problem, fingerprint)
            return
        if found.identity is None:
            reason = f"{found.problem}; {IDENTITY_ADVICE}"
            yield Finding(FindingKind.DAMAGED, identity_path(fingerprint), reason, fingerprint)
        for located in inside_namespace(self._backend, fingerprint):
            yield Finding(FindingKind.FOREIGN, located.path, located.reason, fingerprint, located.size_bytes)
        good = np.ones(len(index.state), np.bool_)
        survey = Survey(
            self._backend,
            index,
            found.identity,
            self._options.level,
            share=self._share,
            threads=self._options.threads,
        )
        told = 0
        for one in survey.shards():
            report.num_checked += 1
            report.checked_bytes += one.checked.bytes_read
            finding = self._judged(one, index)
            if finding is not None:
                if one.row != ABSENT_ROW and finding.kind in (FindingKind.DAMAGED, FindingKind.MISSING):
                    good[one.row] = False
                yield finding
            advance(1 + survey.num_agreeing - told, one.info.size_bytes)
            told = survey.num_agreeing
        advance(survey.num_agreeing - told, 0)
        report.num_listed += survey.num_listed
        report.listed_bytes += survey.bytes_listed
        report.num_good += survey.num_agreeing
        yield from (
            Finding(FindingKind.FOREIGN, path, "not the name of a shard", fingerprint) for path in survey.foreign
        )
        yield from self._unlisted(survey, index, found, good)
        yield from self._segments(index)
        yield from self._chunks(index, found, good)

    def _judged(self, one: Surveyed, index: Index) -> Finding | None:
        """What to say about a shard that was read; None where all is well."""
        kind, reason = self._judgement(one, index)
        if kind is None:
            return None
        return Finding(kind, one.name.path, reason, one.name.fingerprint, one.info.size_bytes)

    def _judgement(self, one: Surveyed, index: Index) -> tuple[FindingKind | None, str]:
        checked, report = one.checked, self.report
        match checked.health:
            case Health.UNKNOWN:
                return FindingKind.UNCHECKED, checked.reason
            case Health.NEWER:
                return FindingKind.NEWER, checked.reason
            case Health.DAMAGED:
                return FindingKind.DAMAGED, checked.reason
            case Health.FOREIGN:
                if one.entry is None:
                    return FindingKind.FOREIGN, f"not a shard in spite of its name: {checked.reason}"
                return FindingKind.DAMAGED, f"another file stands in its place: {checked.reason}"
            case Health.GONE:
                if one.entry is None or one.row == ABSENT_ROW:
                    return None, ""
                index.refresh()
                return (None, "") if index.is_removed(one.entry.nonce) else (FindingKind.MISSING, "vanished meanwhile")
        assert checked.header is not None
        nonce = checked.header.meta.nonce
        if one.entry is None or (one.is_other_write and not index.lists(nonce)):
            if index.is_removed(nonce):
                report.num_awaiting_sweep += 1
                return None, ""
            report.num_good += 1
            reason = "sound, but not in the index" if one.entry is None else "sound, but the index lists another write"
            return FindingKind.UNINDEXED, reason
        if not one.is_other_write and (reason := contradicts_index(checked.header, one.entry, one.info.crc32c)):
            return FindingKind.DAMAGED, reason
        report.num_good += 1
        return None, ""

    def _unlisted(
        self, survey: Survey, index: Index, found: FoundIdentity, good: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> Iterator[Finding]:
        unlisted = survey.unlisted()
        for row in unlisted.missing:
            good[row] = False
            entry = index.state.entry(row)
            path = shown_path(found.fingerprint, entry)
            reason = "in the index, not in the store"
            yield Finding(FindingKind.MISSING, path, reason, found.fingerprint, entry.size_bytes)
        for row, name in unlisted.obstructed:
            good[row] = False
            yield Finding(FindingKind.DAMAGED, name.path, "a directory stands in its place", found.fingerprint)
        if unlisted.left_out:
            count = len(unlisted.left_out)
            reason = f"the listing left out {count} shards that are there, such as {unlisted.left_out[0][1].path}"
            yield Finding(FindingKind.UNSURE, f"ns/{found.fingerprint}/c", reason, found.fingerprint)
        for row, name in unlisted.left_out:
            if self._options.level is Level.QUICK or (self._share is not None and not self._share.holds(name.key)):
                continue
            checked = check_shard(self._backend, name, found.identity, with_data=self._options.level is Level.FULL)
            self.report.num_checked += 1
            self.report.checked_bytes += checked.bytes_read
            if checked.health is Health.SOUND:
                self.report.num_good += 1
            elif checked.health is Health.UNKNOWN:
                yield Finding(FindingKind.UNCHECKED, name.path, checked.reason, found.fingerprint)
            elif checked.health is not Health.NEWER:
                good[row] = False
                yield Finding(FindingKind.DAMAGED, name.path, checked.reason, found.fingerprint)

    def _segments(self, index: Index) -> Iterator[Finding]:
        """What of the index could not be read; by now those flushed meanwhile were read, too."""
        for problem in index.problems:
            kind = FindingKind.NEWER if problem.is_newer else FindingKind.DAMAGED
            reason = problem.reason if problem.is_newer else f"{problem.reason}; 'lmcache repair' makes the index whole"
            yield Finding(kind, problem.path or segment_directory(index.fingerprint), reason, index.fingerprint)

    def _chunks(
        self, index: Index, found: FoundIdentity, good: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> Iterator[Finding]:
        if found.identity is None:
            return
        whole = whole_part(found.identity)
        table = chunk_table(index.state, whole, good)
        self.report.num_chunks += len(table)
        self._count_tails(table, found.identity.chunk_tokens)
        for chunk in np.flatnonzero(~table.is_whole & (table.num_good > 0)).tolist():
            present = [index.state.entry(row).part for row in table.rows(chunk) if good[row]]
            missing = missing_parts(present, index.state.parts, whole)
            reason = f"incomplete {len(missing)}/{len(missing) + len(set(present))}: no {', '.join(map(str, missing))}"
            path = shown_chunk(found.fingerprint, table.key_of(chunk))
            yield Finding(FindingKind.INCOMPLETE, path, reason, found.fingerprint)

    def _count_tails(self, table: ChunkTable, chunk_tokens: int) -> None:
        is_tail = table.num_tokens < chunk_tokens
        self.report.num_tails += int(is_tail.sum())
        parents = table.parents
        self.report.num_tails_beside_full += int(np.isin(parents[is_tail], parents[~is_tail]).sum())
