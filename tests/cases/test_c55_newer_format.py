"""C55: a reader meets newer versions of the format: ignored, named, never called damage, never touched."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.store import Namespace, Store, StoreTooNew
from lmcache_cli.store.explain import explain_prompt
from lmcache_cli.store.repair import RepairOptions, apply_repair, plan_repair
from lmcache_cli.store.stats import store_stats
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import FindingKind, VerifyOptions, verify
from lmcache_format.identity import Identity, fingerprint_of
from lmcache_format.names import new_ulid
from lmcache_format.superblock import Operation, Superblock
from tests.store.altered_shards import in_format, with_unknown_field
from tests.store.pattern import document, hit, put_document, refs, tiny_identity

GOLDEN = Path(__file__).resolve().parents[2] / "format" / "golden"
DOCUMENT = document(24)
BOTH = pytest.mark.parametrize("deep", [False, True])


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def root(tmp_path: Path, identity: Identity) -> Path:
    """A store of this version, one document of six chunks."""
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, DOCUMENT)
    return tmp_path / "kv"


def shard(root: Path, identity: Identity, chunk: int) -> Path:
    return next(root.rglob(f"{refs(identity, DOCUMENT)[chunk].key.hex()}.*"))


def found_tokens(root: Path, identity: Identity) -> int:
    with Store.open(str(root)) as store, store.namespace(identity) as namespace:
        return hit(namespace, DOCUMENT)


def repair(root: Path, *, deep: bool) -> None:
    with Store.open(str(root)) as store:
        apply_repair(store, plan_repair(store, RepairOptions(deep=deep)))


@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDEN.glob("v1-by-*")))
def test_stores_of_every_release_of_this_version_are_sound(golden: str, tmp_path: Path):
    for path in (GOLDEN / golden).rglob("store.000001.json"):
        copy = tmp_path / golden
        shutil.copytree(path.parent, copy)
        with Store.open(str(copy)) as store:
            report = verify(store)
        assert (report.is_sound, report.num_damaged, report.num_good > 0) == (True, 0, True)


@pytest.mark.parametrize("level", [Level.HEADERS, Level.FULL])
def test_a_later_minor_release_is_read_and_its_fields_ignored(root: Path, identity: Identity, level: Level):
    for chunk in range(6):
        with_unknown_field(shard(root, identity, chunk))
    with Store.open(str(root)) as store:
        assert verify(store, VerifyOptions(level)).findings == []
    assert found_tokens(root, identity) == 24


@pytest.mark.parametrize("version", ["2", "9", "1.1", "next"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_later_major_release_is_named_newer(root: Path, identity: Identity, version: str, indexed: bool):
    victim = shard(root, identity, 3)
    in_format(victim, version)
    if not indexed:
        for segment in root.rglob("*.lmi"):
            segment.unlink()
    content = victim.read_bytes()
    with Store.open(str(root)) as store:
        report = verify(store)
    (newer,) = (finding for finding in report.findings if finding.kind is FindingKind.NEWER)
    assert (newer.path, f"'{version}'" in newer.reason) == (str(victim.relative_to(root)), True)
    assert (report.is_sound, report.num_damaged, report.num_good) == (True, 0, 5)
    assert found_tokens(root, identity) == 12
    assert victim.read_bytes() == content


@BOTH
def test_repair_leaves_newer_shards_and_segments_alone(root: Path, identity: Identity, deep: bool):
    victim = shard(root, identity, 3)
    in_format(victim, "9")
    (segment,) = root.rglob("*.lmi")
    data = bytearray(segment.read_bytes())
    data[8:12] = (9).to_bytes(4, "little")
    newer = segment.with_name(f"{new_ulid(2**40)}-newer.lmi")
    newer.write_bytes(data)
    before = {path: path.read_bytes() for path in (victim, newer)}
    repair(root, deep=deep)
    assert {path: path.read_bytes() for path in (victim, newer)} == before
    assert not (root / "quarantine").exists()


@BOTH
def test_another_magic_is_a_foreign_file(root: Path, identity: Identity, deep: bool):
    stranger = shard(root, identity, 3).with_name("ab" * 32 + ".l0-2h0-2.raw.safetensors")
    stranger = root / "ns" / identity.fingerprint / "c" / "ab" / "ab" / stranger.name
    stranger.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode().ljust(4088)
    stranger.write_bytes(len(header).to_bytes(8, "little") + header)
    with Store.open(str(root)) as store:
        report = verify(store)
    assert [(finding.kind, finding.path) for finding in report.findings] == [
        (FindingKind.FOREIGN, str(stranger.relative_to(root)))
    ]
    repair(root, deep=deep)
    assert stranger.exists()


def test_a_namespace_of_a_later_layout_stands_beside_ours(root: Path, identity: Identity):
    text = json.loads(identity.canonical_json()) | {"layout": "htd-9"}
    data = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
    other = root / "ns" / fingerprint_of(data)
    shutil.copytree(root / "ns" / identity.fingerprint, other)
    (other / "ns.json").write_bytes(data)
    before = sorted(path for path in other.rglob("*"))
    with Store.open(str(root)) as store:
        report = verify(store)
        assert [(finding.kind, finding.namespace) for finding in report.findings] == [
            (FindingKind.NEWER, fingerprint_of(data))
        ]
        assert [one.is_newer for one in store_stats(store).namespaces].count(True) == 1
        assert explain_prompt(store, identity, DOCUMENT).hit_tokens == 24
    repair(root, deep=True)
    assert sorted(path for path in other.rglob("*")) == before


def newest(root: Path, **features: object) -> None:
    block = Store.open(str(root)).superblock
    made: Superblock = replace(block, generation=block.generation + 1, **features)  # type: ignore[arg-type]
    (root / f"store.{made.generation:06d}.json").write_bytes(made.to_json())


def test_a_store_of_a_later_kind_refuses_what_it_must(root: Path, identity: Identity):
    newest(root, compat=("prettier",))
    assert found_tokens(root, identity) == 24
    newest(root, ro_compat=("other-commits",))
    assert found_tokens(root, identity) == 24
    with Store.open(str(root)) as store:
        assert verify(store).is_sound
        with pytest.raises(StoreTooNew, match="other-commits"):
            plan_repair(store)
        with pytest.raises(StoreTooNew, match="other-commits"):
            store.namespace(identity, create=True)
    newest(root, require={Operation.VERIFY: ("other-checksums",)})
    with Store.open(str(root)) as store, pytest.raises(StoreTooNew, match="other-checksums"):
        verify(store)
    newest(root, incompat=("other-names",))
    with pytest.raises(StoreTooNew, match="other-names"):
        Store.open(str(root))


def test_a_rollback_finds_its_own_again(root: Path, identity: Identity):
    """A later release wrote beside our shards, then ours goes on: it reads its own, writes what is a miss for it."""
    victim = shard(root, identity, 2)
    in_format(victim, "9")
    assert found_tokens(root, identity) == 8
    with Store.open(str(root)) as store:
        namespace: Namespace
        with store.namespace(identity, create=True) as namespace:
            put_document(namespace, DOCUMENT[:8])
            put_document(namespace, document(8, seed=4))
        assert verify(store).is_sound
    assert victim.exists()
