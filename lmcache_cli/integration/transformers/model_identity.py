"""From a model directory, or a hub name found on this machine, to the identity its KV is stored under (SPEC §3).

What v1 does not store is refused here, before anything is computed: see `_check_supported`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_cli.integration.errors import ModelError, ModelNotFound, UnsupportedModel, UnverifiedWeights
from lmcache_cli.integration.transformers.weights_digest import (
    adapter_digest,
    canonical,
    recall,
    remember,
    weight_files,
    weights_digest,
)
from lmcache_format.dtypes import Dtype
from lmcache_format.errors import FormatError
from lmcache_format.identity import CHUNK_TOKENS, AttentionKind, Identity, LayerGroup

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CACHE_DTYPES = {
    "bfloat16": Dtype.BF16,
    "float16": Dtype.F16,
    "float32": Dtype.F32,
    "half": Dtype.F16,
    "float": Dtype.F32,
}
"""torch's names of the types a model can compute in, and hence cache in."""

STABLE_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary schemes in which a token's key depends on its position alone. `dynamic` and `longrope` change every key once
the sequence grows past a length: the same prefix then has other KV."""

LATENT_MODELS = frozenset({"deepseek_v2", "deepseek_v3"})
"""Kinds of models (MLA) whose latents vLLM packs as SPEC §6 says, and which cache nothing beside them."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MEMORY_VERSION = 1


@dataclass(frozen=True, slots=True)
class IdentifiedModel:
    """A model directory on this machine and whose KV it computes."""

    directory: Path
    identity: Identity


def identify(
    model: str | Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dtype: Dtype | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    adapter: Path | None = None,
    allow_unverified: bool = False,
    with_latents: bool = False,
    cache_dir: Path | None = None,
) -> IdentifiedModel:
    """Identify `model`, a directory or the hub name of one that is on this machine already; nothing is fetched.

    `name` replaces the readable name the configuration records. `dtype` is the type to compute and cache in, by default
    the one the model was saved in. `revision` picks a snapshot of a hub name; being a full commit, it also stands for
    weights that are not on this machine. `adapter` is a LoRA adapter's directory. `with_latents`: the caller packs
    latents as the format does (vLLM; transformers does not), so that models which cache them are identified, too.
    `cache_dir` remembers file digests and results, so that a second call takes milliseconds and imports neither torch
    nor transformers.

    Raises `ModelNotFound`, `UnsupportedModel`, `AdapterError`, and `UnverifiedWeights` where weights can be identified
    by name only, unless `allow_unverified`.
    """
    directory = find_directory(model, revision)
    raw_config = _read_config(directory)
    config = json.loads(raw_config)
    model_name = _readable_name(model, name, config)
    weights = weights_digest(directory, config, cache_dir) or _weights_by_revision(
        directory, model_name, revision, allow_unverified
    )
    request = {
        "memory": _MEMORY_VERSION,
        "versions": [_version("transformers"), _version("lmcache-toolkit")],
        "config": hashlib.sha256(raw_config).hexdigest(),
        "weights": weights,
        "adapter": None if adapter is None else adapter_digest(adapter, cache_dir),
        "model": model_name,
        "dtype": None if dtype is None else dtype.value,
        "chunk_tokens": chunk_tokens,
        "with_latents": with_latents,
    }
    memory = None if cache_dir is None else cache_dir / "identities" / f"{_name_of(request)}.json"
    if memory is not None and (known := _recall(memory, request)) is not None:
        return IdentifiedModel(directory, known)
    identity = _describe(directory, config, request)
    if memory is not None:
        remember(memory, {"request": request, "identity": identity.canonical_json().decode("utf-8")})
    return IdentifiedModel(directory, identity)


def find_directory(model: str | Path, revision: str | None = None) -> Path:
    """The directory of `model` on this machine. Raises `ModelNotFound`."""
    path = Path(model)
    if path.is_dir():
        return path
    text = str(model)
    if not _HUB_NAME.fullmatch(text):
        raise ModelNotFound(f"no model directory {text!r}; give a directory that holds config.json and the weights")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        at = "" if revision is None else f" at revision {revision}"
        raise ModelNotFound(
            f"no directory {text!r} here, and no downloaded model of that name{at}; "
            "give a directory, or download the model first"
        ) from None


def _read_config(directory: Path) -> bytes:
    path = directory / "config.json"
    try:
        raw = path.read_bytes()
        config = json.loads(raw)
    except FileNotFoundError:
        raise ModelNotFound(f"{directory} holds no config.json; give the directory of a transformers model") from None
    except ValueError as problem:
        raise ModelError(f"{path} is not JSON: {problem}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, expected an object")
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"{directory} holds an adapter beside a model; move the adapter to a directory of its own and name it apart"
        )
    return raw


def _readable_name(model: str | Path, name: str | None, config: Mapping[str, Any]) -> str:
    """A name for people: the one asked for, the hub's, the one the configuration records, or the architecture.

    Never a path: the same model in two places is the same model.
    """
    if name is not None:
        if not name.strip() or name.startswith(("/", "./", "../", "~", "\\")):
            raise ModelError(f"model name {name!r} is a path or empty; give a name such as 'organisation/model'")
        return name
    if isinstance(model, str) and _HUB_NAME.fullmatch(model) and not Path(model).is_dir():
        return model
    for key in ("_name_or_path", "_model_name_or_path", "model_type"):
        recorded = config.get(key)
        if isinstance(recorded, str) and _HUB_NAME.fullmatch(recorded):
            return recorded
    return "unnamed"


def _weights_by_revision(directory: Path, name: str, revision: str | None, allow_unverified: bool) -> str:
    if revision is not None and _COMMIT.fullmatch(revision):
        return f"revision:{name}@{revision}"
    if allow_unverified:
        return f"unverified:{name}"
    raise UnverifiedWeights(
        f"{directory} holds no weights (such as *.safetensors), so that KV computed elsewhere under the name {name!r} "
        "cannot be told from another model's; give the 40-digit commit it was made from as revision, or allow "
        "unverified weights"
    )


def _describe(directory: Path, raw_config: Mapping[str, Any], request: Mapping[str, Any]) -> Identity:
    from transformers import AutoConfig

    try:
        whole: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as problem:
        raise UnsupportedModel(f"transformers cannot read {directory}/config.json: {problem}") from None
    config: Any = whole.get_text_config(decoder=True)
    latent_width = _latent_width(directory, whole, config, with_latents=request["with_latents"])
    _check_supported(directory, whole, config)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    groups = _layer_groups(directory, config)
    if latent_width:
        if [group.kind for group in groups] != [AttentionKind.FULL]:
            raise UnsupportedModel(f"{directory} ({whole.model_type}) caches latents of several kinds")
        groups = (LayerGroup(AttentionKind.LATENT, 0, groups[0].stop),)
    try:
        return Identity(
            model=request["model"],
            weights=request["weights"],
            adapter=request["adapter"],
            dtype=Dtype(request["dtype"]) if request["dtype"] else _saved_dtype(directory, raw_config, config),
            layers=int(config.num_hidden_layers),
            kv_heads=1 if latent_width else kv_heads,
            head_dim_k=latent_width or head_dim,
            head_dim_v=0 if latent_width else head_dim,
            groups=groups,
            rope=_text_numbers(dict(getattr(config, "rope_parameters", None) or {})),
            chunk_tokens=request["chunk_tokens"],
        )
    except FormatError as problem:
        raise UnsupportedModel(f"{directory}: {problem}") from None


def _latent_width(directory: Path, whole: Any, config: Any, *, with_latents: bool) -> int:
    """Elements of a token's latent in a layer; 0 for models that cache keys and values. Raises `UnsupportedModel`."""
    if not getattr(config, "kv_lora_rank", None):
        return 0
    if not with_latents:
        raise UnsupportedModel(
            f"{directory} ({whole.model_type}) caches latents (MLA), which are stored as vLLM's latent attention packs "
            "them, and as nothing else does"
        )
    if whole.model_type not in LATENT_MODELS or getattr(config, "index_topk", None):
        raise UnsupportedModel(
            f"{directory} ({whole.model_type}) caches latents (MLA) of a kind that this version does not know; known "
            f"are those of {', '.join(sorted(LATENT_MODELS))}, without an index of sparse attention"
        )
    return int(config.kv_lora_rank) + int(config.qk_rope_head_dim)


def _check_supported(directory: Path, whole: Any, config: Any) -> None:
    """Refuse what v1 does not store: caches that are not one key and value a token, layer and head, each depending on
    the tokens before it alone."""

    def refuse(what: str) -> None:
        raise UnsupportedModel(
            f"{directory} ({whole.model_type}) {what}; this version stores plain keys and values only"
        )

    if whole.is_encoder_decoder:
        refuse("is an encoder-decoder model")
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None):
        refuse("does not attend causally, so that its KV depends on later tokens")
    if getattr(config, "num_kv_shared_layers", None):
        refuse("shares KV between layers")
    if getattr(config, "cache_implementation", None) == "quantized":
        refuse("asks for a quantised cache")
    for rope in _rope_variants(getattr(config, "rope_parameters", None) or {}):
        if rope.get("rope_type", "default") not in STABLE_ROPE_TYPES:
            refuse(f"uses {rope['rope_type']!r} rotary embeddings, whose keys change with the length of the sequence")
    if not getattr(config, "num_attention_heads", None) or not getattr(config, "num_hidden_layers", None):
        refuse("has no attention layers")


def _rope_variants(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """One set of rotary parameters, or one a kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested if nested else [parameters]


def _layer_groups(directory: Path, config: Any) -> tuple[LayerGroup, ...]:
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, _ = get_layer_types_and_kwargs(config)
    groups: list[LayerGroup] = []
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"{directory}: layer {layer} is of kind {kind!r}; this version stores full and sliding attention only"
            )
        sliding = kind == "sliding_attention"
        window = int(config.sliding_window) if sliding else None
        group_kind = AttentionKind.SLIDING if sliding else AttentionKind.FULL
        if groups and (groups[-1].kind, groups[-1].window) == (group_kind, window):
            groups[-1] = LayerGroup(group_kind, groups[-1].start, layer + 1, window)
        else:
            groups.append(LayerGroup(group_kind, layer, layer + 1, window))
    return tuple(groups)


def _saved_dtype(directory: Path, raw_config: Mapping[str, Any], config: Any) -> Dtype:
    """The type `from_pretrained` computes in: what the configuration says, else that of the first weight."""
    recorded = getattr(config, "dtype", None) or raw_config.get("dtype") or raw_config.get("torch_dtype")
    text = str(recorded).removeprefix("torch.") if recorded else _first_weight_dtype(directory)
    if text not in CACHE_DTYPES:
        raise UnsupportedModel(
            f"{directory}: the type to compute in is {text or 'not recorded'}, expected one of "
            f"{', '.join(sorted(set(CACHE_DTYPES)))}; name it"
        )
    return CACHE_DTYPES[text]


def _first_weight_dtype(directory: Path) -> str:
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    for path in weight_files(directory):
        if path.suffix != ".safetensors":
            continue
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100 << 20:
                return ""
            try:
                header = json.loads(file.read(length))
            except ValueError:
                return ""
        for name, entry in header.items():
            if name != "__metadata__" and entry.get("dtype") in names:
                return names[entry["dtype"]]
    return ""


def _text_numbers(value: Any) -> Any:
    """Numbers as text, so that canonical JSON holds no floats: 1e5, 100000 and 100000.0 are one value."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): _text_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_text_numbers(inner) for inner in value]
    raise UnsupportedModel(f"rotary parameters hold a {type(value).__name__}: {value!r}; expected numbers and text")


def _recall(memory: Path, request: Mapping[str, Any]) -> Identity | None:
    entry = recall(memory)
    if entry.get("request") != request or not isinstance(entry.get("identity"), str):
        return None
    try:
        return Identity.from_json(entry["identity"].encode("utf-8"))
    except FormatError:
        return None


def _name_of(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(request)).hexdigest()[:32]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
