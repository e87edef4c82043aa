"""`migrate` and `compress` on real object stores: there, answered from there, and back again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.migrate import MigrateOptions, MigrateResult, apply_migrate, plan_migrate
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.encodings import get_encoding
from lmcache_format.names import chunks_directory
from tests.servers import Bucket
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, read_kv, store_of_kv
from tests.store.pattern import document

pytestmark = pytest.mark.slow
TOKENS = document(12 * CHUNK_TOKENS + 3)
NUM_SHARDS = 13


@pytest.fixture(params=["s3", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    bucket: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return bucket.url(f"store-{os.urandom(6).hex()}")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with store_of_kv(tmp_path / "src", TOKENS) as made:
        yield made


def migrate(source: Store, target: Store, **options: Any) -> MigrateResult:
    return apply_migrate(source, target, plan_migrate(source, target, MigrateOptions(**options)))


def hit(store: Store) -> int:
    with store.namespace(KV_IDENTITY, missing_ok=True) as namespace:
        return read_kv(namespace, TOKENS)


def num_objects(store: Store) -> int:
    return sum(1 for _ in store.backend.list(chunks_directory(KV_IDENTITY.fingerprint)))


def test_there_and_back_with_the_source_deleted(source: Store, url: str, tmp_path: Path) -> None:
    with Store.create(url) as cloud:
        moved = migrate(source, cloud, encoding=get_encoding("bfx"), delete_source=True)
        assert (moved.num_copied, moved.num_deleted, moved.is_whole) == (NUM_SHARDS, NUM_SHARDS, True)
        assert (num_objects(source), num_objects(cloud)) == (0, NUM_SHARDS)
        assert (hit(source), hit(cloud)) == (0, len(TOKENS))
        assert verify(cloud).num_good == NUM_SHARDS
        assert migrate(source, cloud, encoding=get_encoding("bfx"), delete_source=True) == MigrateResult()
        with Store.create(str(tmp_path / "back")) as back:
            again = migrate(cloud, back, delete_source=True)
            assert (again.num_copied, again.num_deleted, again.is_whole) == (NUM_SHARDS, NUM_SHARDS, True)
            assert (num_objects(cloud), hit(cloud), hit(back)) == (0, 0, len(TOKENS))


def test_compress_in_the_bucket(source: Store, url: str) -> None:
    with Store.create(url) as cloud:
        assert migrate(source, cloud).num_copied == NUM_SHARDS
        done = apply_compress(cloud, plan_compress(cloud, CompressOptions(threads=4)))
        assert (done.num_encoded, done.num_removed, done.is_whole) == (NUM_SHARDS, NUM_SHARDS, True)
        assert hit(cloud) == len(TOKENS)
        assert sweep(cloud, grace_ms=0).num_swept == NUM_SHARDS
        assert (num_objects(cloud), hit(cloud)) == (NUM_SHARDS, len(TOKENS))
