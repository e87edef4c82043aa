"""A store in a directory, and a small model to keep in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.store import Namespace, Store
from lmcache_format.identity import Identity
from tests.store.pattern import document, put_document, tiny_identity

NUM_CHUNKS = 10
DOCUMENT = document(NUM_CHUNKS * 4)


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store.create(str(root)) as made:
        yield made


@pytest.fixture
def namespace(store: Store, identity: Identity) -> Iterator[Namespace]:
    with store.namespace(identity, create=True) as made:
        yield made


@pytest.fixture
def filled(root: Path, identity: Identity) -> Path:
    """A store with one document of ten chunks."""
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT)
    return root
