"""A hit turned back into a cache: it answers as if it had never left memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.integration.producer import Document, TokenIds
from lmcache_cli.integration.transformers.model_identity import identify
from tests.integration.transformers.conftest import fresh_buffer

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("transformers"), pytest.mark.slow]


def tokens_of(count: int) -> TokenIds:
    return np.random.default_rng(count).integers(3, 64, size=count).astype(np.uint32)


def filled(engine: Any, prompt: TokenIds, num_hit: int, way: str, **options: Any) -> Any:
    """A cache of `prompt` that holds its first `num_hit` tokens, filled in one of the three ways."""
    from lmcache_cli.integration.transformers.reusable_cache import ReusableCache

    cache = ReusableCache(engine.identity, prompt, **options)
    for chunk in engine.prefill([Document(prompt[:num_hit])], fresh_buffer):
        if way == "chunks":
            cache.add(chunk.num_tokens, chunk.data)
        elif way == "slabs":
            begin = 0
            for slab in cache.next_slabs(chunk.num_tokens):
                slab[:] = chunk.data[begin : begin + slab.nbytes]
                begin += slab.nbytes
            assert begin == chunk.data.nbytes
            cache.accept(chunk.num_tokens)
        else:
            shape = (engine.identity.kv_heads, chunk.num_tokens, engine.identity.head_dim_k)
            sides = torch.from_numpy(chunk.data).view(torch.float32).view(-1, *shape)
            cache.add_layers(list(sides[0::2]), list(sides[1::2]))
    return cache


@pytest.mark.parametrize("way", ["chunks", "slabs", "layers"])
@pytest.mark.parametrize("num_hit", [4, 8, 19])
def test_continuation_equals_the_one_from_memory(engine: Any, way: str, num_hit: int) -> None:
    prompt = tokens_of(23)
    memory = engine.new_cache(64)
    engine.extend(memory, prompt[:num_hit])
    expected = list(engine.greedy(memory, prompt[num_hit:], max_tokens=24, stop_at_eos=False))
    cache = filled(engine, prompt, num_hit, way)
    assert cache.num_tokens == num_hit
    found = list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=24, stop_at_eos=False))
    assert found == expected


def test_generate_of_transformers_goes_on_from_it(engine: Any) -> None:
    prompt = tokens_of(23)
    cache = filled(engine, prompt, 16, "chunks")
    expected = list(engine.greedy(filled(engine, prompt, 16, "slabs").past_key_values, prompt[16:], max_tokens=12))
    output = engine.model.generate(
        cache.input_ids, past_key_values=cache.past_key_values, max_new_tokens=12, do_sample=False
    )
    assert output[0, 23:].tolist() == expected


@pytest.mark.parametrize("way", ["chunks", "slabs", "layers"])
@pytest.mark.parametrize("length", [1, 4, 7, 8])
def test_hit_of_the_whole_prompt_leaves_one_token_to_compute(engine: Any, way: str, length: int) -> None:
    prompt = tokens_of(length)
    cache = filled(engine, prompt, length, way)
    assert cache.num_tokens == length - 1
    assert cache.suffix.tolist() == prompt[-1:].tolist()
    alone = engine.next_token(engine.new_cache(length), prompt)
    assert engine.next_token(cache.past_key_values, cache.suffix) == alone


def test_answer_longer_than_the_spare_room_grows_it(engine: Any) -> None:
    prompt = tokens_of(12)
    roomy, tight = (filled(engine, prompt, 8, "chunks", spare_tokens=spare) for spare in (64, 0))
    answers = [
        list(engine.greedy(cache.past_key_values, cache.suffix, max_tokens=40, stop_at_eos=False))
        for cache in (roomy, tight)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 40


def test_rows_can_be_repeated_for_several_answers(engine: Any) -> None:
    prompt = tokens_of(12)
    cache = filled(engine, prompt, 8, "chunks").past_key_values
    expected = engine.next_token(filled(engine, prompt, 8, "chunks").past_key_values, prompt[8:])
    cache.batch_repeat_interleave(3)
    ids = torch.from_numpy(prompt[8:].astype(np.int64)).repeat(3, 1)
    with torch.inference_mode():
        logits = engine.model(input_ids=ids, past_key_values=cache).logits[:, -1]
    assert logits.argmax(-1).tolist() == [expected] * 3
    assert cache.get_seq_length() == 12


def test_cropping_forgets_the_last_tokens(engine: Any) -> None:
    prompt = tokens_of(12)
    expected = engine.next_token(filled(engine, prompt, 8, "chunks").past_key_values, prompt[8:])
    cache = filled(engine, prompt, 8, "chunks").past_key_values
    engine.next_token(cache, prompt[3:7])
    cache.crop(-4)
    assert engine.next_token(cache, prompt[8:]) == expected


def test_what_does_not_fit_is_refused(engine: Any) -> None:
    from lmcache_cli.integration.transformers.reusable_cache import ReusableCache

    cache = ReusableCache(engine.identity, tokens_of(6))
    with pytest.raises(ValueError, match="bytes"):
        cache.add(4, np.zeros(17, np.uint8))
    with pytest.raises(ValueError, match="cannot add 7"):
        cache.next_slabs(7)
    with pytest.raises(ValueError, match="expected 3 layers"):
        cache.add_layers([torch.zeros(2, 4, 8)], [torch.zeros(2, 4, 8)])
    assert cache.num_tokens == 0
    with pytest.raises(ValueError, match="at least one token"):
        ReusableCache(engine.identity, [])


@pytest.mark.slow
def test_real_model_continues_64_tokens_alike_and_holds_its_own_bits(model_dir: Path) -> None:
    """SmolLM2 in bf16: chunks equal its own cache to the bit, and a rebuilt cache answers like the one in memory."""
    from transformers import DynamicCache

    from lmcache_cli.integration.transformers.engine import TransformersEngine
    from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens
    from lmcache_cli.integration.transformers.reusable_cache import ReusableCache

    identity = identify(model_dir).identity
    engine = TransformersEngine.load(model_dir, identity, piece_tokens=256)
    text = (Path(__file__).parents[3] / "LICENSE").read_text()
    prompt = load_prompt_tokens(model_dir).of_text(text)[:700]
    num_hit = 600

    chunks = list(engine.prefill([Document(prompt[:num_hit])], fresh_buffer))
    own = DynamicCache()
    with torch.inference_mode():
        for start in range(0, num_hit, 256):
            ids = torch.from_numpy(prompt[start : min(num_hit, start + 256)].astype(np.int64))[None]
            engine.model(input_ids=ids, past_key_values=own)
    for chunk in chunks:
        window = slice(chunk.start, chunk.start + chunk.num_tokens)
        whole = torch.cat(
            [side[0, :, window].reshape(-1) for layer in own.layers for side in (layer.keys, layer.values)]
        )
        assert torch.equal(torch.from_numpy(chunk.data), whole.view(torch.uint8))

    rebuilt = ReusableCache(identity, prompt)
    for chunk in chunks:
        rebuilt.add(chunk.num_tokens, chunk.data)
    found = list(engine.greedy(rebuilt.past_key_values, rebuilt.suffix, max_tokens=64, stop_at_eos=False))
    memory = engine.new_cache(800)
    engine.extend(memory, prompt[:num_hit])
    assert found == list(engine.greedy(memory, prompt[num_hit:], max_tokens=64, stop_at_eos=False))
    plain = list(engine.greedy(own, prompt[num_hit:], max_tokens=64, stop_at_eos=False))
    assert found == plain
