"""The process behind `EngineProcess`: `python -m lmcache_cli.integration.vllm.prefilling`.

Reads lines of JSON on standard input, an `EngineSpec` and then documents; writes lines of JSON on standard output,
`{"ready": …}` and then one a document. Everything that vLLM prints goes to standard error. At the end of the input, and
at no other sign, it gives up what is not computed yet, writes what is, and ends.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

_SPARE_TOKENS = 512
Documents = queue.SimpleQueue[dict[str, Any] | None]
"""What is to be computed; None at the end."""


def main() -> None:
    """Serve the other side until it goes."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    spec = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not spec:
        return
    documents: Documents = queue.SimpleQueue()
    threading.Thread(target=_read, args=(documents,), daemon=True).start()
    _set_unless_set(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE=str(cache_gib(spec)))
    engine = build(spec)
    try:
        _say(out, {"ready": describe(engine)})
        serve(engine, documents, out)
    except BrokenPipeError:
        pass
    finally:
        engine.engine_core.shutdown()


def cache_gib(spec: Mapping[str, Any]) -> int:
    """Room for as many of the longest documents as are computed at once, each in blocks that are not full."""
    size_bytes: int = (spec["longest"] + _SPARE_TOKENS) * spec["at_once"] * spec["token_bytes"]
    return math.ceil(size_bytes / (1 << 30))


def build(spec: Mapping[str, Any]) -> Any:
    """The engine of a spec."""
    from transformers import AutoConfig
    from vllm import LLM

    from lmcache_cli.integration.vllm.wrapper import transfer_config

    config = AutoConfig.from_pretrained(spec["directory"], local_files_only=True, trust_remote_code=False)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or spec["longest"] + 1
    pieces = {} if spec["piece_tokens"] is None else {"max_num_batched_tokens": spec["piece_tokens"]}
    arguments = {
        "model": spec["directory"],
        "revision": spec["revision"],
        "dtype": spec["dtype"],
        "max_model_len": min(limit, spec["longest"] + 1),
        "max_num_seqs": spec["at_once"],
        "enforce_eager": True,
        "kv_transfer_config": transfer_config(spec["options"]),
        **pieces,
        **spec["engine"],
    }
    return LLM(**arguments).llm_engine


def describe(engine: Any) -> dict[str, Any]:
    """What the engine says of itself: the fields of `Ready`."""
    from lmcache_cli.integration.vllm.identity import consumer, engine_identity, producer
    from lmcache_cli.integration.vllm.options import ConnectorOptions

    config = engine.vllm_config
    options = ConnectorOptions.parse(config.kv_transfer_config.kv_connector_extra_config)
    return {
        "fingerprint": engine_identity(config, options).fingerprint,
        "producer": producer(config),
        "consumer": consumer(),
        "max_tokens": engine.model_config.max_model_len - 1,
    }


def serve(engine: Any, documents: Documents, out: BinaryIO) -> None:
    """Compute what comes, as the engine sees fit, until the other side goes."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    while True:
        while not documents.empty() or not engine.has_unfinished_requests():
            document = documents.get()
            if document is None:
                return
            prompt = {"prompt_token_ids": document["tokens"]}
            if document["salt"]:
                prompt["cache_salt"] = document["salt"]
            try:
                engine.add_request(str(document["number"]), prompt, sampling)
            except (ValueError, TypeError) as problem:
                _say(out, _done(document["number"], problem=str(problem)))
        for output in engine.step():
            if output.finished:
                reason = output.outputs[0].finish_reason
                trouble = "" if reason in ("length", "stop") else f"vLLM ended it with {reason!r}"
                number = int(output.request_id.partition("-")[0])
                _say(out, _done(number, len(output.prompt_token_ids), output.num_cached_tokens or 0, trouble))


def _set_unless_set(**variables: str) -> None:
    """vLLM's own settings, which it reads from the environment alone."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)  # noqa: TID251


def _done(number: int, num_tokens: int = 0, num_cached: int = 0, problem: str = "") -> dict[str, Any]:
    return {"number": number, "num_tokens": num_tokens, "num_cached": num_cached, "problem": problem}


def _say(out: BinaryIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message).encode("ascii") + b"\n")
    out.flush()


def _read(documents: Documents) -> None:
    for line in sys.stdin.buffer:
        documents.put(json.loads(line))
    documents.put(None)


if __name__ == "__main__":
    main()
