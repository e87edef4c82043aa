"""What selection promises whatever the tree: closure downwards, limits met unless pinned, pins keep what is before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cli.store.chunk_table import ChunkTable, chunk_table
from lmcache_cli.store.manifest import DAY_MS, Pending, segment_of_pending
from lmcache_cli.store.state import Entry, merge
from lmcache_cli.store.victims import (
    Candidates,
    choose_excess,
    choose_old,
    choose_prompt,
    find_chunks,
    pinned_chunks,
    superseded_rows,
    superseded_tails,
    under_root,
)
from lmcache_format.geometry import Part, whole_part
from lmcache_format.keys import ChunkKey, next_key, root_key, token_words
from lmcache_format.segment import Label, Pin, key_number
from tests.store.made_segments import FINGERPRINT
from tests.store.pattern import document, refs, tiny_identity

IDENTITY = tiny_identity()
WHOLE = whole_part(IDENTITY)
CHUNK_TOKENS = IDENTITY.chunk_tokens
NOW_MS = 20_000 * DAY_MS
ROOTS = (bytes([200]) * 32, bytes([201]) * 32)


def key_of(number: int) -> bytes:
    """Keys in no order that has to do with the tree."""
    return ((number + 1) * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") + bytes([number]) * 24


@dataclass(frozen=True, slots=True)
class Chunk:
    parent: int | None
    root: int
    created_ms: int
    touched_day: int | None
    size_bytes: int
    num_tokens: int = CHUNK_TOKENS


@st.composite
def trees(draw: st.DrawFn) -> list[Chunk]:
    """Up to 14 chunks; each follows one with a smaller number, or begins a sequence."""
    count = draw(st.integers(0, 14))
    chunks: list[Chunk] = []
    for number in range(count):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        root = chunks[parent].root if parent is not None else draw(st.integers(0, 1))
        created = NOW_MS + draw(st.integers(-100, 100)) * DAY_MS // 10
        touched = draw(st.none() | st.integers(19_985, 20_010))
        chunks.append(Chunk(parent, root, created, touched, draw(st.integers(0, 5))))
    return chunks


def depth_of(chunks: list[Chunk], number: int) -> int:
    parent = chunks[number].parent
    return 0 if parent is None else 1 + depth_of(chunks, parent)


def table_of(chunks: list[Chunk], pins: tuple[Pin, ...] = (), labels: tuple[Label, ...] = ()) -> ChunkTable:
    pending = Pending()
    for number, chunk in enumerate(chunks):
        parent = key_number(ROOTS[chunk.root]) if chunk.parent is None else key_number(key_of(chunk.parent))
        depth = depth_of(chunks, number)
        pending.adds.append(
            Entry(
                key_of(number)[:16],
                parent,
                depth,
                chunk.num_tokens,
                WHOLE,
                "raw",
                f"{number + 1:016x}",
                chunk.size_bytes,
                chunk.created_ms,
            )
        )
        if chunk.touched_day is not None:
            pending.touches[key_number(key_of(number))] = (chunk.touched_day, 1)
    pending.pins += pins
    pending.labels += labels
    return chunk_table(merge([segment_of_pending(FINGERPRINT, pending, "w", 0)]), WHOLE)


def numbers(table: ChunkTable, chosen: np.ndarray) -> set[int]:
    """The chunks of a selection by their numbers in the tree."""
    return {int(table.key_of(int(row))[15]) for row in np.flatnonzero(chosen)}


def descendants(chunks: list[Chunk], number: int) -> set[int]:
    below = {number}
    for other, chunk in enumerate(chunks):
        if chunk.parent in below:
            below.add(other)
    return below


def ancestors(chunks: list[Chunk], number: int | None) -> set[int]:
    above: set[int] = set()
    while number is not None:
        above.add(number)
        number = chunks[number].parent
    return above


def assert_closed(chunks: list[Chunk], chosen: set[int]) -> None:
    for number in chosen:
        assert descendants(chunks, number) <= chosen, f"{number} would go and leave {descendants(chunks, number)}"


pins = st.lists(
    st.tuples(st.integers(0, 15), st.sampled_from((None, 0, NOW_MS - 1, NOW_MS, NOW_MS + 1))), max_size=3
).map(lambda made: tuple(Pin(key_of(number)[:16], expires, at) for at, (number, expires) in enumerate(made)))


def held_numbers(chunks: list[Chunk], made: tuple[Pin, ...]) -> set[int]:
    """Chunks that pins keep, told from the pins by hand."""
    last = {pin.key: pin for pin in made}
    held = {pin.key[15] for pin in last.values() if pin.expires_ms is None or pin.expires_ms > NOW_MS}
    return {above for number in held if number < len(chunks) for above in ancestors(chunks, number)}


@given(trees(), pins)
def test_pins_keep_their_chunk_and_all_before_it(chunks: list[Chunk], made: tuple[Pin, ...]):
    table = table_of(chunks, made)
    candidates = Candidates.of(table, NOW_MS)
    assert numbers(table, candidates.is_kept) == held_numbers(chunks, made)
    assert numbers(table, candidates.family.with_ancestors(pinned_chunks(table, NOW_MS))) == held_numbers(chunks, made)


@given(trees(), pins, st.none() | st.integers(0, 200), st.none() | st.integers(0, 200))
def test_ages_choose_what_is_old_with_all_after_it_and_nothing_else(
    chunks: list[Chunk], made: tuple[Pin, ...], older: int | None, unused: int | None
):
    table = table_of(chunks, made)
    cut = [None if tenths is None else NOW_MS - tenths * DAY_MS // 10 for tenths in (older, unused)]
    chosen = numbers(table, choose_old(Candidates.of(table, NOW_MS), created_before_ms=cut[0], used_before_ms=cut[1]))
    assert_closed(chunks, chosen)

    def is_old(number: int) -> bool:
        chunk = chunks[number]
        touched = 0 if chunk.touched_day is None else (chunk.touched_day + 1) * DAY_MS - 1
        used = min(max(chunk.created_ms, touched), NOW_MS)
        return (cut[0] is None or min(chunk.created_ms, NOW_MS) < cut[0]) and (cut[1] is None or used < cut[1])

    kept = held_numbers(chunks, made)
    expected = {number for number in range(len(chunks)) if all(is_old(below) for below in descendants(chunks, number))}
    assert chosen <= expected - kept
    if cut[0] is None or cut[1] is None:  # with one rule alone the best of a family decides it exactly
        assert chosen == expected - kept


@given(trees(), pins, st.none() | st.integers(0, 70), st.none() | st.integers(0, 14))
def test_limits_are_met_unless_pins_forbid(
    chunks: list[Chunk], made: tuple[Pin, ...], max_bytes: int | None, max_chunks: int | None
):
    table = table_of(chunks, made)
    candidates = Candidates.of(table, NOW_MS)
    nothing = np.zeros(len(table), np.bool_)
    (mask,) = choose_excess([candidates], [nothing], max_bytes=max_bytes, max_chunks=max_chunks)
    chosen, kept = numbers(table, mask), held_numbers(chunks, made)
    assert_closed(chunks, chosen)
    assert not chosen & kept
    left = set(range(len(chunks))) - chosen
    size = sum(chunks[number].size_bytes for number in left)
    is_met = (max_bytes is None or size <= max_bytes) and (max_chunks is None or len(left) <= max_chunks)
    assert is_met or left == kept
    if chosen:  # and nothing goes in vain: with the last one back a limit would be missed
        used = {number: int(candidates.last_used_ms[row]) for row, number in enumerate(row_numbers(table))}
        last = max(chosen, key=lambda number: (used[number], -depth_of(chunks, number)))
        back = chunks[last].size_bytes
        over_bytes = max_bytes is not None and size + back > max_bytes
        over_count = max_chunks is not None and len(left) + 1 > max_chunks
        same = [n for n in chosen if used[n] == used[last] and depth_of(chunks, n) == depth_of(chunks, last)]
        assert over_bytes or over_count or len(same) > 1
        assert all(used[number] >= used[last] for number in left - kept)


def row_numbers(table: ChunkTable) -> list[int]:
    return [int(table.key_of(row)[15]) for row in range(len(table))]


@given(trees(), trees(), st.integers(0, 100))
def test_a_limit_is_on_all_namespaces_together(first: list[Chunk], second: list[Chunk], max_bytes: int):
    both = [Candidates.of(table_of(chunks), NOW_MS) for chunks in (first, second)]
    masks = choose_excess(
        both, [np.zeros(len(one.is_kept), np.bool_) for one in both], max_bytes=max_bytes, max_chunks=None
    )
    for chunks, one, mask in zip((first, second), both, masks, strict=True):
        assert_closed(chunks, numbers(one.family.table, mask))
    left = sum(int(one.size_bytes[~mask].sum()) for one, mask in zip(both, masks, strict=True))
    assert left <= max_bytes


@given(trees(), pins, st.integers(0, 30))
def test_a_scope_bounds_what_goes_and_what_counts(chunks: list[Chunk], made: tuple[Pin, ...], max_bytes: int):
    table = table_of(chunks, made)
    candidates = Candidates.of(table, NOW_MS)
    tenant = under_root(candidates.family, ChunkKey(ROOTS[1]))
    assert numbers(table, tenant) == {number for number, chunk in enumerate(chunks) if chunk.root == 1}
    (mask,) = choose_excess(
        [candidates.within(tenant)], [np.zeros(len(table), np.bool_)], max_bytes=max_bytes, max_chunks=None
    )
    chosen = numbers(table, mask)
    assert chosen <= numbers(table, tenant)
    assert_closed(chunks, chosen)
    left = {number for number, chunk in enumerate(chunks) if chunk.root == 1} - chosen
    size = sum(chunks[number].size_bytes for number in left)
    assert size <= max_bytes or left == left & held_numbers(chunks, made)


@given(trees(), st.sets(st.integers(0, 13)))
def test_closed_is_the_largest_closed_part(chunks: list[Chunk], wanted: set[int]):
    table = table_of(chunks)
    family = Candidates.of(table, NOW_MS).family
    mask = np.array([number in wanted for number in row_numbers(table)], np.bool_)
    chosen = numbers(table, family.closed(mask))
    expected = {n for n in range(len(chunks)) if descendants(chunks, n) <= wanted}
    assert chosen == expected


@given(trees(), st.integers(0, 13), st.integers(0, 32))
def test_a_key_finds_the_chunks_that_begin_so(chunks: list[Chunk], number: int, digits: int):
    table = table_of(chunks)
    start = key_of(number)[:16].hex()[:digits]
    found = numbers(table, find_chunks(table.state, table, start))
    assert found == {n for n in range(len(chunks)) if key_of(n)[:16].hex().startswith(start)}


@given(trees())
def test_every_beginning_of_the_order_is_closed(chunks: list[Chunk]):
    table = table_of(chunks)
    candidates = Candidates.of(table, NOW_MS)
    gone: set[int] = set()
    for row in candidates.order.tolist():
        gone.add(row_numbers(table)[row])
        assert_closed(chunks, gone)


def test_the_future_is_new_and_no_newer():
    day = NOW_MS // DAY_MS
    chunks = [
        Chunk(None, 0, NOW_MS + 300 * DAY_MS, None, 1),
        Chunk(None, 0, NOW_MS - 50 * DAY_MS, day + 999, 1),
        Chunk(None, 0, 0, None, 1),
        Chunk(None, 0, NOW_MS, None, 1),
    ]
    table = table_of(chunks)
    candidates = Candidates.of(table, NOW_MS)
    by_number = dict(zip(row_numbers(table), candidates.last_used_ms.tolist(), strict=True))
    assert by_number == {0: NOW_MS, 1: NOW_MS, 2: 0, 3: NOW_MS}
    old = choose_old(candidates, created_before_ms=None, used_before_ms=NOW_MS - DAY_MS)
    assert numbers(table, old) == {2}
    aged = choose_old(candidates, created_before_ms=NOW_MS - DAY_MS, used_before_ms=None)
    assert numbers(table, aged) == {1, 2}


def test_ten_thousand_pins_take_no_time():
    chunks = [Chunk(None, 0, 0, None, 1)] * 10
    made = tuple(Pin(number.to_bytes(16, "big"), None, 0) for number in range(10_000))
    table = table_of(chunks, (*made, Pin(key_of(3)[:16], None, 0)))
    assert numbers(table, pinned_chunks(table, NOW_MS)) == {3}


def test_a_pin_of_a_key_that_begins_alike_keeps_nothing():
    table = table_of([Chunk(None, 0, 0, None, 1)], (Pin(key_of(0)[:8] + b"\1" * 8, None, 0),))
    assert not pinned_chunks(table, NOW_MS).any()


# ---- superseded -----------------------------------------------------------------------------------------------------


def tail_beside_full(tail_ms: int, full_ms: int, tail_day: int | None) -> set[int]:
    chunks = [
        Chunk(None, 0, 0, None, 1),
        Chunk(0, 0, tail_ms, tail_day, 1, num_tokens=CHUNK_TOKENS - 1),
        Chunk(0, 0, full_ms, None, 1),
        Chunk(2, 0, full_ms, None, 1, num_tokens=1),
    ]
    table = table_of(chunks)
    return numbers(table, superseded_tails(table, CHUNK_TOKENS))


def test_a_tail_is_superseded_by_a_full_chunk_written_after_its_last_use():
    day = NOW_MS // DAY_MS
    assert tail_beside_full(NOW_MS, NOW_MS + 1, None) == {1}
    assert tail_beside_full(NOW_MS, NOW_MS + 1, day) == {1}


def test_a_tail_used_or_written_since_stays():
    day = NOW_MS // DAY_MS
    assert tail_beside_full(NOW_MS, NOW_MS + 1, day + 1) == set()
    assert tail_beside_full(NOW_MS + 2, NOW_MS + 1, None) == set()


def test_tails_alone_supersede_nothing():
    chunks = [Chunk(None, 0, 0, None, 1, num_tokens=1), Chunk(None, 0, 1, None, 1, num_tokens=2)]
    assert not superseded_tails(table_of(chunks), CHUNK_TOKENS).any()


def encoded_rows(*shards: tuple[str, Part]) -> list[tuple[str, str]]:
    entries = [
        Entry(key_of(0)[:16], 1, 0, CHUNK_TOKENS, part, label, f"{number + 1:016x}", 10, 0)
        for number, (label, part) in enumerate(shards)
    ]
    table = chunk_table(merge([segment_of_pending(FINGERPRINT, Pending(adds=entries), "w", 0)]), WHOLE)
    gone = [table.state.entry(int(row)) for row in np.flatnonzero(superseded_rows(table, CHUNK_TOKENS))]
    return [(entry.encoding, str(entry.part)) for entry in gone]


def test_raw_goes_beside_a_lossless_encoding_of_the_same_part():
    assert encoded_rows(("raw", WHOLE), ("bfx", WHOLE)) == [("raw", str(WHOLE))]


def test_raw_stays_beside_what_is_lossy_unknown_or_of_another_part():
    half = Part(0, 1, 0, 2)
    for label, part in (("uq-near", WHOLE), ("later", WHOLE), ("bfx", half)):
        assert encoded_rows(("raw", WHOLE), (label, part)) == []


# ---- a prompt's own chunks ------------------------------------------------------------------------------------------


def prompt_table(*prompts: list[int], labels: dict[str, list[int]] | None = None) -> ChunkTable:
    pending = Pending()
    for ref in {ref.key: ref for tokens in prompts for ref in refs(IDENTITY, tokens)}.values():
        nonce = f"{len(pending.adds) + 1:016x}"
        parent = key_number(ref.parent)
        pending.adds.append(Entry(ref.key[:16], parent, ref.depth, ref.num_tokens, WHOLE, "raw", nonce, 10, 0))
    for name, tokens in (labels or {}).items():
        last = refs(IDENTITY, tokens)[-1]
        pending.labels.append(Label(last.key[:16], name, len(tokens), 0, last.depth))
    return chunk_table(merge([segment_of_pending(IDENTITY.fingerprint, pending, "w", 0)]), WHOLE)


def chosen_keys(table: ChunkTable, tokens: list[int]) -> set[bytes]:
    candidates = Candidates.of(table, NOW_MS)
    chosen = choose_prompt(candidates, root_key(IDENTITY.fingerprint), token_words(tokens), CHUNK_TOKENS)
    return {table.key_of(int(row)) for row in np.flatnonzero(chosen)}


def keys(tokens: list[int], *depths: int) -> set[bytes]:
    return {ref.key[:16] for ref in refs(IDENTITY, tokens) if not depths or ref.depth in depths}


FIRST = document(3 * CHUNK_TOKENS + 2)
SECOND = [*FIRST[: 2 * CHUNK_TOKENS], *document(CHUNK_TOKENS + 1, seed=1)]


def test_a_prompt_alone_goes_as_a_whole():
    assert chosen_keys(prompt_table(FIRST), FIRST) == keys(FIRST)


def test_what_another_prompt_shares_stays():
    assert chosen_keys(prompt_table(FIRST, SECOND), FIRST) == keys(FIRST, 2, 3)


def test_what_goes_on_after_the_prompt_goes_with_it():
    longer = [*FIRST[: 3 * CHUNK_TOKENS], *document(CHUNK_TOKENS, seed=2)]
    assert chosen_keys(prompt_table(FIRST, longer), FIRST[: 3 * CHUNK_TOKENS]) == keys(FIRST) | keys(longer)


def test_another_continuation_of_an_absent_end_stays():
    table = prompt_table(FIRST[: 2 * CHUNK_TOKENS], SECOND)
    assert chosen_keys(table, FIRST) == set()


def test_what_another_document_ends_with_stays():
    short = FIRST[: 2 * CHUNK_TOKENS]
    table = prompt_table(FIRST, labels={"long": FIRST, "short": short})
    assert chosen_keys(table, FIRST) == keys(FIRST, 2, 3)
    assert chosen_keys(prompt_table(FIRST, labels={"long": FIRST}), FIRST) == keys(FIRST)


def test_a_tail_that_the_prompt_begins_with_goes_and_another_stays():
    other = [*FIRST[: 3 * CHUNK_TOKENS], FIRST[3 * CHUNK_TOKENS] + 1]
    shorter = FIRST[: 3 * CHUNK_TOKENS + 1]
    table = prompt_table(FIRST, other, shorter)
    assert chosen_keys(table, FIRST) == keys(FIRST, 3) | keys(shorter, 3)
    assert next_key(refs(IDENTITY, FIRST)[2].key, other[3 * CHUNK_TOKENS :])[:16] not in chosen_keys(table, FIRST)


class CountedArray(np.ndarray):
    """Counts the elements that are read of it, by arithmetic or by number."""

    num_read = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        CountedArray.num_read += max(np.size(one) for one in inputs)
        return getattr(ufunc, method)(*(np.asarray(one) for one in inputs), **options)

    def __getitem__(self, place: Any) -> Any:
        CountedArray.num_read += np.size(place)
        return np.asarray(self)[place]


def elements_read(num_chunks: int) -> int:
    """How many elements of the chunks' parents are looked at to choose a prompt of so many chunks."""
    tokens = document(num_chunks * CHUNK_TOKENS)
    candidates = Candidates.of(prompt_table(tokens), NOW_MS)
    family = replace(candidates.family, parents=candidates.family.parents.view(CountedArray))
    CountedArray.num_read = 0
    root = root_key(IDENTITY.fingerprint)
    # What comes behind the prompt's end is not there, so that every chunk is looked at on its own.
    chosen = choose_prompt(replace(candidates, family=family), root, token_words([*tokens, *tokens[:4]]), CHUNK_TOKENS)
    assert chosen.all()
    return CountedArray.num_read


def test_a_prompt_twice_as_long_takes_twice_the_work():
    assert elements_read(400) <= 2.1 * elements_read(200)


@settings(max_examples=50)
@given(st.integers(0, 20), st.integers(0, 20))
def test_a_prompt_never_leaves_an_orphan(length: int, shared: int):
    other = [*FIRST[:shared], *document(9, seed=3)]
    table = prompt_table(FIRST, other)
    candidates = Candidates.of(table, NOW_MS)
    chosen = choose_prompt(candidates, root_key(IDENTITY.fingerprint), token_words(FIRST[:length]), CHUNK_TOKENS)
    assert (candidates.family.closed(chosen) == chosen).all()
