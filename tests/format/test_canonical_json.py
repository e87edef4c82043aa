"""Canonical JSON: one byte string for one value; all that is ambiguous is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import FormatError
from lmcache_format.canonical_json import MAX_DEPTH, MAX_INTEGER, dump_canonical, load_strict

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | UNICODE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(UNICODE, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_survives(value: Any) -> None:
    assert load_strict(dump_canonical(value)) == value


@given(VALUES)
def test_stock_json_reads_the_same_value_and_writes_the_same_bytes_from_any_spelling(value: Any) -> None:
    data = dump_canonical(value)
    assert json.loads(data) == value
    spelled = json.dumps(value, indent=3, ensure_ascii=True)
    assert dump_canonical(load_strict(spelled)) == data


def test_the_bytes_of_the_specification() -> None:
    assert dump_canonical({"b": [1, None, True], "a": 'é"\n'}) == '{"a":"é\\"\\n","b":[1,null,true]}'.encode()
    assert (
        dump_canonical({"é": 1, "z": 2, "\U0001f600": 3, "\uffee": 4})
        == '{"z":2,"é":1,"\uffee":4,"\U0001f600":3}'.encode()
    )


@pytest.mark.parametrize(
    "value", [1.0, float("nan"), {1: 2}, {"a": b""}, "\ud800", {"\udfff": 1}, MAX_INTEGER + 1, -MAX_INTEGER - 1, {1, 2}]
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        dump_canonical(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"1.0",
        b"1e3",
        b"NaN",
        b"-Infinity",
        b'{"a":1,"a":1}',
        b"\xff",
        b"\xef\xbb\xbf1",
        b"9007199254740993",
        b"1" * 99,
        b"1 2",
        b"'a'",
        b'"\n"',
        b"01",
    ],
)
def test_what_is_ambiguous_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        load_strict(text)


def test_nesting_has_one_limit_for_both_directions() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert load_strict(dump_canonical(value)) == value
    with pytest.raises(FormatError):
        dump_canonical([value])
    with pytest.raises(FormatError):
        load_strict("[" * (MAX_DEPTH + 1) + "1" + "]" * (MAX_DEPTH + 1))
    assert load_strict("[" + "[]," * 100 + "[]]")
