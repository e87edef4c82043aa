"""Eight processes write overlapping sets of chunks into one store at once: one store comes of it, whole and sound."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_format.geometry import rank_part, whole_part
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName
from tests.store.crash.judge import check_files
from tests.store.pattern import document, hit, put_chunk, real_identity, refs, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
WRITERS = 8


def model(is_real: bool) -> Identity:
    return real_identity("crowd") if is_real else tiny_identity(name="crowd", kv_heads=4)


def prompts(is_real: bool) -> list[list[int]]:
    """Prompts that share their beginnings."""
    identity = model(is_real)
    size = identity.chunk_tokens
    trunk = document(6 * size, 1)
    count = 3 if is_real else 30
    tail = 0 if is_real else 1
    return [trunk[: size * (n % 4)] + document(size * (1 + n % 2) + tail * (n % 3), 100 + n) for n in range(count)]


def work(root: str, writer: int, is_real: bool, start_at: float) -> None:
    """One of the processes: all prompts, in an order and with pauses for flushing of its own."""
    chance = random.Random(writer)
    chosen = prompts(is_real)
    chance.shuffle(chosen)
    identity = model(is_real)
    part = rank_part(identity, writer % 2, 2) if not is_real and writer >= 4 else whole_part(identity)
    options = WriterOptions(flush_after_chunks=chance.randrange(1, 12), grace_ms=0 if writer % 2 else 900_000)
    with Store.open(root) as store:
        with store.namespace(identity, create=True, need=part, writer=options) as namespace:
            time.sleep(max(0.0, start_at - time.time()))
            for tokens in chosen:
                for ref in refs(identity, tokens):
                    put_chunk(namespace, ref, tokens, part)
                assert hit(namespace, tokens) == len(tokens)
            namespace.flush()
            time.sleep(0.3)
            namespace.refresh()
            for tokens in chosen:
                assert hit(namespace, tokens) == len(tokens)


def crowd(root: Path, is_real: bool) -> None:
    """Run the processes, which start writing at the same moment."""
    code = "import sys; from tests.store.test_processes import work; work(*map(eval, sys.argv[1:]))"
    start_at = time.time() + 4
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(repr, (str(root), writer, is_real, start_at))],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for writer in range(WRITERS)
    ]
    for process in running:
        _, problems = process.communicate(timeout=300)
        assert process.returncode == 0, problems
        assert "damaged" not in problems, problems


def check(root: Path, identity: Identity, is_real: bool) -> None:
    """Sound, complete, every shard once on disk and once in the index, and both agree."""
    check_files(root, identity)
    on_disk = Counter(path.name for path in root.rglob("*.safetensors"))
    assert set(on_disk.values()) == {1}
    with Store.open(str(root)) as store, Namespace(store.backend, identity, events=store.events) as namespace:
        state = namespace.state()
        indexed = {(entry.key.hex(), str(entry.part)) for entry in (state.entry(row) for row in range(len(state)))}
        assert len(indexed) == len(state)
        assert not len(state.shadowed_keys)
        names = [ShardName.parse(str(path.relative_to(root))) for path in root.rglob("*.safetensors")]
        assert {(name.key[:16].hex(), str(name.part)) for name in names} == indexed
        for tokens in prompts(is_real):
            assert hit(namespace, tokens) == len(tokens)
        assert store.events.snapshot().get("adopted", 0) == 0  # all was in the index
        wanted = {ref.key for tokens in prompts(is_real) for ref in refs(identity, tokens)}
        assert {name.key for name in names} == wanted
    assert not list((root / "tmp").iterdir())
    assert not (root / "quarantine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True], ids=["small chunks", "chunks of 6 MB"])
def test_eight_writers_at_once(tmp_path: Path, is_real: bool) -> None:
    identity = model(is_real)
    root = tmp_path / "store"
    Store.create(str(root)).close()
    crowd(root, is_real)
    check(root, identity, is_real)


@pytest.mark.slow
def test_a_second_wave_writes_nothing(tmp_path: Path) -> None:
    identity = model(False)
    root = tmp_path / "store"
    Store.create(str(root)).close()
    crowd(root, False)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")}
    crowd(root, False)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.safetensors")} == before
    check(root, identity, False)
