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


def test_a_prune_plans_marks_and_sweeps(lmcache, store):
    everything = ("prune", "--store", store, "--max-size", "1B")
    assert (lmcache(*everything, "--dry-run").code, lmcache(*everything).code, hit(store)) == (0, 2, 40)
    marked = lmcache(*everything, "--yes")
    assert (marked.code, marked.summary["num_marked"], marked.summary["num_waiting"]) == (0, 3, 3)
    assert (hit(store), len(shards(store))) == (0, 3)
    assert lmcache("verify", "--store", store).summary["num_awaiting_sweep"] == 3
    early = lmcache("prune", "--store", store, "--sweep-only")
    assert (early.code, early.summary["num_swept"]) == (0, 0)
    late = lmcache("prune", "--store", store, "--sweep-only", "--grace", "0s")  # as if it were 15 minutes later
    assert (late.code, late.summary["num_swept"], shards(store)) == (0, 3, [])


def test_a_chunk_that_is_wanted_again_before_the_sweep_is_written_anew_and_stays(lmcache, store):
    from lmcache_cli.store import Store

    assert lmcache("prune", "--store", store, "--max-size", "1B", "--yes").code == 0
    with Store.open(str(store)) as opened:
        EXAMPLE["write_document"](opened, "document", DOCUMENT)
    assert lmcache("prune", "--store", store, "--sweep-only", "--grace", "0s").code == 0
    assert hit(store) == 40


def test_pins_hold_against_prune_and_rm_until_they_are_taken_back(lmcache, store):
    everything = ("prune", "--store", store, "--max-size", "1B", "--yes")
    assert lmcache("pin", "--store", store, "--document", "document", "--ttl", "7d").summary["num_chunks"] == 3
    ran = lmcache(*everything)
    assert (ran.code, ran.summary["num_marked"], ran.summary["excess_bytes"] > 0) == (3, 0, True)
    lmcache("rm", "--store", store, IDENTITY.fingerprint[:6], "--yes")
    assert hit(store) == 40
    assert lmcache("unpin", "--store", store, "--document", "document").summary["num_pins"] == 1
    assert (lmcache(*everything).code, hit(store)) == (0, 0)


@pytest.mark.parametrize("stays", [0, 16])
def test_rm_takes_a_namespace_or_a_chunk_with_all_after_it(lmcache, store, stays):
    from lmcache_format import next_key, root_key

    second = next_key(next_key(root_key(IDENTITY.fingerprint), DOCUMENT[:16]), DOCUMENT[16:32])
    target = second.hex()[:12] if stays else IDENTITY.fingerprint[:6]
    assert lmcache("rm", "--store", store, target).code == 2
    assert hit(store) == 40
    gone = lmcache("rm", "--store", store, target, "--yes", "--wait", "--grace", "0s")
    assert (gone.code, gone.summary["num_swept"]) == (0, 2 if stays else 3)
    assert (hit(store), len(shards(store))) == (stays, stays // 16)


def test_rm_of_a_tenant_leaves_the_others(lmcache, store):
    ran = lmcache("rm", "--store", store, "--salt", "tenant-7", "--yes", "--wait", "--grace", "0s")
    assert (ran.code, ran.summary["num_marked"], hit(store)) == (0, 0, 40)


def test_compress_with_loss_leaves_exact_shards_to_those_who_want_them(lmcache, tmp_path):
    from lmcache_cli.store import Store
    from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
    from tests.store.pattern import document

    folder, tokens = tmp_path / "kv", document(2 * CHUNK_TOKENS)
    with Store.create(str(folder)) as made, made.namespace(KV_IDENTITY, create=True) as namespace:
        put_kv(namespace, tokens)
    lossy = ("compress", "--store", folder, "--codec", "uq")
    assert lmcache(*lossy).code == 2
    assert lmcache(*lossy, "--lossy").summary["num_encoded"] == 2
    named = {row["encoding"] for row in lmcache("ls", "--store", folder, KV_IDENTITY.fingerprint).records[:-1]}
    assert named == {"raw", "uq006-near"}
    assert lmcache("compress", "--store", folder).summary["num_encoded"] == 2
    assert lmcache("prune", "--store", folder, "--sweep-only", "--grace", "0s").summary["num_swept"] == 2
    assert lmcache("compress", "--store", folder, "--codec", "raw").summary["num_encoded"] == 2
    with Store.open(str(folder)) as opened, opened.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, tokens) == len(tokens)


def test_migrate_moves_to_a_store_and_to_nothing_else(lmcache, store, tmp_path):
    target = tmp_path / "target"
    move = ("migrate", store, target, "--delete-source")
    assert (lmcache(*move).code, target.exists(), hit(store)) == (10, False, 40)
    assert lmcache("init", "--store", target).code == 0
    done = lmcache(*move)
    assert (done.code, done.summary["num_copied"], done.summary["num_deleted"]) == (0, 3, 3)
    assert (hit(store), hit(target), shards(store)) == (0, 40, [])
    assert lmcache("migrate", target, store, "--filter", "model=example/*").summary["num_copied"] == 3
    assert hit(store) == 40


def test_a_copy_of_a_store_is_not_migrated_into_it(lmcache, store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    assert lmcache("migrate", tmp_path / "copy", store).code == 2


def test_urls_without_a_back_end_end_with_13(lmcache):
    assert lmcache("ls", "--store", "nowhere://bucket/kv").code == 13
