"""C05: LoRA adapter not part of the external key; adapter reloaded under the same name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.integration.vllm.caching import Caching, Uncached
from lmcache_cli.integration.vllm.identity import RequestReader
from lmcache_cli.integration.vllm.options import ConnectorOptions
from lmcache_format.identity import Identity
from tests.integration.vllm.fakes import FakeEngine, FakeRequest
from tests.store.pattern import document, refs

PROMPT = document(35, 5)


@dataclass
class Lora:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@dataclass(eq=False)
class LoraRequest(FakeRequest):
    lora_request: Lora | None = None


def adapter(directory: Path, weights: bytes) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    (directory / "adapter_model.bin").write_bytes(weights)
    return str(directory)


@pytest.fixture
def engine(engine_of: Callable[..., FakeEngine]) -> FakeEngine:
    reader = RequestReader(ConnectorOptions(store="unused"))
    return engine_of(describe=reader, prefix_caching=False)


def run(engine: FakeEngine, name: str, lora: Lora | None, prompt: Any = PROMPT) -> list[int]:
    """What was promised to a request from the store. The base model's pattern stands for every adapter's: this is about
    keys."""
    request = LoraRequest(name, list(prompt), lora_request=lora)
    engine.requests[name] = request
    engine.waiting.append(request)
    engine.until_idle()
    return request.promised


def test_hits_are_exact_in_the_adapter(engine: FakeEngine, tmp_path: Path):
    a = Lora("a", 1, adapter(tmp_path / "a", b"weights of a"))
    b = Lora("b", 2, adapter(tmp_path / "b", b"weights of b"))
    assert run(engine, "base", None) == []
    reader = RequestReader(ConnectorOptions(store="unused"))
    found = [reader(LoraRequest("x", PROMPT, lora_request=lora)) for lora in (None, a, b)]
    assert all(isinstance(each, Caching) for each in found)
    digests = [each.adapter for each in found if isinstance(each, Caching)]
    assert digests[0] is None
    assert len(set(digests)) == 3
    assert engine.scheduler.matched(LoraRequest("a1", PROMPT, lora_request=a), 0) == (0, False)
    assert engine.scheduler.matched(LoraRequest("b1", PROMPT, lora_request=b), 0) == (0, False)
    assert engine.scheduler.matched(LoraRequest("base2", PROMPT), 0) == (32, False)


def test_an_adapters_own_chunks_are_found_under_its_digest_alone(engine_of: Callable[..., FakeEngine], tmp_path: Path):
    a = Lora("a", 1, adapter(tmp_path / "a", b"weights of a"))
    same = Lora("renamed", 9, adapter(tmp_path / "copy", b"weights of a"))
    reader = RequestReader(ConnectorOptions(store="unused"))
    engine = engine_of(describe=reader, prefix_caching=False)
    assert run_saving(engine, "first", a) > 0
    assert engine.scheduler.matched(LoraRequest("again", PROMPT, lora_request=a), 0) == (32, False)
    assert engine.scheduler.matched(LoraRequest("same", PROMPT, lora_request=same), 0) == (32, False)
    assert engine.scheduler.matched(LoraRequest("base", PROMPT), 0) == (0, False)
    for name in ("again", "same", "base"):
        engine.scheduler.finished(name)


def run_saving(engine: FakeEngine, name: str, lora: Lora) -> int:
    run(engine, name, lora)
    return engine.ranks[0].worker.writer.counts["saved"]


def test_files_overwritten_in_place_are_no_hit_and_are_not_saved(
    engine_of: Callable[..., FakeEngine], tmp_path: Path, store_dir: Path
):
    a = Lora("a", 1, adapter(tmp_path / "a", b"weights of a"))
    engine = engine_of(describe=RequestReader(ConnectorOptions(store="unused")), prefix_caching=False)
    run(engine, "first", a)
    before = sorted(store_dir.rglob("*.safetensors"))
    adapter(tmp_path / "a", b"other weights")
    assert run(engine, "second", a) == []
    assert engine.scheduler.counts["uncached_adapter"] == 1
    assert sorted(store_dir.rglob("*.safetensors")) == before  # the engine still computes with what it loaded
    assert engine.scheduler.matched(LoraRequest("r", PROMPT, lora_request=Lora("a", 2, a.lora_path)), 0) == (0, False)
    engine.scheduler.finished("r")
    inplace = Lora("a", 1, a.lora_path, load_inplace=True)
    assert run_saving(engine, "third", inplace) > 4


def test_an_adapter_without_a_digest_leaves_its_requests_uncached(engine: FakeEngine, store_dir: Path):
    assert run(engine, "hub", Lora("hub", 3, "someone/on-the-hub")) == []
    assert engine.scheduler.counts["uncached_adapter"] == 1
    assert list(store_dir.rglob("*.safetensors")) == []


def test_base_keys_know_nothing_of_adapters(engine: FakeEngine, store_dir: Path, identity: Identity):
    """They follow from the identity and the tokens alone, as they did before there were adapters."""
    caching = RequestReader(ConnectorOptions(store="unused"))(LoraRequest("x", PROMPT))
    assert caching == Caching(adapter=None, salt=None, items=())
    assert identity.adapter is None
    run(engine, "base", None)
    stored = {path.name.partition(".")[0] for path in store_dir.rglob("*.safetensors")}
    assert stored == {ref.key.hex() for ref in refs(identity, PROMPT, tail=False)}


@pytest.mark.parametrize("field", ["prompt_embeds", "prompt_is_token_ids"])
def test_prompt_embeddings_are_left_uncached(field: str):
    request = FakeRequest("x", PROMPT)
    setattr(request, field, [0.5])
    assert RequestReader(ConnectorOptions(store="unused"))(request) == Uncached("prompt_embeds")
