"""Parts, ranks and bytes of tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import (
    AttentionKind,
    Dtype,
    GeometryError,
    Identity,
    LayerGroup,
    Part,
    TensorSpec,
    part_bytes,
    part_tensors,
    rank_part,
    whole_part,
)
from lmcache_format.geometry import check_part, raw_bytes, tensors_of
from tests.format.identities import identities, plain_identity

LATENT = plain_identity(kv_heads=1, head_dim_k=24, head_dim_v=0, groups=(LayerGroup(AttentionKind.LATENT, 0, 2),))
ENDS = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda ends: ends[0] < ends[1])
PARTS = st.builds(lambda layers, heads: Part(*layers, *heads), ENDS, ENDS | st.just((None, None)))


@given(PARTS)
def test_a_part_survives_its_text(part: Part) -> None:
    assert Part.parse(str(part)) == part


@pytest.mark.parametrize(
    "text",
    [
        "",
        "l0",
        "l0-0",
        "l2-1",
        "l00-1",
        "l0-01",
        "l0-1h",
        "l0-1h0",
        "l0-1h1-1",
        "L0-1",
        "l0-1 ",
        "l0-1\n",
        "l-1-2",
        "l0-99999999",
        "l٠-1",
    ],
)
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(GeometryError):
        Part.parse(text)


def test_parts_that_could_not_be_read_back_are_not_made() -> None:
    for ends in (
        (0, 0),
        (2, 1),
        (-1, 1),
        (0, 1, 0, 0),
        (0, 1, 0, None),
        (0, 1, None, 1),
        (0, 10_000_000),
        (0, 1, 0, 10_000_000),
    ):
        with pytest.raises(GeometryError):
            Part(*ends)


def cells(part: Part) -> set[tuple[int, int]]:
    """Every layer and head of a part, one by one; head -1 stands for a latent."""
    heads = [-1] if part.head_start is None or part.head_stop is None else range(part.head_start, part.head_stop)
    return set(itertools.product(range(part.layer_start, part.layer_stop), heads))


@given(PARTS, PARTS)
def test_covering_and_meeting_are_those_of_sets(one: Part, other: Part) -> None:
    assert one.covers(other) == (cells(one) >= cells(other))
    common = one.intersect(other)
    assert (set() if common is None else cells(common)) == cells(one) & cells(other)
    assert one.num_layers * one.num_heads == len(cells(one))


@given(identities(), st.integers(1, 16))
def test_tensors_tile_a_part_in_data_order(identity: Identity, num_tokens: int) -> None:
    num_tokens = min(num_tokens, identity.chunk_tokens)
    specs = part_tensors(identity, whole_part(identity), num_tokens)
    assert sum(spec.nbytes for spec in specs) == part_bytes(identity, whole_part(identity), num_tokens)
    assert [spec.layer for spec in specs] == sorted(spec.layer for spec in specs)
    sides = [spec.side for spec in specs[: len(specs) // identity.layers]]
    assert sides == (["latent"] if identity.is_latent else ["k", "v"])
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(spec.slab_bytes * spec.num_slabs == spec.nbytes for spec in specs)


def test_the_usual_slab_is_a_multiple_of_a_page() -> None:
    for dim, dtype in itertools.product((64, 128), (Dtype.BF16, Dtype.F8_E4M3)):
        identity = plain_identity(head_dim_k=dim, head_dim_v=dim, dtype=dtype, chunk_tokens=256)
        assert all(spec.slab_bytes % 4096 == 0 for spec in part_tensors(identity, whole_part(identity), 256))


@pytest.mark.parametrize(("heads", "ranks"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8))))
def test_c18_ranks_share_the_heads_evenly_or_replicate_them(heads: int, ranks: int) -> None:
    identity = plain_identity(kv_heads=heads)
    parts = [rank_part(identity, rank, ranks) for rank in range(ranks)]
    assert set.union(*map(cells, parts)) == cells(whole_part(identity))
    assert {part.num_heads for part in parts} == {max(1, heads // ranks)}
    assert [parts.count(part) for part in parts] == [max(1, ranks // heads)] * ranks


def test_c18_heads_that_do_not_divide_are_refused() -> None:
    for rank, ranks in ((0, 2), (3, 3), (-1, 1), (0, 0)):
        with pytest.raises(GeometryError):
            rank_part(plain_identity(kv_heads=3), rank, ranks)


def test_latents_have_no_heads_to_share() -> None:
    assert [str(rank_part(LATENT, rank, 4)) for rank in range(4)] == ["l0-2"] * 4
    assert str(rank_part(LATENT, 0, 4, layers=(1, 2))) == "l1-2"
    with pytest.raises(GeometryError):
        check_part(LATENT, Part(0, 2, 0, 1))


@pytest.mark.parametrize("part", [Part(0, 3, 0, 4), Part(0, 2, 0, 5), Part(0, 2)])
def test_parts_outside_the_model_are_refused(part: Part) -> None:
    with pytest.raises(GeometryError):
        part_tensors(plain_identity(), part, 4)


@pytest.mark.parametrize("num_tokens", [-1, 0, 17])
def test_token_counts_outside_the_chunk_are_refused(num_tokens: int) -> None:
    with pytest.raises(GeometryError):
        part_tensors(plain_identity(), whole_part(plain_identity()), num_tokens)


def test_impossible_shapes_are_refused_before_memory_is_spent() -> None:
    for part, dim_k, dim_v in (
        (Part(0, 4097), 1, 0),
        (Part(0, 1, 0, 4097), 1, 1),
        (Part(0, 1), 4, 4),
        (Part(0, 1, 0, 1), 4, 0),
        (Part(0, 1), 0, 0),
    ):
        with pytest.raises(GeometryError):
            tensors_of(part, 1, Dtype.BF16, dim_k, dim_v)


BASE = np.random.default_rng(1).standard_normal((8, 16, 64)).astype(np.float16)
VIEWS: list[Any] = [
    BASE,
    BASE.transpose(1, 0, 2).copy().transpose(1, 0, 2),
    np.asfortranarray(BASE),
    np.repeat(BASE, 2, axis=2)[..., ::2],
    BASE.astype(">f2"),
    BASE[::-1].copy()[::-1],
]


@pytest.mark.parametrize("view", VIEWS, ids=["plain", "transposed", "fortran", "strided", "big-endian", "reversed"])
def test_c20_every_view_of_the_same_values_is_stored_as_the_same_bytes(view: Any) -> None:
    spec = TensorSpec("layers.0.k", 0, "k", (8, 16, 64), Dtype.F16)
    stored = raw_bytes(spec, view)
    assert bytes(stored) == BASE.astype("<f2").tobytes()
    assert np.array_equal(np.frombuffer(stored, "<f2").reshape(spec.shape), BASE)


@pytest.mark.parametrize(
    "array",
    [
        BASE[:, :, :0],
        np.float16(1.0).reshape(()),
        BASE.transpose(1, 0, 2),
        BASE.astype(np.float32),
        BASE.view(np.uint16),
    ],
)
def test_c20_arrays_of_another_shape_or_type_are_refused(array: Any) -> None:
    with pytest.raises(GeometryError):
        raw_bytes(TensorSpec("layers.0.k", 0, "k", (8, 16, 64), Dtype.F16), array)
