"""C12: asking twice changes the answer. A prompt of six chunks of which two are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_format.identity import Identity
from lmcache_format.segment import key_number
from tests.integration.vllm.fakes import FakeEngine
from tests.store.pattern import document, put_document

PROMPT = document(48, 12)


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("num_asked", range(1, 6))
def test_a_prompt_is_stored_whole_however_often_it_was_asked_for(
    engine_of: Callable[..., FakeEngine], store_dir: Path, identity: Identity, num_asked: int
):
    with Store.open(str(store_dir)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, PROMPT[:16])
    engine = engine_of(prefix_caching=False)
    request = engine.add("a", PROMPT)
    before = files(store_dir)
    assert [engine.scheduler.matched(request, 0) for _ in range(num_asked)] == [(16, False)] * num_asked
    assert engine.scheduler.counts["lookups"] == 1
    assert files(store_dir) == before
    engine.until_idle()
    assert engine.run("b", PROMPT).promised == [47]
    engine.assert_at_rest()
    engine.close()
    with Store.open(str(store_dir)) as store, store.namespace(identity) as namespace:
        state = namespace.state()
        entries = [state.entry(row) for row in range(len(state))]
        known = {key_number(namespace.root()), *(key_number(entry.key) for entry in entries)}
        assert len(entries) == 6
        assert {entry.parent for entry in entries} <= known
