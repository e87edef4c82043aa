"""C32: files removed or replaced behind our back, while nobody looks and while everybody reads."""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import RootChanged
from lmcache_cli.store import Namespace, Store
from lmcache_cli.store.events import Event
from lmcache_cli.store.namespace import BackendUnsettled
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, put_document, read_match, refs, tiny_identity

TOKENS = document(40, 9)  # ten chunks


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def filled(store: Store, identity: Identity) -> Iterator[Namespace]:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
        namespace.flush()
        yield namespace


def shards(root: Path, identity: Identity) -> list[Path]:
    """In the order of the prompt."""
    by_key = {path.name.split(".")[0]: path for path in root.rglob("*.safetensors")}
    return [by_key[ref.key.hex()] for ref in refs(identity, TOKENS)]


def remove_one(root: Path, identity: Identity) -> int:
    shards(root, identity)[6].unlink()
    return 24


def remove_all(root: Path, identity: Identity) -> int:
    for path in shards(root, identity):
        path.unlink()
    return 0


def remove_directory(root: Path, identity: Identity) -> int:
    shutil.rmtree(shards(root, identity)[3].parent)
    return 12


def remove_namespace(root: Path, identity: Identity) -> int:
    shutil.rmtree(root / "ns" / identity.fingerprint)
    return 0


def remove_index(root: Path, identity: Identity) -> int:
    shutil.rmtree(root / "ns" / identity.fingerprint / "m")
    return 40


def replace_content(root: Path, identity: Identity) -> int:
    shards(root, identity)[2].write_bytes(b"something else\n" * 1000)
    return 8


def replace_by_other_chunk(root: Path, identity: Identity) -> int:
    paths = shards(root, identity)
    paths[5].write_bytes(paths[4].read_bytes())
    return 20


def empty_one(root: Path, identity: Identity) -> int:
    shards(root, identity)[9].write_bytes(b"")
    return 36


@pytest.mark.parametrize(
    "delete",
    [
        remove_one,
        remove_all,
        remove_directory,
        remove_namespace,
        remove_index,
        replace_content,
        replace_by_other_chunk,
        empty_one,
    ],
)
def test_what_is_gone_is_a_miss_once_and_then_not_promised(
    filled: Namespace, store: Store, root: Path, identity: Identity, delete: Callable[[Path, Identity], int]
) -> None:
    left = delete(root, identity)
    assert hit(filled, TOKENS) == left
    assert filled.match(TOKENS).num_tokens == left
    put_document(filled, TOKENS)
    assert hit(filled, TOKENS) == 40
    filled.flush()
    with store.namespace(identity, create=True) as other:
        assert hit(other, TOKENS) == 40


def test_a_root_that_was_renamed_is_unknown_not_empty(
    filled: Namespace, store: Store, root: Path, identity: Identity
) -> None:
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    assert hit(filled, TOKENS) == 0
    assert hit(filled, TOKENS) == 0
    assert store.events[Event.READ_UNAVAILABLE] >= 1
    assert store.events[Event.READ_MISSING] == store.events[Event.QUARANTINED] == 0
    with pytest.raises(RootChanged):
        put_document(filled, document(4, 77))
    assert not root.exists()
    elsewhere.rename(root)
    assert hit(filled, TOKENS) == 40
    put_document(filled, document(4, 77))
    assert hit(filled, document(4, 77)) == 4


def test_a_store_answers_after_its_directory_was_moved(
    filled: Namespace, store: Store, root: Path, identity: Identity
) -> None:
    filled.close()
    store.close()
    moved = root.with_name("moved")
    shutil.copytree(root, moved)
    shutil.rmtree(root)
    with Store.open(str(moved)) as other, other.namespace(identity) as namespace:
        assert hit(namespace, TOKENS[:13] + document(9, 4)) == 12
        assert hit(namespace, TOKENS) == 40


@pytest.mark.slow
@pytest.mark.parametrize("is_writing", [False, True], ids=["deleting", "deleting and writing"])
def test_five_hundred_reads_while_a_thread_deletes(
    store: Store, root: Path, identity: Identity, is_writing: bool
) -> None:
    """No exception, no wrong byte, and the end is whole again."""
    stop = threading.Event()
    problems: list[BaseException] = []
    deleted = [0]

    def delete() -> None:
        chance = random.Random(3)
        while not stop.is_set():
            paths = list(root.rglob("*.safetensors"))
            if paths:
                chance.choice(paths).unlink(missing_ok=True)
                deleted[0] += 1
            stop.wait(0.001)

    def write() -> None:
        try:
            with store.namespace(identity, create=True) as writer:
                while not stop.is_set():
                    put_document(writer, TOKENS)
                    hit(writer, TOKENS)
        except BaseException as problem:
            problems.append(problem)

    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
        threads = [threading.Thread(target=delete)]
        if is_writing:
            threads.append(threading.Thread(target=write))
        for thread in threads:
            thread.start()
        read = 0
        try:
            for _ in range(500):
                read += read_match(namespace, namespace.match(TOKENS), TOKENS)
                with contextlib.suppress(BackendUnsettled):  # a put may fail while its file is taken away
                    put_document(namespace, TOKENS)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not problems
        assert deleted[0] > 10
        assert read > 0
        for _ in range(20):
            put_document(namespace, TOKENS)
            if hit(namespace, TOKENS) == 40:
                break
        assert hit(namespace, TOKENS) == 40
        assert store.events[Event.READ_DAMAGED] == store.events[Event.QUARANTINED] == 0
