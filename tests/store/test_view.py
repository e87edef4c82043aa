"""`View.match` against a model that any reader can check: sets of cells, one chunk at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_cli.store.manifest import Pending, segment_of_pending
from lmcache_cli.store.state import Entry, State, empty_state, merge
from lmcache_cli.store.view import View
from lmcache_format.geometry import Part
from lmcache_format.keys import ChunkKey, KeyList
from lmcache_format.segment import key_number
from tests.store.made_segments import CHUNK_TOKENS, ENCODINGS, FINGERPRINT, KEYS, PARTS, WHOLE


def can_read(encoding: str) -> bool:
    return encoding in ("raw", "bfx")


def cells(part: Part) -> set[tuple[int, int]]:
    """Layers × heads."""
    heads = range(part.head_start or 0, part.head_stop or 1)
    return {(layer, head) for layer in range(part.layer_start, part.layer_stop) for head in heads}


def state_of(entries: list[Entry]) -> State:
    return merge([segment_of_pending(FINGERPRINT, Pending(list(entries)), "w", 0)])


def entry(
    key: bytes,
    number: int,
    part: Part = WHOLE,
    encoding: str = "raw",
    *,
    num_tokens: int = CHUNK_TOKENS,
    parent: bytes = KEYS[0],
) -> Entry:
    return Entry(key[:16], key_number(parent), 0, num_tokens, part, encoding, f"{number:016x}", 4096, number)


class ViewMachine(RuleBasedStateMachine):
    """Shards come and go, the view is rebuilt now and then; it always answers as the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.need = WHOLE
        self.entries: list[Entry] = []
        self.dropped: set[str] = set()
        self.view = self.made()

    def made(self) -> View:
        view = View(state_of(self.entries), self.need, can_read, CHUNK_TOKENS)
        for known in self.entries:
            if known.nonce in self.dropped:
                view.drop(known)
        return view

    @rule(
        key=st.sampled_from(KEYS),
        part=st.sampled_from(PARTS),
        encoding=st.sampled_from(ENCODINGS),
        num_tokens=st.sampled_from((CHUNK_TOKENS, CHUNK_TOKENS, 3)),
        parent=st.sampled_from(KEYS),
    )
    def add(self, key: bytes, part: Part, encoding: str, num_tokens: int, parent: bytes) -> None:
        if any(e.key == key[:16] and e.part == part and e.encoding == encoding for e in self.living()):
            return
        made = entry(key, len(self.entries) + 1, part, encoding, num_tokens=num_tokens, parent=parent)
        self.entries.append(made)
        self.view.add(made)

    @rule(number=st.integers(0, 30))
    def add_again(self, number: int) -> None:
        if number < len(self.entries):
            self.view.add(self.entries[number])

    @rule(number=st.integers(0, 30))
    def drop(self, number: int) -> None:
        if number < len(self.entries):
            self.dropped.add(self.entries[number].nonce)
            self.view.drop(self.entries[number])

    @rule(need=st.sampled_from(PARTS))
    def rebuild(self, need: Part) -> None:
        self.need = need
        self.view = self.made()

    def living(self) -> list[Entry]:
        return [known for known in self.entries if known.nonce not in self.dropped]

    def readable(self, key: bytes) -> list[Entry]:
        return [known for known in self.living() if known.key == key[:16] and can_read(known.encoding)]

    def is_present(self, key: bytes) -> bool:
        covered = set().union(*(cells(known.part) for known in self.readable(key)))
        return cells(self.need) <= covered

    @invariant()
    def every_key_is_present_as_in_the_model(self) -> None:
        for key in KEYS:
            assert self.view.is_present(key) == self.is_present(key)
            assert self.view.match(KeyList(key)) == int(self.is_present(key))
            assert {e.nonce for e in self.view.entries(key)} == {e.nonce for e in self.readable(key)}

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=2, max_size=12))
    def match(self, keys: list[bytes]) -> None:
        present = [self.is_present(key) for key in keys]
        expected = present.index(False) if False in present else len(keys)
        assert self.view.match(KeyList(b"".join(keys))) == expected

    @rule(parent=st.sampled_from(KEYS), key=st.sampled_from(KEYS))
    def tails(self, parent: bytes, key: bytes) -> None:
        found = list(self.view.tails(parent, 0, CHUNK_TOKENS - 1, lambda num_tokens: ChunkKey(key)))
        tails = [e for e in self.readable(key) if e.num_tokens < CHUNK_TOKENS]
        if found:
            assert found == [(key, 3)]
            assert tails
            assert self.is_present(key)
        if self.is_present(key) and any(e.parent == key_number(parent) for e in tails):
            assert found


TestView = ViewMachine.TestCase
TestView.settings = settings(max_examples=80, stateful_step_count=25)


@pytest.mark.parametrize("count", [1, 8, 63, 64, 65, 80, 130])
def test_any_number_of_parts_makes_a_chunk_present(count: int) -> None:
    parts = [Part(layer, layer + 1, 0, 4) for layer in range(count)]
    entries = [entry(KEYS[0], number + 1, part) for number, part in enumerate(parts)]
    need = Part(0, count, 0, 4)
    assert View(state_of(entries), need, can_read, CHUNK_TOKENS).match(KeyList(KEYS[0])) == 1
    lacking = View(state_of(entries[:-1]), need, can_read, CHUNK_TOKENS)
    assert lacking.match(KeyList(KEYS[0])) == 0
    lacking.add(entries[-1])
    assert lacking.match(KeyList(KEYS[0])) == 1


def test_a_whole_prompt_is_matched_up_to_its_first_gap() -> None:
    keys = [int(number).to_bytes(8, "big") * 4 for number in np.random.default_rng(0).permutation(1000)]
    entries = [entry(key, number + 1) for number, key in enumerate(keys)]
    for gap in (0, 1, 500, 999):
        view = View(state_of(entries[:gap] + entries[gap + 1 :]), WHOLE, can_read, CHUNK_TOKENS)
        assert view.match(KeyList(b"".join(keys))) == gap
        view.add(entries[gap])
        assert view.match(KeyList(b"".join(keys))) == 1000


def test_nothing_matches_in_nothing() -> None:
    view = View(empty_state(), WHOLE, can_read, CHUNK_TOKENS)
    assert view.match(KeyList(b"")) == 0
    assert view.match(KeyList(KEYS[3])) == 0
    assert not list(view.tails(KEYS[3], 0, CHUNK_TOKENS, lambda num_tokens: ChunkKey(KEYS[3])))
