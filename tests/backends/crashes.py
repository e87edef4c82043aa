"""A process apart that forks writers, fails and kills them, and says what is left: `crashes.py schedules|boundaries …`.

Forking needs a process without threads, so the tests start this one and read its JSON.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_cli.backends import STAGING_PREFIX, AlreadyExists, Durability, NoSpace, Unavailable
from lmcache_cli.backends.fault import CutShort, Delay, Fail, Fault, FaultScript, FullAfter, Kill, faulty_calls
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.staging import parse_staging_component

NAME = "ns/00/c/ab/cd/key.safetensors"
OUTCOMES = {0: "put", 1: "exists", 2: "full", 3: "unavailable", -9: "killed"}
WRITE_CALLS = ("create", "mkdir", "fallocate", "pwritev", "fdatasync", "fsync", "link", "unlink", "open_beneath")


def payload(writer: int) -> list[bytes]:
    return [bytes([65 + writer]) * 40, bytes([97 + writer]) * 24]


def in_child(work: Callable[[], None]) -> int:
    """Fork, work, and the pid; the child ends with one of OUTCOMES."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        work()
        code = 0
    except AlreadyExists:
        code = 1
    except NoSpace:
        code = 2
    except Unavailable:
        code = 3
    finally:
        os._exit(code)


def outcome_of(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return OUTCOMES.get(code, f"unexpected {code}")


def random_script(chance: random.Random) -> FaultScript:
    """Faults of one writer: an error or a death somewhere, and delays that shuffle the order."""
    call = chance.choice(WRITE_CALLS)
    effect = chance.choice(
        [
            Fail(OSError(errno.EIO, "injected")),
            Fail(OSError(errno.ENOSPC, "injected")),
            Fail(OSError(errno.EDQUOT, "injected")),
            FullAfter(chance.randrange(64), chance.choice([errno.ENOSPC, errno.EDQUOT])),
            Kill(after=chance.random() < 0.5),
            None,
        ]
    )
    faults = [Fault("*", Delay(chance.random() * 0.002), on_call=chance.randrange(1, 20)) for _ in range(2)]
    faults.append(Fault("pwritev", CutShort(chance.randrange(1, 65))))
    if isinstance(effect, FullAfter):
        faults.append(Fault("pwritev", effect))
    elif effect is not None:
        faults.append(Fault(call, effect, on_call=chance.choice([1, 1, 2])))
    return FaultScript(*faults)


def run_schedule(root: Path, seed: int) -> dict[str, object]:
    """Eight writers of one name; what they said and what is wrong with what they left."""
    chance = random.Random(seed)
    go_at = time.monotonic() + 0.01
    pids: list[int] = []
    cannot_unlink: set[int] = set()
    for writer in range(8):
        script, durability = random_script(chance), chance.choice(list(Durability))

        def work(writer: int = writer, script: FaultScript = script, durability: Durability = durability) -> None:
            backend = LocalBackend(root, faulty_calls(script))
            time.sleep(max(0.0, go_at - time.monotonic()))
            backend.put(NAME, payload(writer), durability=durability)

        pids.append(in_child(work))
        if any(fault.operation == "unlink" and isinstance(fault.effect, Fail) for fault in script.faults):
            cannot_unlink.add(pids[-1])
    said = [outcome_of(pid) for pid in pids]
    killed = {pid for pid, outcome in zip(pids, said, strict=True) if outcome == "killed"}
    return {"seed": seed, "said": said, "wrong": complaints(root, said, may_leave_staging=killed | cannot_unlink)}


def complaints(root: Path, said: list[str], *, may_leave_staging: set[int]) -> list[str]:
    wrong = [outcome for outcome in said if outcome.startswith("unexpected")]
    backend = LocalBackend(root)
    found = backend.read(NAME) if backend.stat(NAME) is not None else None
    if found is not None and found not in [b"".join(payload(writer)) for writer in range(8)]:
        wrong.append(f"a torn object: {found!r}")
    if found is None and ("put" in said or "exists" in said):
        wrong.append("success was reported and nothing is there")
    if said.count("put") > 1:
        wrong.append("two winners")
    winner = said.index("put") if "put" in said else None
    if winner is not None and found != b"".join(payload(winner)):
        wrong.append("the winner's bytes were replaced")
    for name in staging(root):
        owner = parse_staging_component(name)
        if owner is None or owner.pid not in may_leave_staging:
            wrong.append(f"a writer that could clean up left {name}")
    if staging(root):
        backend.collect_staging(older_than_ms=0)
    if staging(root):
        wrong.append(f"stale staging was not collected: {staging(root)}")
    return wrong


def staging(root: Path) -> list[str]:
    directory = root / STAGING_PREFIX
    return sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []


def run_boundaries(root: Path, durability: Durability) -> dict[str, object]:
    """One writer, killed before every one of its system calls in turn, until a run gets through."""
    wrong: list[str] = []
    content = [b"h" * 4096, os.urandom(300_000)]
    for at in range(1, 200):
        store = root / f"{durability.value}-{at}"
        script = FaultScript(Fault("*", Kill(), on_call=at))
        pid = in_child(lambda s=store, f=script: put(s, f, content, durability))  # type: ignore[misc]
        outcome = outcome_of(pid)
        backend = LocalBackend(store)
        there = store.exists() and backend.stat(NAME) is not None
        if there and backend.read(NAME) != b"".join(content):
            wrong.append(f"torn after a kill at call {at}")
        try:
            backend.put(NAME, content, durability=durability)
        except AlreadyExists:
            if not there:
                wrong.append(f"exists though absent, call {at}")
        if backend.read(NAME) != b"".join(content):
            wrong.append(f"not healed by the next put, call {at}")
        backend.collect_staging(older_than_ms=0)
        if staging(store):
            wrong.append(f"staging left, call {at}: {staging(store)}")
        if outcome == "put":
            return {"kills": at - 1, "wrong": wrong}
        if outcome != "killed":
            wrong.append(f"call {at}: {outcome}")
    return {"kills": 0, "wrong": [*wrong, "never got through"]}


def put(store: Path, script: FaultScript, content: list[bytes], durability: Durability) -> None:
    LocalBackend(store, faulty_calls(script)).put(NAME, content, durability=durability)


def main() -> None:
    mode, root = sys.argv[1], Path(sys.argv[2])
    if mode == "schedules":
        for seed in range(int(sys.argv[3]), int(sys.argv[4])):
            sys.stdout.write(json.dumps(run_schedule(root / str(seed), seed)) + "\n")
    else:
        sys.stdout.write(json.dumps(run_boundaries(root, Durability(sys.argv[3]))) + "\n")


if __name__ == "__main__":
    main()
