"""Superblocks: which release may do what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import ChecksumMismatch, SuperblockError, UnsupportedVersion
from lmcache_format.superblock import Operation, Superblock

NAMES = st.lists(st.sampled_from(["packs", "leases", "é"]), max_size=2).map(tuple)
BLOCKS = st.builds(
    Superblock,
    store_id=st.sampled_from(["", "0" * 32, "é"]),
    created_ms=st.integers(0, 1 << 53),
    generation=st.integers(1, 999_999),
    writer=st.sampled_from(["", "lmcache-toolkit 0.1.0"]),
    compat=NAMES,
    ro_compat=NAMES,
    incompat=NAMES,
    require=st.fixed_dictionaries(dict.fromkeys(Operation, NAMES)),
)


@given(BLOCKS)
def test_a_superblock_survives(block: Superblock) -> None:
    data = block.to_json()
    assert Superblock.from_json(data, block.generation) == block
    assert Superblock.from_json(data).to_json() == data


@given(BLOCKS, st.sampled_from(Operation))
def test_unknown_features_refuse_what_they_must_and_nothing_else(block: Superblock, operation: Operation) -> None:
    changes = operation in (Operation.WRITE, Operation.PRUNE)
    needed = {*block.incompat, *block.require[operation], *(block.ro_compat if changes else ())}
    if needed:
        with pytest.raises(UnsupportedVersion):
            block.check(operation)
    else:
        block.check(operation)


def test_every_flipped_bit_is_noticed() -> None:
    data = Superblock("0" * 32, 1, compat=("packs",)).to_json()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((SuperblockError, ChecksumMismatch, UnsupportedVersion)):
            Superblock.from_json(bytes(flipped))


def test_a_superblock_under_another_name_is_refused() -> None:
    with pytest.raises(SuperblockError, match="another name"):
        Superblock.from_json(Superblock("x", 1, generation=2).to_json(), 1)
