"""C11: a partial last chunk overlaps blocks the engine already holds. Chunks of 256 tokens, blocks of 16."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.integration.vllm.caching import BARE
from lmcache_cli.integration.vllm.plan import SaveOp
from lmcache_cli.integration.vllm.scheduling import Scheduled, SchedulingOptions, StoreScheduler
from lmcache_cli.runtime.loading import Loader, LoadRequest
from lmcache_cli.runtime.memory import MemoryPool
from lmcache_cli.store import Namespace, Store
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.integration.vllm.fakes import ArrayPages, FakeRequest, kv_of
from tests.store.pattern import document, put_document, tiny_identity

BLOCK = 16
CHUNK = 256
LENGTHS = (0, 1, 15, 16, 255, 256, 257, 511, 512, 513, 14820)
LOCALS = (0, 16, 240, 256, 512, -1, None)  # -1 and None: the length less one, and the length
TEXT = document(14820, 11)


@pytest.fixture(scope="module")
def identity() -> Identity:
    return tiny_identity(layers=1, kv_heads=1, head_dim=2, chunk_tokens=CHUNK)


def namespace_with(root: Path, identity: Identity, length: int, partial: bool) -> Namespace:
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as writer:
        put_document(writer, TEXT[:length], tail=partial)
    return Store.open(str(root)).namespace(identity)


def scheduler_of(namespace: Namespace, **options: bool) -> StoreScheduler:
    settings = SchedulingOptions(block_size=BLOCK, chunk_tokens=CHUNK, **options)
    return StoreScheduler(lambda _: namespace, lambda _: BARE, settings)


@pytest.mark.parametrize("partial", [False, True], ids=["full-chunks", "partial-chunks"])
@pytest.mark.parametrize("length", LENGTHS)
def test_no_slot_below_what_the_engine_has_is_written(tmp_path: Path, identity: Identity, length: int, partial: bool):
    namespace = namespace_with(tmp_path / "kv", identity, length, partial)
    stored = length if partial else length // CHUNK * CHUNK
    pool = MemoryPool(identity, whole_part(identity), 4)
    tokens = TEXT[:length]
    for given in LOCALS:
        local = length + (given or 0) if given is None or given < 0 else given
        if not 0 <= local <= length:
            continue
        request = FakeRequest(f"{length}-{local}", list(tokens))
        scheduler = scheduler_of(namespace)
        external, is_async = scheduler.matched(request, local)
        hit = min(stored, max(0, length - 1))
        assert (external, is_async) == (max(0, hit - local), False)
        if not external:
            continue
        table = list(range(1, -(-length // BLOCK) + 1))
        scheduler.allocated(request, table, external)
        plan = scheduler.plan([Scheduled(request.request_id, table, local + external, length - local - external)])
        (op,) = plan.loads
        pages = ArrayPages(identity, whole_part(identity), (len(table) + 1) * BLOCK)
        loader = Loader(pages, pool)
        outcome = loader.load(namespace, LoadRequest(op.chunks, op.start, op.stop, op.span))
        loader.close()
        assert (outcome.good_stop, outcome.reason) == (hit, "")
        assert pages.loaded == {BLOCK + token for token in range(local, hit)}
        expected = kv_of(identity, whole_part(identity), tokens[local:hit], local)
        assert pages.holds(expected, [BLOCK + token for token in range(local, hit)])
        assert pool.num_leased == 0
    namespace.close()


def saves(scheduler: StoreScheduler, length: int) -> list[int]:
    request = FakeRequest("r", TEXT[:length])
    scheduler.matched(request, 0)
    table = list(range(1, -(-length // BLOCK) + 1))
    scheduler.allocated(request, table, 0)
    ops: tuple[SaveOp, ...] = scheduler.plan([Scheduled("r", table, 0, length)]).saves
    return [chunk.num_tokens for op in ops for chunk in op.chunks]


@pytest.mark.parametrize("length", [length for length in LENGTHS if length])
def test_only_whole_chunks_are_saved_unless_asked(tmp_path: Path, identity: Identity, length: int):
    namespace = namespace_with(tmp_path / "kv", identity, 0, False)
    assert saves(scheduler_of(namespace), length) == [CHUNK] * (length // CHUNK)
    rest = [length % CHUNK] if length % CHUNK else []
    assert saves(scheduler_of(namespace, partial_chunks=True), length) == [CHUNK] * (length // CHUNK) + rest
    namespace.close()


def test_a_tail_serves_prompts_that_agree_with_it_and_gives_way(tmp_path: Path, identity: Identity):
    namespace = namespace_with(tmp_path / "kv", identity, CHUNK + 100, True)

    def found(tokens: list[int]) -> int | None:
        return scheduler_of(namespace).matched(FakeRequest("r", tokens), 0)[0]

    agreeing = [*TEXT[: CHUNK + 100], 1, 2, 3]
    assert found(agreeing) == CHUNK + 100
    assert found([*TEXT[: CHUNK + 99], 1, 2, 3]) == CHUNK
    assert found(TEXT[: CHUNK + 90]) == CHUNK
    with Store.open(str(tmp_path / "kv")) as store, store.namespace(identity, create=True) as writer:
        put_document(writer, TEXT[: 2 * CHUNK])
    namespace.refresh()
    assert found(TEXT[: 2 * CHUNK + 5]) == 2 * CHUNK
    namespace.close()
