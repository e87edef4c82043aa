"""Identities: equal exactly where KV may be exchanged, and named by what they say."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import AttentionKind, Dtype, Fingerprint, Identity, IdentityError, LayerGroup, next_key, root_key
from tests.format.identities import HEX64, identities, plain_identity


@given(identities())
def test_an_identity_survives_its_file(identity: Identity) -> None:
    data = identity.canonical_json()
    again = Identity.from_json(data, identity.fingerprint)
    assert again == identity
    assert hash(again) == hash(identity)
    assert again.canonical_json() == data
    assert identity.fingerprint == hashlib.sha256(data).hexdigest()[:32]


@given(identities(), identities(), st.sampled_from([None, "", "X"]), st.sampled_from([None, "", "X"]))
def test_c06_keys_are_equal_only_for_equal_identities_and_salts(
    one: Identity, other: Identity, salt: str | None, other_salt: str | None
) -> None:
    keys = [next_key(root_key(i.fingerprint, s), range(4)) for i, s in ((one, salt), (other, other_salt))]
    assert (keys[0] == keys[1]) == (one == other and (salt or "") == (other_salt or ""))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "demo2"},
        {"weights": f"sha256:{HEX64[::-1]}"},
        {"weights": f"unverified:{HEX64}"},
        {"adapter": f"sha256:{HEX64}"},
        {"dtype": Dtype.F16},
        {"dtype": Dtype.F8_E4M3},
        {"scale": "per-tensor:1.0"},
        {"layers": 3},
        {"kv_heads": 2},
        {"head_dim_k": 16},
        {"head_dim_v": 16},
        {"groups": (LayerGroup(AttentionKind.SLIDING, 0, 2, 64),)},
        {"rope": {"rope_theta": "1.0"}},
        {"chunk_tokens": 32},
        {"groups": (LayerGroup(AttentionKind.FULL, 0, 1), LayerGroup(AttentionKind.FULL, 1, 2))},
    ],
)
def test_every_field_counts(change: dict[str, Any]) -> None:
    assert plain_identity(**change).fingerprint != plain_identity().fingerprint


def test_c04_dtypes_of_one_size_have_their_own_namespaces() -> None:
    assert len({plain_identity(dtype=dtype).fingerprint for dtype in Dtype}) == len(Dtype)
    scaled = [
        plain_identity(dtype=Dtype.F8_E4M3, scale=scale) for scale in ("none", "per-tensor:1.0", "per-tensor:0.5")
    ]
    assert len({identity.fingerprint for identity in scaled}) == 3


def test_c05_an_adapter_is_known_by_its_content() -> None:
    base, one, other = (plain_identity(adapter=a) for a in (None, f"sha256:{HEX64}", f"sha256:{HEX64[::-1]}"))
    assert len({base.fingerprint, one.fingerprint, other.fingerprint}) == 3
    assert base.is_verified
    assert one.is_verified
    assert not plain_identity(adapter="unverified:a").is_verified


def test_c13_chunk_sizes_have_their_own_namespaces() -> None:
    names = {size: plain_identity(chunk_tokens=size).fingerprint for size in (128, 256, 512)}
    assert len(set(names.values())) == 3
    by_default = {
        name: getattr(plain_identity(), name) for name in Identity.__dataclass_fields__ if name != "chunk_tokens"
    }
    assert Identity(**by_default).fingerprint == names[256]  # unset is 256


def test_unverified_never_equals_verified() -> None:
    verified = plain_identity(weights=f"sha256:{HEX64}")
    assert verified.is_verified
    assert plain_identity(weights="revision:org/model@0123").is_verified
    lookalike = plain_identity(weights=f"unverified:sha256:{HEX64}")
    assert not lookalike.is_verified
    assert lookalike.fingerprint != verified.fingerprint


def test_numbers_in_rope_are_text_so_that_one_value_has_one_spelling() -> None:
    for number in (10_000, 10_000.0, {"inner": [1]}):
        with pytest.raises(IdentityError):
            plain_identity(rope={"rope_theta": number})


def test_an_identity_shares_nothing_with_the_caller() -> None:
    inner = {"factor": "2.0"}
    identity = plain_identity(rope={"scaling": inner})
    before = identity.fingerprint
    inner["factor"] = "4.0"
    assert identity.fingerprint == before


def test_groups_may_come_in_any_sequence() -> None:
    identity = plain_identity()
    assert plain_identity(groups=list(identity.groups)) == identity


def test_another_name_than_its_own_is_refused() -> None:
    with pytest.raises(IdentityError, match="hash"):
        Identity.from_json(plain_identity().canonical_json(), Fingerprint("0" * 32))


def test_every_flipped_bit_of_an_identity_is_noticed() -> None:
    identity = plain_identity()
    data = identity.canonical_json()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IdentityError):
            Identity.from_json(bytes(flipped), identity.fingerprint)


@pytest.mark.parametrize("text", ["\ud800", "x" * (1 << 20)])
def test_names_that_cannot_be_stored_are_refused_at_once(text: str) -> None:
    with pytest.raises(IdentityError):
        plain_identity(model=text)


def test_a_dtype_is_one_of_the_enumeration() -> None:
    with pytest.raises(IdentityError):
        plain_identity(dtype="BF16")


def test_replacing_a_field_checks_again() -> None:
    with pytest.raises(IdentityError):
        replace(plain_identity(), chunk_tokens=0)
