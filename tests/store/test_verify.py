"""What `verify` finds: every kind of damage and every kind of stranger, each by its own name."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import Capabilities, ObjectInfo, open_backend
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript, FlipBit, TruncateListing, unavailable
from lmcache_cli.backends.local.staging import this_host
from lmcache_cli.backends.wrapper import BackendWrapper
from lmcache_cli.store import Namespace, NoSuchNamespace, Store
from lmcache_cli.store.survey import Level, Share
from lmcache_cli.store.verify import FindingKind, Verification, VerifyOptions, VerifyReport, verify
from lmcache_format.checksums import crc32c
from lmcache_format.geometry import Part
from lmcache_format.identity import Fingerprint, Identity, fingerprint_of
from lmcache_format.segment import RemoveReason
from tests.store.altered_shards import in_format
from tests.store.conftest import DOCUMENT, NUM_CHUNKS
from tests.store.pattern import put_document

LEVELS = tuple(Level)


def shards(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def check(root: Path, level: Level = Level.FULL, **options: object) -> VerifyReport:
    with Store.open(str(root)) as store:
        return verify(store, VerifyOptions(level, **options))  # type: ignore[arg-type]


def kinds(report: VerifyReport) -> list[str]:
    return sorted(finding.kind.value for finding in report.findings)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("level", LEVELS)
def test_a_good_store_is_sound(filled: Path, level: Level):
    report = check(filled, level)
    assert report.is_sound
    assert report.findings == []
    assert (report.num_namespaces, report.num_segments, report.num_indexed) == (1, 1, NUM_CHUNKS)
    assert (report.num_listed, report.num_good, report.num_chunks) == (NUM_CHUNKS,) * 3
    assert report.listed_bytes == sum(path.stat().st_size for path in shards(filled))
    expected = {Level.QUICK: 0, Level.HEADERS: NUM_CHUNKS * 4096, Level.FULL: report.listed_bytes}[level]
    assert report.checked_bytes == expected
    assert report.num_checked == (0 if level is Level.QUICK else NUM_CHUNKS)


def test_an_empty_store_is_sound(root: Path):
    Store.create(str(root)).close()
    assert check(root).counts() == dict.fromkeys(VerifyReport(Level.FULL).counts(), 0)


@pytest.mark.parametrize(
    ("change", "seen_by"),
    [
        (lambda path: path.write_bytes(b""), LEVELS),
        (lambda path: path.write_bytes(path.read_bytes()[:7]), LEVELS),
        (lambda path: path.write_bytes(path.read_bytes()[:8]), LEVELS),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), LEVELS),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), LEVELS),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), LEVELS),
        (lambda path: (path.unlink(), path.mkdir()), LEVELS),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), LEVELS),
        (lambda path: flip(path, 3), (Level.HEADERS, Level.FULL)),
        (lambda path: flip(path, 200), (Level.HEADERS, Level.FULL)),
        (lambda path: flip(path, 4096), (Level.FULL,)),
        (lambda path: flip(path, path.stat().st_size - 1), (Level.FULL,)),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_damage_is_found_at_its_level_and_named(filled: Path, change, seen_by, level: Level):
    victim = shards(filled)[3]
    change(victim)
    report = check(filled, level)
    if level not in seen_by:
        assert report.is_sound
        return
    assert [(f.kind, f.path) for f in report.findings] == [(FindingKind.DAMAGED, str(victim.relative_to(filled)))]
    assert report.findings[0].reason
    assert (report.num_damaged, report.num_good, report.is_sound) == (1, NUM_CHUNKS - 1, False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_shard_is_missing_not_damaged(filled: Path, level: Level):
    victim = shards(filled)[5]
    victim.unlink()
    report = check(filled, level)
    (finding,) = report.findings
    assert (finding.kind, report.num_missing, report.num_damaged) == (FindingKind.MISSING, 1, 0)
    assert re.fullmatch(finding.path.replace("*", "[0-9a-f]{32}"), str(victim.relative_to(filled)))
    assert not report.is_sound


@pytest.mark.parametrize("level", LEVELS)
def test_a_renamed_shard_is_damaged_for_it_is_another_chunks(filled: Path, level: Level):
    one, other = shards(filled)[:2]
    data = one.read_bytes()
    other.write_bytes(data)
    report = check(filled, level)
    if level is Level.QUICK:
        assert report.is_sound  # the same size: only reading shows it
    else:
        (finding,) = report.findings
        assert (finding.kind, finding.path) == (FindingKind.DAMAGED, str(other.relative_to(filled)))
        assert "another key" in finding.reason


@pytest.mark.parametrize("level", LEVELS)
def test_what_the_index_lost_is_unindexed_and_sound(filled: Path, level: Level):
    for segment in filled.rglob("*.lmi"):
        segment.unlink()
    report = check(filled, level)
    assert kinds(report) == ["unindexed"] * NUM_CHUNKS
    assert (report.is_sound, report.num_good, report.num_checked) == (True, NUM_CHUNKS, NUM_CHUNKS)


def test_a_damaged_segment_is_named(filled: Path):
    (segment,) = filled.rglob("*.lmi")
    flip(segment, 300)
    report = check(filled, Level.QUICK)
    assert [f.path for f in report.findings if f.kind is FindingKind.DAMAGED] == [str(segment.relative_to(filled))]
    assert (report.num_unindexed, report.is_sound) == (NUM_CHUNKS, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "ns.json is missing"),
        (lambda path: flip(path, 40), "does not hash to its name"),
    ],
)
def test_a_lost_identity_is_damage_and_its_shards_are_checked_all_the_same(filled: Path, change, said: str):
    (path,) = filled.glob("ns/*/ns.json")
    change(path)
    flip(shards(filled)[0], 4096)
    report = check(filled)
    identity_finding, shard_finding = report.findings
    assert said in identity_finding.reason
    assert "lmcache warm" in identity_finding.reason
    assert (shard_finding.kind, report.num_good) == (FindingKind.DAMAGED, NUM_CHUNKS - 1)


def test_strangers_are_reported_and_never_touched(filled: Path):
    (namespace,) = (filled / "ns").iterdir()
    strangers = [
        filled / "notes.txt",
        filled / "ns" / "README",
        filled / "tmp" / "somebody.txt",
        namespace / "old.pkl",
        namespace / "m" / "index.db",
        shards(filled)[0].parent / "Thumbs.db",
        shards(filled)[0].with_name("0" * 64 + ".l0-2h0-2.raw.safetensors.part"),
    ]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\x80\x04not ours")
    (filled / "photos" / "2024").mkdir(parents=True)
    (filled / "photos" / "2024" / "a.jpg").write_bytes(b"jpg")
    report = check(filled)
    expected = {str(path.relative_to(filled)) for path in strangers} | {"photos/"}
    assert {f.path for f in report.findings} == expected
    assert {f.kind for f in report.findings} == {FindingKind.FOREIGN}
    assert report.is_sound
    assert all(path.read_bytes() == b"\x80\x04not ours" for path in strangers)


def test_a_stranger_under_a_shards_name_is_foreign_unless_it_replaced_one(filled: Path):
    one, *_ = shards(filled)
    data = b"\x80\x04" + b"pickle" * 100
    stranger = one.with_name(one.name[:4] + "f" * 60 + ".l0-2h0-2.raw.safetensors")
    stranger.write_bytes(data)
    assert kinds(check(filled)) == ["foreign"]
    one.write_bytes(data)
    assert kinds(check(filled)) == ["damaged", "foreign"]


@pytest.mark.parametrize("level", [Level.HEADERS, Level.FULL])
def test_a_newer_shard_is_no_damage(filled: Path, level: Level):
    victim = shards(filled)[0]
    in_format(victim, "9")
    report = check(filled, level)
    assert [(f.kind, f.path) for f in report.findings] == [(FindingKind.NEWER, str(victim.relative_to(filled)))]
    assert "'9'" in report.findings[0].reason
    assert (report.is_sound, report.num_good) == (True, NUM_CHUNKS - 1)


@pytest.mark.parametrize("level", LEVELS)
def test_an_unknown_encoding_is_no_damage(filled: Path, level: Level):
    victim = shards(filled)[0]
    victim.rename(victim.with_name(victim.name.replace(".raw.", ".zzz9.")))
    in_format(next(filled.rglob("*.zzz9.safetensors")), "9")
    report = check(filled, level)
    assert kinds(report) == ["missing", "newer"]


def test_another_write_than_the_index_lists_is_unindexed(filled: Path, identity: Identity, tmp_path: Path):
    with Store.create(str(tmp_path / "other")) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT)
    victim = shards(filled)[0]
    shutil.copy(tmp_path / "other" / victim.relative_to(filled), victim)
    report = check(filled)
    (finding,) = report.findings
    assert (finding.kind, report.is_sound, report.num_good) == (FindingKind.UNINDEXED, True, NUM_CHUNKS)
    assert "another write" in finding.reason


def test_removed_shards_await_their_sweep_and_are_no_finding(filled: Path, identity: Identity):
    with Store.open(str(filled)) as store, store.namespace(identity, create=True) as namespace:
        namespace.remove(namespace.state().entry(0), RemoveReason.PRUNED)
    report = check(filled)
    assert (report.findings, report.num_awaiting_sweep, report.num_good) == ([], 1, NUM_CHUNKS - 1)


@pytest.mark.parametrize("level", LEVELS)
def test_parts_that_are_missing_make_a_chunk_incomplete(root: Path, identity: Identity, level: Level):
    parts = [Part(layer, layer + 1, head, head + 1) for layer in (0, 1) for head in (0, 1)]
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        for part in parts:
            put_document(namespace, DOCUMENT, part=part)
    assert check(root, level).is_sound
    victim = next(path for path in shards(root) if ".l1-2h0-1." in path.name)
    victim.unlink()
    report = check(root, level)
    assert kinds(report) == ["incomplete", "missing"]
    reason = next(f.reason for f in report.findings if f.kind is FindingKind.INCOMPLETE)
    assert reason == "incomplete 1/4: no l1-2h0-1"


def test_an_unreachable_shard_is_unchecked_not_damaged_nor_missing(filled: Path):
    victim = shards(filled)[2].name
    script = FaultScript(Fault("open_read", Fail(unavailable()), name=victim))
    report = verify(Store.open(FaultBackend(open_backend(str(filled)), script)))
    assert kinds(report) == ["unchecked"]
    assert (report.is_sound, report.num_damaged, report.num_missing) == (False, 0, 0)


def test_a_fault_on_the_way_is_no_damage(filled: Path):
    """One read comes with a flipped bit, the next one does not: the bytes in the store are as they were written."""
    victim = shards(filled)[2].name
    script = FaultScript(Fault("read_into", FlipBit(8 * 4096 + 3), name=victim, on_call=2))
    assert verify(Store.open(FaultBackend(open_backend(str(filled)), script))).is_sound


def test_a_listing_that_fails_leaves_the_namespace_unchecked(filled: Path):
    fingerprint = next((filled / "ns").iterdir()).name
    script = FaultScript(Fault("list", Fail(unavailable()), name=f"ns/{fingerprint}/c"))
    report = verify(Store.open(FaultBackend(open_backend(str(filled)), script)))
    assert (kinds(report), report.is_sound) == (["unchecked"], False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_listing_that_leaves_things_out_is_unsure(filled: Path, level: Level):
    script = FaultScript(Fault("list", TruncateListing(6), on_call=1, name="/c"))
    report = verify(Store.open(FaultBackend(open_backend(str(filled)), script)), VerifyOptions(level))
    assert kinds(report) == ["unsure"]
    assert f"left out {NUM_CHUNKS - 6} shards" in report.findings[0].reason
    assert (report.is_sound, report.num_missing) == (False, 0)


class Checksumming(BackendWrapper):
    """A back-end that knows the CRC32C of its objects, as S3 and GCS do."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, object_crc32c=True)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix, recursive=recursive):
            yield info if info.is_prefix else replace(info, crc32c=crc32c(self.inner.read(info.name)))


def test_quick_finds_changed_bytes_where_the_back_end_knows_checksums(root: Path, identity: Identity):
    store = Store.create(Checksumming(open_backend(str(root))))
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT)
    assert verify(store, VerifyOptions(Level.QUICK)).num_checked == 0
    flip(shards(root)[3], 4100)
    report = verify(store, VerifyOptions(Level.QUICK))
    assert [(f.kind, f.path) for f in report.findings] == [
        (FindingKind.DAMAGED, str(shards(root)[3].relative_to(root)))
    ]
    assert (report.num_checked, report.num_good) == (1, NUM_CHUNKS - 1)


def test_a_share_reads_its_own_and_all_shares_read_everything(filled: Path):
    reports = [check(filled, share=Share(index, 3)) for index in (1, 2, 3)]
    assert sum(report.num_checked for report in reports) == NUM_CHUNKS
    assert all(0 < report.num_checked < NUM_CHUNKS for report in reports)
    assert all(report.num_good == NUM_CHUNKS for report in reports)
    assert check(filled, share=Share(2, 3)).num_checked == reports[1].num_checked
    flip(shards(filled)[4], 4096)
    assert sorted(check(filled, share=Share(index, 3)).num_damaged for index in (1, 2, 3)) == [0, 0, 1]


def test_the_daily_share_takes_its_turn():
    assert [str(Share(None, 3).on(day)) for day in (0, 1, 2, 3)] == ["1/3", "2/3", "3/3", "1/3"]
    assert str(Share(2, 3).on(0)) == "2/3"
    with pytest.raises(ValueError, match="from 1/3 to 3/3"):
        Share(4, 3)


def test_staging_is_stale_only_when_its_writer_is_gone(filled: Path):
    old = time.time() - 7200
    for pid in (4_194_304 + 5, os.getpid()):
        path = filled / "tmp" / f"{this_host()}.{pid}.{'a' * 16}"
        path.write_bytes(b"half")
        os.utime(path, (old, old))
    (filled / "tmp" / f"{this_host()}.{4_194_304 + 6}.{'b' * 16}").write_bytes(b"fresh")
    report = check(filled)
    assert [(f.kind, f.path.split(".")[1]) for f in report.findings] == [(FindingKind.STALE, str(4_194_304 + 5))]
    assert report.is_sound


def test_superblocks_are_checked(filled: Path):
    (filled / "store.000000.json").write_bytes(b"{}")
    report = check(filled)
    assert [(f.kind, f.path) for f in report.findings] == [(FindingKind.FOREIGN, "store.000000.json")]
    newest = Store.open(str(filled)).superblock
    (filled / "store.000002.json").write_bytes(replace(newest, generation=2).to_json())
    flip(filled / "store.000001.json", 60)
    assert ("damaged", "store.000001.json") in [(f.kind.value, f.path) for f in check(filled).findings]


def test_a_newer_namespace_is_no_damage(filled: Path, identity: Identity):
    text = json.loads(identity.canonical_json())
    text["layout"] = "htd-9"
    data = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
    directory = filled / "ns" / fingerprint_of(data)
    directory.mkdir()
    (directory / "ns.json").write_bytes(data)
    report = check(filled)
    assert [(f.kind, f.namespace) for f in report.findings] == [(FindingKind.NEWER, fingerprint_of(data))]
    assert report.is_sound


def test_one_namespace_alone(filled: Path, identity: Identity):
    assert check(filled, namespace=identity.fingerprint).num_good == NUM_CHUNKS
    with pytest.raises(NoSuchNamespace):
        check(filled, namespace=Fingerprint("0" * 32))


def test_tails_beside_full_chunks_are_counted(root: Path, identity: Identity):
    with Store.create(str(root)) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT[:10])
        put_document(namespace, DOCUMENT[:12])
        put_document(namespace, [*DOCUMENT[:4], 7])
    report = check(root)
    assert (report.num_tails, report.num_tails_beside_full) == (2, 2)


def test_progress_adds_up_to_what_was_expected(filled: Path):
    steps: list[tuple[int, int]] = []
    with Store.open(str(filled)) as store:
        verification = Verification(store)
        list(verification.findings(lambda shards, size: steps.append((shards, size))))
    assert sum(shards for shards, _ in steps) == verification.expected_shards == NUM_CHUNKS
    assert sum(size for _, size in steps) == verification.expected_bytes


def test_writers_may_go_on_meanwhile(store: Store, namespace: Namespace):
    put_document(namespace, DOCUMENT[:20])
    namespace.flush()
    verification = Verification(store)
    put_document(namespace, DOCUMENT)
    namespace.flush()
    assert list(verification.findings()) == []
    assert verification.report.num_good == NUM_CHUNKS
