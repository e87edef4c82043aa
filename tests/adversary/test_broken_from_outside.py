"""Misuse and accidents from outside the toolkit: each was a fault once, found by trying to break the store."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import lmcache_cli.store.namespace as namespace_module
from lmcache_cli.backends import Obstructed, Unsupported
from lmcache_cli.store import Namespace, Refused, Store, StoreDamaged
from lmcache_cli.store.prune import PruneRules, plan_prune
from lmcache_cli.store.reading import Fault
from lmcache_cli.store.targets import chunks_of_prompt
from lmcache_format.errors import SegmentError
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, Extra, Tokens, next_key
from tests.store.pattern import document, filled, hit, put_chunk, put_document, refs

TOKENS = document(4 * 3 + 3)
FAR_TOO_LONG = 1 << 40
"""More than there is memory, and nothing on the disk: the file has a hole."""


@pytest.fixture
def namespace(namespace: Namespace) -> Namespace:
    """One with a document in it."""
    put_document(namespace, TOKENS)
    namespace.flush()
    return namespace


# ---- files far longer than memory -----------------------------------------------------------------------------------


def _lengthened(pattern: str, root: Path) -> Path:
    (path,) = root.glob(pattern)
    os.truncate(path, FAR_TOO_LONG)
    return path


def test_a_segment_with_a_hole_is_damage_and_takes_no_memory(
    root: Path, store: Store, namespace: Namespace, identity: Identity
) -> None:
    namespace.close()
    _lengthened("ns/*/m/*.lmi", root)
    with store.namespace(identity) as reader:
        assert hit(reader, TOKENS) == 12  # the shards are there; tails are found by the index alone
    with store.namespace(identity, create=True) as writer:
        put_document(writer, document(8, seed=1))
        writer.compact()
        assert hit(writer, document(8, seed=1)) == 8


def test_an_identity_with_a_hole_is_damage_and_is_written_again(
    root: Path, store: Store, namespace: Namespace, identity: Identity
) -> None:
    path = _lengthened("ns/*/ns.json", root)
    with pytest.raises(StoreDamaged):
        store.identity(identity.fingerprint)
    with store.namespace(identity, create=True) as reader:
        assert hit(reader, TOKENS) == len(TOKENS)
    assert path.read_bytes() == identity.canonical_json()


def test_a_superblock_with_a_hole_is_damage(root: Path, store: Store) -> None:
    _lengthened("store.000001.json", root)
    with pytest.raises(StoreDamaged, match="too long"):
        Store.open(str(root))


# ---- what a caller gets wrong must not reach the store --------------------------------------------------------------


def test_a_buffer_of_another_model_is_refused(store: Store, namespace: Namespace, identity: Identity) -> None:
    other = replace(identity, weights=f"sha256:{'e' * 64}")
    ref = refs(identity, document(4, seed=2))[0]
    wrong = filled(other, namespace.need, document(4, seed=2), 0)
    with pytest.raises(Refused, match="buffer"):
        namespace.put(wrong, key=ref.key, parent=ref.parent, depth=0)
    assert hit(namespace, document(4, seed=2)) == 0
    same = replace(identity, model=identity.model)  # equal, but not the same object
    right = filled(same, namespace.need, document(4, seed=2), 0)
    namespace.put(right, key=ref.key, parent=ref.parent, depth=0)
    assert hit(namespace, document(4, seed=2)) == 4


@pytest.mark.parametrize("expires_ms", [1 << 60, -5, 1.5, "soon"])
def test_a_pin_that_cannot_be_written_is_refused_at_once(
    store: Store, namespace: Namespace, identity: Identity, expires_ms: int
) -> None:
    """It used to stay in the buffer and to keep everything else from being written, for good."""
    ref = refs(identity, TOKENS)[0]
    with pytest.raises(SegmentError):
        namespace.pin(ref.key, expires_ms)
    with pytest.raises(SegmentError):
        namespace.pin(ref.key[:8])  # type: ignore[arg-type]
    with pytest.raises(SegmentError):
        namespace.unpin(ref.key[:8])  # type: ignore[arg-type]
    put_document(namespace, document(6, seed=3))
    namespace.close()
    with store.namespace(identity) as reader:
        assert hit(reader, document(6, seed=3)) == 6  # the tail as well, which the index alone knows
        assert not reader.state().pins


@pytest.mark.parametrize("name", [None, 5])
def test_a_label_that_cannot_be_read_is_refused_at_once(
    store: Store, namespace: Namespace, identity: Identity, name: str
) -> None:
    """It used to be written, and the whole segment to be called damaged."""
    ref = refs(identity, TOKENS)[-1]
    with pytest.raises(SegmentError):
        namespace.label(name, ref.key, len(TOKENS), ref.depth)
    put_document(namespace, document(6, seed=3))
    namespace.close()
    assert not plan_prune(store, PruneRules(everything=True)).unreadable
    with store.namespace(identity) as reader:
        assert hit(reader, document(6, seed=3)) == 6


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_what_cannot_be_a_path_is_refused(path: str) -> None:
    for use in (Store.open, Store.create):
        with pytest.raises(Unsupported, match="cannot be a path"):
            use(path)


def test_a_link_to_nothing_is_no_place_for_a_store(tmp_path: Path) -> None:
    """It used to be told that somebody else had made a store there just now."""
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(Obstructed, match="a link to nothing"):
        Store.create(str(tmp_path / "link"))


# ---- readers whose threads are gone ---------------------------------------------------------------------------------


def test_reading_from_a_closed_namespace_is_a_miss(namespace: Namespace) -> None:
    match = namespace.match(TOKENS)
    namespace.close()
    buffers, result = namespace.load(match)
    assert (buffers, result.num_tokens) == ([], 0)
    assert result.fault is not None
    assert result.fault.fault is Fault.UNAVAILABLE


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_and_writes(store: Store, namespace: Namespace, identity: Identity) -> None:
    """The parent's threads are not there, but its pool believed so: the child waited for them for ever."""
    barrier = threading.Barrier(namespace._reader_threads)
    for started in [namespace._readers.submit(barrier.wait) for _ in range(namespace._reader_threads)]:
        started.result()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            put_document(namespace, document(8, seed=4))
            namespace.flush()
            code = 0 if (hit(namespace, TOKENS), hit(namespace, document(8, seed=4))) == (len(TOKENS), 8) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hit(namespace, TOKENS) == len(TOKENS)
    assert hit(namespace, document(8, seed=4)) == 8


# ---- many tails after one chunk -------------------------------------------------------------------------------------


def test_a_match_asks_once_a_length_however_many_tails_follow_a_chunk(
    store: Store, namespace: Namespace, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every conversation after a common system prompt leaves a tail; each match used to hash its words for all."""
    common = document(4, seed=5)
    for number in range(200):
        tokens = [*common, number, number + 1, *([7] * (number % 2))]
        for ref in refs(identity, tokens):
            put_chunk(namespace, ref, tokens)
    asked: list[int] = []
    real = next_key

    def counted(parent: ChunkKey, words: Tokens, extras: Sequence[Extra] = ()) -> ChunkKey:
        asked.append(len(words))
        return real(parent, words, extras)

    monkeypatch.setattr(namespace_module, "next_key", counted)
    namespace.flush()
    for reader in (namespace, store.namespace(identity)):
        asked.clear()
        assert reader.match([*common, 41, 42, 7]).num_tokens == 7
        assert reader.match([*common, 41, 42, 8]).num_tokens == 4
        assert reader.match([*common, 42, 43, 8]).num_tokens == 6
        assert len(asked) <= 6
    reader.close()


def test_the_chunks_of_a_prompt_leave_out_tails_of_others(
    store: Store, namespace: Namespace, identity: Identity
) -> None:
    """`unpin --prompt` took back the pins of every prompt that went another way after the same chunk."""
    common = document(4, seed=6)
    mine, other = [*common, 1, 2], [*common, 1, 3]
    for tokens in (mine, other):
        for ref in refs(identity, tokens):
            put_chunk(namespace, ref, tokens)
    namespace.flush()
    found = chunks_of_prompt(store, identity.fingerprint, mine, None)
    assert found == [ref.key[:16] for ref in refs(identity, mine)]
