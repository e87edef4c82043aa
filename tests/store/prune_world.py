"""A store in memory, two writers, two pruners and a clock, all of which can be copied and put back: for searching
through what they can do to each other. The code is the real one; only clocks, nonces and the back-end's objects are
ours.

Every deletion is judged as it happens, every state by `World.check` and `World.settle`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lmcache_cli.backends import Durability
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.store import Namespace, PutStatus, Store, WriterOptions
from lmcache_cli.store.index import Index
from lmcache_cli.store.prune import PrunePlan, PruneRules, mark, plan_prune
from lmcache_cli.store.repair import RepairOptions, apply_repair, plan_repair
from lmcache_cli.store.sweep import SWEPT_REASONS, marked, sweep
from lmcache_format.geometry import whole_part
from lmcache_format.names import ShardName
from lmcache_format.shard import header_bytes, parse_header
from tests.store.pattern import document, hit, put_chunk, refs, tiny_identity

GRACE_MS = 1_000
STEP_MS = 1
START_MS = 1_790_000_000_000
IDENTITY = tiny_identity(layers=1, kv_heads=1, head_dim=1)
TOKENS = document(3 * IDENTITY.chunk_tokens)
CHUNKS = refs(IDENTITY, TOKENS)
FOREIGN = {
    "notes.txt": b"mine",
    "quarantine/damaged.safetensors": b"kept for a look",
    ShardName(IDENTITY.fingerprint, CHUNKS[2].key, whole_part(IDENTITY), "raw").path: b"none of ours",
}
RULES = (PruneRules(everything=True), PruneRules(max_chunks=1))


class Crash(BaseException):
    """A process ends here."""


class JudgedBackend(MemoryBackend):
    """Memory with hooks: `before` is called with the operation and the name, and may do anything, or raise `Crash`."""

    def __init__(self, world: World) -> None:
        super().__init__("model", time_s=lambda: world.now_ms / 1000)
        self.world = world
        self.before: Callable[[str, str], None] | None = None

    def put(self, name: str, parts: Any, *, durability: Durability, if_absent: bool = True) -> Any:
        self._hook("put", name)
        return super().put(name, parts, durability=durability, if_absent=if_absent)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[Any]:
        self._hook("list", prefix)
        return super().list(prefix, recursive=recursive)

    def delete(self, name: str, *, version: str | None) -> bool:
        self._hook("delete", name)
        found = self._objects.get(name)
        if found is not None and found.version == version and name.endswith(".safetensors"):
            self.world.judge_deletion(name, found.content)
        return super().delete(name, version=version)

    def _hook(self, operation: str, name: str) -> None:
        if self.before is not None:
            self.before(operation, name)


@dataclass
class Pruner:
    rules: PruneRules
    plan: PrunePlan | None = None


@dataclass
class World:
    """`acknowledged`: for every chunk the write that its writer was last told is stored."""

    now_ms: int = START_MS
    num_nonces: int = 0
    acknowledged: dict[int, str] = field(default_factory=dict)
    pruners: list[Pruner] = field(default_factory=lambda: [Pruner(rules) for rules in RULES])
    writers: list[Namespace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = JudgedBackend(self)
        self.store = Store.create(self.backend)
        self.writers = [self.open(), self.open()]
        for name, content in FOREIGN.items():
            self.backend.put(name, [content], durability=Durability.NONE)
        self.foreign = {name: self.backend._objects[name] for name in FOREIGN}

    # ---- what can be done ---------------------------------------------------------------------------------------

    def put(self, writer: int, chunk: int, *, is_fresh: bool) -> None:
        if is_fresh:
            self.writers[writer].refresh()
        status = put_chunk(self.writers[writer], CHUNKS[chunk], TOKENS)
        if status in (PutStatus.STORED, PutStatus.REPLACED):
            self.acknowledged[chunk] = f"{self.num_nonces:016x}"
        if status is PutStatus.ADOPTED:
            assert self.on_disk()[chunk] not in self.removed(), "a writer was told that it is stored, and it was marked"

    def flush(self, writer: int) -> None:
        self.writers[writer].flush()

    def crash(self, writer: int) -> None:
        self.writers[writer] = self.open()

    def read(self, writer: int) -> None:
        hit(self.writers[writer], TOKENS)

    def compact(self) -> None:
        self.open().compact()

    def wait(self) -> None:
        self.now_ms += GRACE_MS

    def plan(self, pruner: int) -> None:
        self.pruners[pruner].plan = plan_prune(self.store, self.pruners[pruner].rules, host_ms=self.now_ms)

    def mark(self, pruner: int) -> None:
        plan, self.pruners[pruner].plan = self.pruners[pruner].plan, None
        if plan is None:
            return
        before = self.listed()
        mark(self.store, plan, host_ms=self.now_ms)
        after = self.listed()
        for chunk in after - {0}:
            assert chunk - 1 in after or chunk - 1 not in before, "a chunk was taken from under the next one"

    def sweep(self) -> None:
        sweep(self.store, grace_ms=GRACE_MS, threads=1)

    def during(
        self, action: Callable[[World], None], operation: str, name: str, other: Callable[[World], None]
    ) -> None:
        """`action`, and `other` just before its first call of `operation` on a name with `name` in it."""

        def hook(called: str, where: str) -> None:
            if called == operation and name in where:
                self.backend.before = None
                other(self)

        self.backend.before = hook
        try:
            action(self)
        except Crash:
            pass
        finally:
            self.backend.before = None

    # ---- what must hold -----------------------------------------------------------------------------------------

    def judge_deletion(self, name: str, content: bytes) -> None:
        nonce = _nonce(content)
        removes = Index(self.backend, IDENTITY.fingerprint).state.removes
        found = removes[removes["nonce"] == int(nonce, 16)]
        assert len(found) == 1, f"{name}: write {nonce} was deleted, and nobody had marked it"
        assert int(found["reason"][0]) in SWEPT_REASONS
        assert int(found["marked_ms"][0]) <= self.now_ms - GRACE_MS, f"{name}: deleted within the grace time"

    def check(self) -> None:
        """In every state: foreign files untouched, and acknowledged writes that nobody marked are there."""
        for name, item in self.foreign.items():
            assert self.backend._objects.get(name) == item, f"{name} was touched"
        removes = self.removed()
        on_disk = self.on_disk()
        for chunk, nonce in self.acknowledged.items():
            assert nonce in removes or on_disk.get(chunk) == nonce, f"write {nonce} of chunk {chunk} was lost"

    def settle(self) -> None:
        """Once everybody flushed, and what was marked is swept: the index lists exactly what is on disk."""
        for writer in self.writers:
            writer.flush()
        self.wait()
        self.sweep()
        self.compact()
        self.check()
        apply_repair(self.store, plan_repair(self.store, RepairOptions(accept_missing=True)))
        state = self.index()
        listed = {f"{int(nonce):016x}" for nonce in state.adds["nonce"]}
        assert listed == set(self.on_disk().values())
        assert not marked(state).any(), "marks of what is gone wait for ever"
        sizes = [len(item.content) for name, item in self.shards()]
        assert int(state.adds["size_bytes"].sum()) == sum(sizes)
        reader = self.open()
        assert hit(reader, TOKENS) == sum(CHUNKS[0].num_tokens for _ in _prefix(self.on_disk()))

    # ---- looking ------------------------------------------------------------------------------------------------

    def open(self) -> Namespace:
        options = WriterOptions(flush_after_s=float("inf"), grace_ms=GRACE_MS)
        return self.store.namespace(IDENTITY, create=True, writer=options, reader_threads=1)

    def index(self) -> Any:
        return Index(self.backend, IDENTITY.fingerprint).state

    def removed(self) -> set[str]:
        return {f"{int(nonce):016x}" for nonce in self.index().removes["nonce"]}

    def listed(self) -> set[int]:
        state = self.index()
        return {number for number, ref in enumerate(CHUNKS) if len(state.rows_of(ref.key))}

    def shards(self) -> Iterator[tuple[str, Any]]:
        for name, item in self.backend._objects.items():
            if name.startswith("ns/") and name.endswith(".safetensors") and name not in FOREIGN:
                yield name, item

    def on_disk(self) -> dict[int, str]:
        found = {}
        for name, item in self.shards():
            number = next(n for n, ref in enumerate(CHUNKS) if ref.key.hex() in name)
            found[number] = _nonce(item.content)
        return found

    def signature(self) -> object:
        """What decides what can happen next; writes are numbered by where they appear, segments count by content."""
        state = self.index()
        names: dict[int, int] = {}

        def name(nonce: int) -> int:
            return names.setdefault(nonce, len(names))

        disk = tuple((chunk, name(int(nonce, 16))) for chunk, nonce in sorted(self.on_disk().items()))
        keys = {int.from_bytes(ref.key[:8], "big"): number for number, ref in enumerate(CHUNKS)}
        adds = tuple((keys[int(key)], name(int(add["nonce"]))) for key, add in zip(state.keys, state.adds, strict=True))
        shadowed = tuple(sorted(name(int(add["nonce"])) for add in state.shadowed_adds))
        removes = tuple(
            sorted(
                (name(int(one["nonce"])), int(one["flags"]), int(one["reason"]), self.is_due(one))
                for one in state.removes
            )
        )
        touched = tuple(sorted(keys.get(int(key), -1) for key in state.touches["key"]))
        writers = tuple(self._writer_signature(writer, name) for writer in self.writers)
        plans = tuple(
            None if one.plan is None else tuple(name(int(n)) for each in one.plan.namespaces for n in each.nonces)
            for one in self.pruners
        )
        return disk, adds, shadowed, removes, touched, writers, plans, tuple(sorted(self.acknowledged))

    def is_due(self, remove: Any) -> bool:
        return int(remove["marked_ms"]) <= self.now_ms - GRACE_MS

    @staticmethod
    def _writer_signature(writer: Namespace, name: Callable[[int], int]) -> object:
        pending = writer._pending
        state = writer.state()
        return (
            tuple(name(int(nonce)) for nonce in state.adds["nonce"]),
            tuple(sorted(name(int(nonce)) for nonce in state.removes["nonce"])),
            tuple(name(int(entry.nonce, 16)) for entry in pending.adds),
            tuple(name(int(gone.entry.nonce, 16)) for gone in pending.removes),
            tuple(sorted(name(int(nonce, 16)) for nonce in writer._view._dropped)),
            bool(pending.touches),
        )

    # ---- copies -------------------------------------------------------------------------------------------------

    def save(self) -> Saved:
        return Saved(
            dict(self.backend._objects),
            self.now_ms,
            self.num_nonces,
            dict(self.acknowledged),
            [replace(one) for one in self.pruners],
            [_copied(one) for one in self.writers],
        )

    def restore(self, saved: Saved) -> None:
        self.backend._objects = dict(saved.objects)
        self.now_ms, self.num_nonces = saved.now_ms, saved.num_nonces
        self.acknowledged = dict(saved.acknowledged)
        self.pruners = [replace(one) for one in saved.pruners]
        self.writers = [_copied(one) for one in saved.writers]


@dataclass(frozen=True)
class Saved:
    objects: dict[str, Any]
    now_ms: int
    num_nonces: int
    acknowledged: dict[int, str]
    pruners: list[Pruner]
    writers: list[Namespace]


@contextmanager
def new_world() -> Iterator[World]:
    """A world whose clock every part of the store follows, and whose nonces are numbers."""
    with pytest.MonkeyPatch.context() as patch:
        worlds: list[World] = []
        clock = lambda: worlds[0].now_ms if worlds else START_MS  # noqa: E731

        def nonce() -> str:
            worlds[0].num_nonces += 1
            return f"{worlds[0].num_nonces:016x}"

        patch.setattr("lmcache_cli.store.wall_clock.now_ms", clock)
        patch.setattr("lmcache_cli.store.namespace.new_nonce", nonce)
        made = World()
        worlds.append(made)
        yield made


def _copied(namespace: Namespace) -> Namespace:
    """A namespace that goes on from here on its own; locks and threads are shared."""
    made = _shallow(namespace)
    made._pending = _shallow(namespace._pending)
    made._manifest = _shallow(namespace._manifest)
    made._view = _shallow(namespace._view)
    made._view._present = namespace._view._present.copy()
    for table in (made._view._recent, made._view._recent_tails):
        for key, entries in table.items():
            table[key] = list(entries)
    return made


def _shallow(found: Any) -> Any:
    """A copy whose own lists, sets and dictionaries can change without those of the original."""
    made = copy.copy(found)
    names = vars(found) if hasattr(found, "__dict__") else found.__slots__
    for name in names:
        value = getattr(found, name)
        if isinstance(value, list | set | dict):
            setattr(made, name, copy.copy(value))
    return made


def _prefix(on_disk: dict[int, str]) -> Iterator[int]:
    number = 0
    while number in on_disk:
        yield number
        number += 1


def _nonce(content: bytes) -> str:
    size = header_bytes(content, len(content))
    return parse_header(content[:size], len(content)).meta.nonce
