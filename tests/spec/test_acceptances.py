"""Acceptances (SPEC §9.1): what one reader writes the other reads, and both refuse the same."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lmcache_format.acceptance import Acceptance
from lmcache_format.canonical_json import dump_canonical
from lmcache_format.errors import FormatError
from lmcache_format.identity import Fingerprint
from lmcache_format.names import acceptance_path
from tests.spec.independent_reader.acceptance import parse_acceptance
from tests.spec.independent_reader.refusals import Refused

MADE = Acceptance(
    Fingerprint("0123456789abcdef" * 2),
    {"engine": "transformers", "version": "5.19.0"},
    {"engine": "vllm", "version": "0.32.0", "device": "cpu é"},
    passed=True,
    relative_l2=0.017,
    cosine=-0.5,
    num_tokens=512,
    created_ms=1795910400000,
)


def test_what_is_written_is_read_and_lies_where_it_belongs():
    found = parse_acceptance(MADE.to_json())
    assert (found.passed, found.producer) == (MADE.passed, MADE.producer)
    assert found.path == acceptance_path(MADE.fingerprint, MADE.name)
    for producer in ({}, dict(MADE.producer), {**MADE.producer, "piece_tokens": 8}, {**MADE.producer, "version": "6"}):
        assert found.concerns(producer) == MADE.concerns(producer)


@pytest.mark.parametrize("relative_l2", [math.nan, math.inf, 1e30, 2.0])
@pytest.mark.parametrize("cosine", [math.nan, -math.inf, 0.5])
def test_a_probe_that_failed_counts_whatever_its_figures_are(relative_l2: float, cosine: float):
    failed = replace(MADE, passed=False, relative_l2=relative_l2, cosine=cosine)
    found = Acceptance.from_json(failed.to_json())
    assert (found.passed, found.name, parse_acceptance(failed.to_json()).passed) == (False, MADE.name, False)
    assert found.relative_l2 >= 2.0
    assert found.cosine <= 0.5


CHANGES: list[dict[str, Any]] = [
    {"later": [1, 2]},
    {"version": 2},
    {"version": "1"},
    {"version": True},
    {"format": "lmcache-store"},
    {"passed": 1},
    {"passed": None},
    {"producer": {"version": "1"}},
    {"producer": {"engine": 1}},
    {"consumer": ["engine"]},
    {"relative_l2": "nan"},
    {"relative_l2": "1e9"},
    {"relative_l2": ""},
    {"relative_l2": "00.10"},
    {"relative_l2": "1" * 17},
    {"cosine": 1},
    {"cosine": "+1"},
    {"cosine": "1."},
    {"cosine": "\u0661"},
    {"created": -1},
    {"created": True},
    {"num_tokens": "512"},
    {"fingerprint": 7},
    {"later": "x" * 65536},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:40])
def test_both_readers_take_and_refuse_the_same(change: dict[str, Any]):
    data = dump_canonical({**json.loads(MADE.to_json()), **change})
    assert refused(Acceptance.from_json, data) == refused(parse_acceptance, data)


@pytest.mark.parametrize("member", json.loads(MADE.to_json()))
def test_every_member_but_an_unknown_one_must_be_there(member: str):
    value = json.loads(MADE.to_json())
    del value[member]
    data = dump_canonical(value)
    assert refused(Acceptance.from_json, data)
    assert refused(parse_acceptance, data)


def test_any_other_form_of_the_same_is_refused():
    for data in (json.dumps(json.loads(MADE.to_json())).encode(), MADE.to_json() + b"\n", b"[" * 100_000, b"", b"[]"):
        assert refused(Acceptance.from_json, data)
        assert refused(parse_acceptance, data)


def refused(read: Any, data: bytes) -> bool:
    try:
        read(data)
    except (FormatError, Refused):
        return True
    return False
