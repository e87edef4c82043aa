"""`LMCacheWrapper`: a vLLM `LLM` that loads and saves KV, under the field's configuration keys.

    llm = LLM(model="…")
    cached = LMCacheWrapper(llm, config={"chunk_size": 256, "local_cpu": True, "local_disk": "/var/cache/kv"})
    outputs = cached.generate(prompts, SamplingParams(max_tokens=64))
    cached.saved_prefill_tokens       # prompt tokens that were not computed again

An `LLM` that was built without the connector has its engine built again with it, from the same configuration; give
`LLM(kv_transfer_config=…)` instead to start once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from .engine_log import join_engine_log
from .options import ConnectorOptions, OptionError

_LOG = logging.getLogger("lmcache.vllm")
CONNECTOR = "LMCacheStoreConnector"
MODULE = "lmcache_cli.integration.vllm.connector"
ENCODINGS = {"none": "raw", "lossless": "bfx", "fp8": "fp8"}
_KEYS = ("chunk_size", "local_cpu", "local_disk", "remote_url", "compression", "save_decode_cache")
_MISSING = {
    "max_local_cpu_size": "memory beside the engine is the operating system's page cache, which sizes itself",
    "max_local_disk_size": "a store is kept to a size by 'lmcache prune'",
    "save_only_first_rank": "ranks that hold the same KV write it once by themselves",
    "enable_blending": "KV is reused for equal prefixes only",
}


class LMCacheWrapper:
    """See the module. Raises `OptionError` for keys that are unknown or of what is not there, before it touches `llm`.

    `config`: `chunk_size`; `local_disk` or `remote_url`, the store, made where there is none (of both, `remote_url`
    is only read: it is asked for what `local_disk` lacks); `local_cpu`: what was
    read from a disk stays in memory, which the page cache does in any case; `compression`: none, lossless or fp8 (with
    loss); `save_decode_cache`: save generated tokens, too.
    """

    def __init__(self, llm: Any, config: Mapping[str, Any]) -> None:
        options = connector_options(config)
        join_engine_log()
        self.llm = llm
        self.num_prompt_tokens = 0
        self.saved_prefill_tokens = 0
        transfer = llm.llm_engine.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector is None:
            _LOG.warning("the LLM was built without the connector: its engine is built again with it")
            _rebuild(llm, options)
        elif transfer.kv_connector != CONNECTOR:
            raise OptionError(
                f"the LLM has the connector {transfer.kv_connector}; build it without one, or use that one"
            )
        elif transfer.kv_connector_extra_config != options:
            raise OptionError(
                f"the LLM was built with {transfer.kv_connector_extra_config}; "
                f"that is not what config asks for: {options}"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`LLM.generate`; counts what did not have to be computed, and says so in vLLM's log."""
        return self._counted(self.llm.generate(*args, **kwargs))

    def chat(self, *args: Any, **kwargs: Any) -> Any:
        """`LLM.chat`; counts what did not have to be computed, and says so in vLLM's log."""
        return self._counted(self.llm.chat(*args, **kwargs))

    def close(self) -> None:
        """Write what is pending and stop the engine."""
        self.llm.llm_engine.engine_core.shutdown()

    def _counted(self, outputs: Any) -> Any:
        prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
        saved = sum(output.num_cached_tokens or 0 for output in outputs)
        self.num_prompt_tokens += prompt
        self.saved_prefill_tokens += saved
        share = 100 * saved / max(1, prompt)
        _LOG.info("prefill saved: %d of %d prompt tokens were not computed again (%.0f %%)", saved, prompt, share)
        return outputs


def connector_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The connector's options for the field's keys. Raises `OptionError`."""
    for key in config:
        if key in _MISSING:
            raise OptionError(f"{key!r} is not supported here: {_MISSING[key]}")
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_KEYS)}"
            raise OptionError(f"unknown key {key!r}; {hint}")
    stores = [config[key] for key in ("local_disk", "remote_url") if config.get(key)]
    if not stores:
        raise OptionError("'local_disk' or 'remote_url' names the store; found neither")
    compression = config.get("compression") or "none"
    if compression not in ENCODINGS:
        raise OptionError(f"'compression' is {compression!r}; expected one of {', '.join(ENCODINGS)}")
    options = {
        "store": stores[0],
        "create_store": True,
        "encoding": ENCODINGS[compression],
        "allow_lossy": compression == "fp8",
        "save_decode": config.get("save_decode_cache", False),
        **({"archive": stores[1:]} if stores[1:] else {}),
        **({"chunk_size": config["chunk_size"]} if "chunk_size" in config else {}),
    }
    ConnectorOptions.parse(options)
    return options


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `LLM(kv_transfer_config=…)` and `vllm serve --kv-transfer-config` take."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options),
    }


def _rebuild(llm: Any, options: Mapping[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    config = llm.llm_engine.vllm_config
    if config.model_config.runner_type != "generate":
        raise OptionError(f"the LLM is a {config.model_config.runner_type} model; one that generates is needed")
    llm.llm_engine.engine_core.shutdown()
    config.kv_transfer_config = KVTransferConfig(**transfer_config(options))
    config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as vLLM does for this connector
    llm.llm_engine = LLMEngine.from_vllm_config(config, disable_log_stats=not llm.llm_engine.log_stats)
    llm.model_config = llm.llm_engine.model_config
    llm.renderer = llm.llm_engine.renderer
    llm.input_processor = llm.llm_engine.input_processor
