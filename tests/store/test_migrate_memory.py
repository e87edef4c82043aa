"""What `migrate` holds in memory: a shard for each that is under way, and 128 MiB for everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_format.geometry import part_bytes, whole_part
from tests.store.made_kv import put_kv
from tests.store.pattern import document, real_identity

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = real_identity()
MEASURED = """
import sys
from lmcache_cli.store import Store
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from tests.peak_memory import peak_bytes
source, target, concurrency = sys.argv[1:]
with Store.open(source) as here, Store.create(target) as there:
    options = MigrateOptions(concurrency=int(concurrency), delete_source=True)
    plan = plan_migrate(here, there, options)
    before = peak_bytes()
    result = apply_migrate(here, there, plan)
    print(result.num_deleted, peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_memory_is_bounded_by_what_is_under_way(tmp_path: Path, concurrency: int) -> None:
    with Store.create(str(tmp_path / "src")) as store, store.namespace(IDENTITY, create=True) as namespace:
        put_kv(namespace, document(24 * IDENTITY.chunk_tokens))
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "src"), str(tmp_path / "dst"), str(concurrency)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    num_deleted, grown_bytes = map(int, ran.stdout.split())
    assert num_deleted == 24
    shard_bytes = part_bytes(IDENTITY, whole_part(IDENTITY), IDENTITY.chunk_tokens)
    assert grown_bytes <= concurrency * shard_bytes + 128 * 1024 * 1024
