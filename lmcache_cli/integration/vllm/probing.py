"""The probe: what vLLM computes of some tokens, beside what another engine computes of the same."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_cli.integration.acceptance import (
    LEAST_COSINE,
    MOST_RELATIVE_L2,
    PROBE_TOKENS,
    KvDifference,
    compare_kv,
    judged,
    signature,
)
from lmcache_cli.integration.asked_warming import warm_through
from lmcache_cli.integration.errors import EngineFailed, NotAccepted
from lmcache_cli.integration.producer import Document, Producer, TokenIds
from lmcache_cli.integration.warming import WarmDocument
from lmcache_cli.store import ChunkBuffer, Store
from lmcache_format.acceptance import Acceptance
from lmcache_format.geometry import part_bytes, whole_part
from lmcache_format.identity import Identity

from .engine_process import EngineProcess, EngineSpec, Ready, connector_options


@dataclass(frozen=True, slots=True)
class ComputedByVllm:
    """Chunks of some tokens as vLLM computes them, and what it says of itself."""

    tokens: TokenIds
    chunks: Sequence[ChunkBuffer]
    ready: Ready


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe found: the record of it, and the layer and side that are furthest apart."""

    acceptance: Acceptance
    worst: KvDifference

    def require(self) -> None:
        """Raises `NotAccepted` with the figures unless it passed."""
        if self.acceptance.passed:
            return
        worst = self.worst
        raise NotAccepted(
            f"what {self.acceptance.producer['engine']} computes is not what vLLM computes: layer {worst.layer}, "
            f"{worst.side} is apart by relative L2 {worst.relative_l2:.4f} (less than {MOST_RELATIVE_L2} is wanted), "
            f"cosine {worst.cosine:.4f} (more than {LEAST_COSINE}), over {self.acceptance.num_tokens} tokens; "
            "vLLM will not load it: warm with --engine vllm instead"
        )


def probe_tokens(documents: Sequence[WarmDocument], num_tokens: int = PROBE_TOKENS) -> TokenIds:
    """The first tokens of all documents together, again from the start where they are fewer."""
    return np.resize(np.concatenate([document.tokens for document in documents]), num_tokens)


def compute_with_vllm(
    directory: Path,
    identity: Identity,
    tokens: TokenIds,
    *,
    allow_unverified: bool,
    cache_dir: Path | None,
    engine: Mapping[str, Any],
    revision: str | None = None,
) -> ComputedByVllm:
    """Start an engine on a store of its own, have it compute `tokens`, and read what it saved. Raises `EngineFailed`,
    `BackendError`."""
    document = WarmDocument("probe", tokens)
    with tempfile.TemporaryDirectory(prefix="lmcache-probe-") as place, Store.create(f"{place}/kv") as store:
        options = connector_options(
            f"{place}/kv",
            identity.chunk_tokens,
            cache_dir=cache_dir,
            model_name=identity.model,
            allow_unverified=allow_unverified,
        )
        spec = EngineSpec(
            str(directory), dtype_name(identity), len(tokens), 1, token_bytes(identity), options,
            revision=revision, engine=engine,
        )  # fmt: skip
        with EngineProcess(spec, [document]) as process:
            refuse_other_namespace(process.ready, identity)
            with store.namespace(identity, create=True, allow_unverified=True) as namespace:
                warm_through(namespace, lambda: process, [document])
                chunks, _ = namespace.load(namespace.match(tokens))
        if sum(chunk.num_tokens for chunk in chunks) != len(tokens):
            raise EngineFailed(f"vLLM saved {len(chunks)} chunks of the probe's {len(tokens)} tokens, which is too few")
        return ComputedByVllm(tokens, chunks, process.ready)


def compare_with_vllm(producer: Producer, computed: ComputedByVllm, now_ms: int) -> Probe:
    """Have the other engine compute the same tokens, and compare."""
    identity = producer.identity
    differences = compare_kv(_computed_by(producer, computed.tokens), computed.chunks)
    worst, relative_l2, cosine = judged(differences)
    acceptance = Acceptance(
        identity.fingerprint,
        signature(producer.provenance),
        dict(computed.ready.consumer),
        all(one.is_acceptable for one in differences),
        relative_l2,
        cosine,
        len(computed.tokens),
        now_ms,
    )
    return Probe(acceptance, worst)


def refuse_other_namespace(ready: Ready, identity: Identity) -> None:
    """Raises `EngineFailed` where the engine would save under another identity than the one that is meant."""
    if ready.fingerprint != identity.fingerprint:
        raise EngineFailed(
            f"vLLM saves to namespace {ready.fingerprint}, expected {identity.fingerprint}: an engine option changes "
            "what is computed (a quantization, another dtype); leave it out, or serve and warm with the same"
        )


def dtype_name(identity: Identity) -> str:
    """vLLM's name of the type to compute in."""
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(identity.dtype.value, "auto")


def token_bytes(identity: Identity) -> int:
    """Bytes of one token's KV."""
    return part_bytes(identity, whole_part(identity), 1)


def _computed_by(producer: Producer, tokens: TokenIds) -> list[ChunkBuffer]:
    identity = producer.identity
    whole = whole_part(identity)
    return [
        ChunkBuffer(identity, whole, chunk.num_tokens, chunk.data.data)
        for chunk in producer.prefill([Document(tokens)], lambda size: np.empty(size, np.uint8))
    ]
