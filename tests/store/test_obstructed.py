"""Something that is no file stands where a shard belongs: a writer moves it aside and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.store import Namespace, PutStatus, Store
from lmcache_cli.store.verify import verify
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, put_document

DOCUMENT = document(12)


@pytest.mark.parametrize(
    "stand_in", [Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: (path.mkdir(), (path / "x").touch())]
)
def test_a_writer_moves_it_aside(
    store: Store, namespace: Namespace, root: Path, identity: Identity, stand_in: Callable[[Path], object]
):
    put_document(namespace, DOCUMENT)
    namespace.flush()
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    victim = sorted((root / "ns").rglob("*.safetensors"))[1]
    victim.unlink()
    stand_in(victim)
    with store.namespace(identity, create=True) as writer:
        assert sorted(status.value for status in put_document(writer, DOCUMENT)).count(PutStatus.STORED.value) == 1
        assert hit(writer, DOCUMENT) == 12
    assert len(list((root / "quarantine").iterdir())) == 1
    assert verify(store).findings == []
