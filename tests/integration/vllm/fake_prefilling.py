"""In the place of `prefilling`: the same protocol, and pattern KV in the place of a model's.

    python fake_prefilling.py MODE

`good`; `slow`: takes a while for each document, and leaves its process id in `engine.pid`; `few`: saves two chunks more
of a document each time it is asked; `dies`: ends while it computes; `other`: says that it saves elsewhere; `fails`:
does not start; `numbers`: the pattern as `make_numbers` leaves it; `apart`: other numbers than those.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from lmcache_cli.store import Store, WriterOptions
from tests.cases.pattern_engine import ENGINE_IDENTITY
from tests.store.pattern import document, filled, put_chunk, refs

VLLM = {"engine": "vllm", "vllm": "0.32.0"}
CONSUMER = {"engine": "vllm", "version": "0.32.0", "device": "cpu"}
LONGEST = 40


def main(mode: str) -> None:
    spec = json.loads(sys.stdin.readline())
    if mode == "fails":
        sys.stderr.write("(EngineCore pid=1) ERROR core.py: ValueError: no room for anything\n")
        sys.stderr.write("RuntimeError: Engine core initialization failed. See root cause above.\n")
        sys.exit(1)
    if mode == "slow":
        Path("engine.pid").write_text(str(os.getpid()))
    longest = LONGEST if spec["longest"] < 10 * LONGEST else spec["longest"]
    fingerprint = "0" * 32 if mode == "other" else ENGINE_IDENTITY.fingerprint
    say({"ready": {"fingerprint": fingerprint, "producer": VLLM, "consumer": CONSUMER, "max_tokens": longest}})
    options = spec["options"]
    saves = options.get("save", True)
    with (
        Store.open(options["store"]) as store,
        store.namespace(
            ENGINE_IDENTITY, create=saves, missing_ok=True, writer=WriterOptions(producer=VLLM)
        ) as namespace,
    ):
        for line in sys.stdin:
            asked = json.loads(line)
            if mode == "dies":
                sys.stderr.write("ERROR: torch.OutOfMemoryError: no memory\n")
                sys.exit(1)
            if mode == "garbled":
                sys.stdout.write("a plugin says hello\n")
            if mode == "slow":
                time.sleep(0.3)
            say({"number": asked["number"], "problem": "", **save(namespace, asked, mode, options)})


def save(namespace: Any, asked: dict[str, Any], mode: str, options: dict[str, Any]) -> dict[str, int]:
    tokens, salt = asked["tokens"], asked["salt"]
    present = namespace.match(tokens, salt=salt).num_tokens
    chunks = [one for one in refs(ENGINE_IDENTITY, tokens, salt=salt) if one.depth * 4 >= present // 4 * 4]
    for ref in chunks[: 2 if mode == "few" else None] if options.get("save", True) else ():
        if mode in ("numbers", "apart"):
            own = tokens[ref.depth * 4 :][: ref.num_tokens] if mode == "numbers" else document(ref.num_tokens, seed=9)
            buffer = filled(ENGINE_IDENTITY, namespace.need, own, ref.depth * 4)
            make_numbers(buffer.memory)
            namespace.put(buffer, key=ref.key, parent=ref.parent, depth=ref.depth)
        else:
            put_chunk(namespace, ref, tokens)
    namespace.flush()
    return {"num_tokens": len(tokens), "num_cached": present}


def make_numbers(memory: Any) -> None:
    """Patterns are any bits; make each bf16 a number from 0 to 2."""
    np.frombuffer(memory, np.uint16)[...] &= 0x3FFF


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
