"""Models for these tests: tiny random ones, and the real small one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmcache_cli.integration.producer import ChunkData

TINY_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "example/tiny",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}

CHUNK, PIECE = 4, 8
"""Tokens of the tiny models' chunks and pieces."""

MakeDirectory = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Two threads that wait for each other on a busy machine take a hundred times as long as one."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """transformers, imported when the first test needs it: it takes seconds."""
    module: ModuleType = pytest.importorskip("transformers")
    return module


@pytest.fixture
def make_directory(tmp_path: Path) -> MakeDirectory:
    """`make_directory(name, weights=bytes, **config)`: a model directory with one small tensor as its weights."""

    def make(name: str, weights: bytes | None = b"weights of a model", **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        config = {**TINY_CONFIG, **changes}
        (directory / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value != ...})
        )
        if weights is not None:
            save_file({"weights": np.frombuffer(weights, dtype=np.uint8)}, directory / "model.safetensors")
        return directory

    return make


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeDirectory:
    """`make_model(name, **config)`: a directory with a tiny random model that transformers loads and runs."""

    def make(name: str, **changes: Any) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**{**TINY_CONFIG, **changes})
        torch.manual_seed(7)
        directory = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def engine(make_model: MakeDirectory) -> Any:
    """The transformers engine with a tiny Llama, in float32."""
    from lmcache_cli.integration.transformers.engine import TransformersEngine
    from lmcache_cli.integration.transformers.model_identity import identify

    directory = make_model("llama")
    return TransformersEngine.load(directory, identify(directory, chunk_tokens=CHUNK).identity, piece_tokens=PIECE)


def fresh_buffer(num_bytes: int) -> ChunkData:
    """A buffer full of rubbish, so that what is not written shows."""
    return np.full(num_bytes, 0xA5, dtype=np.uint8)
