"""`migrate` at the level of the store: what is copied, what goes at the source, and what an interruption leaves."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.backends import NoSpace, Unavailable
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.store import Namespace, Refused, Store
from lmcache_cli.store.copying import WholeShard
from lmcache_cli.store.formats import FORMATS, TargetFormat, resolve_format
from lmcache_cli.store.index import Index
from lmcache_cli.store.migrate import (
    EVERYTHING,
    Fate,
    MigrateOptions,
    MigrateResult,
    apply_migrate,
    plan_migrate,
)
from lmcache_cli.store.pace import Pace
from lmcache_cli.store.reading import read_header
from lmcache_cli.store.recoding import provenance_of
from lmcache_cli.store.selection import Selection
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.encodings import resolve_encoding
from lmcache_format.errors import ShardError
from lmcache_format.geometry import Part, rank_part
from lmcache_format.identity import AttentionKind
from lmcache_format.segment import RemoveReason
from lmcache_format.shard import RAW, build_header, parse_header
from tests.marks import slow_after
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document, put_document, refs, tiny_identity
from tests.store.pattern import hit as pattern_hit

NUM_CHUNKS = 7
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS + 3)
NUM_SHARDS = NUM_CHUNKS + 1


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return tmp_path / "src"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


@pytest.fixture
def source(src: Path) -> Iterator[Store]:
    with Store.create(str(src)) as made:
        with made.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
            namespace.label("the document", refs(KV_IDENTITY, TOKENS)[-1].key, len(TOKENS), NUM_CHUNKS)
        yield made


@pytest.fixture
def target(dst: Path) -> Iterator[Store]:
    with Store.create(str(dst)) as made:
        yield made


def migrate(source: Store, target: Store, **options: Any) -> MigrateResult:
    chosen = MigrateOptions(**options)
    return apply_migrate(source, target, plan_migrate(source, target, chosen))


def hit(store: Store) -> int:
    with store.namespace(KV_IDENTITY, missing_ok=True) as namespace:
        return read_kv(namespace, TOKENS)


def shards(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in (root / "ns").rglob("*.safetensors")}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_copy_is_the_same_bytes_and_a_second_run_changes_nothing(
    source: Store, target: Store, src: Path, dst: Path
) -> None:
    before = files(src)
    plan = plan_migrate(source, target)
    total = sum(len(content) for content in shards(src).values())
    assert (plan.num_shards, plan.size_bytes, plan.num_present) == (NUM_SHARDS, total, 0)
    result = apply_migrate(source, target, plan)
    assert (result.num_copied, result.copied_bytes, result.num_present) == (NUM_SHARDS, total, 0)
    assert result.is_whole
    assert shards(dst) == shards(src)
    assert files(src) == before
    assert hit(target) == len(TOKENS)
    after = files(dst)
    again = migrate(source, target)
    assert (again.num_copied, again.num_present, again.is_whole) == (0, NUM_SHARDS, True)
    assert files(dst) == after


def test_only_what_is_missing_is_copied(source: Store, target: Store) -> None:
    migrate(source, target)
    longer = [*TOKENS[: NUM_CHUNKS * CHUNK_TOKENS], *document(2 * CHUNK_TOKENS, seed=5)]
    with source.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, longer)
    result = migrate(source, target)
    assert (result.num_copied, result.num_present) == (2, NUM_SHARDS)
    with target.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, longer) == len(longer)


def test_labels_pins_and_last_uses_come_along(source: Store, target: Store) -> None:
    keys = [ref.key for ref in refs(KV_IDENTITY, TOKENS)]
    with source.namespace(KV_IDENTITY, create=True) as namespace:
        namespace.pin(keys[2], 10**15)
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert read_kv(namespace, TOKENS) == len(TOKENS)
    migrate(source, target)
    here, there = (Index(store.backend, KV_IDENTITY.fingerprint).state for store in (source, target))
    assert there.labels == here.labels
    assert [label.name for label in there.labels] == ["the document"]
    assert there.pins == here.pins
    assert [pin.key for pin in there.pins] == [keys[2][:16]]
    assert there.touches.tobytes() == here.touches.tobytes()
    assert set(there.touches["hits"].tolist()) == {2}


def test_the_source_goes_when_the_copy_was_read_back(source: Store, target: Store, src: Path, dst: Path) -> None:
    before = shards(src)
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_deleted, result.is_whole) == (NUM_SHARDS, NUM_SHARDS, True)
    assert result.deleted_bytes == sum(map(len, before.values()))
    assert shards(src) == {}
    assert shards(dst) == before
    assert (hit(source), hit(target)) == (0, len(TOKENS))
    assert verify(source).is_sound
    again = migrate(source, target, delete_source=True)
    assert again == MigrateResult()


def test_what_was_copied_before_goes_after_it_was_read_back(source: Store, target: Store, src: Path, dst: Path) -> None:
    migrate(source, target)
    path = sorted((dst / "ns").rglob("*.safetensors"))[3]
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_present, result.num_deleted) == (1, NUM_SHARDS - 1, NUM_SHARDS)
    assert (result.num_quarantined, result.is_whole) == (1, True)
    assert [notice.kind for notice in result.notices] == ["replaced"]
    assert path.read_bytes() == good
    assert len(list((dst / "quarantine").iterdir())) == 1
    assert hit(target) == len(TOKENS)
    assert shards(src) == {}


def test_there_and_back_again(source: Store, target: Store, src: Path) -> None:
    """A write that was removed never returns: what comes back is a new write of the same KV."""
    migrate(source, target, delete_source=True)
    sweep(source, grace_ms=0)
    result = migrate(target, source, delete_source=True)
    assert (result.num_copied, result.num_deleted) == (NUM_SHARDS, NUM_SHARDS)
    assert (hit(source), hit(target)) == (len(TOKENS), 0)
    assert verify(source).is_sound
    assert len(shards(src)) == NUM_SHARDS


def test_a_write_that_the_target_removed_is_copied_as_another(source: Store, target: Store, dst: Path) -> None:
    migrate(source, target)
    with target.namespace(KV_IDENTITY, create=True) as namespace:
        state = namespace.state()
        for row in range(len(state)):
            namespace.remove(state.entry(row), RemoveReason.PRUNED)
    assert hit(target) == 0
    result = migrate(source, target)
    assert result.num_copied == NUM_SHARDS
    assert hit(target) == len(TOKENS)
    assert sweep(target, grace_ms=0).num_swept == 0
    assert hit(target) == len(TOKENS)


def test_another_sound_write_at_the_target_stays(source: Store, target: Store, src: Path, dst: Path) -> None:
    with target.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, TOKENS[: 2 * CHUNK_TOKENS])
    before = shards(dst)
    for segment in dst.rglob("*.lmi"):
        segment.unlink()
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_conflict, result.num_deleted) == (NUM_SHARDS - 2, 2, NUM_SHARDS)
    assert [notice.kind for notice in result.notices] == ["conflict", "conflict"]
    assert result.is_whole
    assert {name: shards(dst)[name] for name in before} == before
    assert hit(target) == len(TOKENS)


def test_damage_at_the_source_is_not_copied(source: Store, target: Store, src: Path, dst: Path) -> None:
    path = sorted((src / "ns").rglob("*.safetensors"))[4]
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_damaged, result.num_deleted) == (NUM_SHARDS - 1, 1, NUM_SHARDS - 1)
    assert not result.is_whole
    assert [(one.kind, one.path) for one in result.notices] == [(Fate.DAMAGED, str(path.relative_to(src)))]
    assert shards(src) == {str(path.relative_to(src)): bytes(data)}
    assert len(shards(dst)) == NUM_SHARDS - 1


def test_re_encoding_on_the_way(source: Store, target: Store, src: Path, dst: Path) -> None:
    result = migrate(source, target, encoding=resolve_encoding("bfx"), delete_source=True)
    assert (result.num_copied, result.num_deleted) == (NUM_SHARDS, NUM_SHARDS)
    assert all(name.endswith(".bfx.safetensors") for name in shards(dst))
    assert hit(target) == len(TOKENS)
    assert (shards(src), hit(source)) == ({}, 0)


def test_re_encoding_is_incremental_too(source: Store, target: Store, dst: Path) -> None:
    migrate(source, target, encoding=resolve_encoding("bfx"))
    after = files(dst)
    plan = plan_migrate(source, target, MigrateOptions(encoding=resolve_encoding("bfx")))
    assert (plan.num_shards, plan.num_present) == (0, NUM_SHARDS)
    apply_migrate(source, target, plan)
    assert files(dst) == after
    assert hit(target) == len(TOKENS)


def test_lossy_must_be_allowed_and_is_not_encoded_again(source: Store, target: Store, dst: Path) -> None:
    with pytest.raises(Refused, match="lossy"):
        plan_migrate(source, target, MigrateOptions(encoding=resolve_encoding("uq")))
    migrate(source, target, encoding=resolve_encoding("uq"), allow_lossy=True)
    assert {name.rsplit(".", 2)[1] for name in shards(dst)} == {"uq006-near"}
    assert hit(target) == 0
    with Store.create(MemoryBackend()) as third:
        result = migrate(target, third, encoding=resolve_encoding("bfx"))
        assert result.num_copied == NUM_SHARDS
        for name, content in shards(dst).items():
            assert third.backend.read(name) == content


def test_pinned_chunks_are_copied_and_stay(source: Store, target: Store, src: Path) -> None:
    keys = [ref.key for ref in refs(KV_IDENTITY, TOKENS)]
    with source.namespace(KV_IDENTITY, create=True) as namespace:
        namespace.pin(keys[2])
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_deleted, result.num_kept) == (NUM_SHARDS, NUM_SHARDS - 3, 3)
    assert {name.rpartition("/")[2][:64] for name in shards(src)} == {key.hex() for key in keys[:3]}
    again = migrate(source, target, delete_source=True)
    assert (again.num_copied, again.num_present, again.num_deleted, again.num_left) == (0, 3, 0, 0)


def test_ages_choose_and_never_leave_an_orphan(source: Store, target: Store) -> None:
    for selection, count in (
        (Selection(unused_for_ms=3_600_000), 0),
        (Selection(older_than_ms=3_600_000), 0),
        (Selection(older_than_ms=-60_000), NUM_SHARDS),
        (Selection(models=("other/*",)), 0),
    ):
        assert plan_migrate(source, target, MigrateOptions(selection=selection)).num_shards == count
    now_ms = source.backend.now_ms() + 40 * 86_400_000  # as if all were old, and one late chunk was used today
    state = Index(source.backend, KV_IDENTITY.fingerprint).state
    assert Selection(unused_for_ms=30 * 86_400_000).rows(state, now_ms).all()
    from lmcache_cli.store.ledger import Ledger

    last = refs(KV_IDENTITY, TOKENS)[3].key
    ledger = Ledger(source.backend, KV_IDENTITY.fingerprint)
    ledger.note(touches=[(int.from_bytes(last[:8], "big"), now_ms // 86_400_000, 1)])
    ledger.flush()
    state = Index(source.backend, KV_IDENTITY.fingerprint).state
    rows = Selection(unused_for_ms=30 * 86_400_000).rows(state, now_ms)
    chosen = {state.entry(row).depth for row in range(len(state)) if rows[row]}
    assert chosen == set(range(4, NUM_SHARDS))


def test_no_time_copies_nothing_and_says_what_is_left(source: Store, target: Store, dst: Path) -> None:
    result = migrate(source, target, max_duration_s=0)
    assert (result.num_copied, result.num_left, result.is_whole) == (0, NUM_SHARDS, False)
    assert shards(dst) == {}


def test_a_target_that_is_full_at_once_leaves_everything(source: Store, target: Store) -> None:
    target.backend = FaultBackend(target.backend, FaultScript(Fault("put", Fail(NoSpace("full")), name="ns.json")))
    result = MigrateResult()
    with pytest.raises(NoSpace):
        apply_migrate(source, target, plan_migrate(source, target), result=result)
    assert (result.num_copied, result.num_left, result.is_whole) == (0, NUM_SHARDS, False)


def test_shards_the_index_lost_are_copied_too(source: Store, target: Store, src: Path) -> None:
    for segment in src.rglob("*.lmi"):
        segment.unlink()
    result = migrate(source, target, delete_source=True)
    assert (result.num_copied, result.num_deleted, result.num_left) == (NUM_SHARDS, NUM_SHARDS, 0)
    assert hit(target) == len(TOKENS)
    assert shards(src) == {}


def test_marked_shards_are_not_copied(source: Store, target: Store, dst: Path) -> None:
    with source.namespace(KV_IDENTITY, create=True) as namespace:
        entry = namespace.state().entry(0)
        namespace.remove(entry, RemoveReason.PRUNED)
    result = migrate(source, target)
    assert (result.num_copied, result.num_left) == (NUM_SHARDS - 1, 0)


def test_a_source_written_anew_meanwhile_stays(source: Store, target: Store, src: Path) -> None:
    """Between reading and deleting, somebody writes the shard anew: only what was read may go."""
    path = sorted((src / "ns").rglob("*.safetensors"))[0]

    class Rewriting(LocalBackend):
        def delete(self, name: str, *, version: str | None) -> bool:
            if name == str(path.relative_to(src)):
                content = path.read_bytes()
                path.unlink()
                time.sleep(0.01)
                path.write_bytes(content)
            return super().delete(name, version=version)

    with Store.open(Rewriting(str(src))) as racing:
        result = migrate(racing, target, delete_source=True)
    assert (result.num_deleted, result.num_changed, result.is_whole) == (NUM_SHARDS - 1, 1, False)
    assert list(shards(src)) == [str(path.relative_to(src))]


@pytest.mark.parametrize("faulty_side", ["source", "target"])
@pytest.mark.parametrize("attempt", range(3))
def test_interrupted_anywhere_both_together_hold_all(
    source: Store, target: Store, src: Path, dst: Path, faulty_side: str, attempt: int
) -> None:
    chance = random.Random(f"{faulty_side}{attempt}")
    names = set(shards(src))
    for _ in range(5):
        operation = chance.choice(["put", "read_into", "open_read", "stat", "list", "delete", "sync_names", "read"])
        error: Exception = NoSpace("full") if operation == "put" and chance.random() < 0.5 else unavailable()
        script = FaultScript(Fault(operation, Fail(error), on_call=chance.randint(1, 25)))
        sides = {"source": LocalBackend(str(src)), "target": LocalBackend(str(dst))}
        with (
            Store.open(sides["source"]) as here,
            Store.open(sides["target"]) as there,
        ):
            faulty = FaultBackend(sides[faulty_side], script)
            if faulty_side == "source":
                here.backend = faulty
            else:
                there.backend = faulty
            try:
                migrate(here, there, delete_source=True, concurrency=2)
            except (Unavailable, NoSpace):
                pass
        assert set(shards(src)) | set(shards(dst)) == names
        copied = shards(dst)
        both = {name: content for name, content in shards(src).items() if name in copied}
        assert all(copied[name] == content for name, content in both.items())
    last = migrate(source, target, delete_source=True)
    assert last.is_whole
    sweep(source, grace_ms=0)  # what was marked when the deletion failed
    assert (set(shards(src)), set(shards(dst))) == (set(), names)
    assert hit(target) == len(TOKENS)
    assert migrate(source, target, delete_source=True) == MigrateResult()
    with target.namespace(KV_IDENTITY) as namespace:
        assert [label.name for label in namespace.state().labels] == ["the document"]


# ---- cutting anew ---------------------------------------------------------------------------------------------------


def put_ranks(namespace: Namespace, ranks: int) -> None:
    for rank in range(ranks):
        put_kv(namespace, TOKENS, part=rank_part(KV_IDENTITY, rank, ranks))


@pytest.mark.parametrize(("written", "wanted"), [(1, 4), (4, 1), (4, 2), (2, 4), (1, 8), (2, 2)])
@pytest.mark.parametrize("codec", slow_after(1, ["bfx", None]))
def test_parts_are_cut_anew_element_by_element(
    tmp_path: Path, target: Store, dst: Path, written: int, wanted: int, codec: str | None
) -> None:
    encoding = None if codec is None else resolve_encoding(codec)
    with Store.create(str(tmp_path / "ranks")) as source:
        with source.namespace(KV_IDENTITY, create=True) as namespace:
            put_ranks(namespace, written)
        result = migrate(source, target, ranks=wanted, encoding=encoding, delete_source=True)
        assert (result.num_copied, result.num_deleted) == (NUM_SHARDS, written * NUM_SHARDS)
        assert shards(tmp_path / "ranks") == {}
        assert migrate(source, target, ranks=wanted, encoding=encoding, delete_source=True) == MigrateResult()
    parts = {name.split(".")[1] for name in shards(dst)}
    assert parts == {str(rank_part(KV_IDENTITY, rank, wanted)) for rank in range(wanted)}
    for rank in range(wanted):
        with target.namespace(KV_IDENTITY, need=rank_part(KV_IDENTITY, rank, wanted)) as namespace:
            assert read_kv(namespace, TOKENS) == len(TOKENS)
    assert hit(target) == len(TOKENS)
    assert verify(target).is_sound


def test_a_second_cut_has_nothing_to_do(source: Store, target: Store, dst: Path) -> None:
    migrate(source, target, ranks=2)
    after = files(dst)
    again = migrate(source, target, ranks=2)
    assert (again.num_copied, again.num_present, again.num_left) == (0, NUM_SHARDS, 0)
    assert files(dst) == after


def test_a_missing_part_is_told_and_nothing_of_the_chunk_goes(tmp_path: Path, target: Store, dst: Path) -> None:
    root = tmp_path / "ranks"
    with Store.create(str(root)) as source:
        with source.namespace(KV_IDENTITY, create=True) as namespace:
            put_ranks(namespace, 2)
        key = refs(KV_IDENTITY, TOKENS)[1].key.hex()
        next(root.rglob(f"{key}.*h2-4*")).unlink()
        result = migrate(source, target, ranks=1, delete_source=True)
    assert (result.num_copied, result.num_failed, result.num_deleted) == (NUM_SHARDS - 1, 1, 2 * (NUM_SHARDS - 1))
    (notice,) = [one for one in result.notices if one.kind == "failed"]
    assert "cannot be made from l0-2h0-2" in notice.reason
    assert [name.rpartition("/")[2][:64] for name in shards(root)] == [key]


def test_heads_that_do_not_divide_are_refused(source: Store, target: Store) -> None:
    with pytest.raises(Refused, match="tp=3"):
        plan_migrate(source, target, MigrateOptions(ranks=3))


def test_latents_are_copied_whole_for_any_ranks(tmp_path: Path, target: Store) -> None:
    identity = tiny_identity(name="latent", kind=AttentionKind.LATENT)
    tokens = document(14)
    with Store.create(str(tmp_path / "latent")) as source:
        with source.namespace(identity, create=True) as namespace:
            put_document(namespace, tokens)
        assert migrate(source, target, ranks=4).num_copied == 4
    with target.namespace(identity, need=Part(0, 2)) as namespace:
        assert pattern_hit(namespace, tokens) == 14


# ---- refusals and limits --------------------------------------------------------------------------------------------


def test_the_same_and_nested_places_are_refused(source: Store, src: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(src)
    for other in (str(src), f"file://{src}", str(link), str(src / "." / "..") + "/src"):
        with Store.open(other) as same, pytest.raises(Refused, match="same place"):
            plan_migrate(source, same, MigrateOptions(delete_source=True))
    with Store.create(str(src / "inside")) as inside:
        for pair in ((source, inside), (inside, source)):
            with pytest.raises(Refused, match="inside the other"):
                plan_migrate(*pair, EVERYTHING)


def test_a_store_under_another_name_is_refused(source: Store, src: Path, tmp_path: Path) -> None:
    """Two names that look apart and lead to one store, as with bind mounts and aliases of buckets."""
    with Store.open(LocalBackend(str(src))) as other:
        other.backend.url = "file:///elsewhere"  # type: ignore[misc]
        with pytest.raises(Refused, match="same store"):
            plan_migrate(source, other, EVERYTHING)


def test_an_error_does_not_wait_for_those_that_wait_their_turn(source: Store, target: Store, src: Path) -> None:
    size = max(map(len, shards(src).values()))
    script = FaultScript(Fault("put", Fail(unavailable()), on_call=2))
    start = time.monotonic()
    plan = plan_migrate(source, target, MigrateOptions(bytes_per_s=size, concurrency=4))
    target.backend = FaultBackend(target.backend, script)
    with pytest.raises(Unavailable):
        apply_migrate(source, target, plan)
    assert time.monotonic() - start < 3


def test_the_limit_holds_on_average() -> None:
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(100, clock=lambda: now[0], wait=sleep)
    for size in (50, 50, 100, 300):
        pace.take(size)
    assert now[0] == pytest.approx(5.0)
    now[0] += 10.0  # idle time is not saved up
    pace.take(100)
    assert slept[-1] == pytest.approx(1.0)


# ---- formats ---------------------------------------------------------------------------------------------------------


def _noted(shard: WholeShard) -> WholeShard:
    """A made-up format 2: the same data under a header that says so. What is in it already stays as it is."""
    old = shard.header
    if old.meta.producer.get("format") == "2":
        return shard
    meta = replace(old.meta, producer={**old.meta.producer, "format": "2"}, provenance=provenance_of(old))
    sizes = None if meta.encoding.name == RAW else [tensor.end - tensor.begin for tensor in old.tensors]
    data = memoryview(shard.parts[0])[old.data_start :]
    head = build_header(meta, old.checksums, sizes, old.decoded_checksums)
    return WholeShard(parse_header(head, len(head) + len(data)), (head, data), shard.version)


@pytest.fixture
def format_2(monkeypatch: pytest.MonkeyPatch) -> TargetFormat:
    """A second format, registered as the next one will be."""
    made = TargetFormat(version=2, convert=_noted)
    monkeypatch.setitem(FORMATS, 2, made)
    return made


def test_shards_are_converted_on_the_way_to_a_store_of_another_format(
    source: Store, target: Store, src: Path, dst: Path, format_2: TargetFormat
) -> None:
    before = shards(src)
    newer = Store(target.backend, replace(target.superblock, version=2))
    result = migrate(source, newer, to_format=resolve_format("2"), delete_source=True)
    assert (result.num_copied, result.num_deleted, result.is_whole) == (NUM_SHARDS, NUM_SHARDS, True)
    assert (shards(src), shards(dst).keys()) == ({}, before.keys())
    headers = [read_header(target.backend.open_read(name)) for name in shards(dst)]
    assert all(header.meta.producer["format"] == "2" for header in headers)
    assert hit(target) == len(TOKENS)
    with Store.create(MemoryBackend()) as third:
        after = Store(third.backend, replace(third.superblock, version=2))
        assert migrate(newer, after, to_format=format_2).num_copied == NUM_SHARDS
        assert all(third.backend.read(name) == content for name, content in shards(dst).items())


def test_a_format_that_is_not_the_targets_is_refused(source: Store, target: Store, format_2: TargetFormat) -> None:
    assert resolve_format("1").version == target.superblock.version == 1
    with pytest.raises(Refused, match="is a store of format 1, and --to-format asks for 2"):
        migrate(source, target, to_format=format_2)
    newer = Store(target.backend, replace(target.superblock, version=2))
    with pytest.raises(Refused, match="asks for 1"):
        migrate(source, newer, to_format=FORMATS[1])
    with pytest.raises(Refused, match="in format 1 alone"):
        migrate(source, newer, to_format=format_2, encoding=resolve_encoding("bfx"))
    with pytest.raises(Refused, match=r"can write \(1, 2\), found '3'"):
        resolve_format("3")


def test_a_shard_that_has_no_place_in_the_format_stays(source: Store, target: Store, src: Path) -> None:
    victim = refs(KV_IDENTITY, TOKENS)[2].key

    def convert(shard: WholeShard) -> WholeShard:
        if shard.header.meta.key == victim:
            raise ShardError("no such thing in this format")
        return shard

    picky = TargetFormat(version=1, convert=convert)
    result = migrate(source, target, to_format=picky, delete_source=True)
    assert (result.num_copied, result.num_failed, result.num_deleted) == (NUM_SHARDS - 1, 1, NUM_SHARDS - 1)
    assert not result.is_whole
    assert len(shards(src)) == 1
