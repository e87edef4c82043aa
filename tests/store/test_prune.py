"""Plan, mark and sweep on real files; and what others may do in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, NoSpace, Unavailable, open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, LoseResponse, unavailable
from lmcache_cli.store import PutStatus, Store, StoreTooNew, WriterOptions
from lmcache_cli.store.index import Index
from lmcache_cli.store.manifest import DAY_MS, Pending, segment_of_pending
from lmcache_cli.store.prune import PromptChunks, PruneRules, mark, plan_prune
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from lmcache_format.keys import root_key, token_words
from lmcache_format.segment import RemoveReason
from lmcache_format.superblock import Superblock
from tests.store.altered_shards import in_format
from tests.store.pattern import document, hit, put_chunk, put_document, refs, renamed, tiny_identity

FIRST = document(14)
SECOND = [*FIRST[:8], *document(8, seed=1)]
ALL = PruneRules(everything=True)
AT_ONCE_MS = -1_000
"""A grace time that is over: two back-ends may tell the time of one disk some milliseconds apart."""


@pytest.fixture
def filled(store: Store, identity: Identity) -> Store:
    """Two documents that share two chunks: 3 full ones and a tail, 4 full ones."""
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, FIRST)
        put_document(namespace, SECOND)
    return store


def shards(root: Path) -> set[str]:
    """Keys of all shards on disk."""
    return {path.name.split(".")[0] for path in (root / "ns").rglob("*.safetensors")}


def keys(identity: Identity, *prompts: Sequence[int], salt: str | None = None) -> set[str]:
    return {ref.key.hex() for tokens in prompts for ref in refs(identity, list(tokens), salt=salt)}


def listed(store: Store) -> set[str]:
    """The first halves of keys that the indexes list."""
    found = set()
    for fingerprint in store.fingerprints():
        state = Index(store.backend, fingerprint).state
        found |= {state.entry(row).key.hex() for row in range(len(state))}
    return found


def prune(store: Store, rules: PruneRules = ALL) -> None:
    """All of it, without waiting."""
    mark(store, plan_prune(store, rules, grace_ms=AT_ONCE_MS))
    assert sweep(store, grace_ms=AT_ONCE_MS).failures == []


def assert_usage_is_what_is_on_disk(store: Store, root: Path) -> None:
    sizes = [path.stat().st_size for path in (root / "ns").rglob("*.safetensors")]
    total = store_stats(store).total
    assert (total.num_shards, total.size_bytes) == (len(sizes), sum(sizes))
    assert verify(store).is_sound


def test_a_plan_changes_nothing(filled: Store, root: Path):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    plan = plan_prune(filled, ALL)
    assert (plan.num_chunks, plan.num_shards, plan.kept_chunks, plan.kept_bytes) == (6, 6, 0, 0)
    assert plan.size_bytes == sum(len(data) for path, data in before.items() if path.suffix == ".safetensors")
    (group,) = plan.groups()
    assert (group.rule, group.num_chunks, group.model) == ("everything", 6, "example/tiny")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_marked_shards_are_missed_at_once_and_deleted_after_the_grace_time(
    filled: Store, root: Path, identity: Identity
):
    with filled.namespace(identity) as namespace:
        assert hit(namespace, FIRST) == len(FIRST)
        done = mark(filled, plan_prune(filled, ALL))
        assert (done.num_marked, done.num_spared) == (6, 0)
        assert shards(root) == keys(identity, FIRST, SECOND)
        namespace.refresh()
        assert hit(namespace, FIRST) == 0
    assert sweep(filled).num_swept == 0
    plan = plan_prune(filled, PruneRules())
    assert (plan.num_marked, plan.num_due) == (6, 0)
    swept = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (swept.num_swept, swept.swept_bytes, swept.failures) == (6, done.marked_bytes, [])
    assert shards(root) == set()
    assert sweep(filled, grace_ms=AT_ONCE_MS).num_swept == 0
    assert plan_prune(filled, PruneRules()).num_marked == 0
    assert_usage_is_what_is_on_disk(filled, root)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (PruneRules(max_chunks=4), "FIRST"),
        (PruneRules(max_chunks=2), "shared"),
        (PruneRules(max_chunks=0), "none"),
        (PruneRules(max_bytes=10**9), "all"),
        (PruneRules(older_than_ms=DAY_MS), "all"),
        (PruneRules(superseded=True), "all"),
        (PruneRules(everything=True, models=("other/*",)), "all"),
        (PruneRules(everything=True, models=("example/*",)), "none"),
        (PruneRules(everything=True, namespaces=()), "all"),
        (PruneRules(everything=True, salt="tenant"), "all"),
        (PruneRules(), "all"),
    ],
)
def test_what_each_rule_leaves(filled: Store, root: Path, identity: Identity, rules: PruneRules, left: str):
    expected = {
        "all": keys(identity, FIRST, SECOND),
        "FIRST": keys(identity, FIRST),
        "shared": keys(identity, FIRST[:8]),
        "none": set(),
    }[left]
    prune(filled, rules)
    if left == "FIRST":  # all were written on one day; the deepest of both go, one each or two of one
        assert len(shards(root)) == 4
        assert shards(root) > keys(identity, FIRST[:8])
    else:
        assert shards(root) == expected
    assert_usage_is_what_is_on_disk(filled, root)


def test_a_key_goes_with_what_comes_after_it(filled: Store, root: Path, identity: Identity):
    prune(filled, PruneRules(key=refs(identity, FIRST)[2].key.hex()))
    assert shards(root) == keys(identity, SECOND)


def test_a_prompt_goes_without_what_others_share(filled: Store, root: Path, identity: Identity):
    prompt = PromptChunks(root_key(identity.fingerprint), token_words(FIRST))
    prune(filled, PruneRules(prompt=prompt, namespaces=(identity.fingerprint,)))
    assert shards(root) == keys(identity, SECOND)


def test_a_tenant_goes_alone(filled: Store, root: Path, identity: Identity):
    with filled.namespace(identity, create=True) as namespace:
        put_document(namespace, FIRST, salt="tenant")
    plan = plan_prune(filled, PruneRules(everything=True, salt="tenant"))
    assert (plan.num_chunks, plan.kept_chunks) == (4, 0)
    prune(filled, PruneRules(everything=True, salt="tenant"))
    assert shards(root) == keys(identity, FIRST, SECOND)


def test_a_limit_on_a_tenant_counts_the_tenant_alone(filled: Store, root: Path, identity: Identity):
    with filled.namespace(identity, create=True) as namespace:
        put_document(namespace, FIRST, salt="tenant")
    prune(filled, PruneRules(max_chunks=1, salt="tenant"))
    assert shards(root) == keys(identity, FIRST, SECOND) | keys(identity, FIRST[:4], salt="tenant")


def test_pins_keep_a_chunk_and_its_beginning_until_they_end(filled: Store, root: Path, identity: Identity):
    with filled.namespace(identity, create=True) as namespace:
        namespace.pin(refs(identity, FIRST)[2].key, filled.backend.now_ms() + 60_000)
        namespace.pin(refs(identity, SECOND)[3].key, filled.backend.now_ms() - 1)
    plan = plan_prune(filled, ALL)
    assert (plan.num_pinned, plan.num_chunks, plan.kept_chunks) == (3, 3, 3)
    prune(filled)
    assert shards(root) == keys(identity, FIRST[:12])
    with filled.namespace(identity, create=True) as namespace:
        namespace.unpin(refs(identity, FIRST)[2].key)
    prune(filled)
    assert shards(root) == set()


def test_a_pin_made_by_a_clock_that_is_ahead_can_be_taken_back(
    filled: Store, identity: Identity, monkeypatch: pytest.MonkeyPatch
):
    ahead = filled.backend.now_ms() + 7_200_000
    with filled.namespace(identity, create=True) as namespace, monkeypatch.context() as patch:
        patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: ahead)
        namespace.pin(refs(identity, FIRST)[0].key)
    with filled.namespace(identity, create=True) as namespace:
        namespace.unpin(refs(identity, FIRST)[0].key)
    assert plan_prune(filled, ALL).num_pinned == 0


def test_a_missed_limit_is_told(filled: Store, identity: Identity):
    with filled.namespace(identity, create=True) as namespace:
        namespace.pin(refs(identity, FIRST)[2].key)
    plan = plan_prune(filled, PruneRules(max_chunks=1, max_bytes=0))
    assert (plan.kept_chunks, plan.excess_chunks, plan.excess_bytes) == (3, 2, plan.kept_bytes)


def test_a_pinned_tail_is_not_superseded(store: Store, root: Path, identity: Identity):
    tail = FIRST[:6]
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, tail)
        namespace.pin(refs(identity, tail)[-1].key)
        namespace.flush()
        put_document(namespace, FIRST[:8])
    assert plan_prune(store, PruneRules(superseded=True)).num_shards == 0
    with store.namespace(identity, create=True) as namespace:
        namespace.unpin(refs(identity, tail)[-1].key)
    prune(store, PruneRules(superseded=True))
    assert shards(root) == keys(identity, FIRST[:8])


def test_raw_beside_lossless_goes_and_the_prompt_still_hits(filled: Store, root: Path, identity: Identity):
    with filled.namespace(identity, create=True, writer=WriterOptions(encoding="bfx")) as namespace:
        for ref in refs(identity, FIRST):
            namespace._view.drop(namespace._view.entries(ref.key)[0])  # or the put would find the chunk present
            put_chunk(namespace, ref, FIRST)
    plan = plan_prune(filled, PruneRules(superseded=True))
    assert (plan.num_shards, plan.num_chunks, {group.rule for group in plan.groups()}) == (4, 4, {"superseded"})
    prune(filled, PruneRules(superseded=True))
    with filled.namespace(identity) as namespace:
        assert (hit(namespace, FIRST), hit(namespace, SECOND)) == (len(FIRST), len(SECOND))
    assert {path.name.split(".")[0] for path in root.rglob("*.raw.*")} == keys(identity, SECOND) - keys(identity, FIRST)


def test_what_one_run_takes_is_bounded_by_whole_chunks(store: Store, root: Path, identity: Identity):
    left, right = Part(0, 1, 0, 2), Part(1, 2, 0, 2)
    with store.namespace(identity, create=True) as namespace:
        for part in (left, right):
            put_document(namespace, FIRST[:12], part=part)
    one = next(path.stat().st_size for path in root.rglob("*.safetensors"))
    plan = plan_prune(store, replace(ALL, max_delete_bytes=3 * one))
    assert (plan.num_chunks, plan.num_shards, plan.num_left_out, plan.left_out_bytes) == (1, 2, 4, 4 * one)
    prune(store, replace(ALL, max_delete_bytes=3 * one))
    assert shards(root) == keys(identity, FIRST[:8])
    assert len(list(root.rglob("*.safetensors"))) == 4


def test_the_models_that_were_replaced_go(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch):
    now = store.backend.now_ms()
    ages = {"old": 20, "new": 1, "today": 0, "other": 30}
    identities = {}
    for name, days in ages.items():
        model = "example/other" if name == "other" else "example/tiny"
        identities[name] = renamed(tiny_identity(name=name), model=model)
        with monkeypatch.context() as patch:
            patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda days=days: now - days * DAY_MS)
            with store.namespace(identities[name], create=True) as namespace:
                put_document(namespace, FIRST)
    plan = plan_prune(store, PruneRules(stale_models=True))
    assert {one.fingerprint for one in plan.namespaces} == {identities[name].fingerprint for name in ("old", "new")}
    assert {group.rule for group in plan.groups()} == {"stale model"}


def test_models_used_on_the_same_day_are_not_stale(store: Store):
    for name in ("one", "two"):
        with store.namespace(renamed(tiny_identity(name=name), model="example/tiny"), create=True) as namespace:
            put_document(namespace, FIRST)
    assert plan_prune(store, PruneRules(stale_models=True)).num_shards == 0


# ---- between plan, mark and sweep ------------------------------------------------------------------------------------


def test_what_was_written_after_the_plan_keeps_its_beginning(filled: Store, root: Path, identity: Identity):
    plan = plan_prune(filled, ALL)
    longer = [*FIRST[:12], *document(4, seed=5)]
    with filled.namespace(identity, create=True) as namespace:
        put_document(namespace, longer)
    done = mark(filled, plan)
    assert (done.num_marked, done.num_spared) == (3, 3)
    assert sweep(filled, grace_ms=AT_ONCE_MS).num_swept == 3
    assert shards(root) == keys(identity, longer)


def test_what_was_pinned_after_the_plan_stays(filled: Store, root: Path, identity: Identity):
    plan = plan_prune(filled, ALL)
    with filled.namespace(identity, create=True) as namespace:
        namespace.pin(refs(identity, SECOND)[-1].key)
    assert mark(filled, plan).num_spared == 4
    sweep(filled, grace_ms=AT_ONCE_MS)
    assert shards(root) == keys(identity, SECOND)


def test_two_pruners_with_one_plan_mark_once(filled: Store, root: Path):
    plans = [plan_prune(filled, ALL) for _ in range(2)]
    assert [mark(filled, plan).num_marked for plan in plans] == [6, 0]


def test_a_limit_is_not_enforced_twice(filled: Store):
    rules = PruneRules(max_chunks=4)
    plans = [plan_prune(filled, rules) for _ in range(2)]
    assert [mark(filled, plan).num_marked for plan in plans] == [2, 0]
    assert len(listed(filled)) == 4


def test_a_chunk_written_again_survives_the_sweep_of_its_earlier_self(filled: Store, root: Path, identity: Identity):
    mark(filled, plan_prune(filled, ALL))
    with filled.namespace(identity, create=True) as namespace:
        assert put_document(namespace, FIRST) == [PutStatus.REPLACED] * 4
    swept = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (swept.num_swept, swept.num_changed) == (2, 4)
    assert shards(root) == keys(identity, FIRST)
    with filled.namespace(identity) as namespace:
        assert hit(namespace, FIRST) == len(FIRST)
    assert_usage_is_what_is_on_disk(filled, root)


def test_a_writer_that_knows_nothing_of_the_mark_does_not_adopt_what_is_marked(
    store: Store, root: Path, identity: Identity
):
    with store.namespace(identity, create=True) as stale:
        with store.namespace(identity, create=True) as other:
            put_document(other, FIRST)
        mark(store, plan_prune(store, ALL))
        assert put_document(stale, FIRST) == [PutStatus.REPLACED] * 4
    sweep(store, grace_ms=AT_ONCE_MS)
    assert shards(root) == keys(identity, FIRST)


def test_both_writes_of_a_name_are_swept_when_both_were_marked(filled: Store, root: Path, identity: Identity):
    mark(filled, plan_prune(filled, ALL))
    with filled.namespace(identity, create=True) as namespace:
        put_document(namespace, FIRST)
    mark(filled, plan_prune(filled, ALL))
    swept = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (swept.num_swept, swept.num_changed + swept.num_gone) == (6, 4)
    assert shards(root) == set()
    assert plan_prune(filled, PruneRules()).num_marked == 0


def test_an_earlier_write_of_the_name_does_not_come_forward(filled: Store, root: Path, identity: Identity):
    index = Index(filled.backend, identity.fingerprint)
    twins = [replace(index.state.entry(row), nonce=f"{row + 1:016x}", created_ms=1) for row in range(6)]
    segment = segment_of_pending(identity.fingerprint, Pending(adds=twins), "w", 0)
    index.manifest.write(segment, Durability.NONE)
    prune(filled)
    assert listed(filled) == set()
    assert_usage_is_what_is_on_disk(filled, root)


def test_another_write_under_a_victims_name_is_not_deleted_with_it(filled: Store, root: Path, identity: Identity):
    """The index lists one write, the object is another one: a writer replaced it, and has not flushed so far."""
    with filled.namespace(identity, create=True) as writer:
        for row in range(6):
            writer.remove(Index(filled.backend, identity.fingerprint).state.entry(row), RemoveReason.DAMAGED)
        assert put_document(writer, FIRST) == [PutStatus.REPLACED] * 4
        assert mark(filled, plan_prune(filled, ALL)).num_marked == 6
        swept = sweep(filled, grace_ms=AT_ONCE_MS)
        assert (swept.num_swept, swept.num_changed) == (2, 4)
    with filled.namespace(identity) as namespace:
        assert hit(namespace, FIRST) == len(FIRST)
    assert_usage_is_what_is_on_disk(filled, root)


def test_a_shard_deleted_by_hand_is_swept_as_gone(filled: Store, root: Path):
    next(root.rglob("*.safetensors")).unlink()
    done = mark(filled, plan_prune(filled, ALL))
    swept = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (done.num_marked, swept.num_swept, swept.num_gone) == (6, 5, 1)
    assert_usage_is_what_is_on_disk(filled, root)


def test_a_copied_store_is_pruned_like_the_original(filled: Store, root: Path):
    copy = root.with_name("copy")
    mark(filled, plan_prune(filled, ALL))
    shutil.copytree(root, copy)
    with Store.open(str(copy)) as other:
        assert sweep(other, grace_ms=AT_ONCE_MS).num_swept == 6
        assert shards(copy) == set()


def test_a_shard_that_readers_found_missing_is_not_swept_when_it_comes_back(
    filled: Store, root: Path, identity: Identity
):
    victim = next(path for path in root.rglob("*.safetensors") if refs(identity, FIRST)[3].key.hex() in path.name)
    content = victim.read_bytes()
    victim.unlink()
    with filled.namespace(identity) as namespace:
        assert hit(namespace, FIRST) == 12
    victim.write_bytes(content)  # it was away for a moment only
    assert sweep(filled, grace_ms=AT_ONCE_MS).num_swept == 0
    assert victim.exists()
    with filled.namespace(identity) as namespace:
        assert hit(namespace, FIRST) == len(FIRST)
    assert_usage_is_what_is_on_disk(filled, root)


def test_many_runs_compact_the_index(filled: Store, identity: Identity):
    for number in range(20):
        with filled.namespace(identity, create=True) as namespace:
            namespace._manifest._live.clear()  # this writer leaves compaction to others
            put_document(namespace, document(4, seed=number))
        prune(filled, PruneRules(max_chunks=2))
        assert Index(filled.backend, identity.fingerprint).manifest.live_segments <= 17
    assert len(listed(filled)) == 2


# ---- what is not ours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreign", "newer", "damaged header", "directory"])
def test_what_stands_in_a_victims_place_is_left_there(filled: Store, root: Path, identity: Identity, kind: str):
    mark(filled, plan_prune(filled, ALL))
    victim = next(root.rglob("*.safetensors"))
    if kind == "foreign":
        victim.write_bytes(b"mine")
    elif kind == "newer":
        in_format(victim, "9")
    elif kind == "damaged header":
        data = bytearray(victim.read_bytes())
        data[200] ^= 1
        victim.write_bytes(data)
    else:
        victim.unlink()
        victim.mkdir()
    before = None if victim.is_dir() else victim.read_bytes()
    assert sweep(filled, grace_ms=AT_ONCE_MS).num_swept == 5
    assert victim.exists()
    assert (None if victim.is_dir() else victim.read_bytes()) == before


def test_quarantine_and_foreign_files_are_never_touched(filled: Store, root: Path):
    others = [root / "notes.txt", root / "quarantine" / "x.safetensors", root / "ns" / "mine" / "y.safetensors"]
    others.append(next(root.rglob("*.safetensors")).with_name("z.safetensors"))
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    prune(filled)
    assert [path.read_bytes() for path in others] == [b"mine"] * 4
    assert [path for path in root.rglob("*.safetensors") if path not in others] == []


@pytest.mark.parametrize("damage", ["segment", "newer segment", "identity"])
def test_a_namespace_that_cannot_be_read_whole_is_left_alone(
    filled: Store, root: Path, identity: Identity, damage: str
):
    segment = next(root.rglob("*.lmi"))
    if damage == "segment":
        segment.write_bytes(segment.read_bytes()[:-1])
    elif damage == "newer segment":
        data = bytearray(segment.read_bytes())
        data[8] = 9
        segment.with_name(f"{'7' * 26}-w.lmi").write_bytes(data)
    else:
        (root / "ns" / identity.fingerprint / "ns.json").unlink()
    plan = plan_prune(filled, ALL)
    assert (plan.num_shards, [name for name, _ in plan.unreadable]) == (0, [identity.fingerprint])
    prune(filled)
    assert shards(root) == keys(identity, FIRST, SECOND)


def test_a_store_that_asks_for_a_newer_pruner_is_not_pruned(filled: Store, root: Path):
    block = filled.superblock
    newer = Superblock(block.store_id, block.created_ms, generation=2, require={"prune": ("leases",)})  # type: ignore[dict-item]
    (root / "store.000002.json").write_bytes(newer.to_json())
    with Store.open(str(root)) as store:
        for work in (lambda: plan_prune(store, ALL), lambda: sweep(store)):
            with pytest.raises(StoreTooNew, match="leases"):
                work()


# ---- crashes and faults ----------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends."""


@pytest.mark.parametrize("on_call", range(1, 7))
def test_a_sweep_that_dies_is_finished_by_the_next(filled: Store, root: Path, on_call: int):
    mark(filled, plan_prune(filled, ALL))
    script = FaultScript(Fault("delete", Fail(Crash()), on_call=on_call))  # type: ignore[arg-type]
    with pytest.raises(Crash):
        sweep(Store.open(FaultBackend(open_backend(str(root)), script)), grace_ms=AT_ONCE_MS, threads=1)
    assert on_call == 1 or len(shards(root)) < 6
    sweep(filled, grace_ms=AT_ONCE_MS)
    assert shards(root) == set()
    assert plan_prune(filled, PruneRules()).num_marked == 0
    assert_usage_is_what_is_on_disk(filled, root)


def test_a_sweep_that_dies_before_its_record_is_finished_by_the_next(filled: Store, root: Path):
    mark(filled, plan_prune(filled, ALL))
    script = FaultScript(Fault("put", Fail(Crash()), name=".lmi"))  # type: ignore[arg-type]
    with pytest.raises(Crash):
        sweep(Store.open(FaultBackend(open_backend(str(root)), script)), grace_ms=AT_ONCE_MS)
    swept = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (swept.num_swept, swept.num_gone, plan_prune(filled, PruneRules()).num_marked) == (0, 6, 0)


def test_a_deletion_whose_answer_is_lost_counts_as_done_the_next_time(filled: Store, root: Path):
    mark(filled, plan_prune(filled, ALL))
    script = FaultScript(Fault("delete", LoseResponse(unavailable()), on_call=2))
    first = sweep(Store.open(FaultBackend(open_backend(str(root)), script)), grace_ms=AT_ONCE_MS, threads=1)
    assert (first.num_swept, len(first.failures)) == (5, 1)
    assert plan_prune(filled, PruneRules()).num_marked == 1
    again = sweep(filled, grace_ms=AT_ONCE_MS)
    assert (again.num_swept, again.num_gone) == (0, 1)


@pytest.fixture
def large(store: Store, identity: Identity) -> Store:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, document(4 * 200))
    return store


def test_a_store_that_stops_answering_stops_the_sweep(large: Store, root: Path):
    mark(large, plan_prune(large, ALL))
    script = FaultScript(Fault("delete", Fail(unavailable())))
    with pytest.raises(Unavailable, match="others; stopped"):
        sweep(Store.open(FaultBackend(open_backend(str(root)), script)), grace_ms=AT_ONCE_MS)
    assert script.calls["delete"] <= 96
    assert len(shards(root)) == 200
    assert sweep(large, grace_ms=AT_ONCE_MS).num_swept == 200


def test_no_room_for_the_mark_is_an_error_and_changes_nothing(filled: Store, root: Path):
    script = FaultScript(Fault("put", Fail(NoSpace("no space left")), name=".lmi"))
    full = Store.open(FaultBackend(open_backend(str(root)), script))
    before = listed(filled)
    with pytest.raises(NoSpace):
        mark(full, plan_prune(full, ALL))
    assert listed(filled) == before


def test_the_order_of_marks_in_a_large_namespace_is_closed(
    large: Store, identity: Identity, monkeypatch: pytest.MonkeyPatch, root: Path
):
    """Marks come in several segments; a run that dies between two of them leaves whole beginnings."""
    monkeypatch.setattr("lmcache_cli.store.prune._MARKS_A_SEGMENT", 30)
    script = FaultScript(Fault("put", Fail(Crash()), name=".lmi", on_call=3))  # type: ignore[arg-type]
    dying = Store.open(FaultBackend(open_backend(str(root)), script))
    with pytest.raises(Crash):
        mark(dying, plan_prune(dying, ALL))
    state = Index(large.backend, identity.fingerprint).state
    assert sorted(state.adds["depth"].tolist()) == list(range(140))


def test_many_victims_are_found_by_one_listing(large: Store, root: Path):
    script = FaultScript()
    counted = Store.open(FaultBackend(open_backend(str(root)), script))
    mark(counted, plan_prune(counted, ALL))
    assert script.calls["list"] < 20
    assert len(Index(large.backend, large.fingerprints()[0]).state) == 0


def test_few_victims_of_many_are_looked_up_in_their_directories(large: Store, root: Path, identity: Identity):
    last = refs(identity, document(800))[-1]
    seen: list[str] = []

    class Watched(FaultBackend):
        def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator:  # type: ignore[type-arg]
            seen.append(prefix)
            return super().list(prefix, recursive=recursive)

    watched = Store.open(Watched(open_backend(str(root)), FaultScript()))
    mark(watched, plan_prune(watched, PruneRules(key=last.key.hex())))
    text = last.key.hex()
    shard_listings = [prefix for prefix in seen if "/c" in prefix]
    assert shard_listings == [f"ns/{identity.fingerprint}/c/{text[:2]}/{text[2:4]}"]
