"""Several ranks: parts written and read by each, heads cut anew, and ranks that disagree (C16)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.integration.vllm.identity import Ranks, part_of_rank, writes_part
from lmcache_cli.store import Store
from lmcache_format.geometry import Part
from lmcache_format.identity import AttentionKind, Identity
from tests.store.pattern import document, hit, refs, tiny_identity

from .fakes import FakeEngine

Build = Callable[..., FakeEngine]
PROMPT = document(37, 1)
CUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODES = pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])


@MODES
@pytest.mark.parametrize("reader", CUTS, ids=str)
@pytest.mark.parametrize("writer", CUTS, ids=str)
def test_a_store_written_by_some_ranks_serves_any_others(
    engine_of: Build, writer: tuple[int, int], reader: tuple[int, int], load_async: bool
):
    """Every slot that is read is compared, element by element, by every rank."""
    first = engine_of(tp=writer[0], pp=writer[1])
    answer = first.run("a", PROMPT, max_tokens=3)
    first.assert_at_rest()
    second = engine_of(tp=reader[0], pp=reader[1], load_async=load_async)
    again = second.run("b", PROMPT, max_tokens=3)
    assert again.promised == [32]
    assert again.output == answer.output
    assert second.poisoned_forwards == 0
    second.assert_at_rest()


def test_two_ranks_of_four_heads_write_two_parts(engine_of: Build, store_dir: Path):
    identity = tiny_identity(layers=2, kv_heads=4, chunk_tokens=8)
    engine_of(identity=identity, tp=2).run("a", PROMPT)
    parts = {path.name.split(".")[1] for path in store_dir.rglob("*.safetensors")}
    assert parts == {"l0-2h0-2", "l0-2h2-4"}


@MODES
def test_ranks_that_disagree_end_with_the_shortest_prefix(
    engine_of: Build, store_dir: Path, identity: Identity, load_async: bool
):
    """C16: one rank's shard of chunk 3 is deleted, another's of chunk 4 truncated."""
    engine_of(tp=2, pp=2).run("a", PROMPT)
    chunks = refs(identity, PROMPT)
    next(store_dir.rglob(f"{chunks[2].key.hex()}.{Part(0, 1, 1, 2)}.*")).unlink()
    path = next(store_dir.rglob(f"{chunks[3].key.hex()}.{Part(1, 2, 0, 1)}.*"))
    path.write_bytes(path.read_bytes()[:-1])
    engine = engine_of(tp=2, pp=2, load_async=load_async)
    assert engine.scheduler.matched(engine.add("b", PROMPT), 0)[0] == 16
    engine.until_idle()
    assert (engine.undetected, engine.poisoned_forwards) == (0, 0)
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        assert hit(namespace, PROMPT) >= 24


def test_a_chunk_that_one_rank_has_dropped_is_no_hit(engine_of: Build, store_dir: Path, identity: Identity):
    engine = engine_of(tp=2, save_buffers=8)
    engine.ranks[1].worker._saves = False
    engine.run("a", PROMPT)
    assert engine_of().scheduler.matched(engine.add("b", PROMPT), 0) == (0, False)
    engine.abort("b")


def test_ranks_that_hold_the_same_heads_write_once():
    identity = tiny_identity(kv_heads=2)
    ranks = Ranks(tensor=4, pipeline=1)
    assert [str(part_of_rank(identity, ranks, rank, (0, 2))) for rank in range(4)] == [
        "l0-2h0-1",
        "l0-2h0-1",
        "l0-2h1-2",
        "l0-2h1-2",
    ]
    assert [writes_part(identity, ranks, rank) for rank in range(4)] == [True, False, True, False]
    latent = tiny_identity(kind=AttentionKind.LATENT)
    assert [writes_part(latent, Ranks(2, 2), rank) for rank in range(4)] == [True, False, True, False]
