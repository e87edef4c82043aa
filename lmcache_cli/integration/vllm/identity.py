"""From vLLM's configuration to the identity its KV is stored under, and from a request to what it may be cached under.

The identity equals what `integration.transformers.identify` says of the same model directory: a store warmed with
transformers serves vLLM. Whatever the configuration changes that the directory does not say is folded in, or refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmcache_cli.integration.errors import AdapterError, ModelError, UnsupportedModel
from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import Part, rank_part
from lmcache_format.identity import Identity
from lmcache_format.keys import MultimodalItem

from .caching import Caching, Request, Uncached
from .options import ConnectorOptions

LATENT_ARCHITECTURES = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})
"""vLLM's own implementations of the models in `LATENT_MODELS`; another one may order what is rotated otherwise."""

_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.F16, "float32": Dtype.F32, "half": Dtype.F16, "float": Dtype.F32}


class UnsupportedEngine(ModelError):
    """The engine is set up in a way whose KV this version can neither store nor find."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the model is cut: tensor and pipeline parallel sizes. A rank's number counts tensor ranks first."""

    tensor: int
    pipeline: int

    @property
    def num_ranks(self) -> int:
        """Processes that hold a part each."""
        return self.tensor * self.pipeline


def ranks_of(vllm_config: Any) -> Ranks:
    """Raises `UnsupportedEngine` for ways to cut a context that would tear chunks apart."""
    parallel = vllm_config.parallel_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, field, 1) or 1
        if size > 1:
            raise UnsupportedEngine(f"{field} is {size}: chunks would be torn apart over ranks; serve with 1")
    return Ranks(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def engine_identity(vllm_config: Any, options: ConnectorOptions) -> Identity:
    """Raises `ModelError` where the model cannot be identified, or the engine changes what its directory says."""
    from lmcache_cli.integration.transformers.model_identity import identify

    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedEngine(f"{model.model} is an encoder-decoder model; plain decoders are supported")
    if getattr(model, "hf_overrides", None):
        raise UnsupportedEngine(
            f"hf_overrides are given ({model.hf_overrides!r}): the model's directory does not say what is computed; "
            "write them into its config.json"
        )
    is_dummy = str(getattr(vllm_config.load_config, "load_format", "auto")).rpartition(".")[2].lower() == "dummy"
    if is_dummy and not options.allow_unverified:
        raise UnsupportedEngine("load_format is dummy: random weights cannot be identified; set allow_unverified")
    found = identify(
        model.model,
        name=options.model_name,
        revision=getattr(model, "revision", None),
        dtype=cache_dtype(vllm_config),
        chunk_tokens=options.chunk_size,
        allow_unverified=options.allow_unverified,
        with_latents=_computes_latents(model),
        cache_dir=None if options.digest_cache is None else Path(options.digest_cache),
    ).identity
    if is_dummy:
        return replace(found, weights=f"unverified:dummy-{model.seed}")
    return _with_quantization(found, model)


def cache_dtype(vllm_config: Any) -> Dtype:
    """The type KV really has in the pages. Raises `UnsupportedEngine` for quantised caches."""
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    wanted = str(vllm_config.cache_config.cache_dtype)
    name = model_dtype if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise UnsupportedEngine(
            f"kv_cache_dtype is {name}: its scales are no part of what is stored yet; serve with --kv-cache-dtype auto"
        )
    return _DTYPES[name]


def _computes_latents(model: Any) -> bool:
    """Whether the engine caches latents. Raises `UnsupportedEngine` where an implementation does that is not known."""
    if not getattr(model, "use_mla", False):
        return False
    if model.architecture not in LATENT_ARCHITECTURES:
        raise UnsupportedEngine(
            f"{model.model} caches latents (MLA) as computed by {model.architecture}; known are those of "
            f"{', '.join(sorted(LATENT_ARCHITECTURES))}"
        )
    return True


def _with_quantization(identity: Identity, model: Any) -> Identity:
    """Weights that the engine quantises while it loads them compute other KV than their file does."""
    method = getattr(model, "quantization", None)
    is_in_file = getattr(getattr(model, "hf_config", None), "quantization_config", None) is not None
    if not method or is_in_file:
        return identity
    if not identity.weights.startswith("sha256:"):
        raise UnsupportedModel(f"weights known as {identity.weights} are quantised on loading ({method})")
    digest = hashlib.sha256(f"{identity.weights}\0quantization={method}".encode()).hexdigest()
    return replace(identity, weights=f"sha256:{digest}")


def consumer() -> dict[str, str]:
    """This engine, as records of probes name it: whose KV it takes does not depend on how it is set up otherwise."""
    from vllm import __version__
    from vllm.platforms import current_platform

    return {"engine": "vllm", "version": __version__, "device": str(current_platform.device_type)}


def producer(vllm_config: Any) -> dict[str, Any]:
    """This engine, as the headers of shards name it."""
    from vllm import __version__
    from vllm.platforms import current_platform

    from lmcache_cli import __version__ as own_version

    parallel = vllm_config.parallel_config
    return {
        "engine": "vllm",
        "vllm": __version__,
        "torch": importlib.metadata.version("torch"),
        "lmcache-toolkit": own_version,
        "device": str(current_platform.device_type),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
    }


def part_of_rank(identity: Identity, ranks: Ranks, rank: int, layers: tuple[int, int]) -> Part:
    """What global rank `rank` holds of every chunk; `layers` are those of its pipeline stage."""
    return rank_part(identity, rank % ranks.tensor, ranks.tensor, layers)


def writes_part(identity: Identity, ranks: Ranks, rank: int) -> bool:
    """False for a rank that holds the same heads as the one before it (replicated heads, latents)."""
    tensor_rank = rank % ranks.tensor
    if identity.is_latent:
        return tensor_rank == 0
    return tensor_rank % max(1, ranks.tensor // identity.kv_heads) == 0


class RequestReader:
    """Says of each of vLLM's requests what it may be cached under. Adapters are known by the digest of their files, as
    these were when the engine first saw the adapter's id: files that changed since are not what the engine computes
    with, and the request is left uncached."""

    def __init__(self, options: ConnectorOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._adapters: dict[int, str] = {}

    def __call__(self, request: Request) -> Caching | Uncached:
        """See the class. Reads an adapter's files, when there is one."""
        salt = getattr(request, "cache_salt", None)
        if self._options.require_salt and not salt:
            return Uncached("no_salt")
        if getattr(request, "resumable", False):  # a session, whose tokens may be taken back
            return Uncached("session")
        for field in ("prompt_embeds", "prompt_is_token_ids"):
            if getattr(request, field, None) is not None:
                return Uncached("prompt_embeds")
        items = []
        for feature in getattr(request, "mm_features", None) or ():
            identifier = getattr(feature, "identifier", None)
            place = getattr(feature, "mm_position", None)
            if not identifier or place is None:
                return Uncached("multimodal")
            items.append(MultimodalItem(int(place.offset), int(place.length), str(identifier)))
        adapter = None
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            adapter = self._adapter(lora)
            if adapter is None:
                return Uncached("adapter")
        return Caching(adapter=adapter, salt=salt or None, items=tuple(items))

    def _adapter(self, lora: Any) -> str | None:
        from lmcache_cli.integration.transformers.weights_digest import adapter_digest

        cache = None if self._options.digest_cache is None else Path(self._options.digest_cache)
        try:
            digest = adapter_digest(Path(lora.lora_path), cache)
        except (AdapterError, ModelError, OSError):
            return None
        number = int(lora.lora_int_id)
        with self._lock:
            if getattr(lora, "load_inplace", False):
                self._adapters[number] = digest
            return digest if self._adapters.setdefault(number, digest) == digest else None
