"""What a compaction may supersede: all that was read, even if superseded before, and nothing that was not read."""

from __future__ import annotations

from pathlib import Path

from lmcache_cli.backends import Durability
from lmcache_cli.store import Namespace, Store
from lmcache_cli.store.index import Index
from lmcache_format.identity import Identity
from lmcache_format.names import new_ulid
from tests.store.pattern import document, hit, put_document


def test_compaction_leaves_newer_segments_alone(store: Store, namespace: Namespace, root: Path, identity: Identity):
    put_document(namespace, document(16))
    namespace.flush()
    (written,) = root.rglob("*.lmi")
    data = bytearray(written.read_bytes())
    data[8:12] = (9).to_bytes(4, "little")  # the version
    newer = written.with_name(f"{new_ulid(2**40)}-newer.lmi")
    newer.write_bytes(data)
    namespace.compact()
    with store.namespace(identity, create=True) as other:
        put_document(other, document(32))
        other.flush()
        other.compact()
    index = Index(store.backend, identity.fingerprint)
    assert [(problem.path, problem.is_newer) for problem in index.problems] == [(str(newer.relative_to(root)), True)]
    assert newer.exists()
    assert index.manifest.live_segments == 1
    with store.namespace(identity) as reader:
        assert hit(reader, document(32)) == 32


def test_who_reads_the_newest_segment_reads_no_older_one(store: Store, namespace: Namespace, identity: Identity):
    for length in (8, 16, 24):
        put_document(namespace, document(length))
        namespace.flush()
        with store.namespace(identity, create=True) as other:
            other.compact()
    index = Index(store.backend, identity.fingerprint)
    assert (index.manifest.live_segments, len(index.state)) == (1, 6)


def test_superseded_segments_go_after_the_grace_time(store: Store, namespace: Namespace, root: Path):
    for length in (8, 16, 24):
        put_document(namespace, document(length))
        namespace.flush()
        namespace.compact()
    assert len(list(root.rglob("*.lmi"))) > 1
    manifest = Index(store.backend, namespace.fingerprint).manifest
    manifest.refresh()
    manifest.compact(namespace.state(), "w", Durability.NONE, grace_ms=-1_000_000)
    assert len(list(root.rglob("*.lmi"))) == 1
