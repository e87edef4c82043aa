"""What a compression is to do, and what it did: options, plan, outcomes, result. `compress.py` carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

import numpy as np

from lmcache_cli.backends import Backend, Unavailable
from lmcache_format.encodings import Encoding
from lmcache_format.errors import FormatError
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import ShardName, is_lossless_label
from lmcache_format.superblock import Operation

from .checking import Health, check_shard
from .chunk_table import Bools
from .clocks import looked_at_ms
from .codec_choice import choose_encoding
from .errors import Refused
from .index import Index
from .objects import chosen_namespaces, find_identity
from .places import find_objects
from .reading import ReadFault
from .recoding import (
    Written,
    encoding_info,
    read_decoded,
    recoded_meta,
)
from .selection import ALL, Selection
from .state import Entry, State
from .store import Store
from .writing import build_shard

SAMPLED_SHARDS = 4


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """`encoding` None: the lossless one that suits, see `choose_encoding`. `remove_source` None: yes where lossless.

    A lossy encoding needs `allow_lossy`, since only readers that allow it will see what is made.
    """

    encoding: Encoding | None = None
    selection: Selection = ALL
    allow_lossy: bool = False
    remove_source: bool | None = None
    link_bytes_per_s: float | None = None
    threads: int = 1
    max_duration_s: float | None = None


@dataclass(slots=True)
class NamespacePlan:
    """What is to be done in one namespace. `rows` are those of its index; `expected_bytes` is from a sample."""

    fingerprint: Fingerprint
    identity: Identity
    index: Index
    encoding: Encoding
    reason: str
    rows: Bools
    num_present: int
    num_lossy: int
    expected_bytes: int | None = None

    @property
    def label(self) -> str:
        """How the new shards are called."""
        return encoding_info(self.encoding).label

    @property
    def num_shards(self) -> int:
        """Shards to re-encode, or to remove because that was done."""
        return int(self.rows.sum())

    @property
    def size_bytes(self) -> int:
        """Their bytes."""
        return int(self.index.state.adds["size_bytes"][self.rows].sum())

    @property
    def ratio(self) -> float | None:
        """How many times smaller they will be, as far as a sample tells."""
        return self.size_bytes / self.expected_bytes if self.expected_bytes else None


@dataclass(slots=True)
class CompressPlan:
    """What a run would do. `unreadable` namespaces are left alone."""

    options: CompressOptions
    namespaces: list[NamespacePlan] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        """Shards of all namespaces."""
        return sum(plan.num_shards for plan in self.namespaces)

    @property
    def size_bytes(self) -> int:
        """Bytes of all namespaces."""
        return sum(plan.size_bytes for plan in self.namespaces)

    def removes_source(self, encoding: Encoding) -> bool:
        """Whether the old shard goes when the new one is verified."""
        chosen = self.options.remove_source
        return encoding.lossless if chosen is None else chosen


class Fate(StrEnum):
    """What became of one shard. Of those from `damaged` on the old shard stays, and the run is not whole."""

    ENCODED = "encoded"
    PRESENT = "present"
    NO_GAIN = "no gain"
    GONE = "gone"
    DAMAGED = "damaged"
    NEWER = "newer"
    FAILED = "failed"

    @property
    def is_problem(self) -> bool:
        """True where work was left undone that somebody should look at."""
        return self in (Fate.DAMAGED, Fate.NEWER, Fate.FAILED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One shard: the entry of its new encoding, and of the old one with the version that was read."""

    fate: Fate
    path: str
    size_bytes: int = 0
    reason: str = ""
    written: Written | None = None
    source: Entry | None = None
    version: str = ""


@dataclass(slots=True)
class CompressResult:
    """What was done. `encoded_bytes` are of the shards that were made, `source_bytes` of those they were made from."""

    num_encoded: int = 0
    num_present: int = 0
    num_no_gain: int = 0
    num_removed: int = 0
    num_damaged: int = 0
    num_newer: int = 0
    num_failed: int = 0
    num_gone: int = 0
    num_quarantined: int = 0
    num_left: int = 0
    source_bytes: int = 0
    encoded_bytes: int = 0
    removed_bytes: int = 0
    problems: list[Outcome] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """True where nothing of the plan was left undone."""
        return not (self.num_damaged or self.num_newer or self.num_failed or self.num_left)

    def count(self, outcome: Outcome) -> None:
        """Add what became of one shard."""
        name = f"num_{outcome.fate.replace(' ', '_')}"
        setattr(self, name, getattr(self, name) + 1)
        if outcome.fate.is_problem:
            self.problems.append(outcome)
        if outcome.written is not None:
            self.num_quarantined += bool(outcome.written.quarantined)
        if outcome.fate is Fate.ENCODED and outcome.written is not None:
            self.source_bytes += outcome.size_bytes
            self.encoded_bytes += outcome.written.entry.size_bytes


def plan_compress(store: Store, options: CompressOptions = CompressOptions()) -> CompressPlan:
    """Choose the shards and the encoding. Reads indexes, and a few shards of each namespace to estimate the ratio.

    Raises `Refused` for a lossy encoding without leave, `StoreTooNew`, `BackendError`.
    """
    store.check(Operation.WRITE)
    if options.encoding is not None and not options.encoding.lossless and not options.allow_lossy:
        raise Refused(
            f"{options.encoding.name} is lossy: only readers that allow lossy encodings would see what it makes",
            next_step="say that this is meant with --lossy, or choose a lossless codec",
        )
    plan = CompressPlan(options)
    now_ms = looked_at_ms(store.backend)
    for fingerprint in chosen_namespaces(store, None):
        if not options.selection.has_namespace(fingerprint):
            continue
        found = find_identity(store, fingerprint)
        if found.identity is None:
            plan.unreadable.append((f"ns/{fingerprint}", found.problem))
        elif options.selection.has_model(found.identity):
            plan.namespaces.append(_plan_namespace(store, found.identity, options, plan, now_ms))
    return plan


def _plan_namespace(
    store: Store, identity: Identity, options: CompressOptions, plan: CompressPlan, now_ms: int
) -> NamespacePlan:
    if options.encoding is None:
        choice = choose_encoding(
            identity.dtype, link_bytes_per_s=options.link_bytes_per_s, threads=max(1, options.threads)
        )
        encoding, reason = choice.encoding, choice.reason
    else:
        encoding, reason = options.encoding, "asked for"
    index = Index(store.backend, identity.fingerprint)
    state = index.state
    label = encoding_info(encoding).label
    selected = options.selection.rows(state, now_ms)
    is_target = _rows_with(state, lambda name: name == label)
    is_lossy = _rows_with(state, lambda name: not is_lossless_label(name))
    rows = selected & ~is_target & ~is_lossy
    done = rows & _beside(state, is_target)
    if not plan.removes_source(encoding):
        rows &= ~done
    made = NamespacePlan(
        identity.fingerprint,
        identity,
        index,
        encoding,
        reason,
        rows,
        num_present=int((selected & is_target).sum()),
        num_lossy=int((selected & is_lossy & ~is_target).sum()),
    )
    made.expected_bytes = _estimate(store.backend, made)
    return made


def _rows_with(state: State, is_wanted: Callable[[str], bool]) -> Bools:
    wanted = np.array([is_wanted(name) for name in state.encodings], np.bool_)
    rows: Bools = wanted[state.adds["encoding"]] if len(state) else np.zeros(0, np.bool_)
    return rows


def _beside(state: State, others: Bools) -> Bools:
    """Rows that have, of the same chunk and part, one of `others` beside them; rows of a chunk are neighbours."""
    kinds = np.empty(len(state), [("key", "<u8"), ("rest", "<u8"), ("part", "<i8")])
    kinds["key"], kinds["rest"], kinds["part"] = state.keys, state.adds["key_rest"], state.adds["part"]
    result: Bools = np.isin(kinds, kinds[others])
    return result


def _estimate(backend: Backend, plan: NamespacePlan) -> int | None:
    """What the chosen shards will take, from a few of them spread over the namespace; None where none can be read."""
    rows = np.flatnonzero(plan.rows)
    if not len(rows):
        return 0
    step = -(-len(rows) // SAMPLED_SHARDS)
    entries = [plan.index.state.entry(int(row)) for row in rows[::step]]
    places = find_objects(backend, plan.fingerprint, entries, started_ms=looked_at_ms(backend))
    before = after = 0
    for place in islice(places.values(), SAMPLED_SHARDS):
        checked = check_shard(backend, ShardName.parse(place.path), plan.identity, with_data=False)
        if checked.health is Health.UNKNOWN:
            raise Unavailable(f"{place.path}: {checked.reason}", name=place.path)
        if checked.health is not Health.SOUND or checked.header is None:
            continue
        try:
            chunk = read_decoded(backend, checked.header, plan.identity)
            parts = build_shard(recoded_meta(checked.header, plan.encoding, ""), chunk)
        except (ReadFault, FormatError):
            continue
        size = sum(len(part) for part in parts)
        before += place.size_bytes
        after += size if plan.encoding.name == "raw" else min(size, place.size_bytes)
    return round(plan.size_bytes * after / before) if before else None
