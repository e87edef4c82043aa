"""C43: files that are replaced, cut or overwritten under a reader: old bytes or new ones, a miss, never a signal."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_format.geometry import whole_part
from lmcache_format.names import ShardName
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = tiny_identity(name="under", layers=8, kv_heads=8, head_dim=64, chunk_tokens=64)
TOKENS = document(3 * 64, 43)


def read_for_a_while(root: str, seconds: float) -> None:
    """Read the three chunks again and again, all in one process; every element that is handed out is compared."""
    until = time.monotonic() + seconds
    rounds = whole = 0
    with Store.open(root) as store:
        while time.monotonic() < until or not whole:
            with store.namespace(IDENTITY, create=True) as namespace:
                put_document(namespace, TOKENS)
                for _ in range(3):
                    rounds += 1
                    whole += hit(namespace, TOKENS) == len(TOKENS)
    sys.stdout.write(f"{rounds} {whole}\n")


def shard(root: Path, number: int) -> Path:
    key = refs(IDENTITY, TOKENS)[number].key
    return root / ShardName(IDENTITY.fingerprint, key, whole_part(IDENTITY), "raw").path


@pytest.mark.slow
def test_no_signal_and_no_wrong_byte_while_files_change(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Store.create(str(root)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
    good = [shard(root, number).read_bytes() for number in range(3)]
    code = "import sys; from tests.cases.test_c43_file_changed_under_reader import *; read_for_a_while(sys.argv[1], 4)"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    step = 0
    while reader.poll() is None:
        number, kind = step % 3, step % 4
        path = shard(root, number)
        try:
            if kind == 0:  # as compression in place does it: a new file, renamed over
                new = tmp_path / "new"
                new.write_bytes(good[number])
                new.rename(path)
            elif kind == 1:
                with path.open("r+b") as file:
                    file.truncate(len(good[number]) // 2)
            elif kind == 2:
                with path.open("r+b") as file:
                    file.seek(len(good[number]) // 3)
                    file.write(b"other content")
            else:
                path.unlink()
        except FileNotFoundError:
            pass
        step += 1
        time.sleep(0.002)
    out, problems = reader.communicate()
    assert reader.returncode == 0, (reader.returncode, problems[-2000:])
    rounds, whole = map(int, out.split())
    assert rounds > 5
    assert whole > 0
    assert step > 10


def test_truncation_under_an_open_handle_is_an_ordinary_fault(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Store.create(str(root)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
        path = shard(root, 1)
        with store.backend.open_read(str(path.relative_to(root))) as handle:
            with path.open("r+b") as file:
                file.truncate(5000)
            with pytest.raises(Exception, match="ended after"):
                handle.read_into(0, [memoryview(bytearray(handle.size))])
        assert hit(namespace, TOKENS) == 64
        put_document(namespace, TOKENS)
        assert hit(namespace, TOKENS) == len(TOKENS)


def test_a_file_replaced_after_open_is_read_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Store.create(str(root)) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, TOKENS)
        path = shard(root, 0)
        old = path.read_bytes()
        with store.backend.open_read(str(path.relative_to(root))) as handle:
            new = tmp_path / "new"
            new.write_bytes(bytes(len(old)))
            new.rename(path)
            content = bytearray(len(old))
            handle.read_into(0, [memoryview(content)])
        assert content == old
        assert hit(namespace, TOKENS) == 0
