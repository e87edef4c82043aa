"""Latents (MLA): real pages as vLLM shapes them, behind the stand-in engine; and what of them is refused.

In a real vLLM: `test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_cli.integration.vllm import latents
from lmcache_cli.integration.vllm.identity import UnsupportedEngine, engine_identity
from lmcache_cli.integration.vllm.options import ConnectorOptions
from lmcache_cli.integration.vllm.paging import open_pages
from lmcache_cli.store import ChunkBuffer
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import AttentionKind, Identity
from tests.store.pattern import document, tiny_identity

from .fakes import FakeEngine

Build = Callable[..., FakeEngine]
RANK, ROTATED, BLOCK = 6, 2, 4
IDENTITY = tiny_identity(kind=AttentionKind.LATENT, layers=2, head_dim=RANK + ROTATED, chunk_tokens=8)
PROMPT = document(37, 1)


class Impl:
    """Writes pages as vLLM does, or, `is_swapped`, the rotated key first."""

    def __init__(self, is_swapped: bool = False) -> None:
        self.is_swapped = is_swapped

    def do_kv_cache_update(
        self, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        pieces = [kv_c_normed, k_pe.squeeze(1)]
        rows = kv_cache.view(-1, kv_cache.shape[-1])
        rows[slot_mapping] = torch.cat(pieces[::-1] if self.is_swapped else pieces, -1).to(rows.dtype)


class MLAAttentionSpec(SimpleNamespace):
    pass


class FullAttentionSpec(SimpleNamespace):
    pass


def layer(**fields: Any) -> Any:
    given = {"impl": Impl(), "kv_lora_rank": RANK, "qk_rope_head_dim": ROTATED, "kv_cache_dtype": "auto"}
    return SimpleNamespace(**{**given, "_k_scale": None, **fields})


def name_of(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


class TensorPages:
    """Pages of a rank, `[B, 1, N, R]` a layer, opened as the connector opens them."""

    def __init__(
        self, identity: Identity, part: Part, num_slots: int, *, of: Any = None, spec: type = MLAAttentionSpec
    ) -> None:
        self.part = part
        layers = range(part.layer_start, part.layer_stop)
        shape = (num_slots // BLOCK, 1, BLOCK, identity.head_dim_k)
        self.tensors = {name_of(number): torch.full(shape, -1.0, dtype=torch.bfloat16) for number in layers}
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(self.tensors, of or layer()))
        )
        group = SimpleNamespace(layer_names=list(self.tensors), kv_cache_spec=spec(block_size=BLOCK))
        self._pages = open_pages(config, SimpleNamespace(kv_cache_groups=[group]), self.tensors, identity, part)

    def scatter(self, buffer: ChunkBuffer, slots: Any) -> None:
        self._pages.scatter(buffer, slots)

    def gather(self, slots: Any, buffer: ChunkBuffer) -> None:
        self._pages.gather(slots, buffer)

    def write(self, tensors: dict[str, Any], slots: Any) -> None:
        for name, rows in self._rows():
            rows[slots] = tensors[name]

    def holds(self, tensors: dict[str, Any], slots: Any) -> bool:
        return all(np.array_equal(rows[slots], tensors[name]) for name, rows in self._rows())

    def _rows(self) -> list[tuple[str, Any]]:
        found = []
        for number, tensor in enumerate(self.tensors.values(), self.part.layer_start):
            words = tensor.view(torch.int16).numpy().view(np.uint16)
            found.append((f"layers.{number}.latent", words.reshape(-1, tensor.shape[-1])))
        return found


@pytest.fixture
def _rotates_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "check_rotation", lambda config, layer: None)


@pytest.mark.usefixtures("_rotates_well")
@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("writers", "readers"), [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 2), (2, 1))], ids=str)
def test_latents_are_written_once_and_read_by_every_rank(
    engine_of: Build, store_dir: Path, writers: tuple[int, int], readers: tuple[int, int], load_async: bool
):
    """Every slot that is read is compared, element by element, by every rank."""
    first = engine_of(identity=IDENTITY, tp=writers[0], pp=writers[1], pages=TensorPages, events=True)
    answer = first.run("a", PROMPT, max_tokens=3)
    first.step()  # what was written last is heard of
    first.assert_at_rest()
    parts = sorted(path.name.split(".")[1] for path in store_dir.rglob("*.safetensors"))
    assert parts == (["l0-2"] * 4 if writers[1] == 1 else ["l0-1"] * 4 + ["l1-2"] * 4)
    assert [rank.worker.writer.counts["saved"] for rank in first.ranks] == [
        4 if number % writers[0] == 0 else 0 for number in range(writers[0] * writers[1])
    ]
    assert len(first.scheduler.take_stored()) == 4
    second = engine_of(identity=IDENTITY, tp=readers[0], pp=readers[1], pages=TensorPages, load_async=load_async)
    again = second.run("b", PROMPT, max_tokens=3)
    assert again.promised == [32]
    assert again.output == answer.output
    assert second.poisoned_forwards == 0
    second.assert_at_rest()


@pytest.mark.usefixtures("_rotates_well")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (layer(impl=Impl(is_swapped=True)), "not how this engine writes its pages"),
        (layer(use_sparse=True), "sparse"),
        (layer(hisparse_cache=object()), "sparse"),
        (layer(kv_lora_rank=RANK + 1), "7 and 2 wide; expected 8"),
    ],
)
def test_latents_that_lie_otherwise_are_refused(wrong: Any, message: str):
    with pytest.raises(UnsupportedEngine, match=message):
        TensorPages(IDENTITY, whole_part(IDENTITY), 64, of=wrong)


def test_pages_of_another_kind_than_the_models_are_refused():
    with pytest.raises(UnsupportedEngine, match="FullAttentionSpec, which is not what example/tiny caches"):
        TensorPages(IDENTITY, whole_part(IDENTITY), 64, spec=FullAttentionSpec)
    plain = tiny_identity(kv_heads=1, head_dim=4)
    with pytest.raises(UnsupportedEngine, match="MLAAttentionSpec, which is not what example/tiny caches"):
        TensorPages(replace(plain, head_dim_k=8), whole_part(plain), 64)


def test_an_implementation_that_is_not_vllms_own_is_refused(tmp_path: Path):
    model = SimpleNamespace(
        model=str(tmp_path), use_mla=True, architecture="TransformersMoEForCausalLM", dtype="bfloat16"
    )
    config = SimpleNamespace(
        model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"), load_config=SimpleNamespace()
    )
    with pytest.raises(UnsupportedEngine, match="as computed by TransformersMoEForCausalLM"):
        engine_identity(config, ConnectorOptions.parse({"store": "/kv"}))
