"""C43: shards are re-encoded, back and forth, while a reader in another process keeps reading them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.sweep import sweep
from lmcache_format.encodings import get_encoding
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

ROOT = Path(__file__).resolve().parents[2]
TOKENS = document(3 * CHUNK_TOKENS)
READER = """
import sys
from lmcache_cli.store import Store
from tests.store.made_kv import KV_IDENTITY, read_kv
from tests.cases.test_c43_compressed_under_reader import TOKENS
rounds = whole = 0
print("ready", flush=True)
with Store.open(sys.argv[1]) as store:
    while not sys.stdin.closed and rounds < 2000:
        with store.namespace(KV_IDENTITY) as namespace:
            for _ in range(10):
                whole += read_kv(namespace, TOKENS) == len(TOKENS)  # compares every element it is given
                rounds += 1
        if rounds % 100 == 0:
            print(rounds, whole, flush=True)
            if sys.stdin.readline() != "go on\\n":
                break
"""


@pytest.mark.slow
def test_a_reader_sees_the_old_or_the_new_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with Store.create(str(root)) as store:
        with store.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
        with subprocess.Popen(
            [sys.executable, "-c", READER, str(root)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdin is not None
            assert reader.stdout.readline() == "ready\n"
            reader.stdin.write("go on\n" * 2)
            reader.stdin.flush()
            encoded = 0
            for name in ("bfx", "raw", "bfx", "raw", "bfx", "raw"):
                options = CompressOptions(encoding=get_encoding(name))
                encoded += apply_compress(store, plan_compress(store, options)).num_encoded
                sweep(store, grace_ms=0)
            out, problems = reader.communicate("stop\n", timeout=60)
    assert reader.returncode == 0, problems[-2000:]  # neither an exception nor SIGBUS
    assert encoded == 18
    rounds, whole = map(int, out.split()[-2:])
    assert rounds >= 100
    assert whole > 0
    with Store.open(str(root)) as store, store.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
