"""What the victim of a crash was doing: repeatable lists of steps, made from a seed by victim and judge alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lmcache_cli.backends import Durability
from lmcache_cli.store import ChunkRef, Namespace, Store, StoreExists, WriterOptions
from lmcache_format.geometry import Part, whole_part
from lmcache_format.segment import RemoveReason
from tests.store.pattern import document, put_chunk, refs, tiny_identity

IDENTITY = tiny_identity(name="victim")
WHOLE = whole_part(IDENTITY)
HALVES = (Part(0, 1, 0, 2), Part(1, 2, 0, 2))


@dataclass(frozen=True, slots=True)
class Put:
    """Write the chunk with that index of a document, or its part."""

    document: int
    index: int
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Flush:
    """Write the index entries."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Write the whole index as one segment, and delete what earlier ones superseded."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a chunk that the prepared store holds out of the index."""

    document: int
    index: int


@dataclass(frozen=True, slots=True)
class Label:
    """Name a document."""

    document: int


Step = Put | Flush | Compact | Remove | Label


@dataclass(frozen=True, slots=True)
class Workload:
    """`prepared` documents lie in the store before; each was flushed on its own, so there are as many segments.

    `removable` are those of which the victim removes chunks; nothing is promised of them. Where `is_broken`, a bit in
    the header of every prepared shard is flipped, and the index has never heard of them.
    """

    name: str
    seed: int
    durability: Durability
    documents: tuple[tuple[int, ...], ...]
    prepared: tuple[int, ...]
    removable: tuple[int, ...]
    is_broken: bool
    steps: tuple[Step, ...]

    def tokens(self, number: int) -> list[int]:
        return list(self.documents[number])

    def chunks(self, number: int) -> list[ChunkRef]:
        return _chunks(self.documents[number])


@cache
def _chunks(tokens: tuple[int, ...]) -> list[ChunkRef]:
    return refs(IDENTITY, tokens)


def make(kind: str, seed: int, durability: Durability) -> Workload:
    """A workload of one of the `KINDS`."""
    chance = random.Random(f"{kind}/{seed}")
    return KINDS[kind](kind, seed, durability, chance)


def _documents(chance: random.Random, count: int) -> tuple[tuple[int, ...], ...]:
    """Documents of which some begin alike."""
    trunk = document(40, chance.randrange(2**31))
    made = []
    for number in range(count):
        own = document(chance.choice((4, 7, 9, 14)), chance.randrange(2**31))
        made.append(tuple(trunk[: 4 * chance.randrange(3)] + own if number else trunk[:10]))
    return tuple(made)


def _puts(documents: Sequence[Sequence[int]], numbers: Sequence[int], chance: random.Random) -> list[Step]:
    steps: list[Step] = []
    for number in numbers:
        halves = chance.random() < 0.25
        for index in range(len(_chunks(tuple(documents[number])))):
            parts = HALVES if halves else (None,)
            steps += [Put(number, index, part) for part in parts]
    return steps


def _commit(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """Writers in an empty or used store, flushing now and then."""
    documents = _documents(chance, 4)
    prepared = (0,) if seed % 2 else ()
    steps = _puts(documents, (0, 1, 2, 3), chance)
    steps.insert(chance.randrange(1, len(steps)), Flush())
    if chance.random() < 0.5:
        steps.insert(chance.randrange(1, len(steps)), Label(1))
    return Workload(kind, seed, durability, documents, prepared, (), False, (*steps, Flush()))


def _flush(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """An index that is written after every chunk, with removes and labels."""
    first, *others = _documents(chance, 4)
    documents = (first, tuple(document(9, chance.randrange(2**31))), *others)
    steps: list[Step] = []
    for put in _puts(documents, (2, 3, 4), chance):
        steps += [put, Flush()]
    steps.insert(chance.randrange(len(steps)), Remove(1, 0))
    steps.insert(chance.randrange(len(steps)), Label(2))
    return Workload(kind, seed, durability, documents, (0, 1), (1,), False, (*steps, Flush()))


def _single(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """One full chunk and one tail, committed and flushed, beside what is there."""
    documents = (tuple(document(6, seed)), tuple(document(4, seed + 1)))
    return Workload(kind, seed, durability, documents, (1,), (), False, (Put(0, 0), Put(0, 1), Flush()))


def _single_compaction(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """One compaction with everything in it: adds, removes, labels, and segments it deletes."""
    documents = tuple(tuple(document(4 + 2 * (n % 2), n + 100 * seed)) for n in range(8))
    steps = (Label(1), Remove(3, 0), Put(7, 0), Put(7, 1), Flush(), Compact())
    return Workload(kind, seed, durability, documents, tuple(range(7)), (3,), False, steps)


def _compaction(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """More segments than a namespace likes, so that flushing compacts, and old ones are deleted."""
    documents = tuple((*document(4 * chance.randrange(1, 3), n + 1000 * seed), *document(3, n)) for n in range(19))
    prepared = tuple(range(17))
    steps: list[Step] = [*_puts(documents, (17,), chance), Remove(3, 0), Flush()]
    steps += [Compact()] * chance.randrange(1, 3)
    steps += [*_puts(documents, (18,), chance), Flush(), Compact()]
    return Workload(kind, seed, durability, documents, prepared, (3,), False, tuple(steps))


def _replace(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """Chunks whose files were found broken: put aside and written again."""
    documents = _documents(chance, 2)
    again: list[Step] = [Put(0, index) for index in range(len(_chunks(documents[0])))]
    steps = [*again, Flush(), *_puts(documents, (1,), chance), Flush()]
    return Workload(kind, seed, durability, documents, (0,), (), True, tuple(steps))


def _create(kind: str, seed: int, durability: Durability, chance: random.Random) -> Workload:
    """A store made where there was none."""
    documents = _documents(chance, 1)
    return Workload(kind, seed, durability, documents, (), (), False, (*_puts(documents, (0,), chance), Flush()))


KINDS: dict[str, Callable[[str, int, Durability, random.Random], Workload]] = {
    "single": _single,
    "single compaction": _single_compaction,
    "commit": _commit,
    "flush": _flush,
    "compaction": _compaction,
    "replace": _replace,
    "create": _create,
}


def options(workload: Workload) -> WriterOptions:
    no_grace_ms = -60_000  # less than none: the clocks of files are coarse, and every run shall delete the same
    return WriterOptions(durability=workload.durability, flush_after_s=1e9, grace_ms=no_grace_ms)


def prepare(workload: Workload, root: Path) -> None:
    """The store before the victim comes: every prepared document was written by a writer of its own."""
    if workload.name == "create":
        return
    with Store.create(str(root)) as store:
        writers = [
            store.namespace(IDENTITY, create=True, writer=options(workload))
            for _ in workload.prepared  # all open before any writes, so that none sees enough segments to compact
        ]
        for number, writer in zip(workload.prepared, writers, strict=True):
            for ref in workload.chunks(number):
                put_chunk(writer, ref, workload.tokens(number))
            writer.close()
    if workload.is_broken:
        for shard in (root / "ns" / IDENTITY.fingerprint / "c").rglob("*.safetensors"):
            content = bytearray(shard.read_bytes())
            content[300] ^= 4
            shard.write_bytes(content)
        for segment in (root / "ns" / IDENTITY.fingerprint / "m").iterdir():
            segment.unlink()


def perform(workload: Workload, root: Path, returned: memoryview) -> None:
    """The victim: `returned[i]` becomes 1 as soon as step i returned (shared memory: no system call)."""
    if workload.name == "create":
        try:
            Store.create(str(root)).close()
        except StoreExists:
            pass
    store = Store.open(str(root))
    namespace = store.namespace(IDENTITY, create=True, writer=options(workload))
    for number, step in enumerate(workload.steps):
        perform_step(workload, namespace, step)
        returned[number] = 1
    namespace.close()
    store.close()


def perform_step(workload: Workload, namespace: Namespace, step: Step) -> None:
    match step:
        case Put():
            tokens = workload.tokens(step.document)
            put_chunk(namespace, workload.chunks(step.document)[step.index], tokens, step.part)
        case Flush():
            namespace.flush()
        case Compact():
            namespace.compact()
        case Label():
            last = workload.chunks(step.document)[-1]
            namespace.label(f"document {step.document}", last.key, len(workload.tokens(step.document)), last.depth)
        case Remove():
            with namespace._lock:
                entries = namespace._view.entries(workload.chunks(step.document)[step.index].key)
            for entry in entries:
                namespace.remove(entry, RemoveReason.PRUNED)
