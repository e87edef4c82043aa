"""How far a document has come can be seen while it is computed: a run that is killed says nothing more at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lmcache_cli.integration import warming
from lmcache_cli.integration.producer import BufferSource, Document, ProducedChunk
from lmcache_cli.integration.warming import WarmDocument
from lmcache_cli.store import Store, WriterOptions
from lmcache_cli.store.chunk_table import chunk_table
from lmcache_cli.store.documents import documents_of
from lmcache_cli.store.index import Index
from lmcache_format.keys import token_words
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY, PatternEngine
from tests.store.pattern import document

TOKENS = document(8 * CHUNK_TOKENS + 2)


class Watched(PatternEngine):
    """Before each chunk, what another process would be told of the document."""

    def __init__(self, store: Store) -> None:
        super().__init__(ENGINE_IDENTITY, 0.02)
        self._store = store
        self.seen: list[str] = []

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        for chunk in super().prefill(documents, buffers):
            index = Index(self._store.backend, ENGINE_IDENTITY.fingerprint)
            (shown,) = documents_of(chunk_table(index.state, None), CHUNK_TOKENS)
            self.seen.append(shown.status)
            yield chunk


def test_a_long_document_can_be_followed_while_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "LABEL_EVERY_S", 0.0)
    with Store.create(str(tmp_path / "kv")) as store:
        engine = Watched(store)
        writer = WriterOptions(flush_after_chunks=1)
        with store.namespace(ENGINE_IDENTITY, create=True, writer=writer) as namespace:
            warming.warm(namespace, lambda: engine, [WarmDocument("book", token_words(TOKENS))])
    assert engine.seen[0] == f"incomplete (?/{len(TOKENS)} tokens)"
    known = [int(status.partition("(")[2].partition("/")[0]) for status in engine.seen if "?" not in status]
    assert known == sorted(known)
    assert known[-1] >= CHUNK_TOKENS  # at most as many chunks behind as there are buffers
