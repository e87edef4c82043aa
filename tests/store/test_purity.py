"""Asking changes nothing: after any number of matches every file and directory is as it was, times included."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.store import Namespace, Refused, Store, StoreTooNew
from lmcache_format.identity import Identity
from lmcache_format.names import superblock_path
from tests.store.pattern import document, hit, put_document

TOKENS = document(24, 7)


def snapshot(root: Path) -> dict[str, tuple[int, ...]]:
    """Size, times (not of access), inode and links of everything below."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = os.lstat(path)
        found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_nlink)
    return found


@pytest.mark.parametrize("times", range(1, 6))
def test_match_changes_no_file(store: Store, root: Path, identity: Identity, times: int) -> None:
    with store.namespace(identity, create=True) as writer:
        put_document(writer, TOKENS[:8], tail=False)
    before = snapshot(root)
    namespace = store.namespace(identity)
    for _ in range(times):
        assert namespace.match(TOKENS).num_tokens == 8
        assert namespace.match(document(9, 1)).num_tokens == 0
    namespace.refresh()
    assert snapshot(root) == before
    namespace.close()
    assert snapshot(root) == before
    with store.namespace(identity, create=True) as writer:
        put_document(writer, TOKENS)
        assert hit(writer, TOKENS) == len(TOKENS)


def test_match_of_shards_the_index_has_lost_changes_no_file(store: Store, root: Path, identity: Identity) -> None:
    with store.namespace(identity, create=True) as writer:
        put_document(writer, TOKENS, tail=False)
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    before = snapshot(root)
    namespace = store.namespace(identity)
    assert namespace.match(TOKENS).num_tokens == len(TOKENS)
    assert snapshot(root) == before
    namespace.close()
    with store.namespace(identity) as other:
        assert len(other.state()) == len(TOKENS) // 4


def test_a_match_that_is_cut_is_the_same_match(namespace: Namespace) -> None:
    put_document(namespace, TOKENS[:22])
    whole = namespace.match(TOKENS)
    assert whole.num_tokens == 22
    for limit in range(24):
        cut = whole.up_to(limit)
        expected = 22 if limit >= 22 else limit - limit % 4
        assert cut.num_tokens == expected
        assert sum(chunk.num_tokens for chunk in cut.chunks()) == expected


def test_a_store_this_release_must_not_write_to_stays_as_it_is(root: Path, identity: Identity) -> None:
    """A later release added a feature that only readers may ignore: no segment, no quarantine, no touch."""
    with Store.create(str(root)) as store:
        with store.namespace(identity, create=True) as writer:
            put_document(writer, TOKENS)
        newer = replace(store.superblock, generation=2, ro_compat=("folded-shards",))
    (root / superblock_path(2)).write_bytes(newer.to_json())
    victim = sorted(root.rglob("*.safetensors"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    before = snapshot(root)
    with Store.open(str(root)) as store:
        with pytest.raises(StoreTooNew):
            store.namespace(identity, create=True)
        with store.namespace(identity) as namespace:
            assert hit(namespace, TOKENS) < len(TOKENS)
            assert hit(namespace, TOKENS) < len(TOKENS)
            with pytest.raises(Refused):
                put_document(namespace, TOKENS)
            with pytest.raises(Refused):
                namespace.compact()
            namespace.flush()
    assert snapshot(root) == before
