"""Shards that were away for a moment: a directory renamed and renamed back, a disk below the store not mounted yet."""

from __future__ import annotations

from pathlib import Path

from lmcache_cli.store import Store
from lmcache_cli.store.sweep import sweep
from tests.store.pattern import document, hit, put_document, tiny_identity

TOKENS = document(4 * 3 + 3)
IDENTITY = tiny_identity()


def test_shards_that_come_back_are_found_again_and_never_swept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store.create(str(root)) as store:
        with store.namespace(IDENTITY, create=True) as namespace:
            put_document(namespace, TOKENS)
        (shards,) = root.glob("ns/*/c")
        with store.namespace(IDENTITY) as reader:
            shards.rename(tmp_path / "away")
            assert hit(reader, TOKENS) == 0
        (tmp_path / "away").rename(shards)
        with store.namespace(IDENTITY) as reader:
            found = hit(reader, TOKENS)
        deleted = sweep(store, grace_ms=0).num_swept
    assert (found, deleted) == (len(TOKENS), 0)
