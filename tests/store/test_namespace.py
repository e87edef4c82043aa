"""Match, read and write on a sound store: prefixes, tails, salts, items, buffers, several writers, what is counted."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.store import (
    Namespace,
    NoSuchNamespace,
    PutStatus,
    Refused,
    Store,
    WriterOptions,
)
from lmcache_cli.store.events import Event
from lmcache_format.dtypes import Dtype
from lmcache_format.errors import GeometryError, KeyInputError
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import AttentionKind, Identity
from lmcache_format.keys import MultimodalItem, chunk_extras, next_key
from lmcache_format.segment import RemoveReason
from tests.store.pattern import (
    document,
    filled,
    hit,
    put_chunk,
    put_document,
    read_match,
    refs,
    renamed,
    small_buffer,
    tiny_identity,
    wrong_elements,
)

TOKENS = document(14, 1)  # three full chunks, a tail of two


@pytest.mark.parametrize("length", range(15))
def test_a_prompt_hits_its_longest_present_prefix(namespace: Namespace, length: int) -> None:
    """Full chunks, and the tail for a prompt that agrees with it through all its tokens."""
    put_document(namespace, TOKENS)
    own = [7] * 9  # of the prompt alone
    expected = 14 if length == 14 else length - length % 4
    assert hit(namespace, TOKENS[:length] + own) == expected
    assert hit(namespace, TOKENS[:length]) == expected


def test_the_longest_of_several_tails_counts(namespace: Namespace) -> None:
    for length in (9, 11, 10):
        put_document(namespace, TOKENS[:length])
    assert hit(namespace, TOKENS) == 11
    assert hit(namespace, TOKENS[:10]) == 10
    assert hit(namespace, [*TOKENS[:9], 5, 5, 5]) == 9
    put_document(namespace, TOKENS[:12])
    assert hit(namespace, TOKENS) == 12  # the full chunk supersedes its tails
    assert namespace.match(TOKENS, tails=False).num_tokens == 12


def test_a_tail_at_the_very_start(namespace: Namespace) -> None:
    put_document(namespace, TOKENS[:3])
    assert hit(namespace, TOKENS) == 3
    assert namespace.match(TOKENS, tails=False).num_tokens == 0


def test_a_tail_of_another_salt_or_document_is_none(namespace: Namespace) -> None:
    put_document(namespace, TOKENS, salt="a")
    assert hit(namespace, TOKENS) == 0
    assert hit(namespace, TOKENS, salt="b") == 0
    assert hit(namespace, TOKENS, salt="a") == 14
    put_document(namespace, TOKENS, salt="")
    assert hit(namespace, TOKENS) == 14


def test_the_salt_itself_is_written_nowhere(store: Store, root: Path, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS, salt="tenant-of-great-secrecy")
        namespace.label("a document", refs(identity, TOKENS)[0].key, 4, 0)
    for path in root.rglob("*"):
        assert "secrecy" not in str(path)
        assert not path.is_file() or b"secrecy" not in path.read_bytes()


def test_images_are_part_of_the_keys(namespace: Namespace) -> None:
    identity = namespace.identity
    cat, dog = (MultimodalItem(2, 4, name) for name in ("cat", "dog"))
    parent = namespace.root()
    for depth, start in enumerate((0, 4, 8)):
        own = TOKENS[start : start + 4]
        key = next_key(parent, own, chunk_extras([cat], start, 4))
        buffer = filled(identity, whole_part(identity), own, start)
        namespace.put(buffer, key=key, parent=parent, depth=depth, tokens=own, extras_free=False)
        parent = key
    own = TOKENS[12:14]
    key = next_key(parent, own, chunk_extras([cat], 12, 2))
    namespace.put(filled(identity, whole_part(identity), own, 12), key=key, parent=parent, depth=3)
    match = namespace.match(TOKENS, items=[cat])
    assert read_match(namespace, match, TOKENS) == 14
    assert namespace.match(TOKENS, items=[dog]).num_tokens == 0
    assert namespace.match(TOKENS).num_tokens == 0
    assert namespace.match(TOKENS, items=[MultimodalItem(3, 3, "cat")]).num_tokens == 0


def test_a_gap_ends_the_match(store: Store, root: Path, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        chunks = refs(identity, TOKENS)
        for ref in (chunks[0], chunks[2], chunks[3]):
            put_chunk(namespace, ref, TOKENS)
        assert hit(namespace, TOKENS) == 4
        put_chunk(namespace, chunks[1], TOKENS)
        assert hit(namespace, TOKENS) == 14


def test_a_second_process_answers_after_the_first_ended(store: Store, root: Path, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    with Store.open(str(root)) as other, other.namespace(identity) as namespace:
        assert hit(namespace, TOKENS) == 14
        assert other.events[Event.ADOPTED] == 0
        assert put_document(namespace, TOKENS) == [PutStatus.PRESENT] * 4


def test_chunks_of_a_writer_that_has_not_flushed_are_found_by_name(store: Store, identity: Identity) -> None:
    with store.namespace(identity, create=True) as writer, store.namespace(identity) as reader:
        put_document(writer, TOKENS)
        assert hit(reader, TOKENS) == 12  # a tail has no name to guess
        assert store.events[Event.ADOPTED] == 3
        writer.flush()
        assert reader.refresh()
        assert hit(reader, TOKENS) == 14


def test_a_reader_notices_what_others_flushed_once_its_interval_is_over(identity: Identity) -> None:
    now = [0.0]
    backend = MemoryBackend()
    with Namespace(backend, identity) as writer:
        with Namespace(backend, identity, clock=lambda: now[0], refresh_interval_s=5) as reader:
            put_document(writer, TOKENS[:3])
            writer.flush()
            now[0] = 4.9
            assert reader.match(TOKENS).num_tokens == 0
            now[0] = 5.0
            assert reader.match(TOKENS).num_tokens == 3


def test_a_removed_chunk_is_gone_for_all_and_comes_back_by_a_new_write(store: Store, identity: Identity) -> None:
    with store.namespace(identity, create=True) as one, store.namespace(identity, create=True) as two:
        put_document(one, TOKENS)
        one.flush()
        two.refresh()
        state = two.state()
        (row,) = state.rows_of(refs(identity, TOKENS)[1].key)
        two.remove(state.entry(row), RemoveReason.PRUNED)
        assert hit(two, TOKENS) == 4
        two.flush()
        one.refresh()
        assert hit(one, TOKENS) == 4
        assert put_chunk(one, refs(identity, TOKENS)[1], TOKENS) is PutStatus.REPLACED
        assert hit(one, TOKENS) == 14
        one.flush()
        for namespace in (one, two):
            namespace.compact()
            namespace.refresh()
            assert hit(namespace, TOKENS) == 14


def test_touches_add_up_and_survive_compaction(store: Store, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
        for _ in range(3):
            hit(namespace, TOKENS[:8])
        namespace.flush()
        namespace.compact()
    with store.namespace(identity) as namespace:
        hits = {int(touch["key"]): int(touch["hits"]) for touch in namespace.state().touches}
        keys = [int.from_bytes(ref.key[:8], "big") for ref in refs(identity, TOKENS)]
        assert [hits[key] for key in keys] == [3, 3, 0, 0]


def test_labels_survive_and_the_latest_counts(store: Store, identity: Identity) -> None:
    last = refs(identity, TOKENS)[-1]
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
        namespace.label("report.pdf", last.key, 14, 3)
        namespace.label("[red]naïve\n文[/red]", last.key, 14, 3)
        namespace.flush()
        namespace.compact()
    with store.namespace(identity) as namespace:
        labels = namespace.state().labels
        assert {label.name for label in labels} == {"report.pdf", "[red]naïve\n文[/red]"}
        assert {(label.key, label.num_tokens, label.depth) for label in labels} == {(last.key[:16], 14, 3)}


def test_the_result_counts_exactly_what_was_read(namespace: Namespace) -> None:
    put_document(namespace, TOKENS)
    match = namespace.match(TOKENS)
    buffers, result = namespace.load(match)
    assert (result.num_tokens, result.num_chunks, len(buffers)) == (14, 4, 4)
    assert result.fault is None
    assert [buffer.num_tokens for buffer in buffers] == [4, 4, 4, 2]
    assert result.bytes_read == sum(buffer.size_bytes for buffer in buffers) + 4 * 4096
    nothing = namespace.load(namespace.match([1, 2, 3]))
    assert (nothing[0], nothing[1].num_tokens) == ([], 0)


def test_buffers_that_do_not_fit_are_refused(namespace: Namespace) -> None:
    put_document(namespace, TOKENS)
    chunks = refs(namespace.identity, TOKENS)
    part = namespace.need
    with pytest.raises(Refused):
        namespace.read(chunks, [small_buffer(namespace.identity, part, 4)])
    with pytest.raises(Refused):
        namespace.read(chunks[-1:], [small_buffer(namespace.identity, part, 4)])
    other = renamed(namespace.identity, model="another")
    with pytest.raises(Refused):
        namespace.read(chunks[:1], [small_buffer(other, part, 4)])
    with pytest.raises(GeometryError):
        small_buffer(namespace.identity, Part(0, 3, 0, 2), 4)
    with pytest.raises(GeometryError):
        small_buffer(namespace.identity, part, 5)


def test_tokens_that_are_not_those_of_the_key_are_refused(namespace: Namespace, root: Path) -> None:
    ref = refs(namespace.identity, TOKENS)[0]
    buffer = filled(namespace.identity, namespace.need, TOKENS[:4], 0)
    with pytest.raises(KeyInputError):
        namespace.put(buffer, key=ref.key, parent=ref.parent, depth=0, tokens=[1, 2, 3, 4])
    assert not list(root.rglob("*.safetensors"))
    for bad in ([-1], [2**32], [1.5], [[1, 2]], [True, False]):
        with pytest.raises(KeyInputError):
            namespace.match(bad)  # type: ignore[arg-type]


def test_a_buffer_is_reused_for_shorter_chunks(namespace: Namespace) -> None:
    put_document(namespace, TOKENS)
    buffer = small_buffer(namespace.identity, namespace.need, 4)
    for ref in refs(namespace.identity, TOKENS):
        fitting = buffer.for_tokens(ref.num_tokens)
        assert namespace.read([ref], [fitting]).num_tokens == ref.num_tokens
        start = 4 * ref.depth
        assert wrong_elements(namespace.identity, fitting, TOKENS[start : start + ref.num_tokens], start) == 0


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("kind", [AttentionKind.FULL, AttentionKind.LATENT])
def test_every_stored_type_comes_back_bit_for_bit(tmp_path: Path, dtype: Dtype, kind: AttentionKind) -> None:
    identity = tiny_identity(dtype=dtype, kind=kind, head_dim=6)
    with Store.create(str(tmp_path / "s")) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
        assert hit(namespace, TOKENS) == 14


def test_unverified_weights_and_unknown_namespaces_are_refused(store: Store, identity: Identity) -> None:
    with pytest.raises(NoSuchNamespace):
        store.namespace(identity)
    unverified = renamed(identity, weights="unverified:tiny")
    with pytest.raises(Refused):
        store.namespace(unverified, create=True)
    assert unverified.fingerprint not in store.fingerprints()
    with store.namespace(unverified, create=True, allow_unverified=True) as namespace:
        put_document(namespace, TOKENS)
    with store.namespace(identity, create=True) as namespace:
        assert hit(namespace, TOKENS) == 0


def test_flushes_follow_the_number_of_chunks_and_the_time(root: Path, identity: Identity) -> None:
    now = [0.0]
    with Store.create(str(root)) as store:
        options = WriterOptions(flush_after_chunks=3, flush_after_s=10)
        with Namespace(store.backend, identity, writer=options, clock=lambda: now[0]) as namespace:
            for number in range(7):
                put_document(namespace, document(4, number))
            assert len(list(root.rglob("*.lmi"))) == 2
            now[0] = 10
            put_document(namespace, document(4, 7))
            assert len(list(root.rglob("*.lmi"))) == 3
        assert len(list(root.rglob("*.lmi"))) == 3


def test_many_flushes_are_compacted_by_and_by(root: Path, identity: Identity) -> None:
    documents = [document(4, number) for number in range(60)]
    with Store.create(str(root)) as store:
        options = WriterOptions(flush_after_chunks=1, grace_ms=0)
        with store.namespace(identity, create=True, writer=options) as namespace:
            for tokens in documents:
                put_document(namespace, tokens)
        assert len(list(root.rglob("*.lmi"))) <= 18
        with Namespace(store.backend, identity) as namespace:
            state = namespace.state()
            assert all(state.rows_of(refs(identity, tokens)[0].key) for tokens in documents)


@settings(max_examples=25)
@given(st.data())
def test_any_mix_of_writers_readers_and_flushes_agrees_with_a_set_of_chunks(data: st.DataObject) -> None:
    """Three processes on one store; what is put is found by all, what is removed by none, until it is put again."""
    identity = tiny_identity(layers=1, kv_heads=1)
    backend = MemoryBackend()
    trunk = document(8, 3)
    prompts = [[*trunk[:cut], *document(4, seed)] for cut, seed in itertools.product((0, 4, 8), (1, 2))]
    namespaces = [Namespace(backend, identity, refresh_interval_s=0) for _ in range(3)]
    present: set[bytes] = set()
    steps = st.tuples(
        st.sampled_from(("put", "remove", "flush", "refresh", "compact", "reopen", "match")),
        st.integers(0, 2),
        st.sampled_from(prompts),
    )
    for step, number, tokens in data.draw(st.lists(steps, max_size=25)):
        namespace = namespaces[number]
        chunks = refs(identity, tokens)
        match step:
            case "put":
                put_document(namespace, tokens)
                present |= {ref.key for ref in chunks}
            case "remove":
                for other in namespaces:
                    other.flush()
                    other.refresh()
                for ref in chunks[-1:]:
                    state = namespace.state()
                    for row in state.rows_of(ref.key):
                        namespace.remove(state.entry(row), RemoveReason.PRUNED)
                    present.discard(ref.key)
                for other in namespaces:
                    other.flush()
                for other in namespaces:
                    other.refresh()
            case "flush":
                namespace.flush()
            case "refresh":
                namespace.refresh()
            case "compact":
                namespace.compact()
            case "reopen":
                namespace.close()
                namespaces[number] = Namespace(backend, identity, refresh_interval_s=0)
            case _:
                expected = next((n for n, ref in enumerate(chunks) if ref.key not in present), len(chunks))
                assert hit(namespace, tokens) == 4 * expected
    for namespace in namespaces:
        namespace.close()
