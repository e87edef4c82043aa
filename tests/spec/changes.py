"""Random, repeatable changes of sound objects, and the comparison of what two readers make of the result."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmcache_format import FormatError
from tests.spec.independent_reader.refusals import Refused

GOLDEN = Path(__file__).resolve().parents[2] / "format" / "golden"
STORES = sorted(GOLDEN.glob("v1-by-*/store"))
CHANGES = 100
"""Changed objects a test and seed."""
each_seed = pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 4, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 1 << 53, (1 << 53) + 1, 1 << 63,
    "", "a", "é", "\ud800", "x" * 513, "full", "sliding", "latent", "recurrent", "Full", "BF16", "bf16", "F4_E2M1",
    "auto", "F" * 32, "F" * 33, "z" * 33, "htd-2", "none", "raw", "l0-2h0-2", "l0-9999999", "l0-0", "xxh3-128:",
    "unverified:", "unverified:\0", "revision:a@b", "revision:@b", "revision:a@b@c", "sha256:" + "0" * 64,
    "sha256:" + "A" * 64, "0" * 32, "01m8j9nrk00000000000000001-a.lmi", [], {}, [[]], ["x"], [1], {"a": 1}, {"a": "1"},
]  # fmt: skip
"""What members of JSON are set to: limits, names of all kinds, wrong types."""


def agree(mine: Callable[..., Any], theirs: Callable[..., Any], *args: Any) -> tuple[Any, Any] | None:
    """What both readers made of an object, or None where both refuse it. Any other exception than a refusal fails."""
    try:
        found = mine(*args)
    except Refused as refusal:
        try:
            taken = theirs(*args)
        except FormatError:
            return None
        pytest.fail(f"{refusal}; taken by the code: {taken!r:.300}\n{args!r:.2000}")
    try:
        return found, theirs(*args)
    except FormatError as error:
        pytest.fail(f"refused by the code alone: {error}\n{args!r:.2000}")


def edited(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one to three members set, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        inner: list[Any] = []
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict | list):
                inner.append(one)
                waiting += one.values() if isinstance(one, dict) else one
        chosen = rng.choice(inner)
        places = list(chosen) if isinstance(chosen, dict) else list(range(len(chosen)))
        change = rng.choice(("set", "set", "set", "remove", "add"))
        new = copy.deepcopy(rng.choice(VALUES))
        if change == "add" and isinstance(chosen, dict):
            chosen[rng.choice(("zz", "a", "window", "kind", "dtype"))] = new
        elif change == "add":
            chosen.insert(rng.randint(0, len(chosen)), new)
        elif places and change == "set":
            chosen[rng.choice(places)] = new
        elif places:
            del chosen[rng.choice(places)]
    return value


def packed(value: Any) -> bytes:
    """Canonical where the value has a canonical form, and as near to it as can be where it has none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def patched(data: bytes, rng: random.Random, pieces: list[bytes], start: int = 0) -> bytes:
    """Data with one or two bytes from `start` on replaced by one of `pieces`, or one of them put in between."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2))):
        at = rng.randrange(start, len(changed))
        changed[at : at + rng.choice((0, 1, 1))] = rng.choice(pieces)
    return bytes(changed)
