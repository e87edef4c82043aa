"""`compress` at the level of the store: what is made, what goes, what is refused, and what an interruption leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_cli.backends import NoSpace, Unavailable
from lmcache_cli.backends.fault import CutShort, Fail, Fault, FaultBackend, FaultScript, unavailable
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.store import Refused, Store
from lmcache_cli.store.compress import (
    CompressOptions,
    CompressResult,
    Fate,
    apply_compress,
    plan_compress,
)
from lmcache_cli.store.selection import Selection
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import verify
from lmcache_format.encodings import resolve_encoding
from lmcache_format.names import ShardName
from lmcache_format.shard import ShardHeader, header_bytes, parse_header
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document, put_document, tiny_identity

NUM_CHUNKS = 6
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS + 5)
NUM_SHARDS = NUM_CHUNKS + 1


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store.create(str(root)) as made:
        with made.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
        yield made


def options(codec: str | None = None, **more: object) -> CompressOptions:
    return CompressOptions(encoding=None if codec is None else resolve_encoding(codec), **more)  # type: ignore[arg-type]


def compress(store: Store, codec: str | None = None, **more: object) -> CompressResult:
    return apply_compress(store, plan_compress(store, options(codec, **more)))


def hit(store: Store, *, allow_lossy: bool = False) -> int:
    with store.namespace(KV_IDENTITY, allow_lossy=allow_lossy) as namespace:
        return read_kv(namespace, TOKENS)


def labels(root: Path) -> list[str]:
    """Encodings of the shards on disk."""
    paths = sorted((root / "ns").rglob("*.safetensors"))
    return sorted(ShardName.parse(str(path.relative_to(root))).encoding for path in paths)


def headers(root: Path, label: str) -> list[ShardHeader]:
    found = []
    for path in sorted((root / "ns").rglob(f"*.{label}.safetensors")):
        data = path.read_bytes()
        found.append(parse_header(data[: header_bytes(data)], len(data)))
    return found


def test_raw_becomes_bfx_and_raw_again_bit_by_bit(store: Store, root: Path) -> None:
    before = sum(header.file_bytes for header in headers(root, "raw"))
    result = compress(store)
    assert (result.num_encoded, result.num_removed, result.num_left) == (NUM_SHARDS, NUM_SHARDS, 0)
    assert result.is_whole
    assert (result.source_bytes, result.removed_bytes) == (before, before)
    assert 1.2 < before / result.encoded_bytes < 1.55
    assert labels(root) == ["bfx"] * NUM_SHARDS + ["raw"] * NUM_SHARDS  # marked, not swept
    assert hit(store) == len(TOKENS)
    assert sweep(store, grace_ms=0).num_swept == NUM_SHARDS
    assert labels(root) == ["bfx"] * NUM_SHARDS
    assert hit(store) == len(TOKENS)
    assert verify(store).num_good == NUM_SHARDS
    back = compress(store, "raw")
    assert (back.num_encoded, back.num_removed) == (NUM_SHARDS, NUM_SHARDS)
    sweep(store, grace_ms=0)
    assert labels(root) == ["raw"] * NUM_SHARDS
    assert hit(store) == len(TOKENS)


def test_new_shards_say_what_they_were_made_from(store: Store, root: Path) -> None:
    sources = {header.meta.key: header for header in headers(root, "raw")}
    compress(store)
    for made in headers(root, "bfx"):
        source = sources[made.meta.key]
        assert made.meta.provenance == {
            "checksum": source.header_checksum,
            "encoding": "raw",
            "nonce": source.meta.nonce,
        }
        assert made.meta.nonce != source.meta.nonce
        assert made.decoded_checksums == source.checksums
        assert (made.meta.parent, made.meta.depth, made.meta.producer) == (
            source.meta.parent,
            source.meta.depth,
            source.meta.producer,
        )


def test_a_second_run_has_nothing_to_do(store: Store, root: Path) -> None:
    compress(store)
    segments = sorted(path.name for path in root.rglob("*.lmi"))
    plan = plan_compress(store)
    assert (plan.num_shards, plan.size_bytes, plan.namespaces[0].num_present) == (0, 0, NUM_SHARDS)
    assert apply_compress(store, plan) == CompressResult()
    assert sorted(path.name for path in root.rglob("*.lmi")) == segments


def test_the_plan_changes_nothing_and_estimates_from_a_sample(store: Store, root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    plan = plan_compress(store)
    (one,) = plan.namespaces
    assert (one.num_shards, one.label) == (NUM_SHARDS, "bfx")
    assert one.ratio is not None
    assert 1.2 < one.ratio < 1.55
    assert "without loss" in one.reason
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("codec", ["uq", "int8", "int8huf", "uq:0.12", "uq:fp8-grade", "uq:0.5", "fp8"])
def test_lossy_must_be_allowed_lies_beside_and_is_not_seen(store: Store, root: Path, codec: str) -> None:
    with pytest.raises(Refused, match="lossy"):
        plan_compress(store, options(codec))
    result = compress(store, codec, allow_lossy=True)
    assert (result.num_encoded, result.num_removed) == (NUM_SHARDS, 0)
    sweep(store, grace_ms=0)
    assert labels(root).count("raw") == NUM_SHARDS
    assert hit(store) == len(TOKENS)
    again = compress(store, codec, allow_lossy=True)
    assert (again.num_encoded, again.num_present) == (0, 0)  # nothing planned


def test_without_the_source_only_readers_that_allow_lossy_see_the_chunks(store: Store, root: Path) -> None:
    result = compress(store, "uq", allow_lossy=True, remove_source=True)
    assert result.num_removed == NUM_SHARDS
    assert hit(store) == 0
    sweep(store, grace_ms=0)
    assert labels(root) == ["uq006-near"] * NUM_SHARDS
    assert hit(store) == 0
    with store.namespace(KV_IDENTITY, allow_lossy=True) as namespace:
        _, read = namespace.load(namespace.match(TOKENS))
    assert read.num_tokens == len(TOKENS)


@pytest.mark.parametrize("codec", ["raw", "bfx", "int8"])
def test_a_lossy_source_is_never_encoded_again(store: Store, root: Path, codec: str) -> None:
    compress(store, "uq", allow_lossy=True, remove_source=True)
    sweep(store, grace_ms=0)
    plan = plan_compress(store, options(codec, allow_lossy=True))
    assert (plan.num_shards, plan.namespaces[0].num_lossy) == (0, NUM_SHARDS)
    assert apply_compress(store, plan).num_encoded == 0
    for segment in root.rglob("*.lmi"):  # nor where the index does not tell
        segment.unlink()
    assert compress(store, codec, allow_lossy=True) == CompressResult()
    assert labels(root) == ["uq006-near"] * NUM_SHARDS


def test_random_bits_do_not_shrink_and_stay(root: Path, tmp_path: Path) -> None:
    identity = tiny_identity()
    tokens = document(12)
    with Store.create(str(tmp_path / "other")) as store:
        with store.namespace(identity, create=True) as namespace:
            put_document(namespace, tokens)
        result = compress(store)
        assert (result.num_no_gain, result.num_encoded, result.num_removed) == (3, 0, 0)
        assert result.is_whole
    assert labels(tmp_path / "other") == ["raw"] * 3


def test_filters_choose(store: Store) -> None:
    for selection, count in (
        (Selection(models=("example/kv",)), NUM_SHARDS),
        (Selection(models=("example/*",), encodings=("raw",)), NUM_SHARDS),
        (Selection(models=("other/*",)), 0),
        (Selection(namespaces=(f"{KV_IDENTITY.fingerprint[:4]}*",)), NUM_SHARDS),
        (Selection(namespaces=("zz*",)), 0),
        (Selection(encodings=("bfx",)), 0),
        (Selection(older_than_ms=3_600_000), 0),
        (Selection(unused_for_ms=3_600_000), 0),
        (Selection(older_than_ms=-60_000), NUM_SHARDS),
    ):
        assert plan_compress(store, options(selection=selection)).num_shards == count


def test_no_time_leaves_all_and_says_so(store: Store, root: Path) -> None:
    result = compress(store, max_duration_s=0)
    assert (result.num_encoded, result.num_left, result.is_whole) == (0, NUM_SHARDS, False)
    assert labels(root) == ["raw"] * NUM_SHARDS


def test_a_damaged_source_stays_and_is_told(store: Store, root: Path) -> None:
    path = sorted((root / "ns").rglob("*.safetensors"))[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = compress(store)
    assert (result.num_damaged, result.num_encoded, result.num_removed) == (1, NUM_SHARDS - 1, NUM_SHARDS - 1)
    assert [(one.fate, one.path) for one in result.problems] == [(Fate.DAMAGED, str(path.relative_to(root)))]
    assert not result.is_whole
    sweep(store, grace_ms=0)
    assert path.read_bytes() == data


def test_shards_the_index_lost_are_taken_too(store: Store, root: Path) -> None:
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    result = compress(store)
    assert (result.num_encoded, result.num_removed, result.num_left) == (NUM_SHARDS, NUM_SHARDS, 0)
    sweep(store, grace_ms=0)
    assert labels(root) == ["bfx"] * NUM_SHARDS
    assert hit(store) == len(TOKENS)


def test_a_damaged_target_goes_to_quarantine_and_is_made_again(store: Store, root: Path) -> None:
    compress(store, "bfx", remove_source=False)
    path = sorted((root / "ns").rglob("*.bfx.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-10])
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    result = compress(store)
    assert (result.num_encoded, result.num_present, result.num_quarantined) == (1, NUM_SHARDS - 1, 1)
    assert len(list((root / "quarantine").iterdir())) == 1
    assert hit(store) == len(TOKENS)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failing_place_ends_the_run_and_loses_nothing(root: Path, store: Store, threads: int) -> None:
    chance = random.Random(threads)
    for _ in range(6):
        operation = chance.choice(["put", "read_into", "open_read", "sync_names", "list", "move", "stat"])
        error = chance.choice([unavailable(), NoSpace("full")]) if operation == "put" else unavailable()
        script = FaultScript(Fault(operation, Fail(error), on_call=chance.randint(1, 20)))
        with Store.open(FaultBackend(LocalBackend(str(root)), script)) as faulty:
            result = CompressResult()
            try:
                plan = plan_compress(faulty, options(threads=threads))
                apply_compress(faulty, plan, result)
            except (Unavailable, NoSpace):
                pass
            assert result.num_removed <= result.num_encoded + result.num_present
        assert hit(store) == len(TOKENS)
        sweep(store, grace_ms=0)
        assert hit(store) == len(TOKENS)
    compress(store)
    sweep(store, grace_ms=0)
    assert labels(root) == ["bfx"] * NUM_SHARDS
    assert hit(store) == len(TOKENS)


def test_what_comes_back_short_is_not_used_and_the_source_stays(root: Path, store: Store) -> None:
    script = FaultScript(Fault("read_into", CutShort(4200), name=".bfx."))
    with Store.open(FaultBackend(LocalBackend(str(root)), script)) as faulty:
        result = apply_compress(faulty, plan_compress(faulty, options()))
    assert (result.num_failed, result.num_encoded, result.num_removed) == (NUM_SHARDS, 0, 0)
    assert "did not come back as it was written" in result.problems[0].reason
    assert labels(root) == ["raw"] * NUM_SHARDS
    assert len(list((root / "quarantine").iterdir())) == NUM_SHARDS
    assert hit(store) == len(TOKENS)
