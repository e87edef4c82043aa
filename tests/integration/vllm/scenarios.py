"""Scenarios on real engines, told to `test_conformance.py` as JSON: `scenarios.py NAME,NAME… MODEL PLACE`.

SmolLM2 in float32: other shapes of a batch then move KV by 1e-6, not by 1e-2, and greedy answers stay the same however
a prompt is cut, so that every answer can be compared with that of an engine which never met a store.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmcache_cli.backends.fault import Delay, Fail, Fault, unavailable
from tests.integration.vllm.archive_scenario import archive
from tests.integration.vllm.real_engine import (
    CHUNK,
    SCRIPT,
    SETTINGS,
    Engine,
    allow_faults,
    chunks_of,
    compared,
    engine,
    num_damaged,
    only_namespace,
    text_tokens,
)

FAULTS = ("missing", "truncated", "flipped", "slow", "eio")
KEPT = 4 * CHUNK
"""Tokens of each prompt that the store has before the fault."""


# ---- faults ----------------------------------------------------------------------------------------------------


def faults(model: str, place: Path) -> dict[str, Any]:
    """Every fault, in every mode, under every policy: the second of four chunks cannot be read; two more are computed
    in the step that fails."""
    prompts = {name: text_tokens(model, number, KEPT + 2 * CHUNK + 20) for number, name in enumerate(FAULTS)}
    bystander = text_tokens(model, 9, 90)
    base, reference = place / "base", place / "reference"
    with engine(model, {"store": str(base), "create_store": True}) as one:
        one.ask(*(prompt[: KEPT + 1] for prompt in prompts.values()), max_tokens=1)
    with engine(model, {"store": str(reference), "create_store": True, "load": False}) as one:
        control = {name: one.ask(prompt)[0].tokens for name, prompt in prompts.items()}
        other = one.ask(bystander)[0].tokens
    found = []
    for policy in ("recompute", "fail"):
        for mode in ("sync", "async"):
            own = place / f"{policy}-{mode}"
            shutil.copytree(base, own)
            connector = {"store": f"faulty://{own}", "load_async": mode == "async", "load_timeout_s": 1.0}
            with engine(model, connector, policy=policy) as one:
                for name, prompt in prompts.items():
                    told = _one_fault(one, own, name, prompt, bystander)
                    tokens, error = compared(own, reference, prompt)
                    again = one.ask(prompt)[0]
                    one.forget()
                    found.append(
                        {
                            "fault": name,
                            "policy": policy,
                            "mode": mode,
                            **told,
                            "control": control[name],
                            "bystander_control": other,
                            "tokens_after": tokens,
                            "error_after": error,
                            "again": asdict(again),
                            "end": compared(own, reference, prompt),
                        }
                    )
            found[-1]["damaged"] = num_damaged(own)
    return {"faults": found}


def _one_fault(one: Engine, root: Path, name: str, prompt: list[int], bystander: list[int]) -> dict[str, Any]:
    """The fault comes between the lookup, which promises four chunks, and the load."""
    key = chunks_of(root, prompt)[1].key.hex()
    (shard,) = root.rglob(f"{key}.*.safetensors")
    one.before_load = lambda: _harm(name, key, shard)
    one.counts()
    answer, beside = one.ask(prompt, bystander)
    SCRIPT.arm()
    one.forget()
    return {"answer": asdict(answer), "bystander": asdict(beside), "counts": dict(one.counts())}


def _harm(name: str, key: str, shard: Path) -> None:
    data = shard.read_bytes()
    if name in ("missing", "truncated", "flipped"):
        shard.unlink()
    if name == "truncated":
        shard.write_bytes(data[:-1000])
    if name == "flipped":
        shard.write_bytes(data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:])
    if name == "slow":
        SCRIPT.arm(Fault("open_read", Delay(2.5), name=key, on_call=1))
    if name == "eio":
        SCRIPT.arm(Fault("open_read", Fail(unavailable(errno.EIO)), name=key, on_call=1))


def gone(model: str, place: Path) -> dict[str, Any]:
    """A chunk goes while an engine runs whose index lists it: it is not promised, but computed, and saved again."""
    root, reference = place / "kv", place / "reference"
    prompt = text_tokens(model, 3, KEPT + 20)
    with engine(model, {"store": str(root), "create_store": True}) as one:
        one.ask(prompt)
        shutil.copytree(root, reference)
        next(root.rglob(f"{chunks_of(root, prompt)[1].key.hex()}.*.safetensors")).unlink()
        cached = []
        for _ in range(3):
            one.forget()
            cached.append(one.ask(prompt)[0].cached)
    return {"cached": cached, "stored": compared(root, reference, prompt)}


# ---- too little room -------------------------------------------------------------------------------------------


def pressure(model: str, place: Path) -> dict[str, Any]:
    """Requests in pieces of 96 tokens, more than there are blocks for; then the same with hits that end inside."""
    stem = text_tokens(model, 1, 200)
    long = [text_tokens(model, 2 + number, 250) for number in range(3)]
    shared = [[*stem, *text_tokens(model, 5 + number, 40 + 30 * number)] for number in range(4)]
    reference = place / "reference"
    options = {"max_model_len": 512, "num_gpu_blocks_override": 27, "max_num_batched_tokens": 96, "max_num_seqs": 4}
    options["enable_prefix_caching"] = False  # or what was preempted is found in the engine
    with engine(model, {"store": str(reference), "create_store": True, "load": False}, max_model_len=512) as one:
        control = [one.ask(prompt, max_tokens=64)[0].tokens for prompt in long]
        control_shared = [one.ask(prompt, max_tokens=8)[0].tokens for prompt in shared]
    found: dict[str, Any] = {"control": control, "control_shared": control_shared}
    for mode in ("sync", "async"):
        own = place / mode
        connector = {"store": str(own), "create_store": True, "load_async": mode == "async"}
        with engine(model, connector, **options) as one:
            cold = one.ask(*long, max_tokens=64)
            preempted, cold_counts = one.metric("vllm:num_preemptions"), dict(one.counts())
            one.ask(shared[0], max_tokens=1)
            one.counts()
            warm = one.ask(*shared, max_tokens=8)
            found[mode] = {
                "cold": [asdict(answer) for answer in cold],
                "preempted": preempted,
                "cold_counts": cold_counts,
                "warm": [asdict(answer) for answer in warm],
                "warm_counts": dict(one.counts()),
            }
        found[mode]["stored"] = [compared(own, reference, prompt) for prompt in (*long, *shared)]
        found[mode]["damaged"] = num_damaged(own)
    return found


# ---- what else the engine may ask for --------------------------------------------------------------------------


def services(model: str, place: Path) -> dict[str, Any]:
    """KV events, generated tokens, generations, block sizes: on one store."""
    import zmq

    root = place / "kv"
    prompt, other = text_tokens(model, 1, 2 * CHUNK + 20), text_tokens(model, 2, 2 * CHUNK + 20)
    endpoint = f"ipc://{place}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    found: dict[str, Any] = {"prompt": prompt, "other": other}
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(endpoint)
    with engine(model, {"store": str(root), "create_store": True, "save_decode": True}, kv_events_config=events) as one:
        time.sleep(0.2)
        (said,) = one.ask(prompt, max_tokens=60)
        longer = [*prompt, *said.tokens[:-6]]
        one.forget()
        found["decoded"] = {"said": said.tokens, "again": asdict(one.ask(longer, max_tokens=6)[0])}
        one.forget(connector=True)
        found["generation"] = [one.ask(prompt)[0].cached]
        one.forget()
        found["generation"] += [one.ask(prompt)[0].cached]
        one.ask(other)
        one.ask(other)
        found["events"] = _events(subscriber)
        found["chunks"] = [[chunk.key.hex(), chunk.parent.hex()] for chunk in chunks_of(root, longer)]
    subscriber.close(0)
    with only_namespace(root) as namespace:
        found["root"] = namespace.root().hex()
    with engine(model, {"store": str(root), "save": False}) as one:
        found["next_engine"] = [one.ask(prompt)[0].cached, one.ask(other)[0].cached]
    plain = place / "plain"
    with engine(model, {"store": str(plain), "create_store": True}) as one:
        said = one.ask(prompt, max_tokens=60)[0]
    found["without_decode"] = len(chunks_of(plain, [*prompt, *said.tokens]))
    found["block_sizes"] = {}
    for block_size in (32, 64, 128, 256):
        with engine(model, {"store": str(plain), "save": False}, block_size=block_size) as one:
            found["block_sizes"][block_size] = asdict(one.ask(prompt, max_tokens=8)[0])
    found["control"] = said.tokens[:8]
    found["gone"] = gone(model, place / "gone")
    return found


# ---- ranks -----------------------------------------------------------------------------------------------------


def ranks(model: str, place: Path) -> dict[str, Any]:
    """One rank writes and two read, in processes of their own; and the other way round. A small model of four heads,
    since three do not divide."""
    small, root, reference = place / "model", place / "kv", place / "reference"
    _make_model(small)
    first, second = text_tokens(model, 1, 4 * CHUNK + 9), text_tokens(model, 2, 3 * CHUNK + 9)
    first, second = ([token % 500 for token in prompt] for prompt in (first, second))
    with engine(str(small), {"store": str(reference), "create_store": True, "load": False}) as one:
        control = [one.ask(prompt, max_tokens=8)[0].tokens for prompt in (first, second)]
    with engine(str(small), {"store": str(root), "create_store": True}) as one:
        one.ask(first)
    pair = {
        "model": str(small),
        "connector": {"store": str(root), "chunk_size": CHUNK},
        "engine": {**SETTINGS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        "prompts": [first, second, first],
        "batches": [[0], [1], [2]],
        "max_tokens": [8, 8, 8],
        "salts": {"2": "computed anew"},
        "pause_s": 1.0,
    }
    out = place / "pair.json"
    _serve_by_two(pair, out)
    with engine(str(small), {"store": str(root), "save": False}) as one:
        back = [asdict(one.ask(prompt, max_tokens=8)[0]) for prompt in (first, second)]
    return {
        "control": control,
        "pair": json.loads(out.read_text())["results"],
        "back": back,
        "stored": [compared(root, reference, prompt) for prompt in (first, second)],
        "parts": sorted({path.name.split(".")[1] for path in root.rglob("*.safetensors")}),
        "damaged": num_damaged(root),
    }


# ---- latents ---------------------------------------------------------------------------------------------------


ROTATED_PLAINLY: dict[str, Any] = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""With vLLM's own rotation on the CPU, latents depend on which tokens are computed together."""


def latents(model: str, place: Path) -> dict[str, Any]:
    """A small model that caches latents (MLA), of the one width that vLLM's CPU kernel takes: found by a fresh engine,
    which computes a suffix or the last token alone, by one that loads beside others, and by two ranks, which store for
    one in turn."""
    small, root, reference = place / "model", place / "kv", place / "reference"
    _make_latent_model(small)
    first, second = ([token % 500 for token in text_tokens(model, n, 4 * CHUNK + 9)] for n in (1, 2))
    prompts = [first, first[: 4 * CHUNK + 1], second]
    with engine(str(small), {"store": str(reference), "create_store": True, "load": False}, **ROTATED_PLAINLY) as one:
        control = [one.ask(prompt, max_tokens=8)[0].tokens for prompt in prompts[:2]]
        shutil.copytree(reference, root)
        control.append(one.ask(second, max_tokens=8)[0].tokens)
    with engine(str(small), {"store": str(root), "save": False}, **ROTATED_PLAINLY) as one:
        alone = [asdict(one.ask(prompt, max_tokens=8)[0]) for prompt in prompts[:2]]
    pair = {
        "model": str(small),
        "connector": {"store": str(root), "chunk_size": CHUNK},
        "engine": {**SETTINGS, **ROTATED_PLAINLY, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        "prompts": [first, second],
        "batches": [[0], [1]],
        "max_tokens": [8, 8],
        "pause_s": 1.0,
    }
    _serve_by_two(pair, place / "pair.json")
    with engine(str(small), {"store": str(root), "save": False, "load_async": True}, **ROTATED_PLAINLY) as one:
        beside = [asdict(answer) for answer in one.ask(*prompts, max_tokens=8)]
    return {
        "control": control,
        "alone": alone,
        "pair": json.loads((place / "pair.json").read_text())["results"],
        "beside": beside,
        "refused": _refusal(place / "mixing", place / "other"),
        "errors": [compared(root, reference, prompt) for prompt in (first, second)],
        "parts": [path.name.split(".")[1] for path in root.rglob("*.safetensors")],
        "damaged": num_damaged(root),
    }


def _refusal(model: Path, root: Path) -> str:
    """What an engine says that rotates latents wrongly. Of another length, since vLLM keeps what rotates by that."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    _make_latent_model(model, 768)
    try:
        with engine(str(model), {"store": str(root), "create_store": True}):
            return ""
    except Exception as problem:
        return str(problem)
    finally:
        ensure_kv_transfer_shutdown()  # an engine that does not start leaves its connector to the next one


def _serve_by_two(spec: dict[str, Any], out: Path) -> None:
    subprocess.run(
        [sys.executable, Path(__file__).with_name("serve_prompts.py"), json.dumps(spec), out],
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )


def _make_latent_model(directory: Path, max_tokens: int = 1024) -> None:
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(4)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=max_tokens,
        initializer_range=0.2,
    )
    DeepseekV2ForCausalLM(config).float().save_pretrained(directory)


def _make_model(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def _events(subscriber: Any) -> list[dict[str, Any]]:
    """Those of the connector; the engine's own blocks are told of, too, and of no concern here."""
    import msgspec
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    stored = []
    while subscriber.poll(1000):
        batch = msgspec.msgpack.decode(subscriber.recv_multipart()[-1], type=KVEventBatch)
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium == "STORAGE":
                parent = event.parent_block_hash
                stored.append(
                    {
                        "keys": [bytes(key).hex() for key in event.block_hashes],
                        "parent": None if parent is None else bytes(parent).hex(),
                        "tokens": list(event.token_ids),
                    }
                )
    return stored


def main(names: list[str], model: str, place: Path) -> None:
    """Each scenario in a directory of its own; what comes of it in `NAME.json`, or why nothing did in `NAME.failed`."""
    allow_faults()
    known = {
        "faults": faults,
        "pressure": pressure,
        "services": services,
        "ranks": ranks,
        "latents": latents,
        "archive": archive,
    }
    for name in names:
        own = place / name
        own.mkdir()
        began = time.perf_counter()
        try:
            (place / f"{name}.json").write_text(json.dumps(known[name](model, own)))
        except Exception:
            (place / f"{name}.failed").write_text(traceback.format_exc())
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.1f} s\n")
        shutil.rmtree(own)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3]))
