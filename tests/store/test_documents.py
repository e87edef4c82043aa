"""Documents by name: complete, or how much of them."""

from __future__ import annotations

from lmcache_cli.store import Namespace
from lmcache_cli.store.chunk_table import chunk_table
from lmcache_cli.store.documents import documents_of, usable_tokens
from lmcache_format.geometry import Part, whole_part
from lmcache_format.segment import RemoveReason
from tests.store.pattern import document, put_document, refs


def label(namespace: Namespace, name: str, tokens: list[int]) -> None:
    last = refs(namespace.identity, tokens)[-1]
    namespace.label(name, last.key, len(tokens), last.depth)


def statuses(namespace: Namespace) -> dict[str, str]:
    table = chunk_table(namespace.state(), whole_part(namespace.identity))
    return {found.name: found.status for found in documents_of(table, namespace.identity.chunk_tokens)}


def test_complete_documents_tails_included(namespace: Namespace):
    for name, length in (("a", 16), ("b", 18), ("c", 3)):
        tokens = document(length, seed=length)
        put_document(namespace, tokens)
        label(namespace, name, tokens)
    assert statuses(namespace) == {"a": "complete", "b": "complete", "c": "complete"}


def test_a_document_whose_end_is_not_stored_is_incomplete(namespace: Namespace):
    tokens = document(18)
    label(namespace, "report [v2].txt", tokens)
    assert statuses(namespace) == {"report [v2].txt": "incomplete (?/18 tokens)"}
    put_document(namespace, tokens[:8])
    label(namespace, "report [v2].txt", tokens[:8])
    assert statuses(namespace) == {"report [v2].txt": "incomplete (8/18 tokens)"}
    put_document(namespace, tokens)
    assert statuses(namespace) == {"report [v2].txt": "complete"}


def test_a_chunk_without_all_parts_ends_what_is_usable(namespace: Namespace):
    tokens = document(18)
    put_document(namespace, tokens, part=Part(0, 1, 0, 2))
    put_document(namespace, tokens[:12], part=Part(1, 2, 0, 2))
    label(namespace, "a", tokens)
    assert statuses(namespace) == {"a": "incomplete (12/18 tokens)"}


def test_a_chunk_that_is_gone_leaves_it_open_how_much_is_usable(namespace: Namespace):
    tokens = document(18)
    put_document(namespace, tokens)
    label(namespace, "a", tokens)
    third = next(e for e in map(namespace.state().entry, range(5)) if e.depth == 2)
    namespace.remove(third, RemoveReason.PRUNED)
    assert statuses(namespace) == {"a": "incomplete (?/18 tokens)"}
    label(namespace, "a", tokens[:8])
    assert statuses(namespace) == {"a": "incomplete (8/18 tokens)"}


def test_usable_tokens_of_every_chunk_of_a_tree(namespace: Namespace):
    trunk = document(12)
    put_document(namespace, trunk)
    put_document(namespace, [*trunk[:8], *document(6, seed=1)])
    table = chunk_table(namespace.state(), whole_part(namespace.identity))
    usable = usable_tokens(table, 4)
    assert sorted(usable.tolist()) == [4, 8, 12, 12, 14]
    assert (usable == table.depths * 4 + table.num_tokens).all()


def test_an_empty_namespace_has_no_documents(namespace: Namespace):
    assert statuses(namespace) == {}
