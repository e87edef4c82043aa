"""Headers of listed shards: what is listed wrongly is forgotten, and what is there instead is found."""

from __future__ import annotations

from asyncio import CancelledError
from pathlib import Path

import pytest

from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, FlipBit, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import ChunkRef, Entry, Namespace, Store
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

IDENTITY = tiny_identity()
TOKENS = document(12)
SECOND = refs(IDENTITY, TOKENS)[1]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
    return tmp_path / "kv"


def listed(namespace: Namespace) -> list[tuple[ChunkRef, Entry]]:
    return [(chunk, entry) for chunk in namespace.match(TOKENS).chunks() for entry in namespace.shards(chunk.key)]


def found(namespace: Namespace) -> list[bool]:
    return [header is not None for header in namespace.headers(listed(namespace))]


def shard(root: Path) -> Path:
    return next(root.rglob(f"{SECOND.key.hex()}.*"))


def test_what_is_listed_and_there_is_told(root: Path):
    with Namespace(LocalBackend(root), IDENTITY) as reader:
        assert found(reader) == [True, True, True]
        assert reader.match(TOKENS).num_tokens == 12


@pytest.mark.parametrize("content", [None, b"", b"torn"])
def test_what_is_gone_or_torn_is_not_promised_again(root: Path, content: bytes | None):
    with Namespace(LocalBackend(root), IDENTITY) as reader:
        shard(root).unlink() if content is None else shard(root).write_bytes(content)
        assert found(reader) == [True, False, True]
        assert reader.match(TOKENS).num_tokens == 4
        with Store.open(str(root)) as store, store.namespace(IDENTITY) as writer:
            hit(writer, TOKENS)  # another process meets the damage, and computes the chunk again
            put_document(writer, TOKENS)
        assert reader.match(TOKENS).num_tokens == 12
        assert found(reader) == [True, True, True]


def test_what_another_process_has_replaced_is_found(root: Path):
    with Namespace(LocalBackend(root), IDENTITY) as reader:
        assert found(reader) == [True, True, True]
        shard(root).unlink()
        with Store.open(str(root)) as store, store.namespace(IDENTITY) as writer:
            hit(writer, TOKENS)
            put_document(writer, TOKENS)
        assert found(reader) == [True, False, True]
        assert reader.match(TOKENS).num_tokens == 12
        assert hit(reader, TOKENS) == 12


@pytest.mark.parametrize("error", [unavailable(), RuntimeError("odd"), CancelledError()])
def test_what_cannot_be_read_now_stays_listed(root: Path, error: Exception):
    fault = Fault("open_read", Fail(error), name=SECOND.key.hex(), on_call=1)
    with Namespace(FaultBackend(LocalBackend(root), FaultScript(fault)), IDENTITY) as reader:
        assert found(reader) == [True, False, True]
        assert reader.match(TOKENS).num_tokens == 12
        assert found(reader) == [True, True, True]


def test_a_bit_that_is_flipped_on_the_way_condemns_nothing(root: Path):
    fault = Fault("read_into", FlipBit(8 * 40), name=SECOND.key.hex(), on_call=1)
    with Namespace(FaultBackend(LocalBackend(root), FaultScript(fault)), IDENTITY) as reader:
        assert found(reader) == [True, True, True]
