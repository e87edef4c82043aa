"""C45: an incomplete listing. 200 chunks; LIST returns 120 without an error, fails on page 2, or returns duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import Backend, ObjectInfo, Unavailable, open_backend
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, LoseResponse, TruncateListing, unavailable
from lmcache_cli.backends.wrapper import BackendWrapper
from lmcache_cli.store import IncompleteListing, Store
from lmcache_cli.store.repair import RepairOptions, plan_repair
from lmcache_cli.store.verify import verify
from lmcache_format.identity import Identity
from tests.store.pattern import document, put_document, tiny_identity

NUM_CHUNKS = 200
BOTH = pytest.mark.parametrize("deep", [False, True])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("c45") / "kv"
    identity: Identity = tiny_identity()
    with Store.create(str(path)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, document(NUM_CHUNKS * 4))
    return path


@pytest.fixture(autouse=True)
def nothing_changes(root: Path) -> Iterator[None]:
    """Whatever the listing says, every file is the same afterwards."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    before = files()
    yield
    assert files() == before


class Duplicates(BackendWrapper):
    """Lists everything twice."""

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix, recursive=recursive):
            yield info
            yield info


def short(root: Path) -> Backend:
    return FaultBackend(open_backend(str(root)), FaultScript(Fault("list", TruncateListing(120), on_call=1, name="/c")))


def failing(root: Path) -> Backend:
    return FaultBackend(open_backend(str(root)), FaultScript(Fault("list", LoseResponse(unavailable()), name="/c")))


@BOTH
def test_a_short_listing_aborts_the_rebuilding_of_the_index(root: Path, deep: bool):
    with pytest.raises(IncompleteListing, match="listed 120 of 200 shards"):
        plan_repair(Store.open(short(root)), RepairOptions(deep=deep, accept_missing=True))


@BOTH
def test_a_listing_that_fails_on_the_way_aborts_it(root: Path, deep: bool):
    with pytest.raises(Unavailable):
        plan_repair(Store.open(failing(root)), RepairOptions(deep=deep, accept_missing=True))


@BOTH
def test_duplicates_change_nothing(root: Path, deep: bool):
    plan = plan_repair(Store.open(Duplicates(open_backend(str(root)))), RepairOptions(deep=deep))
    assert plan.num_changes == (1 if deep else 0)
    report = verify(Store.open(Duplicates(open_backend(str(root)))))
    assert (report.num_listed, report.num_good, report.findings) == (NUM_CHUNKS, NUM_CHUNKS, [])


def test_verify_is_unsure_rather_than_missing_80_shards(root: Path):
    report = verify(Store.open(short(root)))
    assert (report.num_missing, report.num_unsure, report.num_good) == (0, 1, NUM_CHUNKS)
    assert not report.is_sound


def test_verify_says_that_it_could_not_check(root: Path):
    report = verify(Store.open(failing(root)))
    assert (report.num_missing, report.num_damaged, report.num_unchecked) == (0, 0, 1)
    assert not report.is_sound
