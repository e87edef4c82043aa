"""`stats` and `ls` count from the index: right numbers, told damage, and seconds for a million shards."""

import json
import time

import pytest

from tests.marks import slow_after


def _records(ran):
    return [json.loads(line) for line in ran.lines]


def test_the_numbers_of_a_store(inside, made_store):
    record, summary = _records(inside("stats", "--store", made_store, "--json"))
    shards = [path.stat().st_size for path in made_store.rglob("*.safetensors")]
    assert (
        (record["num_shards"], record["size_bytes"])
        == (len(shards), sum(shards))
        == (5, 5 * 4096 + record["raw_bytes"])
    )
    assert record["bytes_by_part"] == {"l0-2h0-2": sum(shards)}
    assert (record["num_chunks"], record["num_complete_chunks"], record["num_tails"]) == (5, 5, 1)
    assert (record["num_tokens"], record["num_documents"], record["num_segments"]) == (18, 2, 1)
    assert sum(record["chunks_by_last_use"].values()) == 5
    assert (summary["num_incomplete_chunks"], summary["num_damaged"]) == (0, 0)


@pytest.mark.parametrize("command", slow_after(1, ["stats", "ls"]))
def test_a_damaged_index_is_exit_3_and_says_what_to_do(inside, made_store, command):
    (segment,) = made_store.rglob("*.lmi")
    segment.write_bytes(segment.read_bytes()[:-1])
    ran = inside(command, "--store", made_store)
    assert ran.code == 3
    assert b"1 segments of the index are damaged; run 'lmcache repair'" in ran.stderr
    assert inside("repair", "--store", made_store, "--yes").code == 0
    assert inside(command, "--store", made_store).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stats", "ls"])
def test_a_million_shards_take_seconds(lmcache, tmp_path, command):
    """3 s for the whole process is the bar on a quiet machine; this one may be busy."""
    from lmcache_cli.backends import Durability
    from lmcache_cli.store import Store
    from lmcache_format.names import new_ulid, segment_directory
    from lmcache_format.segment import encode_segment
    from tests.store.pattern import tiny_identity
    from tests.store.test_stats import made_segment

    identity = tiny_identity()
    with Store.create(str(tmp_path / "kv")) as store, store.namespace(identity, create=True):
        path = f"{segment_directory(identity.fingerprint)}/{new_ulid(1)}-made.lmi"
        store.backend.put(path, [encode_segment(made_segment(identity, 1_000_000, 20_000))], durability=Durability.NONE)
    started = time.perf_counter()
    ran = lmcache(command, "--store", tmp_path / "kv", "--json")
    elapsed_s = time.perf_counter() - started
    assert (ran.code, _records(ran)[0]["num_shards"]) == (0, 1_000_000)
    assert elapsed_s < 6
