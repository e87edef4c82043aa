"""What `repair` does: the index agrees with the shards afterwards, nothing is deleted, doubt stops it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, TruncateListing, unavailable
from lmcache_cli.backends.local.staging import this_host
from lmcache_cli.store import IncompleteListing, Store, StoreTooNew
from lmcache_cli.store.index import Index
from lmcache_cli.store.manifest import segment_of_state
from lmcache_cli.store.repair import ActionKind, RepairOptions, RepairPlan, RepairResult, apply_repair, plan_repair
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import VerifyOptions, verify
from lmcache_format.identity import Identity
from lmcache_format.segment import RemoveReason
from lmcache_format.superblock import Superblock
from tests.store.conftest import DOCUMENT, NUM_CHUNKS
from tests.store.pattern import document, hit, put_document

BOTH = pytest.mark.parametrize("deep", [False, True])


def shards(root: Path) -> list[Path]:
    return sorted((root / "ns").rglob("*.safetensors"))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def repair(root: Path, **options: object) -> tuple[RepairPlan, RepairResult]:
    with Store.open(str(root)) as store:
        plan = plan_repair(store, RepairOptions(**options))  # type: ignore[arg-type]
        return plan, apply_repair(store, plan)


def is_sound(root: Path) -> bool:
    with Store.open(str(root)) as store:
        return verify(store, VerifyOptions(Level.FULL)).num_findings == 0


def tokens_found(root: Path, identity: Identity) -> int:
    with Store.open(str(root)) as store, store.namespace(identity) as namespace:
        return hit(namespace, DOCUMENT)


def test_a_sound_store_needs_nothing(filled: Path):
    before = files(filled)
    plan, result = repair(filled)
    assert (plan.actions, plan.num_changes) == ([], 0)
    assert result == RepairResult()
    assert files(filled) == before


@BOTH
def test_a_plan_changes_nothing(filled: Path, deep: bool):
    for segment in filled.rglob("*.lmi"):
        segment.unlink()
    before = files(filled)
    with Store.open(str(filled)) as store:
        assert plan_repair(store, RepairOptions(deep=deep)).num_changes > 0
    assert files(filled) == before


@BOTH
def test_a_lost_index_is_rebuilt(filled: Path, identity: Identity, deep: bool):
    for segment in filled.rglob("*.lmi"):
        segment.unlink()
    plan, result = repair(filled, deep=deep)
    assert plan.count(ActionKind.ADOPT) == result.num_adopted == NUM_CHUNKS
    adopting = next(action for action in plan.actions if action.kind is ActionKind.ADOPT)
    assert adopting.size_bytes == sum(path.stat().st_size for path in shards(filled))
    assert is_sound(filled)
    state = Index(open_backend(str(filled)), identity.fingerprint).state
    assert sorted(state.adds["depth"].tolist()) == list(range(NUM_CHUNKS))
    assert tokens_found(filled, identity) == len(DOCUMENT)


@BOTH
def test_entries_without_a_shard_are_dropped(filled: Path, identity: Identity, deep: bool):
    victims = [shards(filled)[1], shards(filled)[6]]
    for victim in victims:
        victim.unlink()
    plan, result = repair(filled, deep=deep)
    assert plan.count(ActionKind.DROP) == result.num_dropped == 2
    assert is_sound(filled)
    assert len(Index(open_backend(str(filled)), identity.fingerprint).state) == NUM_CHUNKS - 2


@BOTH
@pytest.mark.parametrize("indexed", [False, True])
def test_damaged_shards_go_to_quarantine_as_they_are(filled: Path, identity: Identity, deep: bool, indexed: bool):
    victim = shards(filled)[4]
    broken = victim.read_bytes()[:4200]
    victim.write_bytes(broken)
    if not indexed:
        for segment in filled.rglob("*.lmi"):
            segment.unlink()
    plan, result = repair(filled, deep=deep)
    assert plan.count(ActionKind.QUARANTINE) == result.num_quarantined == 1
    (kept,) = (filled / "quarantine").iterdir()
    assert (kept.name, kept.read_bytes()) == (f"{identity.fingerprint}.{victim.name}", broken)
    assert not victim.exists()
    assert is_sound(filled)
    with Store.open(str(filled)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT)
    assert is_sound(filled)
    assert tokens_found(filled, identity) == len(DOCUMENT)


@BOTH
def test_a_directory_in_a_shards_place_goes_to_quarantine(filled: Path, deep: bool):
    victim = shards(filled)[4]
    victim.unlink()
    victim.mkdir()
    _, result = repair(filled, deep=deep)
    assert (result.num_quarantined, result.failures, victim.exists()) == (1, [], False)
    assert is_sound(filled)


def test_headers_are_only_read_by_a_deep_repair(filled: Path):
    victim = shards(filled)[4]
    data = bytearray(victim.read_bytes())
    data[300] ^= 1
    victim.write_bytes(data)
    assert repair(filled)[0].num_changes == 0
    assert repair(filled, deep=True)[1].num_quarantined == 1
    assert is_sound(filled)


@BOTH
def test_a_damaged_segment_is_set_aside_and_its_entries_come_back(filled: Path, identity: Identity, deep: bool):
    (segment,) = filled.rglob("*.lmi")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    plan, result = repair(filled, deep=deep)
    assert (plan.count(ActionKind.ADOPT), result.num_quarantined) == (NUM_CHUNKS, 1)
    assert (filled / "quarantine" / f"{identity.fingerprint}.{segment.name}").read_bytes() == bytes(data)
    assert is_sound(filled)
    assert tokens_found(filled, identity) == len(DOCUMENT)


def test_a_deep_repair_leaves_one_segment_and_keeps_hits_and_names(filled: Path, identity: Identity):
    with Store.open(str(filled)) as store, store.namespace(identity, create=True) as namespace:
        assert hit(namespace, DOCUMENT) == len(DOCUMENT)
        namespace.label("report.txt", namespace.match(DOCUMENT).keys[-1], len(DOCUMENT), NUM_CHUNKS - 1)
    before = Index(open_backend(str(filled)), identity.fingerprint)
    assert before.manifest.live_segments == 2
    plan, result = repair(filled, deep=True)
    assert [action.kind for action in plan.actions] == [ActionKind.REWRITE]
    assert result.num_rewritten == 1
    after = Index(open_backend(str(filled)), identity.fingerprint)
    assert after.manifest.live_segments == 1
    assert after.state.labels == before.state.labels
    assert after.state.touches.tobytes() == before.state.touches.tobytes()
    assert after.state.adds.tobytes() == before.state.adds.tobytes()


def test_a_wrong_entry_is_corrected_from_the_header(filled: Path, identity: Identity):
    backend = open_backend(str(filled))
    index = Index(backend, identity.fingerprint)
    adds = index.state.adds.copy()
    adds["depth"][3] += 7
    wrong = replace(index.state, adds=adds)
    for segment in filled.rglob("*.lmi"):
        segment.unlink()
    index.manifest.write(segment_of_state(identity.fingerprint, wrong, "w", 1, ()), Durability.NONE)
    with Store.open(str(filled)) as store:
        (finding,) = verify(store, VerifyOptions(Level.HEADERS)).findings
    assert "index says depth" in finding.reason
    plan, result = repair(filled, deep=True)
    assert (plan.count(ActionKind.CORRECT), result.num_corrected, result.num_adopted) == (1, 1, 0)
    assert is_sound(filled)
    assert sorted(Index(backend, identity.fingerprint).state.adds["depth"].tolist()) == list(range(NUM_CHUNKS))


@BOTH
def test_removed_shards_are_not_brought_back(filled: Path, identity: Identity, deep: bool):
    with Store.open(str(filled)) as store, store.namespace(identity, create=True) as namespace:
        namespace.remove(namespace.state().entry(0), RemoveReason.PRUNED)
    plan, _ = repair(filled, deep=deep)
    assert plan.count(ActionKind.ADOPT) == 0
    assert len(Index(open_backend(str(filled)), identity.fingerprint).state) == NUM_CHUNKS - 1


@BOTH
@pytest.mark.parametrize("keep", [0, 6])
def test_a_listing_that_leaves_things_out_stops_it(filled: Path, deep: bool, keep: int):
    before = files(filled)
    script = FaultScript(Fault("list", TruncateListing(keep), on_call=1, name="/c"))
    with pytest.raises(IncompleteListing, match=f"listed {keep} of {NUM_CHUNKS} shards"):
        plan_repair(Store.open(FaultBackend(open_backend(str(filled)), script)), RepairOptions(deep=deep))
    assert files(filled) == before


def test_losing_most_shards_must_be_accepted(root: Path, identity: Identity):
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, document(80))
    for path in shards(root)[:18]:
        path.unlink()
    with pytest.raises(IncompleteListing, match="18 of the 20 shards"):
        repair(root)
    assert repair(root, accept_missing=True)[1].num_dropped == 18
    assert is_sound(root)


def test_a_listing_that_fails_stops_it(filled: Path):
    script = FaultScript(Fault("list", Fail(unavailable()), name="/c"))
    with pytest.raises(type(unavailable())):
        plan_repair(Store.open(FaultBackend(open_backend(str(filled)), script)))


def test_what_cannot_be_read_stays_as_it_is(filled: Path, identity: Identity):
    script = FaultScript(Fault("open_read", Fail(unavailable()), name=shards(filled)[2].name))
    store = Store.open(FaultBackend(open_backend(str(filled)), script))
    plan = plan_repair(store, RepairOptions(deep=True))
    assert plan.num_unchecked == 1
    apply_repair(store, plan)
    assert len(Index(open_backend(str(filled)), identity.fingerprint).state) == NUM_CHUNKS
    assert len(shards(filled)) == NUM_CHUNKS


@BOTH
def test_strangers_stay(filled: Path, deep: bool):
    strangers = [filled / "notes.txt", shards(filled)[0].with_name("Thumbs.db"), filled / "ns" / "old.pkl"]
    for path in strangers:
        path.write_bytes(b"mine")
    plan, _ = repair(filled, deep=deep)
    assert plan.count(ActionKind.QUARANTINE) == 0
    assert [path.read_bytes() for path in strangers] == [b"mine"] * 3


def test_a_lost_identity_is_told_and_restored_by_the_next_writer(filled: Path, identity: Identity):
    (path,) = filled.glob("ns/*/ns.json")
    path.unlink()
    plan, _ = repair(filled, deep=True)
    advice = next(action for action in plan.actions if action.kind is ActionKind.ADVISE)
    assert advice.path == str(path.relative_to(filled))
    assert "lmcache warm" in advice.reason
    with Store.open(str(filled)) as store, store.namespace(identity, create=True) as namespace:
        assert hit(namespace, DOCUMENT) == len(DOCUMENT)
    assert is_sound(filled)


def test_stale_staging_is_collected(filled: Path):
    stale = filled / "tmp" / f"{this_host()}.{4_194_304 + 5}.{'a' * 16}"
    fresh = filled / "tmp" / f"{this_host()}.{4_194_304 + 5}.{'b' * 16}"
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (time.time() - 7200,) * 2)
    with Store.open(str(filled)) as store:
        plan = plan_repair(store)
    assert [(action.kind, action.path) for action in plan.actions] == [
        (ActionKind.COLLECT, str(stale.relative_to(filled)))
    ]


def test_a_condemned_shard_that_a_writer_replaced_is_left_alone(filled: Path, identity: Identity):
    victim = shards(filled)[4]
    good = victim.read_bytes()
    victim.write_bytes(good[:4200])
    with Store.open(str(filled)) as store:
        plan = plan_repair(store)
        victim.write_bytes(good)
        result = apply_repair(store, plan)
    assert (result.num_quarantined, victim.read_bytes()) == (0, good)
    assert tokens_found(filled, identity) == len(DOCUMENT)


def test_a_second_repair_finds_nothing_to_do(filled: Path):
    shards(filled)[0].unlink()
    shards(filled)[1].write_bytes(b"short")
    assert repair(filled)[0].num_changes == 2
    assert repair(filled)[0].num_changes == 0


def test_a_store_this_release_must_not_change_is_refused(filled: Path):
    block = Store.open(str(filled)).superblock
    newer = Superblock(block.store_id, block.created_ms, generation=2, ro_compat=("from-the-future",))
    (filled / "store.000002.json").write_bytes(newer.to_json())
    with pytest.raises(StoreTooNew):
        repair(filled)
