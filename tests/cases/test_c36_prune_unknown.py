"""C36, prune's side: what is unknown is not absent. Whatever does not answer, nothing is marked, nothing deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import Unavailable, open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, LoseResponse, unavailable
from lmcache_cli.store import Store
from lmcache_cli.store.prune import PruneRules, mark, plan_prune
from lmcache_cli.store.sweep import sweep
from tests.store.pattern import document, put_document, tiny_identity

NUM_CHUNKS = 40
ALL = PruneRules(everything=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    with Store.create(str(path)) as store, store.namespace(tiny_identity(), create=True) as namespace:
        put_document(namespace, document(NUM_CHUNKS * 4))
    return path


@pytest.fixture
def unchanged(root: Path) -> Iterator[Path]:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    before = files()
    yield root
    assert files() == before


def faulty(root: Path, *faults: Fault) -> Store:
    return Store.open(FaultBackend(open_backend(str(root)), FaultScript(*faults)))


PLANNING = {
    "the listing of namespaces": Fault("list", Fail(unavailable()), name="ns", on_call=1),
    "the listing of the index": Fault("list", Fail(unavailable()), name="/m"),
    "half of the listing of the index": Fault("list", LoseResponse(unavailable()), name="/m"),
    "a segment of the index": Fault("read", Fail(unavailable()), name=".lmi"),
    "the identity": Fault("open_read", Fail(unavailable()), name="ns.json"),
    "the clock": Fault("now_ms", Fail(unavailable())),
}
MARKING = {
    "the listing of shards": Fault("list", Fail(unavailable()), name="/c"),
    "the end of the listing of shards": Fault("list", LoseResponse(unavailable()), name="/c"),
    "the put of the mark": Fault("put", Fail(unavailable()), name=".lmi"),
}


@pytest.mark.parametrize("what", PLANNING)
def test_a_plan_without_an_answer_is_none(unchanged: Path, what: str):
    with pytest.raises(Unavailable):
        plan_prune(faulty(unchanged, PLANNING[what]), ALL)


@pytest.mark.parametrize("what", [*PLANNING, *MARKING])
def test_a_mark_without_an_answer_changes_nothing(unchanged: Path, what: str):
    plan = plan_prune(Store.open(str(unchanged)), ALL)
    with pytest.raises(Unavailable):
        mark(faulty(unchanged, {**PLANNING, **MARKING}[what]), plan)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("list", Fail(unavailable()), name="/m"),
        Fault("read", Fail(unavailable()), name=".lmi"),
        Fault("list", LoseResponse(unavailable()), name="/c"),
        Fault("now_ms", Fail(unavailable())),
    ],
    ids=lambda fault: f"{fault.operation} {fault.name}",
)
def test_a_sweep_without_an_answer_deletes_nothing(root: Path, fault: Fault):
    with Store.open(str(root)) as store:
        mark(store, plan_prune(store, ALL))
    with pytest.raises(Unavailable):
        sweep(faulty(root, fault), grace_ms=-1_000)
    assert len(list(root.rglob("*.safetensors"))) == NUM_CHUNKS


@pytest.mark.parametrize("operation", ["open_read", "read_into", "delete"])
def test_shards_that_do_not_answer_stay_and_stay_marked(root: Path, operation: str):
    with Store.open(str(root)) as store:
        mark(store, plan_prune(store, ALL))
        faults = [Fault(operation, Fail(unavailable()), name=".safetensors", on_call=call) for call in (1, 7, 20)]
        swept = sweep(faulty(root, *faults), grace_ms=-1_000)
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))
        assert (swept.num_swept, sorted(path for path, _ in swept.failures)) == (NUM_CHUNKS - 3, left)
        assert plan_prune(store, PruneRules()).num_marked == 3
        assert sweep(store, grace_ms=-1_000).num_swept == 3


def test_only_what_is_surely_absent_counts_as_gone(root: Path):
    with Store.open(str(root)) as store:
        mark(store, plan_prune(store, ALL))
        for path in list(root.rglob("*.safetensors"))[:3]:
            path.unlink()
        swept = sweep(store, grace_ms=-1_000)
        assert (swept.num_swept, swept.num_gone, swept.failures) == (NUM_CHUNKS - 3, 3, [])
