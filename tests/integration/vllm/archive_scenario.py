"""A real engine whose store has an archive behind it; told to `test_conformance.py` by `scenarios.py`."""

from __future__ import annotations

import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmcache_cli.backends.fault import Fail, Fault, Hold, unavailable
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from tests.integration.vllm.real_engine import (
    CHUNK,
    SCHEME,
    SCRIPT,
    Engine,
    chunks_of,
    engine,
    num_damaged,
    text_tokens,
)

NUM_CHUNKS = 3


def archive(model: str, place: Path) -> dict[str, Any]:
    """What one engine has saved is moved to an archive; others, with an empty store in front of it, are asked twice:
    for a prompt that the archive gives, for one while it fails, and for one while it hangs."""
    near, far = place / "near", place / "far"
    moved, failing, hanging = (text_tokens(model, number, NUM_CHUNKS * CHUNK + 20) for number in (1, 2, 3))
    with engine(model, {"store": str(near), "create_store": True}) as one:
        control = [answer.tokens for answer in one.ask(moved, failing, hanging, max_tokens=8)]
    with Store.open(str(near)) as source, Store.create(str(far)) as target:
        apply_migrate(source, target, plan_migrate(source, target, MigrateOptions(delete_source=True)))
    found: dict[str, Any] = {"control": control, "left": len(chunks_of(near, moved))}
    for mode in ("sync", "async"):
        own = place / mode
        shutil.copytree(near, own)
        connector = {
            "store": str(own),
            "archive": f"{SCHEME}://{far}",
            "archive_timeout_s": 1.0,
            "promote_min_free_bytes": 0,
            "load_async": mode == "async",
        }
        with engine(model, connector) as one:
            told: dict[str, Any] = {"moved": [_asked(one, moved), _asked(one, moved)]}
            SCRIPT.arm(Fault("read_into", Fail(unavailable()), name="/c/"))
            told["failing"] = [_asked(one, failing)]
            go_on = threading.Event()
            SCRIPT.arm(Fault("read_into", Hold(threading.Event(), go_on), name="/c/"))
            told["hanging"] = [_asked(one, hanging)]
            go_on.set()
            SCRIPT.arm()
            told["failing"].append(_asked(one, failing))
            told["hanging"].append(_asked(one, hanging))
        told["chunks"] = [len(chunks_of(own, prompt)) for prompt in (moved, failing, hanging)]
        told["damaged"] = num_damaged(own)
        found[mode] = told
    found["archived"] = [len(chunks_of(far, prompt)) for prompt in (moved, failing, hanging)]
    return found


def _asked(one: Engine, prompt: list[int]) -> dict[str, Any]:
    """The answer, what was cached, and how many chunks the archive has given so far; all promoted."""
    (answer,) = one.ask(prompt, max_tokens=8)
    assert one.worker._namespace_of(None).wait_promoted(30)
    one.forget()
    return {**asdict(answer), "far_read": one.metric("vllm:lmcache_store_far_read")}
