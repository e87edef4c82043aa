"""The recipes of docs/cookbook.md that lose, move or damage files, on a small store, with the real command line."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "write_and_read.py"))
IDENTITY, DOCUMENT = EXAMPLE["IDENTITY"], list(range(100, 140))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three chunks of the example's document: 16, 16 and 8 tokens."""
    from lmcache_cli.store import Store

    folder = tmp_path / "kv"
    with Store.create(str(folder)) as made:
        EXAMPLE["write_document"](made, "document", DOCUMENT)
    return folder


def hit(folder: Path) -> int:
    """Tokens of the document that can be read."""
    from lmcache_cli.store import Store

    with Store.open(str(folder)) as opened, opened.namespace(IDENTITY) as namespace:
        return namespace.load(namespace.match(DOCUMENT))[1].num_tokens


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("ns/**/*.safetensors"))


def flip_a_bit(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_without_an_index_full_chunks_are_still_found(store):
    for segment in store.rglob("*.lmi"):
        segment.unlink()
    assert hit(store) == 32


def test_repair_lists_again_what_a_lost_index_knew(lmcache, store):
    for segment in store.rglob("*.lmi"):
        segment.unlink()
    assert lmcache("repair", "--store", store, "--dry-run").code == 0
    assert lmcache("repair", "--store", store).code == 2
    done = lmcache("repair", "--store", store, "--yes")
    assert (done.code, done.summary["num_adopted"]) == (0, 3)
    assert lmcache("verify", "--store", store, "--quick").summary["num_indexed"] == 3
    assert hit(store) == 40


def test_a_damaged_index_is_written_anew_from_the_headers(lmcache, store):
    for segment in store.rglob("*.lmi"):
        segment.write_bytes(segment.read_bytes()[:-5])
    assert lmcache("repair", "--store", store, "--deep", "--yes").code == 0
    assert lmcache("verify", "--store", store).code == 0
    assert hit(store) == 40


def test_quick_finds_missing_and_cut_files(lmcache, store):
    missing, cut, _ = shards(store)
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-100])
    ran = lmcache("verify", "--store", store, "--quick")
    assert (ran.code, ran.summary["num_missing"], ran.summary["num_damaged"]) == (3, 1, 1)


def test_a_flipped_bit_in_the_data_is_reported_and_moved_aside_by_repair(lmcache, store):
    victim = shards(store)[0]
    flip_a_bit(victim)
    assert lmcache("verify", "--store", store, "--headers").code == 0  # headers are sound: only data tells
    found = lmcache("verify", "--store", store)
    finding = found.records[0]
    assert (found.code, finding["kind"]) == (3, "damaged")
    assert "data checksum" in str(finding["reason"])
    assert store / str(finding["path"]) == victim

    assert lmcache("repair", "--store", store, "--yes").code == 0  # does not read data
    assert victim.exists()
    done = lmcache("repair", "--store", store, "--read-data", "--yes")
    assert (done.code, done.summary["num_quarantined"]) == (0, 1)
    assert not victim.exists()
    assert [path.name.endswith(victim.name) for path in (store / "quarantine").iterdir()] == [True]
    assert lmcache("verify", "--store", store).code == 0


def test_a_reader_moves_a_damaged_shard_to_quarantine(lmcache, store):
    flip_a_bit(shards(store)[0])
    assert hit(store) < 40
    assert len(list((store / "quarantine").iterdir())) == 1
    assert lmcache("verify", "--store", store).code == 0


def test_a_moved_store_answers_under_its_new_path(lmcache, store, tmp_path):
    elsewhere = tmp_path / "fast" / "kv"
    elsewhere.parent.mkdir()
    store.rename(elsewhere)
    assert lmcache("verify", "--store", elsewhere, "--quick").code == 0
    assert hit(elsewhere) == 40
    assert lmcache("ls", "--store", store).code == 10


def test_a_copy_that_lacks_shards_is_made_to_agree(lmcache, store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shards(copy)[1].unlink()  # written after the copy had passed by
    assert lmcache("repair", "--store", copy, "--yes").code == 0
    assert lmcache("verify", "--store", copy).code == 0
    assert hit(store) == 40


def test_a_copy_that_lacks_index_segments_has_all_after_a_repair(lmcache, store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.lmi"))
    assert hit(copy) == 32
    assert lmcache("repair", "--store", copy, "--yes").code == 0
    assert hit(copy) == 40


def test_chunks_of_one_store_join_another(lmcache, store, tmp_path):
    from lmcache_cli.store import Store

    target = tmp_path / "target"
    with Store.create(str(target)) as made:
        EXAMPLE["write_document"](made, "beginning", DOCUMENT[:16])
    for path in store.rglob("ns/**/*"):
        copied = target / path.relative_to(store)
        if path.is_file() and not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copied)
    assert lmcache("repair", "--store", target, "--yes").code == 0
    assert lmcache("verify", "--store", target).code == 0
    assert hit(target) == 40


def test_a_namespace_deleted_by_hand_leaves_a_sound_store(lmcache, store):
    shutil.rmtree(store / "ns" / IDENTITY.fingerprint)
    ran = lmcache("verify", "--store", store)
    assert (ran.code, ran.summary["num_listed"]) == (0, 0)


def test_a_shard_deleted_by_hand_is_dropped_by_repair(lmcache, store):
    shards(store)[0].unlink()
    assert lmcache("verify", "--store", store, "--quick").code == 3
    assert lmcache("repair", "--store", store, "--yes").code == 0
    assert lmcache("verify", "--store", store).code == 0


def test_a_superblock_from_a_copy_brings_a_store_back(lmcache, store, tmp_path):
    kept = tmp_path / "kept.json"
    shutil.move(store / "store.000001.json", kept)
    assert lmcache("ls", "--store", store).code == 10
    shutil.copy(kept, store / "store.000001.json")
    assert hit(store) == 40


def test_urls_without_a_back_end_end_with_13(lmcache):
    assert lmcache("ls", "--store", "nowhere://bucket/kv").code == 13
