"""A store in a directory, as the tests of the store have it."""

from tests.store.conftest import identity, namespace, root, store

__all__ = ["identity", "namespace", "root", "store"]
