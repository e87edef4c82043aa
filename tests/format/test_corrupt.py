"""Every file of `format/golden/corrupt` is refused by the check, and with the error class, that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_format import Identity
from tests.format.judge import judge

CORRUPT = Path(__file__).resolve().parents[2] / "format" / "golden" / "corrupt"
CASES = sorted(path.name for path in CORRUPT.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def identity() -> Identity:
    """The namespace that the lying shards claim to be of."""
    return Identity.from_json((CORRUPT / "ns.json").read_bytes())


@pytest.mark.parametrize("name", CASES)
def test_lie_is_refused(name: str, identity: Identity) -> None:
    expected = json.loads((CORRUPT / name / "expected.json").read_text("utf-8"))
    content = (CORRUPT / name / expected["file"]).read_bytes()
    refusal = judge(expected["path"], content, identity, expected.get("operation", "read"))
    assert refusal is not None, "accepted"
    assert (refusal.check, type(refusal.error).__name__) == (expected["check"], expected["error"]), str(refusal.error)


def test_there_is_a_case_for_every_kind_of_file() -> None:
    kinds = {name.split("-")[0] for name in CASES}
    assert kinds == {"encoded", "identity", "segment", "shard", "superblock"}
    assert len(CASES) > 250
