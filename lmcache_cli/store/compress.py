"""Re-encode shards in place: the new encoding beside the old, verified by decoding, then the old one is marked.

Only when the new shard was read back, and the index that lists it is published, is the old one taken out of the index;
a later sweep deletes it. A run that ends anywhere leaves both or the new one, and the next run goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

from lmcache_cli.backends import Backend, BackendError, Unavailable
from lmcache_format.errors import FormatError
from lmcache_format.names import ShardName, is_lossless_label
from lmcache_format.segment import RemoveReason
from lmcache_format.shard import ShardHeader

from .checking import Health, check_shard
from .compression import CompressOptions, CompressPlan, CompressResult, Fate, NamespacePlan, Outcome, plan_compress
from .errors import StoreError
from .ledger import Ledger
from .pace import Deadline, in_parallel
from .reading import ReadFault
from .recoding import (
    NoGain,
    entry_of_header,
    read_decoded,
    recoded_meta,
    write_encoded,
)
from .selection import ListedShard, listed_shards
from .store import Store
from .verify import Advance

__all__ = [
    "CompressOptions",
    "CompressPlan",
    "CompressResult",
    "Fate",
    "NamespacePlan",
    "Outcome",
    "apply_compress",
    "plan_compress",
]


def _ignore(num_shards: int, num_bytes: int) -> None: ...


def apply_compress(
    store: Store, plan: CompressPlan, result: CompressResult | None = None, advance: Advance = _ignore
) -> CompressResult:
    """Carry a plan out. `result` is counted up as it goes, so that it tells what was done when an error ends the run.

    Shards that the index does not list are taken as well, unless ages were asked for. Raises `NoSpace`, `Unavailable`:
    what was verified by then is kept, and nothing is removed any more.
    """
    done = CompressResult() if result is None else result
    deadline = Deadline(plan.options.max_duration_s)
    for namespace in plan.namespaces:
        _Run(store.backend, plan, namespace, done, deadline, advance).run()
    return done


class _Run:
    """One namespace."""

    def __init__(
        self,
        backend: Backend,
        plan: CompressPlan,
        namespace: NamespacePlan,
        result: CompressResult,
        deadline: Deadline,
        advance: Advance,
    ) -> None:
        self._backend = backend
        self._options = plan.options
        self._plan = namespace
        self._removes_source = plan.removes_source(namespace.encoding)
        self._result = result
        self._deadline = deadline
        self._advance = advance
        self._ledger = Ledger(backend, namespace.fingerprint, namespace.index)
        self._verified: list[tuple[ListedShard, Outcome]] = []
        self._seen = 0

    def run(self) -> None:
        threads = self._options.threads
        try:
            with closing(in_parallel(self._work, self._jobs(), threads)) as outcomes:
                for shard, outcome in outcomes:
                    self._take(shard, outcome)
            self._settle()
            self._ledger.flush()
            self._tell_missing()
        except BaseException:
            with suppress(BackendError, StoreError):
                self._ledger.flush()
            raise
        finally:
            self._result.num_left += max(0, self._plan.num_shards - self._seen)

    def _jobs(self) -> Iterator[ListedShard]:
        for shard in listed_shards(self._backend, self._plan.fingerprint, self._plan.index.state):
            if not self._is_wanted(shard):
                continue
            if self._deadline.is_over:
                return
            yield shard

    def _is_wanted(self, shard: ListedShard) -> bool:
        if shard.is_indexed:
            return bool(self._plan.rows[shard.row])
        label, selection = shard.name.encoding, self._options.selection
        is_source = label != self._plan.label and is_lossless_label(label)
        return is_source and selection.has_encoding(label) and not selection.has_age

    def _work(self, shard: ListedShard) -> tuple[ListedShard, Outcome]:
        return shard, self._recode(shard.name)

    def _recode(self, name: ShardName) -> Outcome:
        checked = check_shard(self._backend, name, self._plan.identity, with_data=False)
        match checked.health:
            case Health.UNKNOWN:
                raise Unavailable(f"{name.path}: {checked.reason}", name=name.path)
            case Health.GONE:
                return Outcome(Fate.GONE, name.path)
            case Health.NEWER:
                return Outcome(Fate.NEWER, name.path, reason=checked.reason)
            case Health.DAMAGED | Health.FOREIGN:
                return Outcome(Fate.DAMAGED, name.path, reason=checked.reason)
        assert checked.header is not None
        if self._ledger.is_removed(checked.header.meta.nonce):
            return Outcome(Fate.GONE, name.path)
        try:
            return self._write(name, checked.header, checked.version)
        except ReadFault as fault:
            return Outcome(Fate.DAMAGED, name.path, reason=fault.reason)
        except NoGain as problem:
            return Outcome(Fate.NO_GAIN, name.path, reason=str(problem))
        except (StoreError, FormatError) as problem:
            return Outcome(Fate.FAILED, name.path, reason=str(problem))

    def _write(self, name: ShardName, header: ShardHeader, version: str) -> Outcome:
        encoding = self._plan.encoding
        chunk = read_decoded(self._backend, header, self._plan.identity)
        written = write_encoded(
            self._backend,
            recoded_meta(header, encoding, self._ledger.writer),
            chunk,
            encoding,
            is_removed=self._ledger.is_removed,
            smaller_than=None if encoding.name == "raw" else header.file_bytes,
        )
        fate = Fate.ENCODED if written.is_ours else Fate.PRESENT
        source = entry_of_header(header)
        return Outcome(fate, name.path, header.file_bytes, written.quarantined, written, source, version)

    def _take(self, shard: ListedShard, outcome: Outcome) -> None:
        """Count one outcome. Runs in one thread."""
        self._seen += shard.is_indexed
        if outcome.fate is Fate.GONE and not shard.is_indexed:
            return  # waits for a sweep
        self._result.count(outcome)
        self._advance(1, outcome.size_bytes)
        if outcome.written is not None:
            self._ledger.add(outcome.written.entry)
            self._verified.append((shard, outcome))
        if self._ledger.is_due:
            self._settle()

    def _tell_missing(self) -> None:
        missing = self._plan.num_shards - self._seen
        if missing > 0 and not self._deadline.is_over:
            reason = f"{missing} shards of the index are not in the listing; run 'lmcache verify'"
            self._result.problems.append(Outcome(Fate.FAILED, f"ns/{self._plan.fingerprint}/c", reason=reason))

    def _settle(self) -> None:
        """Publish the entries of new shards; only then may the old ones be marked."""
        self._ledger.flush()
        verified, self._verified = self._verified, []
        if not verified or not self._removes_source:
            return
        self._ledger.refresh()
        for shard, outcome in verified:
            assert outcome.source is not None
            assert outcome.written is not None
            if self._ledger.is_removed(outcome.written.entry.nonce):
                continue  # somebody pruned the new one meanwhile: the old one is not ours to take, too
            if shard.is_indexed and not self._ledger.lists(outcome.source.nonce, shard.row):
                listed = self._ledger.state.entry(shard.row)
                self._ledger.remove(listed, RemoveReason.REPLACED, is_swept=True)  # overwritten long ago
            self._ledger.remove(outcome.source, RemoveReason.REPLACED, outcome.version)
            self._result.num_removed += 1
            self._result.removed_bytes += outcome.source.size_bytes
