"""A store that cannot be written to (a read-only mount, another user's, a snapshot) can be looked at and copied."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.backends import Unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.staging import new_staging_component
from lmcache_cli.backends.local.syscalls import SystemCalls
from lmcache_cli.store import Store
from lmcache_cli.store.compress import CompressOptions, plan_compress
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_cli.store.repair import plan_repair
from lmcache_cli.store.selection import Selection
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.targets import held_pins
from lmcache_cli.store.verify import verify
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

TOKENS = document(4 * 3 + 3)
IDENTITY = tiny_identity()


def _refused(*arguments: Any, **named: Any) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _read_only(root: Path) -> Store:
    calls = replace(
        SystemCalls(),
        create=_refused,
        mkdir=_refused,
        link=_refused,
        rename=_refused,
        rename_new=_refused,
        unlink=_refused,
    )
    return Store.open(LocalBackend(root, calls))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    root = tmp_path / "store"
    with Store.create(str(root)) as made, made.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
        last = refs(IDENTITY, TOKENS)[-1]
        namespace.label("doc", last.key, len(TOKENS), last.depth)
        namespace.pin(last.key)
    (root / "tmp" / new_staging_component()).write_bytes(b"left behind")
    return _read_only(root)


def test_it_is_read_listed_verified_and_explained(store: Store) -> None:
    with store.namespace(IDENTITY) as namespace:
        assert hit(namespace, TOKENS) == len(TOKENS)
    assert store_stats(store).total.num_chunks == 4
    assert len(held_pins(store, IDENTITY.fingerprint)) == 1
    assert plan_repair(store).num_changes == 0
    report = verify(store)
    assert (report.num_checked, report.num_damaged) == (4, 0)


def test_it_is_copied_with_its_pins(store: Store, tmp_path: Path) -> None:
    with Store.create(str(tmp_path / "other")) as target:
        assert apply_migrate(store, target, plan_migrate(store, target)).num_copied == 4
        with target.namespace(IDENTITY) as namespace:
            assert hit(namespace, TOKENS) == len(TOKENS)
        assert len(held_pins(target, IDENTITY.fingerprint)) == 1
        with pytest.raises(Unavailable, match="clock"):
            plan_migrate(store, target, MigrateOptions(delete_source=True))


def test_what_compressing_it_would_bring_is_told(store: Store) -> None:
    options = CompressOptions(selection=Selection(older_than_ms=-60_000))
    plan = plan_compress(store, options)
    assert plan.num_shards == 4
    assert plan.namespaces[0].expected_bytes is not None
