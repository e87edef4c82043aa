"""Segments that are damaged, foreign, newer, gone or out of order cost their own entries at most, and one warning."""

from __future__ import annotations

import itertools
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, NotFound, Unavailable
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, LoseResponse, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_cli.store import manifest as manifest_module
from lmcache_cli.store.events import Event, Events
from lmcache_cli.store.manifest import DEFAULT_GRACE_MS, Manifest, Pending, merge, segment_of_pending
from lmcache_format.errors import SegmentError
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import SegmentName, new_ulid, segment_directory
from lmcache_format.segment import Segment, encode_segment
from tests.store.made_segments import FINGERPRINT, WRITES
from tests.store.pattern import document, hit, put_document, refs

DISTINCT = list({(write.key, write.part, write.encoding): write for write in WRITES}.values())
"""Writes of which no two have one name."""


def segments_of(root: Path, identity: Identity) -> list[Path]:
    return sorted((root / segment_directory(identity.fingerprint)).iterdir())


def written_one_by_one(store: Store, identity: Identity, documents: list[list[int]]) -> None:
    """Every document by a writer of its own: as many segments."""
    writers = [store.namespace(identity, create=True) for _ in documents]
    for writer, tokens in zip(writers, documents, strict=True):
        put_document(writer, tokens)
        writer.close()


def known_to_index(store: Store, identity: Identity, documents: list[list[int]]) -> list[bool]:
    """Which documents the index knows whole, without looking at shards."""
    with Namespace(store.backend, identity, events=Events()) as namespace:
        state = namespace.state()
        return [all(state.rows_of(ref.key) for ref in refs(identity, tokens)) for tokens in documents]


DOCUMENTS = [document(6, seed) for seed in range(3)]


def flipped(data: bytes) -> bytes:
    damaged = bytearray(data)
    damaged[len(damaged) // 2] ^= 16
    return bytes(damaged)


def newer_version(data: bytes) -> bytes:
    return data[:8] + struct.pack("<I", 2) + data[12:]


def of_another_namespace(_: bytes) -> bytes:
    return encode_segment(Segment(Fingerprint("ab" * 16), 0))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flipped,
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut in the table": lambda data: data[:100],
    "extended": lambda data: data + b"\0",
    "text": lambda data: b"not a segment at all\n" * 10,
    "of another namespace": of_another_namespace,
    "newer": newer_version,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_segment_costs_its_own_entries_and_one_warning(
    store: Store, root: Path, identity: Identity, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    written_one_by_one(store, identity, DOCUMENTS)
    bad = segments_of(root, identity)[1]
    bad.write_bytes(DAMAGE[kind](bad.read_bytes()))
    before = bad.read_bytes()
    assert known_to_index(store, identity, DOCUMENTS).count(False) == 1
    caplog.clear()
    with store.namespace(identity, create=True) as namespace:
        for _ in range(3):
            namespace.refresh()
        for tokens in DOCUMENTS:  # full chunks are found under their names
            assert hit(namespace, tokens) >= 4
        namespace.compact()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    event = Event.SEGMENT_TOO_NEW if kind == "newer" else Event.SEGMENT_DAMAGED
    assert warnings[0].getMessage().startswith(event.value)
    assert bad.name in warnings[0].getMessage()
    assert store.events[event] == 1
    assert bad.read_bytes() == before


@pytest.mark.parametrize("kind", DAMAGE)
def test_compaction_never_deletes_what_it_could_not_read(
    store: Store, root: Path, identity: Identity, kind: str
) -> None:
    written_one_by_one(store, identity, DOCUMENTS)
    bad = segments_of(root, identity)[0]
    bad.write_bytes(DAMAGE[kind](bad.read_bytes()))
    for _ in range(3):
        with store.namespace(identity, create=True, writer=WriterOptions(grace_ms=0)) as namespace:
            namespace.compact()
    assert bad in segments_of(root, identity)
    assert len(segments_of(root, identity)) == 2


@pytest.mark.parametrize("name", ["notes.txt", "UPPER.lmi", "01jdxxxxxxxxxxxxxxxxxxxxxx-w.lmi.bak", "readme"])
def test_foreign_files_among_the_segments_are_left_alone(
    store: Store, root: Path, identity: Identity, name: str
) -> None:
    written_one_by_one(store, identity, DOCUMENTS)
    foreign = root / segment_directory(identity.fingerprint) / name
    foreign.write_text("mine")
    with store.namespace(identity, create=True, writer=WriterOptions(grace_ms=0)) as namespace:
        namespace.compact()
        namespace.compact()
    assert known_to_index(store, identity, DOCUMENTS) == [True] * 3
    assert foreign.read_text() == "mine"
    assert not store.events.snapshot().get("segment_damaged")


@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: os.mkfifo(path)])
def test_what_is_no_file_does_not_stop_the_index(
    store: Store, root: Path, identity: Identity, make: Callable[[Path], None]
) -> None:
    written_one_by_one(store, identity, DOCUMENTS)
    make(root / SegmentName(identity.fingerprint, new_ulid(0), "w").path)
    assert known_to_index(store, identity, DOCUMENTS) == [True] * 3


def manifest_on(backend: object, events: Events | None = None) -> Manifest:
    return Manifest(backend, FINGERPRINT, events or Events())  # type: ignore[arg-type]


def flushed(manifest: Manifest, *numbers: int) -> str:
    pending = Pending([DISTINCT[number] for number in numbers])
    return manifest.write(segment_of_pending(FINGERPRINT, pending, "w", 0), Durability.NONE)


def nonces(manifest: Manifest, **how: bool) -> set[str]:
    state = merge(manifest.refresh(**how))
    return {state.entry(row).nonce for row in range(len(state))}


class Vanishing(FaultBackend):
    """Deletes a segment between its listing and its reading, as a compactor elsewhere does."""

    def __init__(self, inner: MemoryBackend, replace: Callable[[], None]) -> None:
        super().__init__(inner, FaultScript())
        self._replace = replace
        self._is_done = False

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if not self._is_done:
            self._is_done = True
            self._replace()
        return super().read(name, offset=offset, length=length)


def test_segments_compacted_away_between_list_and_read_lose_nothing() -> None:
    backend = MemoryBackend()
    for number in range(4):
        flushed(manifest_on(backend), number)

    def compact() -> None:
        other = manifest_on(backend)
        other.compact(merge(other.refresh()), "c", Durability.NONE, 0)

    reader = manifest_on(Vanishing(backend, compact))
    assert nonces(reader) == {DISTINCT[number].nonce for number in range(4)}
    assert reader.live_segments == 1


def test_a_segment_that_is_listed_and_never_there_is_left_out() -> None:
    backend = MemoryBackend()
    flushed(manifest_on(backend), 0)
    ghost = flushed(manifest_on(backend), 1)
    script = FaultScript(Fault("read", Fail(NotFound("gone")), name=ghost))
    with pytest.raises(NotFound):
        manifest_on(FaultBackend(backend, script)).refresh()
    events = Events()
    reader = manifest_on(FaultBackend(backend, script), events)
    assert nonces(reader, leave_out_unavailable=True) == {DISTINCT[0].nonce}
    assert events[Event.SEGMENT_LOST] == 1
    assert reader.live_segments == 1


def test_a_segment_that_cannot_be_read_now_is_taken_in_later() -> None:
    backend = MemoryBackend()
    flushed(manifest_on(backend), 0)
    sick = flushed(manifest_on(backend), 1)
    script = FaultScript(*(Fault("read", Fail(unavailable()), name=sick, on_call=call) for call in (1, 2)))
    with pytest.raises(Unavailable):
        manifest_on(FaultBackend(backend, script)).refresh()
    events = Events()
    reader = manifest_on(FaultBackend(backend, script), events)
    assert nonces(reader, leave_out_unavailable=True) == {DISTINCT[0].nonce}
    reader.compact(merge(()), "c", Durability.NONE, 0)
    assert backend.stat(f"{segment_directory(FINGERPRINT)}/{sick}") is not None
    assert nonces(reader, leave_out_unavailable=True) == {DISTINCT[1].nonce}
    assert events[Event.SEGMENT_LOST] == 1


def test_two_compactors_at_once_lose_nothing() -> None:
    backend = MemoryBackend()
    for number in range(6):
        flushed(manifest_on(backend), number)
    one, two = manifest_on(backend), manifest_on(backend)
    states = merge(one.refresh()), merge(two.refresh())
    late = flushed(manifest_on(backend), 6)
    one.compact(states[0], "a", Durability.NONE, 0)
    two.compact(states[1], "b", Durability.NONE, 0)
    assert nonces(manifest_on(backend)) == {DISTINCT[number].nonce for number in range(7)}
    third = manifest_on(backend)
    third.compact(merge(third.refresh()), "c", Durability.NONE, 0)
    assert nonces(manifest_on(backend)) == {DISTINCT[number].nonce for number in range(7)}
    assert len(list(backend.list(segment_directory(FINGERPRINT)))) == 1
    assert backend.stat(f"{segment_directory(FINGERPRINT)}/{late}") is None


def test_clocks_that_disagree_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are named by the writer's clock; a compactor an hour behind supersedes what looks newer than itself."""
    backend = MemoryBackend()
    hour = 3_600_000
    times = iter([10 * hour, 2 * hour, 30 * hour, 4 * hour])
    for number in range(4):
        at = next(times)
        monkeypatch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda at=at: at)
        flushed(manifest_on(backend), number)
    monkeypatch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: hour)
    compactor = manifest_on(backend)
    compactor.compact(merge(compactor.refresh()), "c", Durability.NONE, 0)
    assert nonces(manifest_on(backend)) == {DISTINCT[number].nonce for number in range(4)}
    assert manifest_on(backend).refresh()[0].supersedes
    assert len(list(backend.list(segment_directory(FINGERPRINT)))) == 1


def test_superseded_segments_stay_for_the_grace_time() -> None:
    now = [1_000_000.0]
    backend = MemoryBackend(time_s=lambda: now[0])
    old = [f"{segment_directory(FINGERPRINT)}/{flushed(manifest_on(backend), number)}" for number in range(3)]

    compactor = manifest_on(backend)
    state = merge(compactor.refresh())

    def compact() -> None:
        compactor.compact(state, "c", Durability.NONE, DEFAULT_GRACE_MS)

    compact()
    now[0] += DEFAULT_GRACE_MS / 1000 - 1
    compact()
    assert all(backend.stat(name) for name in old)
    now[0] += 1
    compact()
    assert not any(backend.stat(name) for name in old)
    assert nonces(manifest_on(backend)) == {DISTINCT[number].nonce for number in range(3)}


def test_a_reader_of_the_last_compaction_alone_reads_no_older_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(1_000)
    monkeypatch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: next(times))
    backend = MemoryBackend()
    for number in range(3):
        flushed(manifest_on(backend), number)
    for _ in range(3):
        compactor = manifest_on(backend)
        compactor.compact(merge(compactor.refresh()), "c", Durability.NONE, DEFAULT_GRACE_MS)
    reader = manifest_on(backend)
    assert len(reader.refresh()) == 1
    assert reader.live_segments == 1


def test_a_segment_whose_answer_was_lost_is_written_once_more_at_most(root: Path, identity: Identity) -> None:
    script = FaultScript(Fault("put", LoseResponse(unavailable()), on_call=1, name=".lmi"))
    Store.create(str(root)).close()
    backend = FaultBackend(LocalBackend(root), script)
    with Store.open(backend) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENTS[0])
        with pytest.raises(Unavailable):
            namespace.flush()
        namespace.flush()
        assert known_to_index(store, identity, DOCUMENTS[:1]) == [True]
        assert len(namespace.state()) == 2


def test_a_retried_segment_counts_as_written(root: Path, identity: Identity) -> None:
    script = FaultScript(Fault("put", LoseResponse(unavailable()), on_call=1, name=".lmi"))
    Store.create(str(root)).close()
    policy = RetryPolicy(pause_s=0)
    backend = RetryBackend(FaultBackend(LocalBackend(root), script), policy)
    with Store.open(backend) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENTS[0])
        namespace.flush()
        assert len(segments_of(root, identity)) == 1
        assert store.events[Event.FLUSH_FAILED] == 0


def test_a_compaction_that_fails_does_not_fail_the_flush(root: Path, identity: Identity) -> None:
    Store.create(str(root)).close()
    documents = [document(4, seed) for seed in range(17)]
    with Store.open(str(root)) as store:
        written_one_by_one(store, identity, documents)
    script = FaultScript(Fault("put", Fail(unavailable()), on_call=2, name=".lmi"))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        with store.namespace(identity, create=True) as namespace:
            put_document(namespace, DOCUMENTS[0])
            namespace.flush()
            assert store.events[Event.COMPACTION_FAILED] == 1
            assert store.events[Event.FLUSH_FAILED] == 0
            assert known_to_index(store, identity, [*documents, DOCUMENTS[0]]) == [True] * 18


def test_a_segment_that_comes_back_otherwise_supersedes_nothing(root: Path, identity: Identity) -> None:
    """A device that acknowledges and forgets: the old segments must not go."""
    Store.create(str(root)).close()

    class Forgetful(FaultBackend):
        def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
            return flipped(super().read(name, offset=offset, length=length)) if name in made else super().read(name)

        def put(self, name: str, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            made.append(name)
            return super().put(name, *args, **kwargs)  # type: ignore[arg-type]

    with Store.open(str(root)) as store:
        written_one_by_one(store, identity, DOCUMENTS)
    old = segments_of(root, identity)
    made: list[str] = []
    with Store.open(Forgetful(LocalBackend(root), FaultScript())) as store:
        with store.namespace(identity, create=True, writer=WriterOptions(grace_ms=0)) as namespace:
            with pytest.raises(manifest_module.StoreError):
                namespace.compact()
    assert set(old) <= set(segments_of(root, identity))


def test_reading_and_writing_in_turns_does_not_flush_every_chunk(store: Store, root: Path, identity: Identity) -> None:
    now = [0.0]
    with Namespace(store.backend, identity, events=store.events, clock=lambda: now[0]) as namespace:
        for seed in range(12):
            now[0] += 6
            put_document(namespace, document(4, seed))
            hit(namespace, document(4, seed))
    assert len(segments_of(root, identity)) <= 8


def test_a_label_that_cannot_be_written_is_refused_at_once(namespace: Namespace) -> None:
    put_document(namespace, DOCUMENTS[0])
    last = refs(namespace.identity, DOCUMENTS[0])[-1]
    for bad in ((last.key, -1, 0), (last.key, 3, -1), (last.key[:8], 3, 0)):
        with pytest.raises(SegmentError):
            namespace.label("x", bad[0], bad[1], bad[2])  # type: ignore[arg-type]
    namespace.label("doc [2007] \udcff", last.key, 6, last.depth)
    namespace.flush()
    with Namespace(namespace._backend, namespace.identity) as other:
        assert [label.name for label in other.state().labels] == ["doc [2007] \udcff"]


def test_entries_stay_buffered_when_a_flush_fails_in_any_way(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_document(namespace, DOCUMENTS[0])
    for error in (unavailable(), KeyboardInterrupt(), MemoryError()):
        with monkeypatch.context() as patch:

            def fail(*_: object, error: BaseException = error) -> None:
                raise error

            patch.setattr(namespace._manifest, "write", fail)
            with pytest.raises(type(error)):
                namespace.flush()
    namespace.flush()
    with Namespace(namespace._backend, namespace.identity) as other:
        assert all(other.state().rows_of(ref.key) for ref in refs(namespace.identity, DOCUMENTS[0]))
