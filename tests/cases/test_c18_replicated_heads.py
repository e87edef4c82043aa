"""C18, reading: grouped heads, any number of ranks on both sides; every rank gets the heads the model gives it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Store
from lmcache_format.errors import GeometryError
from lmcache_format.geometry import Part, rank_part
from tests.store.pattern import document, put_document, refs, small_buffer, tiny_identity

TOKENS = document(4, 18)
RANKS = (1, 2, 4, 8)


@pytest.mark.parametrize(("heads", "source"), list(product(RANKS, RANKS)))
def test_all_64_combinations(tmp_path: Path, heads: int, source: int) -> None:
    """Head h holds the value h + 1 everywhere; replicas are the same shard, so they cannot differ."""
    identity = tiny_identity(kv_heads=heads)
    (ref,) = refs(identity, TOKENS)
    with Store.create(str(tmp_path / "s")) as store:
        for rank in range(source):
            part = rank_part(identity, rank, source)
            buffer = small_buffer(identity, part, 4)
            for tensor in buffer.tensors.values():
                tensor[...] = np.arange(part.head_start or 0, part.head_stop or 0)[:, None, None] + 1
            with store.namespace(identity, create=True, need=part) as writer:
                writer.put(buffer, key=ref.key, parent=ref.parent, depth=0)
        assert len(list((tmp_path / "s").rglob("*.safetensors"))) == min(heads, source)
        for target in RANKS:
            for rank in range(target):
                share = max(1, heads // target)
                first = rank * heads // target if target <= heads else rank // (target // heads)
                part = rank_part(identity, rank, target)
                assert part == Part(0, 2, first, first + share)
                with store.namespace(identity, need=part) as reader:
                    (buffer,), result = reader.load(reader.match(TOKENS))
                    assert result.num_tokens == 4
                    for tensor in buffer.tensors.values():
                        assert tensor.shape[0] == share
                        assert (tensor == (np.arange(share) + first + 1)[:, None, None]).all()


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (2, 3), (4, 3), (6, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(GeometryError):
        rank_part(tiny_identity(kv_heads=heads), 0, ranks)


def test_the_number_of_heads_is_recorded_not_derived(tmp_path: Path) -> None:
    """One rank of four says nothing about how many heads there are: a reader of the whole sees a gap."""
    identity = tiny_identity(kv_heads=8)
    with Store.create(str(tmp_path / "s")) as store:
        part = rank_part(identity, 0, 4)
        with store.namespace(identity, create=True, need=part) as writer:
            put_document(writer, TOKENS, part=part)
        with store.namespace(identity) as reader:
            assert reader.match(TOKENS).num_tokens == 0
        assert store.identity(identity.fingerprint).kv_heads == 8
