"""Digests of weights: by content, never by name, path or time.

digest = SHA-256 of the canonical JSON of `{"config": …, "files": [[name, size_bytes, sha256], …], "kind": …}`. Files
are those that hold weights, sorted by name. The configuration counts too, less the keys in `INERT_CONFIG_KEYS`: two
models with equal weights and another `rms_norm_eps` compute other KV.

Hashing 15 GB takes some ten seconds, so that each file's SHA-256 is remembered under what the kernel says of the file:
device, inode, size, mtime and ctime in nanoseconds. A path is no part of it. ctime cannot be set by a program, so that
a file overwritten in place is hashed again even where its size and mtime were put back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_cli.integration.errors import AdapterError, ModelError

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
"""The first pattern that matches anything decides: loaders prefer safetensors where both are there."""

INERT_CONFIG_KEYS = frozenset(
    {
        # Who wrote the file, and under what name.
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "transformers_version",
        # The type computed in is the cache's own type, an identity field of its own.
        "dtype",
        "torch_dtype",
        # Names the class with the head on top; what is below follows from model_type.
        "architectures",
        # Concern sampling, training and what a call returns; none reaches a key or value.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "initializer_range",
        "attention_dropout",
        "gradient_checkpointing",
        "id2label",
        "label2id",
        "problem_type",
    }
)
"""Keys of config.json that change no KV, at any depth. Every key not listed counts: a needless difference costs a miss,
a missed one costs a wrong answer."""

INERT_ADAPTER_KEYS = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)

_BLOCK_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000
"""A file younger than this could be changed again within one tick of the file system's clock: not remembered."""


def weights_digest(directory: Path, config: dict[str, Any], cache_dir: Path | None) -> str | None:
    """`sha256:<64 hex>` of a model directory's weights and configuration; None where it holds no weights.

    `cache_dir` is where file digests are remembered, None for nowhere.
    """
    files = weight_files(directory)
    if not files:
        return None
    return _digest("model", files, without_keys(config, INERT_CONFIG_KEYS), cache_dir)


def adapter_digest(directory: Path, cache_dir: Path | None) -> str:
    """`sha256:<64 hex>` of a LoRA adapter directory (`adapter_config.json` and its weights). Raises `AdapterError`."""
    config_path = directory / "adapter_config.json"
    files = weight_files(directory)
    if not config_path.is_file() or not files:
        raise AdapterError(
            f"no adapter in {directory}: expected adapter_config.json and weights (*.safetensors or *.bin) beside it"
        )
    try:
        config = json.loads(config_path.read_bytes())
    except ValueError as problem:
        raise AdapterError(f"{config_path} is not JSON: {problem}") from None
    return _digest("adapter", files, without_keys(config, INERT_ADAPTER_KEYS), cache_dir)


def weight_files(directory: Path) -> list[Path]:
    """The files in `directory` that hold weights, sorted by name."""
    for pattern in WEIGHT_PATTERNS:
        found = sorted((path for path in directory.glob(pattern) if path.is_file()), key=lambda path: path.name)
        if found:
            return found
    return []


def without_keys(value: Any, keys: frozenset[str]) -> Any:
    """A copy of a JSON value without the given object keys, at any depth."""
    if isinstance(value, dict):
        return {name: without_keys(inner, keys) for name, inner in value.items() if name not in keys}
    if isinstance(value, list):
        return [without_keys(inner, keys) for inner in value]
    return value


def canonical(value: Any) -> bytes:
    """JSON in one form: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _digest(kind: str, files: Sequence[Path], config: Any, cache_dir: Path | None) -> str:
    entries = []
    for path in files:
        sha256_hex, size_bytes = file_sha256(path, cache_dir)
        entries.append([path.name, size_bytes, sha256_hex])
    text = canonical({"kind": kind, "config": config, "files": entries})
    return "sha256:" + hashlib.sha256(text).hexdigest()


def file_sha256(path: Path, cache_dir: Path | None) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a file, remembered in `cache_dir`. Raises `ModelError` where it changes
    meanwhile, OSError where it cannot be read."""
    before = path.stat()
    memory = None if cache_dir is None else cache_dir / "file-digests" / f"{_stat_name(before)}.json"
    if memory is not None and (known := _recall(memory, _stat_key(before))) is not None:
        return known, before.st_size
    with path.open("rb") as file:
        sha256_hex = _hash(file.fileno())
        after = os.fstat(file.fileno())
    if _stat_key(after) != _stat_key(before):
        raise ModelError(f"{path} changed while it was read; wait until it is written and try again")
    if memory is not None and time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS:
        remember(memory, {"file": _stat_key(after), "sha256": sha256_hex})
    return sha256_hex, before.st_size


def _hash(descriptor: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while num_bytes := os.readv(descriptor, [buffer]):
        digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def _stat_key(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _stat_name(status: os.stat_result) -> str:
    return hashlib.sha256(canonical(_stat_key(status))).hexdigest()[:32]


def _recall(memory: Path, key: list[int]) -> str | None:
    entry = recall(memory)
    sha256_hex = entry.get("sha256") if entry.get("file") == key else None
    return sha256_hex if isinstance(sha256_hex, str) and len(sha256_hex) == 64 else None


def recall(memory: Path) -> dict[str, Any]:
    """What `remember` wrote there, or nothing: a memory that is missing or damaged is only slower."""
    try:
        entry = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


def remember(memory: Path, entry: dict[str, Any]) -> None:
    """Write a small JSON file in one rename. A place that cannot be written to is only slower."""
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, staging = tempfile.mkstemp(prefix=".new-", dir=memory.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(canonical(entry))
            Path(staging).replace(memory)
        except OSError:
            Path(staging).unlink(missing_ok=True)
            raise
