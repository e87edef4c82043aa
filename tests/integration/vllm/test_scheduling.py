"""Lookup, load, save and what comes between, with an engine that checks every slot before it attends to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, refs

from .fakes import FakeEngine

Build = Callable[..., FakeEngine]
MODES = pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
PROMPT = document(50, 1)


def stored_tokens(store_dir: Path, identity: Identity, tokens: list[int]) -> int:
    """Tokens found by somebody else, every element compared."""
    with Store.open(str(store_dir)) as store, store.namespace(identity, missing_ok=True) as namespace:
        return hit(namespace, tokens)


@MODES
def test_a_prompt_is_loaded_by_a_fresh_engine(engine_of: Build, load_async: bool):
    first = engine_of(load_async=load_async)
    answer = first.run("a", PROMPT, max_tokens=3)
    second = engine_of(load_async=load_async)
    again = second.run("a", PROMPT, max_tokens=3)
    assert again.output == answer.output
    assert (first.loaded_tokens, again.promised) == (0, [48])
    assert (second.poisoned_forwards, second.undetected) == (0, 0)
    for engine in (first, second):
        engine.assert_at_rest()


@MODES
def test_a_whole_hit_leaves_one_token_to_compute(engine_of: Build, load_async: bool):
    engine_of().run("a", PROMPT[:48])
    engine = engine_of(load_async=load_async)
    assert engine.run("a", PROMPT[:48]).promised == [47]
    assert engine.poisoned_forwards == 0


def test_prompts_in_pieces_are_saved_whole(engine_of: Build, store_dir: Path, identity: Identity):
    engine = engine_of(budget=5)
    engine.run("a", PROMPT)
    assert stored_tokens(store_dir, identity, PROMPT) == 48
    engine.assert_at_rest()


def test_generated_tokens_are_saved_on_demand(engine_of: Build, store_dir: Path, identity: Identity):
    request = engine_of(save_decode=True).run("a", PROMPT, max_tokens=20)
    assert stored_tokens(store_dir, identity, list(request.all_token_ids)) == 64
    other = document(50, 2)
    request = engine_of().run("b", other, max_tokens=20)
    assert stored_tokens(store_dir, identity, list(request.all_token_ids)) == 48


@MODES
def test_what_the_prefix_cache_holds_is_not_loaded_and_yet_saved(
    engine_of: Build, load_async: bool, store_dir: Path, identity: Identity
):
    engine = engine_of(load_async=load_async, save=False)
    engine.run("a", PROMPT)
    assert stored_tokens(store_dir, identity, PROMPT) == 0
    saving = engine_of(load_async=load_async)
    saving.run("a", PROMPT[:20])
    saving.run("b", PROMPT)
    assert stored_tokens(store_dir, identity, PROMPT) == 48
    assert saving.loaded_tokens == 0


@MODES
def test_requests_that_share_a_prefix_at_once(engine_of: Build, load_async: bool):
    engine_of().run("a", PROMPT)
    engine = engine_of(load_async=load_async)
    for number in range(4):
        engine.add(f"r{number}", [*PROMPT[: 30 + 4 * number], *document(9, 10 + number)], max_tokens=2)
    engine.until_idle()
    assert (engine.poisoned_forwards, engine.undetected) == (0, 0)
    assert engine.loaded_tokens >= 24
    engine.assert_at_rest()


@MODES
@pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])
def test_a_preempted_request_is_loaded_again(engine_of: Build, load_async: bool, overlap: bool):
    """12 blocks of 4 tokens for three requests of 20 tokens and what they generate."""
    answers = [engine_of(prefix_caching=False, save=False).run("x", document(20, n), max_tokens=9) for n in range(3)]
    engine = engine_of(load_async=load_async, num_blocks=12, prefix_caching=False, overlap=overlap, settles=True)
    requests = [engine.add(f"r{n}", document(20, n), max_tokens=9) for n in range(3)]
    engine.until_idle()
    assert [request.output for request in requests] == [answer.output for answer in answers]
    assert engine.poisoned_forwards == 0
    assert any(request.redone and request.promised for request in requests)
    engine.assert_at_rest()


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_lost_where_memory_for_saves_is_short(
    engine_of: Build, store_dir: Path, identity: Identity, tp: int
):
    engine = engine_of(save_buffers=1, budget=16, tp=tp)
    engine.run("a", PROMPT, max_tokens=60)
    assert sum(rank.worker.counts["save_no_memory"] for rank in engine.ranks) > 0
    assert stored_tokens(store_dir, identity, PROMPT) == 48
    engine.assert_at_rest()


def test_reset_begins_a_generation(engine_of: Build, store_dir: Path, identity: Identity):
    engine_of().run("a", PROMPT)
    engine = engine_of()
    engine.reset()
    assert engine.run("b", PROMPT).promised == []
    engine.blocks.clear()
    assert engine.run("c", PROMPT).promised == [48]  # what this generation stored
    assert engine_of().run("d", PROMPT).promised == [48]  # another engine still finds what was there before


def test_partial_chunks_are_saved_and_found_on_demand(engine_of: Build):
    first = engine_of(partial_chunks=True)
    first.run("a", PROMPT)
    first.close()
    engine = engine_of()
    assert engine.run("b", [*PROMPT, 7, 8, 9]).promised == [50]
    assert engine.poisoned_forwards == 0
    fresh = engine_of(prefix_caching=False)
    assert fresh.run("c", [*PROMPT[:49], 1, 2, 3]).promised == [48]


def test_saves_that_are_held_are_written_once_confirmed(engine_of: Build, store_dir: Path, identity: Identity):
    engine = engine_of(hold_saves=True, budget=10)
    engine.run("a", PROMPT)
    assert stored_tokens(store_dir, identity, PROMPT) == 48
    engine.assert_at_rest()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_that_is_never_heard_of_keeps_nobody_waiting(engine_of: Build, tp: int):
    engine = engine_of(tp=tp)
    engine.scheduler.heard = lambda report: None  # type: ignore[method-assign]
    engine.add("a", PROMPT)
    for _ in range(70):
        engine.step()
    assert not engine.scheduler.awaits_confirmation
    engine.settle()
    engine.assert_at_rest()


@MODES
def test_a_load_nobody_promised_is_reported_as_failed(engine_of: Build, load_async: bool):
    """Should the engine ask for tokens that were not looked up, it hears that they are not there."""
    engine = engine_of(load_async=load_async)
    engine.scheduler.matched = lambda request, local: (16, load_async)  # type: ignore[method-assign]
    engine.add("a", PROMPT)
    for _ in range(500):
        engine.step()
        if engine.bad_blocks_seen:
            break
        time.sleep(0.001)
    assert len(engine.bad_blocks_seen[0]) == 4
    engine.abort("a")


@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_are_announced_once_every_rank_has_written_them(engine_of: Build, identity: Identity, tp: int):
    engine = engine_of(tp=tp, events=True, settles=True)
    engine.run("a", PROMPT, max_tokens=3)
    engine.step()
    stored = engine.scheduler.take_stored()
    chunks = refs(identity, PROMPT, tail=False)
    assert [chunk.key for chunk in stored] == [chunk.key for chunk in chunks]
    assert [chunk.parent for chunk in stored] == [None, *(chunk.key for chunk in chunks[:-1])]
    assert [token for chunk in stored for token in chunk.tokens] == PROMPT[:48]
    assert engine.scheduler.take_stored() == []
