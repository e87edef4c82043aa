"""Background saves: bounded memory, parents before children, failures that end where they began (C26, C28)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import NoSpace, Unavailable
from lmcache_cli.backends.fault import Effect, Fail, Fault, FaultBackend, FaultScript, Hold
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.runtime.loading import Loader, LoadRequest
from lmcache_cli.runtime.memory import MemoryPool
from lmcache_cli.runtime.pages import BlockSpan
from lmcache_cli.runtime.saving import BackgroundWriter, SaveJob
from lmcache_cli.store import ChunkRef, Namespace, Store
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, pattern, refs, tiny_identity

IDENTITY = tiny_identity(chunk_tokens=4)


def namespace_with(root: Path, *faults: Fault) -> Namespace:
    store = Store.create(FaultBackend(LocalBackend(root), FaultScript(*faults)))
    return store.namespace(IDENTITY, create=True)


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    made = BackgroundWriter(pause_s=0.2, flush_idle_s=0.05)
    yield made
    made.close(5.0)


def submit(
    writer: BackgroundWriter, pool: MemoryPool, namespace: Namespace, chunk: ChunkRef, tokens: list[int]
) -> bool:
    """As the connector does: lease, fill, hand over; False where there is no memory."""
    memory = pool.lease(IDENTITY, chunk.num_tokens)
    if memory is None:
        return False
    start = chunk.depth * IDENTITY.chunk_tokens
    memory.buffer.fill(pattern(IDENTITY, whole_part(IDENTITY), tokens[start : start + chunk.num_tokens], start))
    writer.submit(SaveJob(namespace, chunk, memory))
    return True


def pool_of(num_chunks: int, identity: Identity = IDENTITY) -> MemoryPool:
    return MemoryPool(identity, whole_part(identity), num_chunks)


def test_a_full_queue_says_no_and_takes_again_later(tmp_path: Path, writer: BackgroundWriter):
    reached, go_on = threading.Event(), threading.Event()
    namespace = namespace_with(tmp_path, Fault("put", Hold(reached, go_on), on_call=4))
    tokens, pool = document(16), pool_of(2)
    taken = [submit(writer, pool, namespace, chunk, tokens) for chunk in refs(IDENTITY, tokens)]
    assert taken == [True, True, False, False]
    go_on.set()
    assert writer.wait_idle(10)
    assert pool.num_leased == 0
    assert submit(writer, pool, namespace, refs(IDENTITY, tokens)[2], tokens)
    writer.wait_idle(10)
    assert hit(namespace, tokens) == 12


@pytest.mark.parametrize("effect", [Fail(Unavailable("no answer")), Fail(NoSpace("full")), Fail(RuntimeError("odd"))])
def test_chunks_after_one_that_failed_are_not_written(tmp_path: Path, writer: BackgroundWriter, effect: Effect):
    """A chunk without its parent would never be found."""
    tokens = document(16)
    chunks = refs(IDENTITY, tokens)
    namespace = namespace_with(tmp_path, Fault("put", effect, on_call=1, name=chunks[1].key.hex()))
    pool = pool_of(8)
    for chunk in chunks:
        submit(writer, pool, namespace, chunk, tokens)
    assert writer.wait_idle(10)
    assert (writer.counts["saved"], writer.counts["save_failed"], writer.counts["save_dropped"]) == (1, 1, 2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    threading.Event().wait(0.25)  # the pause after a full device
    for chunk in chunks[1:]:
        submit(writer, pool, namespace, chunk, tokens)
    assert writer.wait_idle(10)
    assert hit(namespace, tokens) == 16
    assert pool.num_leased == 0


def test_the_index_is_flushed_when_nothing_comes(tmp_path: Path, writer: BackgroundWriter):
    namespace = namespace_with(tmp_path)
    tokens = document(8)
    for chunk in refs(IDENTITY, tokens):
        submit(writer, pool_of(4), namespace, chunk, tokens)
    for _ in range(200):
        if list(tmp_path.rglob("*.lmi")):
            break
        threading.Event().wait(0.02)
    assert len(list(tmp_path.rglob("*.lmi"))) == 1


def test_a_chunk_is_invisible_until_it_is_written_whole(tmp_path: Path, writer: BackgroundWriter):
    """C28: its memory belongs to the writer meanwhile, whatever else asks for some."""
    reached, go_on = threading.Event(), threading.Event()
    tokens, others = document(4, 1), [document(4, n) for n in range(2, 9)]
    key = refs(IDENTITY, tokens)[0].key.hex()
    namespace = namespace_with(tmp_path, Fault("put", Hold(reached, go_on), name=key))
    pool = pool_of(4)
    assert submit(writer, pool, namespace, refs(IDENTITY, tokens)[0], tokens)
    assert reached.wait(10)
    taken = [submit(writer, pool, namespace, refs(IDENTITY, other)[0], other) for other in others]
    assert taken == [True] * 3 + [False] * 4
    with Store.open(str(tmp_path)) as store, store.namespace(IDENTITY) as reader:
        assert reader.match(tokens).num_tokens == 0
    go_on.set()
    assert writer.wait_idle(10)
    assert hit(namespace, tokens) == 4  # every element compared: the pattern of this prompt and no other


class Slots:
    """Pages of one layer's worth: remembers what was written where."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}

    def scatter(self, buffer: object, slots: list[int]) -> None:
        keys = buffer.array(0, "k")  # type: ignore[attr-defined]
        self.written.update({slot: int(keys[0, n, 0]) for n, slot in enumerate(slots) if slot >= 0})

    def gather(self, slots: list[int], buffer: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("seed", range(20))
def test_random_loads_and_saves_share_memory_without_mixing(tmp_path: Path, writer: BackgroundWriter, seed: int):
    """C26: at rest nothing is leased; what ran out of memory is stored later."""
    chance = random.Random(seed)
    namespace = namespace_with(tmp_path, Fault("read_into", Fail(Unavailable("now and then")), on_call=5 + seed))
    pool = pool_of(4)
    pages = Slots()
    loader = Loader(pages, pool, depth=3, timeout_s=10.0)  # type: ignore[arg-type]
    prompts = [document(16, n) for n in range(6)]
    for _ in range(60):
        tokens = chance.choice(prompts)
        chunks = refs(IDENTITY, tokens)
        if chance.random() < 0.5:
            for chunk in chunks:
                if not submit(writer, pool, namespace, chunk, tokens):
                    break
        else:
            found = namespace.match(tokens).num_tokens // 4
            if found:
                request = LoadRequest(tuple(chunks[:found]), 1, 4 * found - 1, BlockSpan(0, 4, tuple(range(1, 5))))
                outcome = loader.load(namespace, request)
                expected = pattern(IDENTITY, whole_part(IDENTITY), tokens[:4], 0)["layers.0.k"]
                if outcome.good_stop > 3:
                    assert [pages.written[4 + n] for n in (1, 2, 3)] == [int(v) for v in expected[0, 1:4, 0]]
                assert outcome.good_stop == request.stop or outcome.reason
    assert writer.wait_idle(10)
    loader.close()
    assert pool.num_leased == 0
    for tokens in prompts:
        for chunk in refs(IDENTITY, tokens):
            assert submit(writer, pool, namespace, chunk, tokens) or writer.wait_idle(10)
        writer.wait_idle(10)
