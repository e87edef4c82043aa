"""A small process that forks victims: it has imported everything, has one thread, and is quick to copy.

Reads one JSON object a line from stdin, answers one a line on stdout. `python -m tests.store.crash.server`
"""

from __future__ import annotations

import json
import mmap
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from lmcache_cli.backends import Durability
from tests.store.crash.tracer import CHANGES_BY_MACHINE, run_traced
from tests.store.crash.workloads import make, perform, prepare


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Put a copy of the prepared store at `root`, run the victim on it, kill it at boundary `kill_at`."""
    workload = make(job["kind"], job["seed"], Durability(job["durability"]))
    base, root = Path(job["base"]), Path(job["root"])
    if not base.exists():
        base.mkdir()
        prepare(workload, base / "store")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(base, root)
    returned = mmap.mmap(-1, max(1, len(workload.steps)))
    only = CHANGES_BY_MACHINE.get(platform.machine()) if job["changes_only"] else None
    traced = run_traced(lambda: perform(workload, root / "store", memoryview(returned)), job["kill_at"], only)
    return {
        "exit_code": traced.exit_code,
        "boundaries": len(traced.boundaries),
        "returned": list(returned[: len(workload.steps)]),
    }


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
