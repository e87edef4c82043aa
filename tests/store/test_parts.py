"""Chunks in parts: whatever grid wrote them, every other grid reads its own layers and heads, element for element."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_cli.store.coverage import covers, pick
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import Part, rank_part, whole_part
from lmcache_format.identity import AttentionKind, Identity
from lmcache_format.names import ShardName
from tests.store.pattern import document, hit, put_document, refs, small_buffer, tiny_identity, wrong_elements

TOKENS = document(11, 8)
RANKS = (1, 2, 4, 8)


def grid(identity: Identity, tensor_ranks: int, stages: int = 1) -> list[Part]:
    """The part of every rank, replicas included."""
    step = identity.layers // stages
    layers = [(stage * step, (stage + 1) * step) for stage in range(stages)]
    return [rank_part(identity, rank, tensor_ranks, span) for span in layers for rank in range(tensor_ranks)]


def write(store: Store, identity: Identity, parts: list[Part]) -> None:
    for part in parts:
        with store.namespace(identity, create=True, need=part) as writer:
            put_document(writer, TOKENS, part=part)


def read(store: Store, identity: Identity, part: Part) -> int:
    with store.namespace(identity, need=part) as reader:
        return hit(reader, TOKENS)


@pytest.mark.parametrize(("heads", "source"), list(product(RANKS, RANKS)))
def test_every_rank_reads_its_heads_whoever_wrote_them(store: Store, root: Path, heads: int, source: int) -> None:
    """C18: 64 combinations of heads, writers and readers; with more ranks than heads, replicas are one shard."""
    identity = tiny_identity(layers=2, kv_heads=heads)
    write(store, identity, grid(identity, source))
    shards = list(root.rglob("*.safetensors"))
    assert len(shards) == min(source, heads) * len(refs(identity, TOKENS))
    for target in RANKS:
        for part in set(grid(identity, target)):
            assert part.num_heads == max(1, heads // target)
            assert read(store, identity, part) == len(TOKENS)


@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 1), (2, 2)), ((2, 2), (1, 1)), ((4, 1), (1, 4)), ((1, 4), (4, 1)), ((2, 4), (4, 2)), ((4, 4), (2, 1))],
)
def test_stages_and_ranks_in_any_combination(store: Store, source: tuple[int, int], target: tuple[int, int]) -> None:
    identity = tiny_identity(layers=4, kv_heads=4)
    write(store, identity, grid(identity, *source))
    for part in grid(identity, *target):
        assert read(store, identity, part) == len(TOKENS)


def test_uneven_layer_ranges(store: Store) -> None:
    identity = tiny_identity(layers=5, kv_heads=2)
    write(store, identity, [Part(0, 1, 0, 2), Part(1, 4, 0, 1), Part(1, 4, 1, 2), Part(4, 5, 0, 2)])
    for part in (whole_part(identity), Part(0, 5, 1, 2), Part(1, 3, 0, 2), Part(3, 5, 0, 1), Part(2, 3, 1, 2)):
        assert read(store, identity, part) == len(TOKENS)


def test_overlapping_parts_are_read_once_each_place(store: Store) -> None:
    identity = tiny_identity(layers=4, kv_heads=4)
    write(store, identity, [Part(0, 3, 0, 3), Part(1, 4, 1, 4), Part(0, 1, 3, 4), Part(3, 4, 0, 1), Part(1, 3, 0, 4)])
    assert read(store, identity, whole_part(identity)) == len(TOKENS)


def test_latents_have_no_heads_to_share(store: Store) -> None:
    identity = tiny_identity(layers=4, kind=AttentionKind.LATENT)
    write(store, identity, [Part(0, 2), Part(2, 4)])
    for part in (Part(0, 4), Part(1, 3), Part(3, 4)):
        assert read(store, identity, part) == len(TOKENS)


@pytest.mark.parametrize("encoding", ["raw", "bfx"])
def test_encoded_parts_are_cut_as_raw_ones_are(store: Store, encoding: str) -> None:
    identity = tiny_identity(layers=4, kv_heads=4)
    for part in grid(identity, 2, 2):
        options = WriterOptions(encoding=encoding)
        with store.namespace(identity, create=True, writer=options) as writer:
            put_document(writer, TOKENS, part=part)
    for part in {*grid(identity, 4), *grid(identity, 1), Part(1, 3, 1, 3)}:
        assert read(store, identity, part) == len(TOKENS)


@pytest.mark.parametrize("index_is_lost", [False, True])
def test_a_missing_part_ends_the_match_for_those_who_need_it(store: Store, root: Path, index_is_lost: bool) -> None:
    """C16: rank (1, 0) lost its shard of the third chunk: whoever needs it sees two chunks, all others three."""
    identity = tiny_identity(layers=4, kv_heads=4)
    tokens = document(16, 3)
    parts = grid(identity, 2, 2)
    for part in parts:
        with store.namespace(identity, create=True, need=part) as writer:
            put_document(writer, tokens, part=part)
    lost = ShardName(identity.fingerprint, refs(identity, tokens)[2].key, parts[2], "raw")
    (root / lost.path).unlink()
    if index_is_lost:
        for segment in root.rglob("*.lmi"):
            segment.unlink()
    for need in [whole_part(identity), Part(2, 4, 0, 4), Part(0, 4, 0, 1), *parts]:
        expected = 8 if need.intersect(parts[2]) else 16
        with store.namespace(identity, need=need) as reader:
            assert hit(reader, tokens) == expected
            assert reader.match(tokens).num_tokens == expected


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(GeometryError):
        rank_part(tiny_identity(kv_heads=3), 0, 2)


def test_a_writer_of_a_part_the_store_has_already_writes_nothing(store: Store, root: Path) -> None:
    identity = tiny_identity(layers=4, kv_heads=4)
    write(store, identity, [whole_part(identity)])
    before = sorted(root.rglob("*.safetensors"))
    write(store, identity, grid(identity, 4))
    assert sorted(root.rglob("*.safetensors")) == before


def test_a_reader_that_needs_one_layer_reads_one_layer(store: Store) -> None:
    identity = tiny_identity(layers=8, kv_heads=8, head_dim=64, chunk_tokens=64)
    tokens = document(64, 2)
    with store.namespace(identity, create=True) as writer:
        put_document(writer, tokens)
    with store.namespace(identity, need=Part(3, 4, 0, 8)) as reader:
        buffers, result = reader.load(reader.match(tokens))
        assert buffers[0].size_bytes == 8 * 64 * 64 * 2 * 2
        assert buffers[0].size_bytes <= result.bytes_read <= buffers[0].size_bytes + 65_536


rectangles = st.builds(
    lambda a, b, c, d: Part(min(a, b), max(a, b) + 1, min(c, d), max(c, d) + 1),
    *(st.integers(0, 4) for _ in range(4)),
)


def cells(part: Part) -> set[tuple[int, int]]:
    assert part.head_start is not None
    assert part.head_stop is not None
    return set(product(range(part.layer_start, part.layer_stop), range(part.head_start, part.head_stop)))


@given(st.lists(rectangles, max_size=6), rectangles)
def test_covers_and_pick_agree_with_sets_of_cells(parts: list[Part], need: Part) -> None:
    union = set().union(*(cells(part) for part in parts))
    assert covers(parts, need) == (cells(need) <= union)
    pieces = pick(parts, need)
    taken = [cell for _, piece in pieces for cell in cells(piece)]
    assert len(taken) == len(set(taken))
    assert set(taken) == cells(need) & union
    assert all(cells(piece) <= cells(parts[number]) for number, piece in pieces)


def test_read_into_the_callers_own_part(namespace: Namespace) -> None:
    """A buffer may ask for less than the namespace's need."""
    put_document(namespace, TOKENS)
    chunk = refs(namespace.identity, TOKENS)[1]
    for part in (Part(0, 1, 0, 2), Part(1, 2, 1, 2)):
        buffer = small_buffer(namespace.identity, part, 4)
        assert namespace.read([chunk], [buffer]).num_tokens == 4
        assert wrong_elements(namespace.identity, buffer, TOKENS[4:8], 4) == 0
