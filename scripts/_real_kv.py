"""Real KV for benches: SmolLM2-135M reads documents that are on any machine with Python.

Code is the standard library's own sources; prose is the language reference that `pydoc` ships.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import ROOT
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import TensorSpec

CHUNK_TOKENS = 256
CODE_MODULES = (
    "argparse", "inspect", "typing", "tarfile", "subprocess", "threading", "difflib", "doctest", "pdb", "pickle",
    "shutil", "statistics", "tempfile", "turtle", "optparse", "smtplib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """Text by its tokens. `kind` is `code` or `prose`."""

    kind: str
    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Raw tensors of 256 tokens back to back, in data order, and where in the document they stand."""

    kind: str
    start_pos: int
    data: NDArray[np.uint8]
    specs: tuple[TensorSpec, ...]


def model_directory() -> Path:
    """Where `scripts/get_model` puts SmolLM2; made where missing."""
    made = subprocess.run([ROOT / "scripts" / "get_model"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.strip())


def load_model(dtype: torch.dtype) -> Any:
    """The model on the CPU, ready to read."""
    quiet_transformers()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_directory(), dtype=dtype).eval()


def documents(per_kind: int, num_tokens: int) -> list[Document]:
    """`per_kind` documents of code and as many of prose, cut to `num_tokens`; the same on every run of one Python."""
    quiet_transformers()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    found = []
    for kind, texts in (("code", _code()), ("prose", _prose())):
        taken = 0
        for name, text in texts:
            tokens = tokenizer(text[: num_tokens * 12]).input_ids[:num_tokens]
            if len(tokens) == num_tokens and taken < per_kind:
                found.append(Document(kind, name, tuple(tokens)))
                taken += 1
        if taken < per_kind:
            raise ValueError(
                f"only {taken} {kind} documents of {num_tokens} tokens; expected {per_kind}; ask for fewer"
            )
    return found


@torch.no_grad()
def prefill(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """KV of `tokens`, `[2 * L, H, T, D]`: keys and values of layer 0, of layer 1, …"""
    cache = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values
    return torch.stack([side[0] for layer in cache.layers for side in (layer.keys, layer.values)])


def chunks_of(kind: str, kv: torch.Tensor) -> list[Chunk]:
    """The full chunks of bf16 `kv` `[2 * L, H, T, D]`."""
    bits = kv.contiguous().view(torch.int16).numpy().view(np.uint8)
    sides, heads, tokens, dim = kv.shape
    specs = tuple(
        TensorSpec(f"layers.{i // 2}.{'kv'[i % 2]}", i // 2, "kv"[i % 2], (heads, CHUNK_TOKENS, dim), Dtype.BF16)
        for i in range(sides)
    )
    return [
        Chunk(kind, start, np.ascontiguousarray(bits[:, :, start : start + CHUNK_TOKENS]).reshape(-1), specs)
        for start in range(0, tokens - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    ]


def quiet_transformers() -> None:
    """No progress bars and no advice between the rows."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _code() -> list[tuple[str, str]]:
    library = Path(sysconfig.get_path("stdlib"))
    return [
        (name, (library / f"{name}.py").read_text(encoding="utf-8"))
        for name in CODE_MODULES
        if (library / f"{name}.py").is_file()
    ]


def _prose() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    long = sorted((name for name in topics if len(topics[name]) > 4000), key=lambda name: -len(topics[name]))
    stride = max(1, len(long) // 16)
    return [(name, "\n\n".join(topics[each] for each in long[at:] + long[:at])) for at, name in enumerate(long)][
        ::stride
    ]


if __name__ == "__main__":
    print(*(f"{each.kind} {each.name} {len(each.tokens)}" for each in documents(12, 2304)), sep="\n", file=sys.stdout)
