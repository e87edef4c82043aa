"""Why a prompt would miss: each reason by its own name, with what differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_cli.store.explain import Cause, Difference, Explanation, explain_prompt
from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from tests.store.pattern import document, put_document, refs, tiny_identity

DOCUMENT = document(22)  # five chunks of 4 and a tail of 2


@pytest.fixture
def filled(store: Store, namespace: Namespace) -> Store:
    put_document(namespace, DOCUMENT)
    namespace.flush()
    return store


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def changed(at: int) -> list[int]:
    return [token + (number == at) for number, token in enumerate(DOCUMENT)]


def test_a_prompt_that_is_stored_hits(filled: Store, identity: Identity):
    found = explain_prompt(filled, identity, DOCUMENT)
    assert (found.cause, found.hit_tokens, found.chunk) == (Cause.HIT, 22, None)
    assert explain_prompt(filled, identity, DOCUMENT[:20]).cause is Cause.HIT


@pytest.mark.parametrize(("at", "hit"), [(0, 0), (3, 0), (4, 4), (13, 12), (19, 16)])
def test_other_tokens_end_the_hit_at_their_chunk(filled: Store, identity: Identity, at: int, hit: int):
    found = explain_prompt(filled, identity, changed(at))
    assert (found.cause, found.hit_tokens) == (Cause.OTHER_TOKENS, hit)
    assert (found.chunk, found.chunk_start, found.chunk_stop) == (hit // 4, hit, hit + 4)
    assert (found.num_siblings, found.first_other_token) == (1, None)
    assert found.sentences[0] == f"{hit} of 22 tokens hit"


def test_a_changed_tail_is_named(filled: Store, identity: Identity):
    found = explain_prompt(filled, identity, changed(21))
    assert (found.cause, found.hit_tokens, found.chunk_start, found.chunk_stop) == (Cause.OTHER_TOKENS, 20, 20, 22)


def test_kept_token_ids_tell_the_very_token(store: Store, identity: Identity):
    with store.namespace(identity, create=True, writer=WriterOptions(keep_tokens=True)) as namespace:
        put_document(namespace, DOCUMENT)
        put_document(namespace, [*DOCUMENT[:12], 1, 2, 3, 4])
    found = explain_prompt(store, identity, changed(14))
    assert (found.num_siblings, found.first_other_token) == (2, 14)
    assert "another token at position 14" in found.sentences[-1]


def test_what_follows_a_stored_beginning_may_just_not_be_stored(filled: Store, identity: Identity):
    found = explain_prompt(filled, identity, [*DOCUMENT[:20], *document(8, seed=3)])
    assert (found.cause, found.hit_tokens) == (Cause.OTHER_TOKENS, 20)  # the tail is a sibling
    with filled.namespace(identity, create=True) as namespace:
        put_document(namespace, document(8, seed=9))
    found = explain_prompt(filled, identity, [*document(8, seed=9), *DOCUMENT[:8]])
    assert (found.cause, found.hit_tokens, found.num_siblings) == (Cause.NOT_STORED, 8, 0)


def test_a_prompt_shorter_than_a_chunk(store: Store, namespace: Namespace, identity: Identity):
    put_document(namespace, DOCUMENT)
    namespace.flush()
    found = explain_prompt(store, identity, DOCUMENT[:3])
    assert (found.cause, found.hit_tokens, found.chunk_stop) == (Cause.TOO_SHORT, 0, 3)


@pytest.mark.parametrize(
    ("change", "field", "stored"),
    [
        ({"weights": "sha256:" + "1" * 64}, "weights", tiny_identity().weights),
        ({"dtype": Dtype.F16}, "dtype", "BF16"),
        ({"adapter": "sha256:" + "2" * 64}, "adapter", None),
        ({"chunk_tokens": 8}, "chunk_tokens", 4),
        ({"rope": {"type": "default", "theta": "20000.0"}}, "rope", {"type": "default", "theta": "10000.0"}),
    ],
)
def test_another_identity_is_named_with_the_field_that_differs(
    filled: Store, identity: Identity, change: dict[str, object], field: str, stored: object
):
    wanted = replace(identity, **change)  # type: ignore[arg-type]
    found = explain_prompt(filled, wanted, DOCUMENT)
    (other,) = found.elsewhere
    assert (found.cause, found.hit_tokens, other.hit_tokens) == (Cause.OTHER_IDENTITY, 0, 22)
    assert other.differences == (Difference(field, wanted.to_dict()[field], stored),)
    assert (other.namespace, other.model) == (identity.fingerprint, identity.model)
    assert any(identity.fingerprint in sentence and field in sentence for sentence in found.sentences)


def test_nothing_under_this_identity_and_nothing_elsewhere(filled: Store):
    found = explain_prompt(filled, tiny_identity(name="other"), document(8, seed=5))
    assert (found.cause, found.elsewhere) == (Cause.NO_NAMESPACE, ())


def test_salts_are_told_apart(store: Store, namespace: Namespace, identity: Identity):
    put_document(namespace, DOCUMENT)
    put_document(namespace, document(8, seed=2), salt="tenant-b")
    namespace.flush()
    salted = explain_prompt(store, identity, DOCUMENT, salt="tenant-a")
    assert (salted.cause, salted.hit_tokens, salted.unsalted_tokens) == (Cause.OTHER_SALT, 0, 22)
    assert salted.num_salted_firsts == 1
    unsalted = explain_prompt(store, identity, document(8, seed=2))
    assert (unsalted.hit_tokens, unsalted.num_salted_firsts) == (0, 1)
    assert any("under other salts" in sentence for sentence in unsalted.sentences)
    assert explain_prompt(store, identity, document(8, seed=2), salt="tenant-b").cause is Cause.HIT
    assert not any("tenant" in sentence for sentence in (*salted.sentences, *unsalted.sentences))


def test_missing_parts_are_named(store: Store, namespace: Namespace, identity: Identity):
    put_document(namespace, DOCUMENT, part=Part(0, 1, 0, 2))
    put_document(namespace, DOCUMENT[:8], part=Part(1, 2, 0, 2))
    namespace.flush()
    found = explain_prompt(store, identity, DOCUMENT)
    assert (found.cause, found.hit_tokens) == (Cause.INCOMPLETE, 8)
    assert "there are l0-1h0-2" in " ".join(found.sentences)


def test_shards_the_index_lost_hit_as_they_do_for_readers(filled: Store, root: Path, identity: Identity):
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    found = explain_prompt(filled, identity, DOCUMENT)
    assert found.hit_tokens == 20  # a tail is found through the index alone
    assert found.key is None


def test_explaining_changes_nothing(filled: Store, root: Path, identity: Identity):
    before = files(root)
    for prompt in (DOCUMENT, changed(5), document(9, seed=8)):
        explain_prompt(filled, identity, prompt, salt="x")
        explain_prompt(filled, replace(identity, chunk_tokens=8), np.array(prompt, np.int64))
    assert files(root) == before


def test_the_hit_is_that_of_a_reader(filled: Store, identity: Identity):
    rng = np.random.default_rng(7)
    with filled.namespace(identity) as reader:
        for _ in range(50):
            prompt = [*DOCUMENT[: rng.integers(0, 23)], *map(int, rng.integers(0, 5, rng.integers(0, 6)))]
            found: Explanation = explain_prompt(filled, identity, prompt)
            assert found.hit_tokens == reader.match(prompt).num_tokens
    assert [ref.num_tokens for ref in refs(identity, DOCUMENT)] == [4, 4, 4, 4, 4, 2]
