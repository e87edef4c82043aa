"""Stores for the fake engine, and engines that are closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.store import Store
from lmcache_format.identity import Identity
from tests.store.pattern import tiny_identity

from .fakes import FakeEngine


@pytest.fixture
def identity() -> Identity:
    return tiny_identity(layers=2, kv_heads=2, head_dim=4, chunk_tokens=8)


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    Store.create(str(tmp_path / "kv")).close()
    return tmp_path / "kv"


@pytest.fixture
def engine_of(store_dir: Path, identity: Identity) -> Iterator[Callable[..., FakeEngine]]:
    engines: list[FakeEngine] = []

    def build(**options: Any) -> FakeEngine:
        where = options.pop("store", str(store_dir))
        engines.append(FakeEngine(where, options.pop("identity", identity), **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
