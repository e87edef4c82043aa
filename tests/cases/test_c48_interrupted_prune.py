"""C48, prune's side: stopped at any time by any signal, a prune of 20 chunks goes on where it was when run again."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.verify import verify
from tests.cli.conftest import Program
from tests.store.pattern import document, hit, put_document, tiny_identity

NUM_CHUNKS = 20
IDENTITY = tiny_identity()
TOKENS = document(NUM_CHUNKS * 4)
PRUNE = ("prune", "--max-count", "0", "--yes", "--wait", "--grace", "0s", "-q", "--json")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    with Store.create(str(path)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("seed", range(4))
def test_the_next_run_finishes_it(lmcache: Program, root: Path, number: signal.Signals, seed: int):
    process = lmcache.start(*PRUNE, "--store", root)
    time.sleep(random.Random(f"{seed} {number}").uniform(0.2, 0.9))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode in ((0, -9) if number is signal.SIGKILL else (0, -number, 128 + number))
    assert b"Traceback" not in stderr
    for line in stdout.splitlines():
        json.loads(line)
    with Store.open(str(root)) as store, store.namespace(IDENTITY) as namespace:
        hit(namespace, TOKENS)
    again = lmcache(*PRUNE, "--store", root)
    assert again.code == 0, again.stderr
    assert list((root / "ns").rglob("*.safetensors")) == []
    with Store.open(str(root)) as store:
        assert store_stats(store).total.num_shards == 0
        assert verify(store).is_sound
