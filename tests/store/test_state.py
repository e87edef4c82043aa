"""Merging segments: any order, any grouping, read once or twice, compacted or not, gives the same state."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.store.manifest import combine, segment_of_state
from lmcache_cli.store.state import Entry, State, empty_state, merge
from lmcache_format.segment import AddFlags, Segment, decode_segment, encode_segment
from tests.store.made_segments import FINGERPRINT, KEYS, WRITES, content, segments

many = st.lists(segments(), max_size=3)


def compacted(state: State, created_ms: int = 0) -> Segment:
    """The state as it comes back from the segment that compaction writes."""
    return decode_segment(encode_segment(segment_of_state(FINGERPRINT, state, "c", created_ms, ())))


def entries_of(segment: Segment) -> list[Entry]:
    by_nonce = {int(write.nonce, 16): write for write in WRITES}
    return [by_nonce[int(add["nonce"])] for add in segment.adds]


@given(many, st.randoms(use_true_random=False))
def test_merge_is_commutative(found: list[Segment], chance: random.Random) -> None:
    shuffled = chance.sample(found, len(found))
    assert content(merge(found)) == content(merge(shuffled))


@given(many)
def test_merge_is_idempotent(found: list[Segment]) -> None:
    assert content(merge([*found, *found])) == content(merge(found))


@given(many, many, many)
def test_merge_is_associative(a: list[Segment], b: list[Segment], c: list[Segment]) -> None:
    at_once = content(merge([*a, *b, *c]))
    left = combine(combine(combine(empty_state(), FINGERPRINT, a), FINGERPRINT, b), FINGERPRINT, c)
    right = combine(merge(a), FINGERPRINT, [compacted_fully(merge([*b, *c]))])
    assert content(left) == at_once
    assert content(right) == at_once


def compacted_fully(state: State) -> Segment:
    """As compaction does it, but with the touches of chunks that nobody added so far."""
    return segment_of_state(FINGERPRINT, state, "c", 0, (), keep_all_touches=True)


@given(many, st.integers(0, 4))
def test_compaction_of_some_of_the_segments_changes_nothing(found: list[Segment], cut: int) -> None:
    compact = compacted(merge(found[:cut]))
    whole, partly = content(merge(found)), content(merge([compact, *found[cut:]]))
    assert partly.entries == whole.entries
    assert partly.removes == whole.removes
    assert partly.labels == whole.labels
    assert content(merge([compact, *found])) == whole


@given(many)
def test_the_state_is_the_adds_minus_the_removes(found: list[Segment]) -> None:
    removed = {int(gone["nonce"]) for segment in found for gone in segment.removes}
    living = {entry for segment in found for entry in entries_of(segment) if int(entry.nonce, 16) not in removed}
    best: dict[tuple[object, ...], Entry] = {}
    for entry in living:
        name = (entry.key, entry.part, entry.encoding)
        other = best.get(name)
        if other is None or (other.created_ms, int(other.nonce, 16)) < (entry.created_ms, int(entry.nonce, 16)):
            best[name] = entry
    assert content(merge(found)).entries == frozenset(best.values())


@given(many)
def test_a_removed_write_never_comes_back(found: list[Segment]) -> None:
    removed = {f"{int(gone['nonce']):016x}" for segment in found for gone in segment.removes}
    late = compacted(merge([segment for segment in found if not len(segment.removes)]))
    for state in (merge(found), merge([*found, late]), combine(merge([late]), FINGERPRINT, found)):
        assert not {state.entry(row).nonce for row in range(len(state))} & removed


@given(many)
def test_rows_of_finds_exactly_the_shards_of_a_key(found: list[Segment]) -> None:
    state = merge(found)
    everything = content(state).entries
    for key in KEYS:
        rows = {state.entry(row) for row in state.rows_of(key)}
        assert rows == {entry for entry in everything if entry.key == key[:16]}
    assert bool((np.diff(state.keys.astype(object)) >= 0).all())


@given(many)
def test_touches_are_the_latest_and_the_most(found: list[Segment]) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for segment in found:
        for touch in segment.touches:
            day, hits = expected.get(int(touch["key"]), (0, 0))
            expected[int(touch["key"])] = max(day, int(touch["day"])), max(hits, int(touch["hits"]))
    assert content(merge(found)).touches == frozenset((key, day, hits) for key, (day, hits) in expected.items())


def test_the_state_of_nothing_is_empty() -> None:
    state = empty_state()
    assert len(state) == 0
    assert not state.rows_of(KEYS[0])
    assert content(merge([compacted(state)])) == content(state)


@given(segments(), st.data())
def test_a_crc32c_that_one_record_of_a_write_has_counts_in_any_order(segment: Segment, data: st.DataObject) -> None:
    """Others of the same write may lack it, or (which no writer makes) have another one: the order tells nothing."""
    variants = []
    for flags, crc32c in ((0, 0), (0, 9), (AddFlags.HAS_CRC32C, 5), (AddFlags.HAS_CRC32C, 7)):
        adds = segment.adds.copy()
        adds["flags"], adds["crc32c"] = flags, crc32c
        variants.append(replace(segment, adds=adds))
    state = merge(data.draw(st.permutations(variants)))
    assert all(state.entry(row).crc32c == 7 for row in range(len(state)))
    assert content(state) == content(merge(variants))
