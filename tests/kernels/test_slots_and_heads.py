"""Token → slot and head → rank, in plain integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import (
    HeadRange,
    HeadsError,
    PageLayout,
    SlotError,
    SlotMapping,
    gather_paged,
    heads_of_rank,
    scatter_paged,
    shared_heads,
    slots_of,
)
from lmcache_kernels.slots import Run
from tests.kernels.made_pages import Sizes, Variant, make_pages, poisoned_chunk


def test_slots_follow_the_block_table() -> None:
    assert slots_of([7, 3, 9], 4, 2, 10) == [30, 31, 12, 13, 14, 15, 36, 37]
    assert slots_of([7], 4, 2, 2) == []


def test_blocks_that_are_not_there_give_holes() -> None:
    assert slots_of([-1, 3], 2, 0, 4) == [-1, -1, 6, 7]
    assert slots_of([0, 3], 2, 0, 4, null_block=0) == [-1, -1, 6, 7]
    assert slots_of([0, 3], 2, 0, 4) == [0, 1, 6, 7]


@pytest.mark.parametrize(("size", "start", "stop"), [(4, 0, 13), (0, 0, 1), (4, 3, 2), (4, -1, 2)])
def test_a_table_that_ends_early_is_refused(size: int, start: int, stop: int) -> None:
    with pytest.raises(SlotError):
        slots_of([7, 3, 9], size, start, stop)


@given(st.lists(st.integers(0, 99), max_size=6, unique=True), st.sampled_from([2, 16, 32, 128]), st.data())
def test_a_mapping_of_blocks_is_slots_of(blocks: list[int], size: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(blocks) * size))
    start = data.draw(st.integers(0, stop))
    mapping = SlotMapping.of_blocks(blocks, size, start, stop)
    expected = [blocks[token // size] * size + token % size for token in range(start, stop)]
    assert mapping.slots.tolist() == slots_of(blocks, size, start, stop) == expected


@given(st.lists(st.integers(-3, 40), max_size=60))
def test_runs_cover_every_token_that_is_no_hole_once(slots: list[int]) -> None:
    mapping = SlotMapping.of(slots)
    covered = [(run.token + i, run.slot + i) for run in mapping.runs for i in range(run.length)]
    assert covered == [(token, slot) for token, slot in enumerate(slots) if slot >= 0]
    assert mapping.has_duplicates == (len({slot for _, slot in covered}) < len(covered))
    assert mapping.highest == max([slot for _, slot in covered], default=-1)


def test_runs_break_at_holes_and_jumps() -> None:
    assert SlotMapping.of([-1, 0, 1]).runs == (Run(1, 0, 2),)
    assert SlotMapping.of([4, 5, -1, -1, 6, 7, 0]).runs == (Run(0, 4, 2), Run(4, 6, 2), Run(6, 0, 1))


@pytest.mark.parametrize("slots", [[1.5], [[1, 2]], np.zeros(3)])
def test_a_mapping_is_a_list_of_integers(slots: object) -> None:
    with pytest.raises(SlotError, match="1-D sequence of integers"):
        SlotMapping.of(slots)  # type: ignore[arg-type]


def test_a_mapping_is_taken_from_tensors_and_arrays_alike() -> None:
    for slots in ([3, -7], np.array([3, -7], dtype=np.int32), torch.tensor([3, -7])):
        assert SlotMapping.of(slots).slots.tolist() == [3, -1]


HEADS, RANKS = (1, 2, 4, 8), (1, 2, 4, 8)


@pytest.mark.parametrize("total", HEADS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_share_and_replicas_agree(total: int, ranks: int) -> None:
    held = [heads_of_rank(total, ranks, rank) for rank in range(ranks)]
    assert all(len(each) == max(1, total // ranks) for each in held)
    assert sorted({head for each in held for head in each}) == list(range(total))
    assert sorted(held, key=lambda each: each.start) == held


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(HeadsError, match="3 kv heads cannot be divided over 2 ranks"):
        heads_of_rank(3, 2, 0)
    with pytest.raises(HeadsError):
        heads_of_rank(4, 2, 2)


def test_shared_heads_are_positions_on_both_sides() -> None:
    assert shared_heads(range(4, 8), range(2, 6)) == HeadRange(page_head=0, chunk_head=2, count=2)
    assert shared_heads(range(2), range(2, 6)) is None
    with pytest.raises(HeadsError):
        HeadRange(-1, 0, 1)


@pytest.mark.parametrize("total", HEADS)
@pytest.mark.parametrize("source_ranks", RANKS)
@pytest.mark.parametrize("target_ranks", RANKS)
def test_every_target_rank_gets_exactly_its_heads(total: int, source_ranks: int, target_ranks: int) -> None:
    """C18: head h holds h; a store cut by one number of ranks is read by another."""
    slots = SlotMapping.of(list(range(3, 20)))
    source_sizes = Sizes(heads=max(1, total // source_ranks))
    chunks = []
    for rank in range(source_ranks):
        pages = make_pages(Variant(PageLayout.FUSED_HND), source_sizes)
        for i, head in enumerate(heads_of_rank(total, source_ranks, rank)):
            for layer in pages.layers:
                layer[:, i] = head
        chunk = poisoned_chunk(17, source_sizes, torch.bfloat16, latent=False, heads=source_sizes.heads)
        gather_paged(pages.cache, slots, chunk)
        chunks.append(chunk)
    for rank in range(target_ranks):
        wanted = heads_of_rank(total, target_ranks, rank)
        pages = make_pages(Variant(PageLayout.KV_FIRST_NHD), Sizes(heads=len(wanted)))
        for source_rank, chunk in enumerate(chunks):
            shared = shared_heads(wanted, heads_of_rank(total, source_ranks, source_rank))
            if shared is not None:
                scatter_paged(pages.cache, slots, chunk, heads=shared)
        for layer in pages.layers:
            by_slot = layer.flatten(1, 2)[:, 3:20]
            assert all(bool((by_slot[:, :, i] == head).all()) for i, head in enumerate(wanted))
