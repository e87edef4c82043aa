"""What a retrieve costs in memory beyond the buffers it fills: at most 64 MiB, whatever the size of the chunks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_cli.store import Store, WriterOptions
from lmcache_format.identity import Identity
from tests.peak_memory import peak_bytes
from tests.store.pattern import document, put_document, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_BYTES = 64 << 20
CHUNKS = 8


def large_identity() -> Identity:
    """Chunks of 32 MiB: 32 layers of 8 heads of 128."""
    return tiny_identity(name="large", layers=32, kv_heads=8, head_dim=128, chunk_tokens=256)


def retrieve(root: str) -> None:
    """In a process of its own: fill buffers with zeros, note the peak, read, print how much the peak rose."""
    identity = large_identity()
    tokens = document(CHUNKS * 256, 3)
    with Store.open(root) as store, store.namespace(identity) as namespace:
        match = namespace.match(tokens)
        buffers = [namespace.buffer() for _ in match.chunks()]
        for buffer in buffers:
            buffer.memory[:] = bytes(buffer.size_bytes)
        del buffer
        before = peak_bytes()
        result = namespace.read(match.chunks(), buffers)
        assert result.num_tokens == len(tokens)
        sys.stdout.write(f"{peak_bytes() - before} {sum(b.size_bytes for b in buffers)}\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["raw", "bfx"])
def test_a_retrieve_needs_little_more_than_its_buffers(tmp_path: Path, encoding: str) -> None:
    root = str(tmp_path / "store")
    with Store.create(root) as store:
        options = WriterOptions(encoding=encoding)
        with store.namespace(large_identity(), create=True, writer=options) as namespace:
            put_document(namespace, document(CHUNKS * 256, 3))
    code = "import sys; from tests.store.test_memory import retrieve; retrieve(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, root], cwd=ROOT, capture_output=True, text=True, check=True)
    rose, buffers = map(int, ran.stdout.split())
    assert buffers == CHUNKS * (32 << 20)
    assert rose <= ALLOWED_BYTES, f"{rose / 2**20:.1f} MiB beyond the buffers"
