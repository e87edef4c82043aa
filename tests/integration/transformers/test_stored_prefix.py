"""From a model to files and back: a second opening of the store answers with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.integration.producer import Document, TokenIds
from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_cli.store.chunk import ChunkBuffer
from lmcache_cli.store.store import Store
from lmcache_format.geometry import whole_part
from lmcache_format.keys import next_key
from tests.integration.transformers.conftest import CHUNK, MakeDirectory, fresh_buffer

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("transformers"), pytest.mark.slow]

DOCUMENT = np.random.default_rng(5).integers(3, 64, size=42).astype(np.uint32)


@pytest.fixture
def store_dir(engine: Any, tmp_path: Path) -> Path:
    """A store that holds `DOCUMENT`: ten chunks and a tail of two tokens."""
    directory = tmp_path / "store"
    with Store.create(str(directory)) as store, store.namespace(engine.identity, create=True) as namespace:
        parent = namespace.root()
        for chunk in engine.prefill([Document(DOCUMENT)], fresh_buffer):
            tokens = DOCUMENT[chunk.start : chunk.start + chunk.num_tokens]
            buffer = ChunkBuffer(engine.identity, whole_part(engine.identity), chunk.num_tokens, chunk.data.data)
            key = next_key(parent, tokens)
            namespace.put(buffer, key=key, parent=parent, depth=chunk.start // CHUNK, tokens=tokens)
            parent = key
    return directory


def prefix_of(engine: Any, directory: Path, prompt: TokenIds, salt: str | None = None) -> Any:
    from lmcache_cli.integration.transformers.stored_prefix import load_prefix

    with Store.open(str(directory)) as store, store.namespace(engine.identity) as namespace:
        return load_prefix(namespace, prompt, salt=salt)


def answer_from_memory(engine: Any, prompt: TokenIds, num_hit: int) -> list[int]:
    cache = engine.new_cache(len(prompt) + 32)
    engine.extend(cache, prompt[:num_hit])
    return list(engine.greedy(cache, prompt[num_hit:], max_tokens=16, stop_at_eos=False))


@pytest.mark.parametrize(
    ("shared", "question", "num_hit"), [(42, 5, 42), (42, 0, 41), (41, 5, 40), (17, 9, 16), (3, 9, 0), (0, 9, 0)]
)
def test_answer_equals_the_one_from_memory(
    engine: Any, store_dir: Path, shared: int, question: int, num_hit: int
) -> None:
    follows = np.resize(np.append(DOCUMENT, 3)[shared:], question)
    other = np.where(follows == 63, 3, follows + 1).astype(np.uint32)
    prompt = np.concatenate([DOCUMENT[:shared], other])
    cache = prefix_of(engine, store_dir, prompt)
    assert cache.num_tokens == num_hit
    found = list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=16, stop_at_eos=False))
    assert found == answer_from_memory(engine, prompt, num_hit)


def test_store_that_was_moved_answers_the_same(engine: Any, store_dir: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    store_dir.rename(moved)
    assert prefix_of(engine, moved, DOCUMENT).num_tokens == 41


def test_another_tenants_salt_hits_nothing(engine: Any, store_dir: Path) -> None:
    assert prefix_of(engine, store_dir, DOCUMENT, salt="somebody").num_tokens == 0


def test_damaged_chunk_ends_the_prefix_and_the_answer_stays_right(engine: Any, store_dir: Path) -> None:
    with Store.open(str(store_dir)) as store, store.namespace(engine.identity) as namespace:
        victim = namespace.match(DOCUMENT).chunks()[6].key.hex()
    (path,) = store_dir.rglob(f"{victim}*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    cache = prefix_of(engine, store_dir, DOCUMENT)
    assert cache.num_tokens == 24
    found = list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=16, stop_at_eos=False))
    assert found == answer_from_memory(engine, DOCUMENT, 24)


def test_other_weights_hit_nothing(make_model: MakeDirectory, engine: Any, store_dir: Path) -> None:
    other = identify(make_model("other", intermediate_size=56), chunk_tokens=CHUNK).identity
    with Store.open(str(store_dir)) as store, store.namespace(other, missing_ok=True) as namespace:
        assert namespace.match(DOCUMENT).num_tokens == 0
    assert prefix_of(engine, store_dir, DOCUMENT).num_tokens == 41
