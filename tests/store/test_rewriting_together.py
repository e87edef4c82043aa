"""Compressors, a mover, writers and sweeps at once on one store: no chunk is ever lost, no reader gets a wrong byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from lmcache_cli.store import Store
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.encodings import get_encoding
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

TOKENS = document(16 * CHUNK_TOKENS + 3)
ROUNDS = 4


def together(*works: Callable[[], None]) -> list[BaseException]:
    """Run all at once; the errors they raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as problem:
            errors.append(problem)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def compress_as(root: Path, name: str) -> None:
    for _ in range(ROUNDS):
        with Store.open(str(root)) as store:
            apply_compress(store, plan_compress(store, CompressOptions(encoding=get_encoding(name))))


def sweep_often(root: Path) -> None:
    for _ in range(3 * ROUNDS):
        with Store.open(str(root)) as store:
            sweep(store, grace_ms=0)


def read_often(root: Path) -> None:
    for _ in range(5 * ROUNDS):
        with Store.open(str(root)) as store, store.namespace(KV_IDENTITY) as namespace:
            read_kv(namespace, TOKENS)  # compares every element it is given


def test_two_compressors_a_sweep_and_a_reader(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with Store.create(str(root)) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    errors = together(
        lambda: compress_as(root, "bfx"),
        lambda: compress_as(root, "bfx"),
        lambda: sweep_often(root),
        lambda: read_often(root),
    )
    assert errors == []
    with Store.open(str(root)) as store:
        with store.namespace(KV_IDENTITY) as namespace:
            assert read_kv(namespace, TOKENS) == len(TOKENS)
        sweep(store, grace_ms=0)
        assert verify(store).is_sound
        with store.namespace(KV_IDENTITY) as namespace:
            assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert {path.name.split(".")[2] for path in (root / "ns").rglob("*.safetensors")} == {"bfx"}


def test_two_movers_to_one_place(tmp_path: Path) -> None:
    root, other = tmp_path / "kv", tmp_path / "other"
    with Store.create(str(root)) as store, store.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS)
    Store.create(str(other)).close()

    def move() -> None:
        with Store.open(str(root)) as here, Store.open(str(other)) as there:
            apply_migrate(here, there, plan_migrate(here, there, MigrateOptions(delete_source=True)))

    assert together(move, move, move) == []
    with Store.open(str(other)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert list((root / "ns").rglob("*.safetensors")) == []
