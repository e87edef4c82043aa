"""C31: restart. 50 good chunks, temp files, an unknown file, a newer record and an unreadable one lie in the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lmcache_cli.backends.local.staging import this_host
from lmcache_cli.store import Store
from lmcache_cli.store.repair import apply_repair, plan_repair
from lmcache_cli.store.verify import FindingKind, verify
from lmcache_format.identity import Identity
from tests.store.altered_shards import in_format
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
NUM_CHUNKS = 50
DOCUMENT = document(NUM_CHUNKS * 4 + 4)
DEAD_PID = 4_194_304 + 5  # above the largest a kernel gives out


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def left(tmp_path: Path, identity: Identity) -> Path:
    """What an earlier process left behind."""
    root = tmp_path / "kv"
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT[: NUM_CHUNKS * 4])
        put_document(namespace, document(8, seed=1))  # one will be newer, one unreadable
    newer, unreadable = shards_of(root, identity, document(8, seed=1))
    in_format(newer, "9")
    unreadable.write_bytes(b"")
    (root / "unknown.bin").write_bytes(b"not ours")
    for number, age_s in enumerate((7200, 7200, 0)):
        path = root / "tmp" / f"{this_host()}.{DEAD_PID}.{number:016x}"
        path.write_bytes(b"half a shard")
        os.utime(path, (time.time() - age_s,) * 2)
    return root


def shards_of(root: Path, identity: Identity, tokens: list[int]) -> list[Path]:
    return [next(root.rglob(f"{ref.key.hex()}.*")) for ref in refs(identity, tokens)]


def shard_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "ns").rglob("*.safetensors"))


def test_everything_good_hits_and_usage_is_what_is_on_disk(left: Path, identity: Identity):
    with Store.open(str(left)) as store:
        with store.namespace(identity) as namespace:
            assert hit(namespace, DOCUMENT) == NUM_CHUNKS * 4
        assert verify(store).listed_bytes == shard_bytes(left)


def test_opening_twice_changes_nothing(left: Path, identity: Identity):
    def look() -> dict[str, bytes]:
        with Store.open(str(left)) as store, store.namespace(identity) as namespace:
            namespace.match(DOCUMENT)
        return {str(path): path.read_bytes() for path in left.rglob("*") if path.is_file()}

    assert look() == look()


def test_everything_is_listed_by_its_kind_and_nothing_foreign_is_touched(left: Path):
    with Store.open(str(left)) as store:
        report = verify(store)
    foreign = [finding.path for finding in report.findings if finding.kind is FindingKind.FOREIGN]
    assert foreign == ["unknown.bin"]
    assert (report.num_damaged, report.num_newer, report.num_foreign, report.num_stale) == (1, 1, 1, 2)
    assert report.num_findings == 5
    assert report.num_good == NUM_CHUNKS
    assert (left / "unknown.bin").read_bytes() == b"not ours"


def test_a_process_killed_after_a_put_loses_nothing(left: Path, identity: Identity):
    program = f"""
        import os, signal
        from lmcache_cli.store import Store
        from tests.cases.test_c31_restart import DOCUMENT
        from tests.store.pattern import put_document, tiny_identity
        namespace = Store.open({str(left)!r}).namespace(tiny_identity(), create=True)
        put_document(namespace, DOCUMENT)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with Store.open(str(left)) as store:
        assert verify(store).num_unindexed == 1
        with store.namespace(identity) as namespace:
            assert hit(namespace, DOCUMENT) == len(DOCUMENT)
        report = verify(store)  # the reader listed what it found
        assert (report.num_unindexed, report.num_good) == (0, NUM_CHUNKS + 1)


def test_repair_collects_stale_temp_files_alone(left: Path):
    with Store.open(str(left)) as store:
        plan = plan_repair(store)
        result = apply_repair(store, plan)
    assert (result.num_quarantined, result.failures) == (1, [])
    assert (left / "unknown.bin").exists()
    assert plan.num_stale_staging == 2
    with Store.open(str(left)) as store:
        report = verify(store)
    assert (report.is_sound, report.num_newer, report.num_foreign) == (True, 1, 1)
