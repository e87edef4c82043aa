"""Keys: the same everywhere, for every way to pass tokens, and different for everything that changes the KV."""

from __future__ import annotations

import ast
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmcache_format.keys as keys_module
from lmcache_format import ChunkKey, Extra, Fingerprint, KeyInputError, chunk_keys, next_key, root_key
from lmcache_format.keys import MultimodalItem, chunk_extras, encode_extras, salt_digest, token_words

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "format" / "golden" / "keys.json").read_text("utf-8"))
FINGERPRINT = Fingerprint(GOLDEN["fingerprint"])
TOKENS = [(1009 + 7919 * i) % 49_152 for i in range(600)]
PRINT_KEYS = """
import sys
import numpy as np
from lmcache_format import chunk_keys, root_key
tokens = [(1009 + 7919 * i) % 49152 for i in range(600)]
tokens = {"list": list, "int64": np.int64, "int32": np.int32}[sys.argv[1]](tokens)
print(chunk_keys(root_key(sys.argv[2]), tokens, 256).blob.hex())
"""


def test_c01_keys_are_the_golden_ones() -> None:
    root = root_key(FINGERPRINT)
    full = chunk_keys(root, TOKENS, GOLDEN["chunk_tokens"])
    picture = Extra(1, (4).to_bytes(8, "little") + (6).to_bytes(4, "little") + b"sha256:picture")
    assert root.hex() == GOLDEN["root"]
    assert [key.hex() for key in full] == [GOLDEN["chunk_0"], GOLDEN["chunk_1"]]
    assert next_key(full[1], TOKENS[512:]).hex() == GOLDEN["tail_of_88"]
    assert root_key(FINGERPRINT, "a").hex() == GOLDEN["root_with_salt_a"]
    assert root_key(FINGERPRINT, "é").hex() == GOLDEN["root_with_salt_é"]
    assert chunk_keys(root_key(FINGERPRINT, "a"), TOKENS, 256)[0].hex() == GOLDEN["chunk_0_with_salt_a"]
    assert next_key(root, TOKENS[:256], [picture]).hex() == GOLDEN["chunk_0_with_picture"]


def test_c01_every_process_computes_the_golden_keys() -> None:
    runs = [(None, "list"), ("0", "list"), ("random", "list"), ("1", "list"), ("random", "int64"), ("1", "int32")]
    procs = []
    for seed, form in runs:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        command = [sys.executable, "-c", PRINT_KEYS, form, FINGERPRINT]
        procs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    found = {proc.communicate(timeout=60)[0].strip() for proc in procs}
    assert found == {GOLDEN["chunk_0"] + GOLDEN["chunk_1"]}


def test_c01_keys_never_come_from_the_built_in_hash() -> None:
    tree = ast.parse(Path(str(keys_module.__file__)).read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"hash", "id"}


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.int64,
        np.int32,
        np.uint32,
        np.uint64,
        np.uint16,
        lambda t: np.array(t, ">i4"),
        lambda t: np.repeat(np.array(t, np.int64), 2)[::2],
        lambda t: [np.int64(x) for x in t],
    ],
)
def test_c01_every_form_of_the_same_tokens_has_the_same_keys(form: Any) -> None:
    keys = chunk_keys(root_key(FINGERPRINT), form(TOKENS), 256)
    assert [key.hex() for key in keys] == [GOLDEN["chunk_0"], GOLDEN["chunk_1"]]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_a_chain_is_its_links_one_by_one(tokens: list[int], size: int) -> None:
    keys = chunk_keys(root_key(FINGERPRINT), tokens, size)
    assert len(keys) == len(tokens) // size
    parent = root_key(FINGERPRINT)
    for index, key in enumerate(keys):
        parent = next_key(parent, tokens[index * size : (index + 1) * size])
        assert key == parent


@given(st.lists(st.integers(0, 99), min_size=8, max_size=8), st.integers(0, 7), st.integers(100, 2**32 - 1))
def test_one_other_token_changes_its_key_and_all_later_ones_only(tokens: list[int], at: int, other: int) -> None:
    before = list(chunk_keys(root_key(FINGERPRINT), tokens, 2))
    tokens[at] = other
    after = list(chunk_keys(root_key(FINGERPRINT), tokens, 2))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // 2 for i in range(4)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_tails_of_other_tokens_or_lengths_have_other_keys(one: list[int], other: list[int]) -> None:
    root = root_key(FINGERPRINT)
    assert (next_key(root, one) == next_key(root, other)) == (one == other)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**64],
        [2**63, -1],
        [1.0],
        ["1"],
        [True],
        [None],
        [[1]],
        [[]],
        [[1], [1, 2]],
        "12",
        b"12",
        np.array(3),
        np.array([1.0]),
        np.array([[1]]),
        np.array([True]),
        np.array([-1], np.int8),
        np.array([2**40]),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(KeyInputError):
        next_key(root_key(FINGERPRINT), tokens)


def test_wrong_lengths_and_counts_are_refused() -> None:
    root = root_key(FINGERPRINT)
    for wrong in ("", "0" * 31, "0" * 33, "A" * 32, " " * 32, "g" * 32):
        with pytest.raises(KeyInputError):
            root_key(Fingerprint(wrong))
    with pytest.raises(KeyInputError):
        next_key(root, [])
    with pytest.raises(KeyInputError):
        next_key(ChunkKey(root[:31]), [1])
    with pytest.raises(KeyInputError):
        chunk_keys(ChunkKey(root[:31]), [1], 1)
    with pytest.raises(KeyInputError):
        chunk_keys(root, [1], 0)
    with pytest.raises(KeyInputError):
        chunk_keys(root, [1, 2], 1, [[]])
    with pytest.raises(KeyInputError):
        encode_extras([Extra(1 << 16, b"")])


SALTS = st.one_of(
    st.none(), st.sampled_from(["", "X", "X|Y", "X\0", "é", "e\u0301", "s" * 200, "a", b"", b"X", b"\xff"])
)


@given(SALTS, SALTS)
def test_c06_c07_salts_separate_keys_and_only_the_empty_salt_is_none(
    one: str | bytes | None, other: str | bytes | None
) -> None:
    def meaning(salt: str | bytes | None) -> bytes:
        return salt.encode() if isinstance(salt, str) else salt or b""

    keys = [next_key(root_key(FINGERPRINT, salt), [1, 2, 3]) for salt in (one, other)]
    assert (keys[0] == keys[1]) == (meaning(one) == meaning(other))


def test_c07_a_salt_enters_as_its_digest() -> None:
    assert salt_digest(None) == salt_digest("") == bytes(32)
    assert b"secret-tenant" not in salt_digest("secret-tenant")


EXTRAS = st.lists(
    st.builds(Extra, st.integers(0, 3), st.sampled_from([b"", b"X", b"X|Y", b"\0", b"\0\0\0\0\0\0", b"p" * 200])),
    max_size=4,
)


def decode_extras(data: bytes) -> list[Extra]:
    """The inverse of `encode_extras`, written from SPEC §5.3: that it exists proves that no two lists read alike."""
    extras = []
    while data:
        tag, size = struct.unpack_from("<HI", data)
        assert len(data) >= 6 + size
        extras.append(Extra(tag, data[6 : 6 + size]))
        data = data[6 + size :]
    return extras


@given(EXTRAS)
def test_c06_extras_can_be_decoded(extras: list[Extra]) -> None:
    assert decode_extras(encode_extras(extras)) == sorted(extras)


@given(EXTRAS, EXTRAS)
def test_c06_keys_are_equal_only_for_equal_extras(one: list[Extra], other: list[Extra]) -> None:
    root = root_key(FINGERPRINT)
    assert (next_key(root, [1], one) == next_key(root, [1], other)) == (sorted(one) == sorted(other))


@given(EXTRAS.filter(bool))
def test_c06_extras_never_read_as_tokens(extras: list[Extra]) -> None:
    data = encode_extras(extras)
    root = root_key(FINGERPRINT)
    as_tokens = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), "<u4")
    assert next_key(root, [1], extras) != next_key(root, np.concatenate([np.array([1], "<u4"), as_tokens]))


ITEM = st.builds(MultimodalItem, st.integers(0, 40), st.integers(1, 20), st.sampled_from(["", "a", "b", "a\0"]))


@given(st.lists(ITEM, max_size=3), st.lists(ITEM, max_size=3))
def test_c06_items_change_exactly_the_keys_of_chunks_they_touch(
    one: list[MultimodalItem], other: list[MultimodalItem]
) -> None:
    root, tokens = root_key(FINGERPRINT), [5] * 32
    chains = [chunk_keys(root, tokens, 8, [chunk_extras(items, 8 * i, 8) for i in range(4)]) for items in (one, other)]
    same = True
    for index in range(4):
        touching = [
            sorted(
                (i.start, i.num_tokens, i.identifier)
                for i in items
                if i.start < 8 * index + 8 and i.start + i.num_tokens > 8 * index
            )
            for items in (one, other)
        ]
        same = same and touching[0] == touching[1]
        assert (chains[0][index] == chains[1][index]) == same


def test_items_that_cannot_be_hashed_are_refused() -> None:
    for item in (MultimodalItem(0, -1, "a"), MultimodalItem(0, 1 << 32, "a"), MultimodalItem(0, 1, "\ud800")):
        with pytest.raises(KeyInputError):
            chunk_extras([item], -5, 50)


def test_a_key_list_is_a_sequence_of_keys() -> None:
    keys = chunk_keys(root_key(FINGERPRINT), TOKENS, 100)
    assert len(keys) == 6
    assert keys[-1] == list(keys)[5]
    assert list(keys.first(2)) == list(keys)[:2]
    with pytest.raises(IndexError):
        keys[6]
    assert len(chunk_keys(root_key(FINGERPRINT), [], 4)) == 0
    assert token_words([]).size == 0
