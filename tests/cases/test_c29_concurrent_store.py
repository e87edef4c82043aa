"""C29: failing, racing and dying writers of one chunk: its file is absent or whole, and success means it is there."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcache_cli.backends import BackendError, Durability
from lmcache_cli.backends.fault import Effect, Fail, Fault, FaultScript, FullAfter, Kill, faulty_calls
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Namespace, Store, WriterOptions
from tests.store.crash.judge import check_files
from tests.store.pattern import document, hit, put_document, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = tiny_identity()
TOKENS = document(4, 29)
SCHEDULES = 200
WRITERS = 8
CALLS = ("create", "fallocate", "pwritev", "fdatasync", "link", "unlink", "mkdir", "open_beneath", "fsync", "status")


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one writer."""

    call: str
    effect: Effect | None
    on_call: int
    durability: Durability


def plan(chance: random.Random) -> Plan:
    effects: list[Effect | None] = [
        None,
        Fail(OSError(errno.EIO, "injected")),
        Fail(OSError(errno.ENOSPC, "injected")),
        Fail(OSError(errno.EDQUOT, "injected")),
        Kill(),
        Kill(after=True),
        FullAfter(chance.randrange(8192)),
    ]
    effect = chance.choice(effects)
    call = "pwritev" if isinstance(effect, FullAfter) else chance.choice(CALLS)
    return Plan(call, effect, chance.randrange(1, 6), chance.choice(list(Durability)))


def write(root: str, plan: Plan) -> int:
    """One writer: 0 where it was told that the chunk is stored, 1 where it was told that it is not."""
    faults = () if plan.effect is None else (Fault(plan.call, plan.effect, on_call=plan.on_call),)
    if isinstance(plan.effect, FullAfter):
        faults = (Fault(plan.call, plan.effect),)
    backend = LocalBackend(root, faulty_calls(FaultScript(*faults)))
    try:
        with Namespace(backend, IDENTITY, writer=WriterOptions(durability=plan.durability)) as namespace:
            put_document(namespace, TOKENS)
    except BackendError:
        return 1
    return 0


def run_schedules(root: str) -> None:
    """In a process without threads, which forks eight writers a schedule."""
    for schedule in range(SCHEDULES):
        chance = random.Random(schedule)
        for path in Path(root, "ns").rglob("*.*"):
            path.unlink()
        children = []
        for _ in range(WRITERS):
            mine = plan(chance)
            pid = os.fork()
            if pid == 0:
                code = 77
                try:
                    code = write(root, mine)
                finally:
                    os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert set(codes) <= {0, 1, -9}, codes
        check_files(Path(root), IDENTITY)
        with Store.open(root) as store, Namespace(store.backend, IDENTITY, events=store.events) as namespace:
            found = hit(namespace, TOKENS)
            assert found == 4 or 0 not in codes, codes
            put_document(namespace, TOKENS)
            assert hit(namespace, TOKENS) == 4
            assert len(list(Path(root).rglob("*.safetensors"))) == 1
            store.backend.collect_staging(older_than_ms=0)
        assert not [name for name in os.listdir(Path(root, "tmp")) if not Path(f"/proc/{name.split('.')[-2]}").exists()]


@pytest.mark.slow
def test_two_hundred_schedules_of_eight_writers(tmp_path: Path) -> None:
    Store.create(str(tmp_path / "s")).close()
    code = "import sys; from tests.cases.test_c29_concurrent_store import run_schedules; run_schedules(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_failing_writer_removes_its_own_staging_alone(tmp_path: Path) -> None:
    root = tmp_path / "s"
    Store.create(str(root)).close()
    others = root / "tmp" / "otherhost.4711.0123456789abcdef"
    others.write_bytes(b"half a chunk of somebody else")
    for call in set(CALLS) - {"unlink"}:  # what cannot be removed now is collected later
        for on_call in range(1, 5):
            write(str(root), Plan(call, Fail(OSError(errno.EIO, "injected")), on_call, Durability.FULL))
    assert [path for path in (root / "tmp").iterdir() if path != others] == []
    assert others.read_bytes() == b"half a chunk of somebody else"
