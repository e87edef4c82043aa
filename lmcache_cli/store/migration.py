"""What a migration is to do, and what it did: options, plan, outcomes, result. `migrate.py` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lmcache_format.encodings import Encoding
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import Part, rank_part
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import is_lossless_label
from lmcache_format.superblock import VERSION, Operation

from .chunk_table import Bools, chunk_table
from .clocks import looked_at_ms
from .errors import Refused
from .formats import TargetFormat
from .index import Index
from .objects import chosen_namespaces, find_identity
from .overlap import refuse_overlap
from .recoding import encoding_info
from .selection import ALL, ListedShard, Selection
from .state import Entry, State
from .store import Store
from .victims import Candidates

_KEPT_NOTICES = 10_000


@dataclass(frozen=True, slots=True)
class MigrateOptions:
    """`encoding` None and `ranks` None: byte for byte. `ranks`: cut the parts anew for so many tensor-parallel ranks.

    `concurrency` shards are in memory at once. Lossy shards are copied as they are, whatever is asked for. `to_format`:
    every shard is written in that format, which must be the target's.
    """

    selection: Selection = ALL
    encoding: Encoding | None = None
    allow_lossy: bool = False
    delete_source: bool = False
    ranks: int | None = None
    concurrency: int = 4
    bytes_per_s: int | None = None
    max_duration_s: float | None = None
    to_format: TargetFormat | None = None


EVERYTHING = MigrateOptions()


@dataclass(slots=True)
class NamespacePlan:
    """What is to be done in one namespace. `rows` of the source's index are chosen; those `present` are listed by the
    target's index; those `kept` stay at the source though they are copied, because of a pin."""

    fingerprint: Fingerprint
    identity: Identity
    source: Index
    target: Index
    rows: Bools
    present: Bools
    kept: Bools
    parts: tuple[Part, ...] | None = None

    @property
    def num_shards(self) -> int:
        """Shards to copy."""
        return int((self.rows & ~self.present).sum())

    @property
    def num_present(self) -> int:
        """Shards that are there, as far as the target's index tells."""
        return int((self.rows & self.present).sum())

    @property
    def size_bytes(self) -> int:
        """Bytes to copy."""
        return int(self.source.state.adds["size_bytes"][self.rows & ~self.present].sum())


@dataclass(slots=True)
class MigratePlan:
    """What a run would do. `unreadable` namespaces are left alone."""

    options: MigrateOptions
    namespaces: list[NamespacePlan] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        """Shards to copy, of all namespaces."""
        return sum(plan.num_shards for plan in self.namespaces)

    @property
    def num_present(self) -> int:
        """Shards the target has already."""
        return sum(plan.num_present for plan in self.namespaces)

    @property
    def size_bytes(self) -> int:
        """Bytes to copy, of all namespaces."""
        return sum(plan.size_bytes for plan in self.namespaces)


class Fate(StrEnum):
    """What became of one shard. `conflict`: another sound write of it stands at the target, and stays: the same KV."""

    COPIED = "copied"
    PRESENT = "present"
    CONFLICT = "conflict"
    GONE = "gone"
    DAMAGED = "damaged"
    NEWER = "newer"
    FAILED = "failed"

    @property
    def is_problem(self) -> bool:
        """True where a shard was not copied although it is there."""
        return self in (Fate.DAMAGED, Fate.NEWER, Fate.FAILED)

    @property
    def is_at_target(self) -> bool:
        """True where the target has the chunk's part now."""
        return self in (Fate.COPIED, Fate.PRESENT, Fate.CONFLICT)


@dataclass(frozen=True, slots=True)
class Removable:
    """One object of the source whose KV was read back from the target, where it stands under those nonces."""

    shard: ListedShard
    entry: Entry
    version: str
    copies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did: entries to list at the target, objects that may go from the source."""

    fate: Fate
    path: str
    reason: str = ""
    size_bytes: int = 0
    added: tuple[Entry, ...] = ()
    removable: tuple[Removable, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth telling about one path; a problem where work was left undone."""

    kind: str
    path: str
    reason: str
    is_problem: bool


@dataclass(slots=True)
class MigrateResult:
    """What was done. `num_changed` objects were rewritten at the source since they were read, and stay."""

    num_copied: int = 0
    copied_bytes: int = 0
    num_present: int = 0
    num_conflict: int = 0
    num_deleted: int = 0
    deleted_bytes: int = 0
    num_kept: int = 0
    num_changed: int = 0
    num_damaged: int = 0
    num_newer: int = 0
    num_failed: int = 0
    num_gone: int = 0
    num_quarantined: int = 0
    num_left: int = 0
    notices: list[Notice] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True where nothing of the plan was left undone."""
        return not (self.num_damaged or self.num_newer or self.num_failed or self.num_left or self.num_changed)

    def count(self, outcome: Outcome) -> None:
        """Add what became of one job."""
        name = f"num_{outcome.fate}"
        setattr(self, name, getattr(self, name) + 1)
        self.copied_bytes += outcome.size_bytes if outcome.fate is Fate.COPIED else 0
        self.num_quarantined += len(outcome.quarantined)
        for reason in outcome.quarantined:
            self.tell(Notice("replaced", outcome.path, f"damaged at the target, now in quarantine: {reason}", False))
        if outcome.fate.is_problem or outcome.fate is Fate.CONFLICT:
            self.tell(Notice(outcome.fate, outcome.path, outcome.reason, outcome.fate.is_problem))

    def tell(self, notice: Notice) -> None:
        """Keep a notice, as long as there are not too many."""
        if len(self.notices) < _KEPT_NOTICES:
            self.notices.append(notice)


def plan_migrate(source: Store, target: Store, options: MigrateOptions = EVERYTHING) -> MigratePlan:
    """Choose the shards, and find those that the target's index lacks. Reads indexes alone.

    Raises `Refused` for stores that overlap, for a lossy encoding without leave, for a format that is not the target's,
    and for heads that do not divide; `StoreTooNew`, `BackendError`.
    """
    refuse_overlap(source, target)
    target.check(Operation.WRITE)
    if options.delete_source:
        source.check(Operation.PRUNE)
    if options.encoding is not None and not options.encoding.lossless and not options.allow_lossy:
        raise Refused(
            f"{options.encoding.name} is lossy: only readers that allow lossy encodings would see what it makes",
            next_step="say that this is meant with --lossy, or choose a lossless codec",
        )
    _check_format(target, options)
    plan = MigratePlan(options)
    now_ms = source.backend.now_ms() if options.delete_source else looked_at_ms(source.backend)
    for fingerprint in chosen_namespaces(source, None):
        if not options.selection.has_namespace(fingerprint):
            continue
        found = find_identity(source, fingerprint)
        if found.identity is None:
            plan.unreadable.append((f"ns/{fingerprint}", found.problem))
        elif options.selection.has_model(found.identity):
            plan.namespaces.append(_plan_namespace(source, target, found.identity, options, now_ms))
    return plan


def _check_format(target: Store, options: MigrateOptions) -> None:
    wanted, found = options.to_format, target.superblock.version
    if wanted is None:
        return
    if wanted.version != found:
        raise Refused(
            f"{target.url} is a store of format {found}, and --to-format asks for {wanted.version}",
            next_step=f"migrate to a store of format {wanted.version}",
        )
    if wanted.version != VERSION and (options.encoding is not None or options.ranks is not None):
        raise Refused(
            f"shards are encoded and cut anew in format {VERSION} alone",
            next_step="migrate to that format first, and with --codec or --reshard in a second run",
        )


def _plan_namespace(
    source: Store, target: Store, identity: Identity, options: MigrateOptions, now_ms: int
) -> NamespacePlan:
    here, there = Index(source.backend, identity.fingerprint), Index(target.backend, identity.fingerprint)
    parts = None if options.ranks is None else parts_for_ranks(identity, options.ranks)
    kept = np.zeros(len(here.state), np.bool_)
    if options.delete_source and len(here.state):
        table = chunk_table(here.state, None)
        kept = np.repeat(Candidates.of(table, now_ms).is_kept, table.stops - table.starts)
    present = np.zeros(len(here.state), np.bool_) if parts else _present(here.state, there.state, options.encoding)
    rows = options.selection.rows(here.state, now_ms)
    return NamespacePlan(identity.fingerprint, identity, here, there, rows, present, kept, parts)


def parts_for_ranks(identity: Identity, ranks: int) -> tuple[Part, ...]:
    """What tensor-parallel ranks hold, each part once. Raises `Refused` where the heads do not divide."""
    try:
        return tuple(dict.fromkeys(rank_part(identity, rank, ranks) for rank in range(ranks)))
    except GeometryError as problem:
        raise Refused(f"{identity.model} cannot be cut for tp={ranks}: {problem}") from None


def _present(here: State, there: State, encoding: Encoding | None) -> Bools:
    """Rows of the source whose shard, under its name at the target, is listed there."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    kind = [("key", "<u8"), ("rest", "<u8"), ("part", "<i8"), ("encoding", "<i8")]

    def names(state: State, labels: Sequence[str]) -> npt.NDArray[np.void]:
        table = np.empty(len(state), kind)
        if len(state):
            table["key"], table["rest"] = state.keys, state.adds["key_rest"]
            table["part"] = np.array([number(str(part)) for part in state.parts])[state.adds["part"]]
            table["encoding"] = np.array([number(label) for label in labels])[state.adds["encoding"]]
        return table

    mine = names(here, [target_label(label, encoding) for label in here.encodings])
    result: Bools = np.isin(mine, names(there, there.encodings))
    return result


def target_label(label: str, encoding: Encoding | None) -> str:
    """How a shard is called at the target: lossy ones are never encoded again."""
    return label if encoding is None or not is_lossless_label(label) else encoding_info(encoding).label
