"""C13: writer and reader disagree on tokens per chunk. They never meet: the number is part of the namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.store import NoSuchNamespace, Store
from lmcache_format.identity import CHUNK_TOKENS, Identity
from lmcache_format.names import ShardName
from tests.store.pattern import document, hit, put_document, refs, renamed, tiny_identity

TOKENS = document(1024, 13)
SIZES = (128, 256, 512)


def with_chunks_of(chunk_tokens: int) -> Identity:
    return tiny_identity(layers=1, kv_heads=1, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("configured", [128, 512])
def test_another_chunk_size_hits_nothing_and_coexists(tmp_path: Path, configured: int) -> None:
    written, other = with_chunks_of(256), with_chunks_of(configured)
    assert written.fingerprint != other.fingerprint
    with Store.create(str(tmp_path / "s")) as store:
        with store.namespace(written, create=True) as namespace:
            put_document(namespace, TOKENS)
        with pytest.raises(NoSuchNamespace):
            store.namespace(other)
        with store.namespace(other, create=True) as namespace:
            assert namespace.match(TOKENS).num_tokens == 0
            put_document(namespace, TOKENS)
            assert hit(namespace, TOKENS) == 1024
        with store.namespace(written) as namespace:  # the control
            assert hit(namespace, TOKENS) == 1024
            assert len(namespace.state()) == 4
        assert set(store.fingerprints()) == {written.fingerprint, other.fingerprint}


def test_unset_is_one_number_everywhere() -> None:
    assert renamed(with_chunks_of(CHUNK_TOKENS)).chunk_tokens == 256
    assert Identity.__dataclass_fields__["chunk_tokens"].default == CHUNK_TOKENS == 256


def test_every_record_says_how_many_tokens_its_writer_cut(tmp_path: Path) -> None:
    """A shard of another chunk size that comes under the name of ours is no hit, whatever its shape."""
    ours, theirs = with_chunks_of(256), with_chunks_of(512)
    tokens = TOKENS[:256]
    with Store.create(str(tmp_path / "s")) as store:
        for identity in (ours, theirs):
            with store.namespace(identity, create=True) as namespace:
                put_document(namespace, tokens)
        paths = []
        for identity in (ours, theirs):
            with store.namespace(identity) as namespace:
                part = namespace.need
            (ref,) = refs(identity, tokens)
            paths.append(tmp_path / "s" / ShardName(identity.fingerprint, ref.key, part, "raw").path)
        assert paths[0].stat().st_size == paths[1].stat().st_size  # nothing but what they say differs
        paths[0].write_bytes(paths[1].read_bytes())
        with store.namespace(ours) as namespace:
            assert hit(namespace, tokens) == 0
        with store.namespace(theirs) as namespace:
            assert hit(namespace, tokens) == 256
