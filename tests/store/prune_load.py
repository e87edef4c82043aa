"""Writers, readers, pruners and a compactor, each a process of its own, on one store for some seconds; then the books.

    python -m tests.store.prune_load DIRECTORY|URL --seconds 60

makes a store there, prints one JSON object, and exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lmcache_cli.backends import BackendError, Durability
from lmcache_cli.store import Event, Namespace, Store, StoreError, WriterOptions
from lmcache_cli.store.index import Index
from lmcache_cli.store.places import slot_of
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.repair import RepairOptions, apply_repair, plan_repair
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.names import ShardName
from lmcache_format.segment import key_number
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = tiny_identity(layers=2, kv_heads=2, head_dim=64, chunk_tokens=16)  # 8 KiB a chunk
NUM_DOCUMENTS = 24
GRACE_MS = 400
ROLES = ("writer", "writer", "reader", "reader", "reader", "pruner", "pruner", "compactor")
RULES = (
    PruneRules(max_chunks=60),
    PruneRules(max_chunks=20),
    PruneRules(older_than_ms=1_000),
    PruneRules(everything=True, max_delete_bytes=200_000),
    PruneRules(superseded=True),
)
FAULTS = (Event.READ_DAMAGED, Event.READ_FOREIGN, Event.READ_UNAVAILABLE, Event.READ_TOO_NEW, Event.QUARANTINED)


def tokens_of(number: int) -> list[int]:
    """Documents of 3 to 7 chunks and a tail; neighbours share their first two chunks."""
    size = IDENTITY.chunk_tokens
    return [*document(2 * size, seed=number // 4), *document((number % 5 + 1) * size + number % 3, seed=1000 + number)]


@dataclass(slots=True)
class Worked:
    """What a process did: counts by kind, and everything that must not have happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def work(role: str, url: str, seed: int, seconds: float) -> Worked:
    """One process. A back-end or a store that says why not is no fault of anybody's; a wrong byte is."""
    done = Worked()
    chance = random.Random(seed)
    step = {"writer": _write, "reader": _read, "pruner": _prune, "compactor": _compact}[role]
    with Store.open(url) as store:
        namespace = _open(store)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                namespace = step(store, namespace, chance, done)
            except AssertionError as problem:
                done.wrong.append(f"{role}: {problem}")
            except (StoreError, BackendError) as problem:
                done.counts[type(problem).__name__] += 1
                if not isinstance(problem, StoreError):
                    done.wrong.append(f"{role}: {type(problem).__name__}: {problem}")
        namespace.close()
        for event in FAULTS:
            if store.events[event]:
                done.wrong.append(f"{role}: {store.events[event]} times {event.value}")
    return done


def judge(url: str) -> Worked:
    """When all is quiet: everything is swept, what crashed writers left is adopted, and index and disk agree.

    The repair reads headers: with a grace time as short as this, a writer that is slow to flush may list a write that
    another one has replaced by then, which names and sizes do not tell.
    """
    done = Worked()
    with Store.open(url) as store:
        _sweep_all(store, done)
        apply_repair(store, plan_repair(store, RepairOptions(deep=True, accept_missing=True)))
        _expect_agreement(store, done, "after the sweep")
        with _open(store) as namespace:
            for number in range(NUM_DOCUMENTS):
                put_document(namespace, tokens_of(number))
        with _open(store) as namespace:
            for number in range(NUM_DOCUMENTS):
                if hit(namespace, tokens_of(number)) != len(tokens_of(number)):
                    done.wrong.append(f"document {number} is not whole after it was written again")
        _expect_closure(store, done)
        mark(store, plan_prune(store, PruneRules(max_chunks=25)))
        _sweep_all(store, done)
        _expect_closure(store, done)
        _expect_agreement(store, done, "after the last prune")
    return done


def run(url: str, seconds: float) -> dict[str, object]:
    """All of it. The result has `wrong`, which is empty where all is well."""
    with Store.create(url) as store, _open(store) as namespace:
        for number in range(0, NUM_DOCUMENTS, 2):
            put_document(namespace, tokens_of(number))
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.store.prune_load",
                url,
                "--role",
                role,
                "--seed",
                str(seed),
                "--seconds",
                str(seconds),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed, role in enumerate(ROLES)
    ]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=seconds * 4 + 120)
        if process.returncode:
            wrong.append(stderr.decode()[-2000:])
            continue
        told = json.loads(stdout)
        counts.update(told["counts"])
        wrong += told["wrong"]
    judged = judge(url)
    return {"seconds": seconds, **counts, **judged.counts, "wrong": wrong + judged.wrong}


# ---- roles ----------------------------------------------------------------------------------------------------------


def _write(store: Store, namespace: Namespace, chance: random.Random, done: Worked) -> Namespace:
    for status in put_document(namespace, tokens_of(chance.randrange(NUM_DOCUMENTS))):
        done.counts[f"puts {status.value}"] += 1
    if chance.random() < 0.1:  # it crashed: what it buffered is lost
        namespace._pending = type(namespace._pending)()
        done.counts["crashes"] += 1
        return _open(store)
    if chance.random() < 0.5:
        namespace.flush()
    return namespace


def _read(store: Store, namespace: Namespace, chance: random.Random, done: Worked) -> Namespace:
    tokens = tokens_of(chance.randrange(NUM_DOCUMENTS))
    num_tokens = hit(namespace, tokens)
    done.counts["hits" if num_tokens == len(tokens) else "hits in part" if num_tokens else "misses"] += 1
    if chance.random() < 0.05:
        namespace.close()
        return _open(store)
    return namespace


def _prune(store: Store, namespace: Namespace, chance: random.Random, done: Worked) -> Namespace:
    marked = mark(store, plan_prune(store, chance.choice(RULES)))
    done.counts["marked"] += marked.num_marked
    done.counts["spared"] += marked.num_spared
    time.sleep(chance.uniform(0, 0.3))
    swept = sweep(store, grace_ms=GRACE_MS)
    done.counts["swept"] += swept.num_swept
    done.counts["changed"] += swept.num_changed
    if swept.failures:
        done.wrong.append(f"pruner: {swept.failures[0]}")
    return namespace


def _compact(store: Store, namespace: Namespace, chance: random.Random, done: Worked) -> Namespace:
    namespace.compact()
    done.counts["compactions"] += 1
    time.sleep(chance.uniform(0, 0.2))
    return namespace


# ---- the books ------------------------------------------------------------------------------------------------------


def _open(store: Store) -> Namespace:
    options = WriterOptions(durability=Durability.NONE, flush_after_s=0.5, grace_ms=GRACE_MS)
    return store.namespace(IDENTITY, create=True, writer=options, reader_threads=2)


def _sweep_all(store: Store, done: Worked) -> None:
    swept = sweep(store, grace_ms=-10_000)
    done.wrong += [f"the sweep of all: {path}: {reason}" for path, reason in swept.failures]


def _expect_agreement(store: Store, done: Worked, when: str) -> None:
    infos = [info for info in store.backend.list("ns") if info.name.endswith(".safetensors")]
    usage = store_stats(store).total
    told, found = (usage.num_shards, usage.size_bytes), (len(infos), sum(info.size_bytes for info in infos))
    done.counts["shards on disk"] = len(infos)
    if told != found:
        state = Index(store.backend, IDENTITY.fingerprint).state
        listed = {slot_of(state.entry(row)) for row in range(len(state))}
        names = map(ShardName.parse, (info.name for info in infos))
        others = [name.path for name in names if (name.key[:16], name.part, name.encoding) not in listed]
        done.wrong.append(f"{when} the index tells of {told} shards and bytes, the disk of {found}: {others[:4]}")
    report = verify(store)
    if not report.is_sound:
        done.wrong.append(f"{when} verify finds {report.findings[:3]}")


def _expect_closure(store: Store, done: Worked) -> None:
    state = Index(store.backend, IDENTITY.fingerprint).state
    is_first = state.adds["depth"] == 0
    orphans = ~is_first & ~np.isin(state.adds["parent"], state.keys)
    known = {key_number(ref.key) for number in range(NUM_DOCUMENTS) for ref in refs(IDENTITY, tokens_of(number))}
    done.counts["chunks at last"] = len(state)
    if orphans.any():
        done.wrong.append(f"{int(orphans.sum())} chunks without the one before them")
    if not set(map(int, state.keys)) <= known:
        done.wrong.append("the index lists what nobody wrote")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--role", choices=sorted(set(ROLES)))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    asked = _parsed()
    if asked.role is not None:
        done = work(asked.role, asked.url, asked.seed, asked.seconds)
        sys.stdout.write(json.dumps({"counts": done.counts, "wrong": done.wrong}))
        return 0
    result = run(asked.url, asked.seconds)
    sys.stdout.write(f"{json.dumps(result)}\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
