"""C16: ranks disagree about the hit; some stages never saved.

A grid of tp=2 × pp=2, four chunks numbered from 1: one shard of chunk 3 is deleted, one of chunk 4 truncated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.backends import open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript
from lmcache_cli.store import Namespace, Store
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.repair import apply_repair, plan_repair
from lmcache_cli.store.survey import Level
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import VerifyOptions, verify
from lmcache_format.geometry import Part, rank_part
from lmcache_format.identity import Identity
from tests.store.pattern import document, put_document, refs, small_buffer, tiny_identity, wrong_elements

DOCUMENT = document(16)
STAGES = ((0, 1), (1, 2))
AT_ONCE_MS = -1_000
"""A grace time that is over: two back-ends may tell the time of one disk some milliseconds apart."""
LEVELS = pytest.mark.parametrize("level", list(Level))


@pytest.fixture
def identity() -> Identity:
    return tiny_identity(layers=2, kv_heads=2, chunk_tokens=4)


def part_of(identity: Identity, tp: int, pp: int) -> Part:
    return rank_part(identity, tp, 2, STAGES[pp])


@pytest.fixture
def grid(tmp_path: Path, identity: Identity) -> Path:
    with Store.create(str(tmp_path / "kv")) as store:
        for tp in (0, 1):
            for pp in (0, 1):
                with store.namespace(identity, create=True) as rank:
                    put_document(rank, DOCUMENT, part=part_of(identity, tp, pp))
    return tmp_path / "kv"


def shard(root: Path, identity: Identity, chunk: int, tp: int, pp: int) -> Path:
    key = refs(identity, DOCUMENT)[chunk - 1].key.hex()
    return next(root.rglob(f"{key}.{part_of(identity, tp, pp)}.raw.safetensors"))


def harm(root: Path, identity: Identity) -> None:
    shard(root, identity, 3, 1, 0).unlink()
    truncated = shard(root, identity, 4, 0, 1)
    truncated.write_bytes(truncated.read_bytes()[:-1])


def tokens_read(namespace: Namespace, tp: int, pp: int) -> int:
    chunks = namespace.match(DOCUMENT).chunks()
    part = part_of(namespace.identity, tp, pp)
    buffers = [small_buffer(namespace.identity, part, chunk.num_tokens) for chunk in chunks]
    result = namespace.read(chunks, buffers)
    for number, buffer in enumerate(buffers[: result.num_chunks]):
        assert wrong_elements(namespace.identity, buffer, DOCUMENT[number * 4 : number * 4 + 4], number * 4) == 0
    return result.num_tokens


def test_all_parts_together_are_a_hit_for_everyone(grid: Path, identity: Identity):
    with Store.open(str(grid)) as store, store.namespace(identity) as reader:
        assert [tokens_read(reader, tp, pp) for tp in (0, 1) for pp in (0, 1)] == [16] * 4
    with Store.open(str(grid)) as store:
        assert verify(store).findings == []


def test_everyone_reports_the_chunks_that_are_whole(grid: Path, identity: Identity):
    harm(grid, identity)
    with Store.open(str(grid)) as store, store.namespace(identity) as scheduler:
        first = [tokens_read(scheduler, tp, pp) for tp in (0, 1) for pp in (0, 1)]
        assert min(first) == 8  # promised once more than that, never read as more
        again = [tokens_read(scheduler, tp, pp) for tp in (0, 1) for pp in (0, 1)]
        assert (again, scheduler.match(DOCUMENT).num_tokens) == ([8] * 4, 8)
    with Store.open(str(grid)) as store:
        matches, read = [], []
        for tp in (0, 1):
            for pp in (0, 1):
                with store.namespace(identity) as rank:
                    matches.append(rank.match(DOCUMENT).num_tokens)
                    read.append(tokens_read(rank, tp, pp))
        assert (len(set(matches)), min(read)) == (1, 8)  # the same promise to all, and what is away is found out
        apply_repair(store, plan_repair(store))
        with store.namespace(identity) as rank:
            assert rank.match(DOCUMENT).num_tokens == 8


@LEVELS
def test_verify_says_which_chunks_lack_which_part(grid: Path, identity: Identity, level: Level):
    harm(grid, identity)
    with Store.open(str(grid)) as store:
        report = verify(store, VerifyOptions(level))
    assert {(finding.kind.value, finding.reason.partition(":")[0]) for finding in report.findings} >= {
        ("missing", "in the index, not in the store"),
        ("incomplete", "incomplete 1/4"),
    }
    assert (report.num_missing, report.num_damaged, report.num_incomplete) == (1, 1, 2)
    assert {finding.reason for finding in report.findings if finding.kind.value == "incomplete"} == {
        f"incomplete 1/4: no {part_of(identity, 1, 0)}",
        f"incomplete 1/4: no {part_of(identity, 0, 1)}",
    }
    assert not report.is_sound


def test_a_stage_that_never_saved_leaves_nothing_to_hit(tmp_path: Path, identity: Identity):
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(identity, create=True) as namespace:
        for tp in (0, 1):
            put_document(namespace, DOCUMENT, part=part_of(identity, tp, 0))
        assert namespace.match(DOCUMENT).num_tokens == 0
        namespace.flush()
        report = verify(store)
    assert report.num_incomplete == 4
    assert {finding.reason for finding in report.findings} == {"incomplete 1/3: no l1-2h0-2"}


class Crash(BaseException):
    """The process ends."""


@pytest.mark.parametrize("on_call", range(1, 5))
def test_what_is_pruned_of_one_rank_is_pruned_of_all(grid: Path, identity: Identity, on_call: int):
    """The last chunk goes, and the process dies between two of its four deletions: nobody finds what is left of it,
    and the next run collects that."""
    last = refs(identity, DOCUMENT)[3].key.hex()
    with Store.open(str(grid)) as store:
        plan = plan_prune(store, PruneRules(max_chunks=3))
        assert (plan.num_chunks, plan.num_shards) == (1, 4)
        mark(store, plan)
    script = FaultScript(Fault("delete", Fail(Crash()), on_call=on_call))  # type: ignore[arg-type]
    with pytest.raises(Crash):
        sweep(Store.open(FaultBackend(open_backend(str(grid)), script)), grace_ms=AT_ONCE_MS, threads=1)
    assert 1 <= len(list(grid.rglob(f"{last}.*"))) <= 5 - on_call
    with Store.open(str(grid)) as store:
        for tp in (0, 1):
            for pp in (0, 1):
                with store.namespace(identity, need=part_of(identity, tp, pp)) as rank:
                    assert (rank.match(DOCUMENT).num_tokens, tokens_read(rank, tp, pp)) == (12, 12)
        sweep(store, grace_ms=AT_ONCE_MS)
        assert list(grid.rglob(f"{last}.*")) == []
        assert verify(store).findings == []
