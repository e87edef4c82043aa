"""The transformers engine, on tiny random models: what it yields is what the model's own cache holds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.integration.errors import GeometryMismatch, ModelError
from lmcache_cli.integration.producer import Document, KnownChunk, ProducedChunk, TokenIds
from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_format.geometry import part_tensors, whole_part
from lmcache_format.identity import AttentionKind
from tests.integration.transformers.conftest import CHUNK, PIECE, MakeDirectory, fresh_buffer

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("transformers"), pytest.mark.slow]


def tokens_of(count: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(3, 64, size=count).astype(np.uint32)


def load(directory: Path, **options: Any) -> Any:
    from lmcache_cli.integration.transformers.engine import TransformersEngine

    identity = options.pop("identity", None) or identify(directory, chunk_tokens=CHUNK).identity
    return TransformersEngine.load(directory, identity, **{"piece_tokens": PIECE, **options})


def own_cache(engine: Any, tokens: TokenIds, pieces: int = PIECE) -> list[tuple[Any, Any]]:
    """Keys and values `[H, T, D]` a layer from transformers' own cache, computed in the same pieces."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        for start in range(0, len(tokens), pieces):
            ids = torch.from_numpy(tokens[start : start + pieces].astype(np.int64))[None]
            engine.model(input_ids=ids, past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def tensors_in(engine: Any, chunk: ProducedChunk) -> list[Any]:
    """A chunk's bytes cut by the format's own table."""
    found, begin = [], 0
    for spec in part_tensors(engine.identity, whole_part(engine.identity), chunk.num_tokens):
        part = torch.from_numpy(chunk.data[begin : begin + spec.nbytes])
        found.append(part.view(engine.model.dtype).view(spec.shape))
        begin += spec.nbytes
    assert begin == chunk.data.nbytes
    return found


def same_bits(left: Any, right: Any) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def assert_chunks_hold(engine: Any, chunks: list[ProducedChunk], own: list[tuple[Any, Any]]) -> None:
    for chunk in chunks:
        window = slice(chunk.start, chunk.start + chunk.num_tokens)
        expected = [side[:, window] for layer in own for side in layer]
        for found, wanted in zip(tensors_in(engine, chunk), expected, strict=True):
            assert same_bits(found, wanted)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 21])
def test_chunks_equal_the_models_own_cache_to_the_bit(engine: Any, length: int) -> None:
    tokens = tokens_of(length)
    chunks = list(engine.prefill([Document(tokens)], fresh_buffer))
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [
        (start, min(CHUNK, length - start)) for start in range(0, length, CHUNK)
    ]
    assert_chunks_hold(engine, chunks, own_cache(engine, tokens))


def test_computing_twice_gives_the_same_bytes(engine: Any) -> None:
    documents = [Document(tokens_of(21)), Document(tokens_of(13, seed=1))]
    first, second = (list(engine.prefill(documents, fresh_buffer)) for _ in range(2))
    assert all(np.array_equal(a.data, b.data) for a, b in zip(first, second, strict=True))


def test_known_prefix_is_not_produced_again_and_changes_nothing(engine: Any) -> None:
    tokens = tokens_of(30)
    whole = list(engine.prefill([Document(tokens)], fresh_buffer))
    known = [KnownChunk(chunk.num_tokens, chunk.data) for chunk in whole[:4]]
    for chunk in known:
        chunk.data.flags.writeable = False
    rest = list(engine.prefill([Document(tokens, known)], fresh_buffer))
    assert [chunk.start for chunk in rest] == [chunk.start for chunk in whole[4:]]
    for a, b in zip(rest, whole[4:], strict=True):
        assert np.array_equal(a.data, b.data)


def test_known_tail_is_completed_to_a_chunk(engine: Any) -> None:
    tokens = tokens_of(12)
    short = list(engine.prefill([Document(tokens[:6])], fresh_buffer))
    known = [KnownChunk(chunk.num_tokens, chunk.data) for chunk in short]
    chunks = list(engine.prefill([Document(tokens, known)], fresh_buffer))
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(4, 4), (8, 4)]
    own = own_cache(engine, tokens)
    for chunk in chunks:
        for found, wanted in zip(tensors_in(engine, chunk), itertools.chain.from_iterable(own), strict=True):
            torch.testing.assert_close(found, wanted[:, chunk.start : chunk.start + 4], rtol=1e-4, atol=1e-4)


def test_all_known_is_nothing_to_do(engine: Any) -> None:
    tokens = tokens_of(6)
    known = [KnownChunk(c.num_tokens, c.data) for c in engine.prefill([Document(tokens)], fresh_buffer)]
    assert list(engine.prefill([Document(tokens, known)], fresh_buffer)) == []
    assert list(engine.prefill([], fresh_buffer)) == []


def test_batch_of_unequal_documents_equals_each_alone(engine: Any) -> None:
    lengths = [5, 21, 1, 16, 9]
    documents = [Document(tokens_of(length, seed=length)) for length in lengths]
    chunks = list(engine.prefill(documents, fresh_buffer))
    for index, document in enumerate(documents):
        mine = [chunk for chunk in chunks if chunk.document == index]
        assert [chunk.start for chunk in mine] == list(range(0, lengths[index], CHUNK))
        own = own_cache(engine, document.tokens)
        for chunk in mine:
            window = slice(chunk.start, chunk.start + chunk.num_tokens)
            expected = [side[:, window] for layer in own for side in layer]
            for found, wanted in zip(tensors_in(engine, chunk), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_chunks_come_before_the_document_is_computed_whole(engine: Any) -> None:
    chunks = engine.prefill([Document(tokens_of(32))], fresh_buffer)
    calls = []
    hook = engine.model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert next(chunks).start == 0
    hook.remove()
    assert len(calls) == 1


def test_documents_that_know_unequally_much_are_no_batch(engine: Any) -> None:
    known = [KnownChunk(c.num_tokens, c.data) for c in engine.prefill([Document(tokens_of(4))], fresh_buffer)]
    with pytest.raises(ValueError, match="equally many"):
        list(engine.prefill([Document(tokens_of(8), known), Document(tokens_of(8))], fresh_buffer))
    with pytest.raises(ValueError, match="knows the KV of 4"):
        list(engine.prefill([Document(tokens_of(3), known)], fresh_buffer))


def test_ids_that_the_model_does_not_have_are_refused_by_place(engine: Any) -> None:
    wrong = np.array([3, 4, 63, 64], np.uint32)
    with pytest.raises(ModelError, match="token id 64 at position 3 is none of the model's 64"):
        list(engine.prefill([Document(wrong)], fresh_buffer))


@pytest.mark.slow
def test_an_answer_to_such_ids_is_refused_likewise(make_model: MakeDirectory) -> None:
    from lmcache_cli.integration.errors import AnswerFailed
    from lmcache_cli.integration.transformers.answering import AnswerRequest, Way, answer_in_fresh_process

    directory = make_model("llama")
    identity = identify(directory, chunk_tokens=CHUNK).identity.canonical_json().decode()
    with pytest.raises(AnswerFailed, match="token id 64 at position 1 is none of the model's 64"):
        answer_in_fresh_process(AnswerRequest(Way.COLD, str(directory), identity, [3, 64], 1, PIECE))


SLIDING = {
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


@pytest.mark.parametrize("kind", SLIDING)
def test_sliding_layers_keep_every_token_and_answer_the_same(make_model: MakeDirectory, kind: str) -> None:
    engine = load(make_model(kind, **SLIDING[kind]))
    assert AttentionKind.SLIDING in {group.kind for group in engine.identity.groups}
    tokens = tokens_of(29)
    cache = engine.new_cache(32)
    engine.extend(cache, tokens[:-5])
    assert cache.num_tokens == 24
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.inference_mode():
        alone = engine.model(input_ids=ids, use_cache=False).logits[0, -1]
        cached = engine.model(input_ids=ids[:, 24:], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(cached, alone, rtol=1e-3, atol=1e-3)


def test_model_that_caches_something_else_is_refused(make_model: MakeDirectory) -> None:
    directory = make_model("llama")
    other = identify(make_model("other", num_key_value_heads=4), chunk_tokens=CHUNK).identity
    with pytest.raises(GeometryMismatch, match="expected"):
        load(directory, identity=other)


def test_pieces_hold_whole_chunks(make_model: MakeDirectory) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        load(make_model("llama"), piece_tokens=6)


def test_provenance_names_who_computed(make_model: MakeDirectory) -> None:
    provenance = load(make_model("llama"), attention="eager").provenance
    assert provenance["engine"] == "transformers"
    assert provenance["attention"] == "eager"
