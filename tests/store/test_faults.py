"""A back-end that fails: reads are misses and change nothing, writes fail whole, the index waits; it is told once."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from lmcache_cli.backends import AlreadyExists, NoSpace, Unavailable
from lmcache_cli.backends.fault import (
    CutShort,
    Effect,
    Fail,
    Fault,
    FaultBackend,
    FaultScript,
    FullAfter,
    LoseResponse,
    faulty_calls,
    unavailable,
)
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Fault as Kind
from lmcache_cli.store import Namespace, PutStatus, Store
from lmcache_cli.store.events import Event
from lmcache_format.identity import Identity
from tests.store.pattern import document, hit, put_chunk, put_document, refs, small_buffer

TOKENS = document(14, 6)
SILENT = [
    pytest.param(unavailable(errno.EIO), id="EIO"),
    pytest.param(unavailable(errno.EACCES), id="EACCES"),
    pytest.param(unavailable(errno.ESTALE), id="ESTALE"),
    pytest.param(Unavailable("injected: no answer within 2 s"), id="time-out"),
    pytest.param(Unavailable("injected: 503 Slow Down"), id="503"),
]


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def objects(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if not name.startswith("tmp/")}


@pytest.fixture
def filled_root(root: Path, identity: Identity) -> Path:
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    return root


def store_with(root: Path, *faults: Fault) -> Store:
    return Store.open(FaultBackend(LocalBackend(root), FaultScript(*faults)))


@pytest.mark.parametrize("error", SILENT)
@pytest.mark.parametrize("operation", ["open_read", "read_into"])
def test_a_shard_that_cannot_be_read_is_a_miss_and_stays(
    filled_root: Path, identity: Identity, error: Unavailable, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = refs(identity, TOKENS)[1].key.hex()
    before = objects(filled_root)
    script = FaultScript(Fault(operation, Fail(error), name=second))
    with Store.open(FaultBackend(LocalBackend(filled_root), script)) as store:
        with store.namespace(identity) as namespace:
            for _ in range(3):
                match = namespace.match(TOKENS)
                assert match.num_tokens == len(TOKENS)
                buffers = [small_buffer(identity, namespace.need, chunk.num_tokens) for chunk in match.chunks()]
                result = namespace.read(match.chunks(), buffers)
                assert (result.num_tokens, result.num_chunks) == (4, 1)
                assert result.fault is not None
                assert result.fault.fault is Kind.UNAVAILABLE
            script.faults = ()
            assert hit(namespace, TOKENS) == len(TOKENS)
        events = store.events
        assert events[Event.READ_UNAVAILABLE] == 3
        assert events[Event.QUARANTINED] == events[Event.READ_DAMAGED] == events[Event.READ_MISSING] == 0
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    after = objects(filled_root)
    assert {name: after[name] for name in before} == before
    with Store.open(str(filled_root)) as store, store.namespace(identity) as namespace:
        assert hit(namespace, TOKENS) == len(TOKENS)
        assert not len(namespace.state().removes)


def test_a_store_that_does_not_answer_at_all_is_all_misses(filled_root: Path, identity: Identity) -> None:
    before = objects(filled_root)
    script = FaultScript()
    with Store.open(FaultBackend(LocalBackend(filled_root), script)) as store:
        with store.namespace(identity) as namespace:
            script.faults = (Fault("*", Fail(unavailable())),)
            script._matched = [0]
            for prompt in (TOKENS, document(40, 99)):
                match = namespace.match(prompt)
                buffers = [small_buffer(identity, namespace.need, chunk.num_tokens) for chunk in match.chunks()]
                assert namespace.read(match.chunks(), buffers).num_tokens == 0
            assert not namespace.refresh()
            with pytest.raises(Unavailable):
                put_document(namespace, document(8, 1))
    assert store.events[Event.QUARANTINED] == 0
    assert objects(filled_root) == before


@pytest.mark.parametrize("operation", ["open_beneath", "preadv"])
def test_errors_of_the_device_below_the_local_backend_are_misses(
    filled_root: Path, identity: Identity, operation: str
) -> None:
    before = objects(filled_root)
    key = refs(identity, TOKENS)[0].key.hex()
    name = key if operation == "open_beneath" else ""
    script = FaultScript()
    with Store.open(LocalBackend(filled_root, faulty_calls(script))) as store:
        with store.namespace(identity) as namespace:
            script.faults = (Fault(operation, Fail(OSError(errno.EIO, "injected")), name=name),)
            script._matched = [0]
            assert hit(namespace, TOKENS) == 0
            script.faults = ()
            assert hit(namespace, TOKENS) == len(TOKENS)
    after = objects(filled_root)
    assert {name: after[name] for name in before} == before


def test_a_short_read_is_damage_and_a_short_read_once_is_not(filled_root: Path, identity: Identity) -> None:
    second = refs(identity, TOKENS)[1].key.hex()
    with store_with(filled_root, Fault("read_into", CutShort(4200), on_call=2, name=second)) as store:
        with store.namespace(identity) as namespace:
            assert hit(namespace, TOKENS) == len(TOKENS)
            assert store.events[Event.READ_DAMAGED] == 0
    with store_with(filled_root, Fault("read_into", CutShort(4200), name=second)) as store:
        with store.namespace(identity) as namespace:
            assert hit(namespace, TOKENS) == 4
            assert store.events[Event.QUARANTINED] == 1


NO_ROOM: list[Effect] = [Fail(NoSpace("injected: no space")), FullAfter(3000)]


@pytest.mark.parametrize("effect", NO_ROOM, ids=["at once", "in the middle"])
def test_no_space_leaves_nothing_and_passes(
    root: Path, identity: Identity, effect: Effect, caplog: pytest.LogCaptureFixture
) -> None:
    Store.create(str(root)).close()
    script = FaultScript()
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        with store.namespace(identity, create=True) as namespace:
            before = objects(root)
            script.faults = (Fault("put", effect),)
            script._matched = [0]
            for _ in range(3):
                with pytest.raises(NoSpace):
                    put_document(namespace, TOKENS)
            assert objects(root) == before
            assert namespace.match(TOKENS).num_tokens == 0
            assert not len(namespace.state())
            assert store.events[Event.STORE_FAILED] == 3
            assert len(caplog.records) == 1
            script.faults = ()
            assert put_document(namespace, TOKENS) == [PutStatus.STORED] * 4
            assert hit(namespace, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("size_bytes", [0, 1, 4000, 4096, 4100])
def test_a_full_device_leaves_no_partial_file(root: Path, identity: Identity, code: int, size_bytes: int) -> None:
    Store.create(str(root)).close()
    script = FaultScript()
    with Store.open(LocalBackend(root)) as store:
        store.namespace(identity, create=True).close()
    full = FullAfter(size_bytes, code)
    script = FaultScript(Fault("pwritev", full))
    with Store.open(LocalBackend(root, faulty_calls(script))) as store:
        before = tree(root)
        with Namespace(store.backend, identity, events=store.events) as namespace:
            with pytest.raises(NoSpace):
                put_document(namespace, TOKENS)
            assert {name: data for name, data in tree(root).items() if ".safetensors" not in name} == before
            assert len(list(root.rglob("*.safetensors"))) == 0
            assert not os.listdir(root / "tmp")
            script.written_bytes = -(10**9)
            put_document(namespace, TOKENS)
            assert hit(namespace, TOKENS) == len(TOKENS)


def test_a_lost_answer_to_a_put_loses_no_chunk(root: Path, identity: Identity) -> None:
    """The shard is there, but nobody said so: the caller sees a failure, the next reader and writer find it."""
    Store.create(str(root)).close()
    script = FaultScript(Fault("put", LoseResponse(unavailable()), on_call=2, name=".safetensors"))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        with store.namespace(identity, create=True) as namespace:
            chunks = refs(identity, TOKENS)
            put_chunk(namespace, chunks[0], TOKENS)
            with pytest.raises(Unavailable):
                put_chunk(namespace, chunks[1], TOKENS)
            assert put_chunk(namespace, chunks[1], TOKENS) is PutStatus.ADOPTED
            assert [put_chunk(namespace, chunk, TOKENS) for chunk in chunks[2:]] == [PutStatus.STORED] * 2
            assert hit(namespace, TOKENS) == len(TOKENS)
        assert store.events[Event.STORE_FAILED] == 1
        assert store.events[Event.ADOPTED] == 1
    assert len(list(root.rglob("*.safetensors"))) == 4


def test_what_stands_in_the_way_and_cannot_be_read_fails_the_put(root: Path, identity: Identity) -> None:
    Store.create(str(root)).close()
    with Store.open(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    before = objects(root)
    with store_with(root, Fault("open_read", Fail(unavailable()), name=".safetensors")) as store:
        with store.namespace(identity, create=True) as namespace:
            with pytest.raises(Exception, match="stands in the way"):
                put_document(namespace, TOKENS)
            assert not len(namespace.state())
    assert objects(root) == before


def test_a_flush_that_fails_keeps_its_entries(root: Path, identity: Identity, caplog: pytest.LogCaptureFixture) -> None:
    Store.create(str(root)).close()
    script = FaultScript(*(Fault("put", Fail(unavailable()), on_call=call, name=".lmi") for call in (1, 2, 3, 4)))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        now = [0.0]
        store.namespace(identity, create=True).close()
        with Namespace(store.backend, identity, events=store.events, clock=lambda: now[0]) as namespace:
            for ref in refs(identity, TOKENS):
                now[0] += 20  # every put is due for a flush
                put_chunk(namespace, ref, TOKENS)
            assert hit(namespace, TOKENS) == len(TOKENS)
            assert store.events[Event.FLUSH_FAILED] == 3
            with pytest.raises(Unavailable):
                namespace.flush()
            namespace.flush()
            with Namespace(LocalBackend(root), identity) as other:
                assert all(other.state().rows_of(ref.key) for ref in refs(identity, TOKENS))
                assert hit(other, TOKENS) == len(TOKENS)
    assert len([record for record in caplog.records if "flush_failed" in record.getMessage()]) == 1
    assert len(list(root.rglob("*.lmi"))) <= 2


def test_a_failing_look_for_shards_is_a_miss(filled_root: Path, identity: Identity) -> None:
    for segment in filled_root.rglob("*.lmi"):
        segment.unlink()
    before = objects(filled_root)
    with store_with(filled_root, Fault("list", Fail(unavailable()), name="/c/")) as store:
        with store.namespace(identity) as namespace:
            assert hit(namespace, TOKENS) == 0
            assert store.events[Event.READ_UNAVAILABLE] == 1
    assert objects(filled_root) == before


def test_a_quarantine_that_fails_keeps_the_bytes_and_the_miss(filled_root: Path, identity: Identity) -> None:
    victim = next(
        path for path in filled_root.rglob("*.safetensors") if refs(identity, TOKENS)[1].key.hex() in path.name
    )
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with store_with(filled_root, Fault("move", Fail(unavailable(errno.EACCES)))) as store:
        with store.namespace(identity, create=True) as namespace:
            for _ in range(3):
                assert hit(namespace, TOKENS) == 4
            assert store.events[Event.QUARANTINED] == 0
            assert put_chunk(namespace, refs(identity, TOKENS)[1], TOKENS) is PutStatus.REPLACED
            assert hit(namespace, TOKENS) == len(TOKENS)


def test_names_that_turn_up_again_after_a_failed_publish(root: Path, identity: Identity) -> None:
    """Two writers race for one name: the loser adopts, whatever the back-end says first."""
    Store.create(str(root)).close()
    script = FaultScript(Fault("put", Fail(AlreadyExists("injected")), on_call=1, name=".safetensors"))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        with store.namespace(identity, create=True) as namespace:
            assert put_document(namespace, TOKENS) == [PutStatus.STORED] * 4
            assert hit(namespace, TOKENS) == len(TOKENS)
