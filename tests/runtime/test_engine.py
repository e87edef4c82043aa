"""The field's names: store, look up, retrieve; memory before stores; several ranks (C26: nothing leaks)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_cli.runtime.config import ConfigError, LMCacheEngineConfig
from lmcache_cli.runtime.engine import LMCacheEngine, LMCacheEngineBuilder, LMCacheEngineMetadata
from lmcache_cli.runtime.gpu_connector import PagedGPUConnector
from lmcache_cli.runtime.token_database import ChunkedTokenDatabase
from lmcache_cli.runtime.torch_pages import TorchPages
from lmcache_format.geometry import Part, rank_part
from lmcache_format.identity import AttentionKind, Identity
from lmcache_kernels import PagedCache, PageGeometry, PageLayout
from tests.integration.vllm.fakes import ArrayPages, kv_of
from tests.store.pattern import document, tiny_identity

IDENTITY = tiny_identity(layers=2, kv_heads=2, head_dim=4, chunk_tokens=8)
TOKENS = document(35, 1)
SLOTS = list(np.random.default_rng(3).permutation(64)[:35])


def pages_of(identity: Identity, part: Part) -> Any:
    """Real tensors: pages of 4 tokens as vLLM has them."""
    geometry = PageGeometry(
        PageLayout.FUSED_HND,
        block_size=4,
        heads=part.num_heads,
        head_dim_k=identity.head_dim_k,
        head_dim_v=identity.head_dim_v,
        dtype=torch.bfloat16,
    )
    shape = (16, part.num_heads, 4, identity.head_dim_k + identity.head_dim_v)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(part.num_layers)]
    return TorchPages(PagedCache.of_layers(tensors, geometry))


class Rank:
    """An engine over real pages, and a second opinion of what they hold."""

    def __init__(self, engine: LMCacheEngine, pages: Any) -> None:
        self.engine = engine
        self.pages = pages

    def compute(self, tokens: list[int]) -> None:
        """What a model would leave in the pages."""
        part = self.engine.metadata.part
        for start in range(0, len(tokens), 8):
            own = tokens[start : start + 8]
            memory = self.engine.storage_manager.allocate(len(own))
            assert memory is not None
            with memory:
                memory.buffer.fill(kv_of(self.engine.metadata.identity, part, own, start))
                self.pages.scatter(memory.buffer, SLOTS[start : start + len(own)])

    def holds(self, tokens: list[int], count: int) -> bool:
        part = self.engine.metadata.part
        for start in range(0, count, 8):
            own = tokens[start : min(count, start + 8)]
            memory = self.engine.storage_manager.allocate(len(own))
            assert memory is not None
            with memory:
                self.pages.gather(SLOTS[start : start + len(own)], memory.buffer)
                expected = kv_of(self.engine.metadata.identity, part, own, start)
                if not all(np.array_equal(memory.buffer.tensors[name], expected[name]) for name in expected):
                    return False
        return True


@pytest.fixture
def rank_of(tmp_path: Path) -> Iterator[Any]:
    made: list[str] = []

    def build(worker_id: int = 0, world_size: int = 1, **config: Any) -> Rank:
        name = f"rank-{len(made)}"
        made.append(name)
        keys = {"chunk_size": 8, "max_local_cpu_size": 1e-6, "local_disk": str(tmp_path / "kv"), **config}
        metadata = LMCacheEngineMetadata(IDENTITY, world_size, worker_id)
        pages = pages_of(IDENTITY, metadata.part)
        connector = PagedGPUConnector(pages)
        config_object = LMCacheEngineConfig.from_dict(keys)
        return Rank(LMCacheEngineBuilder.get_or_create(name, config_object, metadata, connector), pages)

    yield build
    for name in made:
        engine = LMCacheEngineBuilder.get(name)
        if engine is not None:
            manager = engine.storage_manager
            LMCacheEngineBuilder.destroy(name)
            assert manager.num_leased == 0


@pytest.mark.parametrize("local_cpu", [False, True])
def test_what_was_stored_is_retrieved_by_another_engine(rank_of: Any, local_cpu: bool):
    first = rank_of(local_cpu=local_cpu)
    first.compute(TOKENS)
    assert first.engine.store(TOKENS, slot_mapping=SLOTS) == 32
    assert first.engine.storage_manager.wait_idle(10)
    second = rank_of(local_cpu=local_cpu)
    assert second.engine.lookup(TOKENS) == 32
    done = second.engine.retrieve(TOKENS, slot_mapping=SLOTS)
    assert done.tolist() == [True] * 32 + [False] * 3
    assert second.holds(TOKENS, 32)
    assert second.engine.store(TOKENS, slot_mapping=SLOTS) == 0


def test_a_remote_store_is_written_too_and_read_where_the_local_one_lacks_something(rank_of: Any, tmp_path: Path):
    config = {"local_cpu": False, "remote_url": str(tmp_path / "far"), "promote_min_free_bytes": 0}
    first = rank_of(**config)
    first.compute(TOKENS)
    assert first.engine.store(TOKENS, slot_mapping=SLOTS) == 32
    assert first.engine.storage_manager.wait_idle(10)
    LMCacheEngineBuilder.destroy("rank-0")
    assert [len(list((tmp_path / name / "ns").rglob("*.safetensors"))) for name in ("kv", "far")] == [4, 4]
    for path in sorted((tmp_path / "kv" / "ns").rglob("*.safetensors"))[1:]:
        path.unlink()
    second = rank_of(**config)
    assert second.engine.lookup(TOKENS) == 32
    assert second.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
    assert second.holds(TOKENS, 32)
    LMCacheEngineBuilder.destroy("rank-1")
    local = rank_of(local_cpu=False)
    assert local.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
    assert local.holds(TOKENS, 32)


def test_a_remote_store_that_does_not_answer_is_no_error(rank_of: Any):
    far = "s3://key:secret@bucket/kv?endpoint_url=http://127.0.0.1:9"
    rank = rank_of(local_cpu=False, remote_url=far, remote_timeout_s=0.2)
    rank.compute(TOKENS)
    assert rank.engine.store(TOKENS, slot_mapping=SLOTS) == 32
    manager = rank.engine.storage_manager
    assert manager.wait_idle(10)
    assert manager.counts["save_not_open"] == 4
    assert rank.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
    assert rank.holds(TOKENS, 32)


def test_memory_alone_serves_without_a_store(rank_of: Any):
    rank = rank_of(local_disk=None, max_local_cpu_size=1.0)
    rank.compute(TOKENS)
    assert rank.engine.store(TOKENS, slot_mapping=SLOTS) == 32
    assert rank.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
    assert rank.engine.storage_manager.counts["hit_memory"] == 4
    assert rank.engine.clear() == 4
    assert rank.engine.lookup(TOKENS) == 0


def test_memory_keeps_what_was_used_last(rank_of: Any):
    chunk_bytes = 8 * 2 * 2 * 8 * 2
    rank = rank_of(max_local_cpu_size=2.5 * chunk_bytes / 2**30)
    rank.compute(TOKENS)
    rank.engine.store(TOKENS, slot_mapping=SLOTS)
    assert rank.engine.storage_manager.num_hot == 2
    rank.engine.storage_manager.wait_idle(10)
    assert rank.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
    assert rank.engine.storage_manager.num_hot == 2


def test_a_mask_leaves_out_a_prefix_of_whole_chunks(rank_of: Any):
    rank = rank_of()
    rank.compute(TOKENS)
    rank.engine.store(TOKENS, slot_mapping=SLOTS)
    rank.engine.storage_manager.wait_idle(10)
    mask = np.arange(35) >= 16
    assert rank.engine.retrieve(TOKENS, mask, slot_mapping=SLOTS).tolist() == [False] * 16 + [True] * 16 + [False] * 3
    with pytest.raises(ValueError, match="whole chunks of 8"):
        rank.engine.retrieve(TOKENS, np.arange(35) >= 5, slot_mapping=SLOTS)
    with pytest.raises(ValueError, match="False for a prefix"):
        rank.engine.retrieve(TOKENS, np.arange(35) < 8, slot_mapping=SLOTS)


def test_salt_and_tokens_decide(rank_of: Any):
    rank = rank_of()
    rank.compute(TOKENS)
    rank.engine.store(TOKENS, salt="a", slot_mapping=SLOTS)
    rank.engine.storage_manager.wait_idle(10)
    assert [rank.engine.lookup(TOKENS, salt=salt) for salt in ("a", "b", None)] == [32, 0, 0]
    assert rank.engine.lookup([*TOKENS[:20], 1, *TOKENS[21:]], salt="a") == 16


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_heads_are_cut_anew_for_other_ranks(rank_of: Any, writers: int, readers: int):
    for worker in range(writers):
        rank = rank_of(worker, writers)
        rank.compute(TOKENS)
        rank.engine.store(TOKENS, slot_mapping=SLOTS)
        rank.engine.storage_manager.wait_idle(10)
    for worker in range(readers):
        rank = rank_of(worker, readers)
        assert rank.engine.retrieve(TOKENS, slot_mapping=SLOTS).sum() == 32
        assert rank.holds(TOKENS, 32)


def test_latents_are_saved_by_the_first_rank_alone(tmp_path: Path):
    identity = tiny_identity(kind=AttentionKind.LATENT, chunk_tokens=8)
    saved = []
    for worker in (1, 0):
        metadata = LMCacheEngineMetadata(identity, 2, worker)
        pages = ArrayPages(identity, metadata.part, 64)
        pages.write(kv_of(identity, metadata.part, TOKENS, 0), SLOTS)
        config = LMCacheEngineConfig.from_dict(
            {"chunk_size": 8, "local_cpu": False, "local_disk": str(tmp_path), "save_only_first_rank": True}
        )
        engine = LMCacheEngine(config, metadata, PagedGPUConnector(pages))
        saved.append(engine.store(TOKENS, slot_mapping=SLOTS))
        engine.close()
    assert saved == [0, 32]
    assert rank_part(identity, 0, 2) == rank_part(identity, 1, 2)


def test_the_builder_keeps_one_engine_a_name(rank_of: Any):
    rank = rank_of()
    engine, config = rank.engine, rank.engine.config
    metadata = LMCacheEngineMetadata(IDENTITY)
    assert LMCacheEngineBuilder.get_or_create("rank-0", config, metadata, engine.gpu_connector) is engine
    with pytest.raises(ValueError, match="another configuration"):
        LMCacheEngineBuilder.get_or_create("rank-0", LMCacheEngineConfig(), metadata, engine.gpu_connector)
    LMCacheEngineBuilder.destroy("rank-0")
    LMCacheEngineBuilder.destroy("rank-0")
    assert LMCacheEngineBuilder.get("rank-0") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk_sizes": 8}, "did you mean 'chunk_size'"),
        ({"enable_p2p": True}, "not supported by this version: engines share a store"),
        ({"max_local_disk_size": 5}, "lmcache prune"),
        ({"local_cpu": 1}, "expected bool"),
        ({"chunk_size": 0}, "sizes are positive"),
        ({"remote_url": 5}, "expected str or None"),
        ({"remote_timeout_s": 0}, "more than zero"),
        ({"promote_min_free_bytes": -1}, "not negative"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        LMCacheEngineConfig.from_dict(given)


def test_one_writer_for_kv_that_differs_is_refused():
    config = LMCacheEngineConfig.from_dict({"chunk_size": 8, "save_only_first_rank": True})
    with pytest.raises(ConfigError, match="these hold heads each"):
        LMCacheEngine(config, LMCacheEngineMetadata(IDENTITY, 2, 0), PagedGPUConnector(None))  # type: ignore[arg-type]


def test_chunks_of_tokens_are_those_of_the_store():
    database = ChunkedTokenDatabase(IDENTITY, save_unfull_chunk=True)
    chunks = list(database.process_tokens(TOKENS))
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 35)]
    assert [chunk.ref.depth for chunk in chunks] == [0, 1, 2, 3, 4]
    assert all(a.ref.key == b.ref.parent for a, b in pairwise(chunks))
