"""The golden store of every release is read in full, by this package and by stock safetensors."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard

from lmcache_format import ChunkKey, Dtype, Extra, Fingerprint, Identity, chunk_keys, next_key, root_key
from lmcache_format.checksums import crc32c, xxh3
from lmcache_format.names import (
    SegmentName,
    ShardName,
    identity_path,
    parse_identity_path,
    parse_superblock_path,
)
from lmcache_format.segment import AddFlags, RemoveFlags, Segment, decode_segment, key_number
from lmcache_format.shard import ShardHeader, header_bytes, parse_header
from lmcache_format.superblock import Operation, Superblock
from tests.format.judge import decoded, judge

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "format" / "golden"
RELEASES = sorted(path.name for path in GOLDEN.glob("v1-by-*"))
STORES = [GOLDEN / release / "store" for release in RELEASES]
SHARDS = [path for store in STORES for path in sorted(store.rglob("*.safetensors"))]
IN_NUMPY = {Dtype.F16: np.float16, Dtype.F32: np.float32, Dtype.U8: np.uint8, Dtype.I8: np.int8}


def shard_id(path: Path) -> str:
    return f"{path.parts[-5][:8]}/{path.name[:8]}{path.name[64:]}"


def expected_namespaces(release: str) -> list[dict[str, Any]]:
    spaces: list[dict[str, Any]] = json.loads((GOLDEN / release / "expected.json").read_text("utf-8"))["namespaces"]
    return spaces


def header_of(file: bytes) -> ShardHeader:
    return parse_header(file[: header_bytes(file)], len(file))


def test_there_are_golden_stores() -> None:
    assert "v1-by-0.1.0" in RELEASES
    dtypes = {header_of(path.read_bytes()).meta.dtype for path in SHARDS}
    assert dtypes == set(Dtype)
    assert any(header_of(path.read_bytes()).tensor_checksums for path in SHARDS)
    folders = (*(GOLDEN / release for release in RELEASES), GOLDEN / "corrupt")
    assert sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()) < 1_500_000


def test_the_files_are_those_that_make_golden_makes() -> None:
    loader = importlib.machinery.SourceFileLoader("make_golden", str(ROOT / "scripts" / "make_golden"))
    spec = importlib.util.spec_from_loader("make_golden", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    made = module.all_files()
    assert made == module.all_files()
    if ".".join(map(str, zstandard.ZSTD_VERSION)) != module.ZSTD_VERSION:
        pytest.skip(f"another zstd compresses to other bytes: {zstandard.ZSTD_VERSION}")
    assert module.stale_files(made, GOLDEN) == []


@pytest.mark.parametrize("store", STORES, ids=RELEASES)
def test_every_file_of_the_store_is_sound(store: Path) -> None:
    identities = {
        path.parent.name: Identity.from_json(path.read_bytes(), parse_identity_path(path.relative_to(store).as_posix()))
        for path in store.glob("ns/*/ns.json")
    }
    for path in store.rglob("*"):
        name = path.relative_to(store).as_posix()
        if path.is_file() and name != "CACHEDIR.TAG":
            assert all(set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-") for part in name.split("/"))
            identity = identities.get(name.split("/")[1]) if "/" in name else next(iter(identities.values()))
            assert identity is not None
            assert judge(name, path.read_bytes(), identity) is None, name


@pytest.mark.parametrize("release", RELEASES)
def test_identities_and_keys_are_the_expected_ones(release: str) -> None:
    for space in expected_namespaces(release):
        path = GOLDEN / release / "store" / identity_path(Fingerprint(space["fingerprint"]))
        identity = Identity.from_json(path.read_bytes())
        assert identity.to_dict() == space["identity"]
        assert identity.fingerprint == space["fingerprint"]
        for sequence in space["sequences"]:
            assert [key.hex() for key in sequence_keys(identity, sequence)] == sequence["keys"]


def sequence_keys(identity: Identity, sequence: dict[str, Any]) -> list[ChunkKey]:
    """Keys of a golden sequence, tail included, by the rule that `format/golden/README.md` tells."""
    tokens = [(1009 * sequence["seed"] + 7919 * i) % 49_152 for i in range(sequence["tokens"])]
    size = identity.chunk_tokens
    extras = [Extra(each["tag"], bytes.fromhex(each["payload"])) for each in sequence["extras"]]
    parent = root_key(identity.fingerprint, sequence["salt"])
    keys = list(chunk_keys(parent, tokens, size, [extras, *([()] * (len(tokens) // size))]))
    if len(tokens) % size:
        keys.append(next_key(keys[-1] if keys else parent, tokens[len(tokens) // size * size :]))
    return keys


@pytest.mark.parametrize("release", RELEASES)
def test_shards_hold_what_is_expected(release: str) -> None:
    for space in expected_namespaces(release):
        for shard in space["shards"]:
            file = (GOLDEN / release / "store" / shard["path"]).read_bytes()
            header = header_of(file)
            meta = header.meta
            assert len(file) == shard["file_bytes"] == header.file_bytes
            assert crc32c(file) == shard["crc32c"]
            assert (meta.nonce, meta.depth, meta.num_tokens) == (shard["nonce"], shard["depth"], shard["num_tokens"])
            assert meta.parent.hex() == shard["parent"]
            assert hashlib.sha256(decoded(header, file[header.data_start :])).hexdigest() == shard["raw_sha256"]


@pytest.mark.parametrize("path", SHARDS, ids=shard_id)
def test_checksums_of_whole_tensors_are_those_of_the_tensors(path: Path) -> None:
    header = header_of(path.read_bytes())
    if header.tensor_checksums:
        assert header.tensor_checksums == b"".join(map(xxh3, stored_bytes(path).values()))


@pytest.mark.parametrize("release", RELEASES)
def test_segments_say_what_is_expected(release: str) -> None:
    store = GOLDEN / release / "store"
    for space in expected_namespaces(release):
        names = [path.relative_to(store).as_posix() for path in store.glob(f"ns/{space['fingerprint']}/m/*.lmi")]
        segments = {SegmentName.parse(name).file_name: decode_segment((store / name).read_bytes()) for name in names}
        removed = {int(row["nonce"]): row for segment in segments.values() for row in segment.removes}
        listed = {name for segment in segments.values() for name in shards_listed(store, segment, removed)}
        marked, swept = set(space.get("marked", ())), set(space.get("swept", ()))
        assert listed == {shard["path"] for shard in space["shards"]} - marked
        assert sum(bool(row["flags"] & RemoveFlags.SWEPT) for row in removed.values()) == len(swept)
        assert len(removed) == len(marked) + len(swept)
        touches: dict[str, list[int]] = {}
        for segment in segments.values():
            for row in segment.touches:
                day, hits = touches.get(f"{row['key']:016x}", (0, 0))
                touches[f"{row['key']:016x}"] = [max(day, int(row["day"])), max(hits, int(row["hits"]))]
        assert touches == space.get("touches", {})
        assert {old for segment in segments.values() for old in segment.supersedes} <= set(segments)


def shards_listed(store: Path, segment: Segment, removed: dict[int, Any]) -> list[str]:
    """Paths of the adds of `segment` whose nonce is not removed; 128 bits of a key are enough to find its file."""
    paths = []
    for number, row in zip(segment.keys, segment.adds, strict=True):
        if int(row["nonce"]) not in removed:
            prefix = f"{number:016x}{row['key_rest']:016x}"
            tail = f"{segment.parts[row['part']]}.{segment.encodings[row['encoding']]}.safetensors"
            directory = f"ns/{segment.fingerprint}/c/{prefix[:2]}/{prefix[2:4]}"
            (found,) = (store / directory).glob(f"{prefix}*.{tail}")
            file = found.read_bytes()
            assert len(file) == row["size_bytes"]
            assert not row["flags"] & AddFlags.HAS_CRC32C or crc32c(file) == row["crc32c"]
            assert key_number(header_of(file).meta.parent) == row["parent"]
            paths.append(f"{directory}/{found.name}")
    return paths


@pytest.mark.parametrize("store", STORES, ids=RELEASES)
def test_the_superblock_allows_everything(store: Path) -> None:
    for path in store.glob("store.*.json"):
        block = Superblock.from_json(path.read_bytes(), parse_superblock_path(path.name))
        for operation in Operation:
            block.check(operation)


def stored_bytes(path: Path) -> dict[str, bytes]:
    """Stored bytes of every tensor by this package's own header parser."""
    file = path.read_bytes()
    header = header_of(file)
    data = file[header.data_start :]
    return {tensor.spec.name: data[tensor.begin : tensor.end] for tensor in header.tensors}


@pytest.mark.parametrize("path", SHARDS, ids=shard_id)
def test_stock_safetensors_opens_every_shard_in_torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    meta = header_of(path.read_bytes()).meta
    assert metadata["lmcache.key"] == ShardName.parse("/".join(path.parts[-6:])).key.hex() == meta.key.hex()
    assert {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in found.items()
    } == stored_bytes(path)
    if meta.encoding.name == "raw":
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {s.name: s.shape for s in meta.specs}


def stored_dtype(path: Path) -> Dtype:
    meta = header_of(path.read_bytes()).meta
    return meta.dtype if meta.encoding.name == "raw" else Dtype.U8


@pytest.mark.parametrize("path", [path for path in SHARDS if stored_dtype(path) in IN_NUMPY], ids=shard_id)
def test_stock_safetensors_opens_shards_in_numpy_where_numpy_has_the_dtype(path: Path) -> None:
    found = safetensors.numpy.load_file(path)
    assert {array.dtype for array in found.values()} == {np.dtype(IN_NUMPY[stored_dtype(path)])}
    assert {name: array.tobytes() for name, array in found.items()} == stored_bytes(path)


@pytest.mark.parametrize("path", SHARDS, ids=shard_id)
def test_stock_safetensors_deserializes_every_shard_without_numpy_or_torch(path: Path) -> None:
    found = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    assert {name: bytes(entry["data"]) for name, entry in found.items()} == stored_bytes(path)


@pytest.mark.parametrize("path", SHARDS, ids=shard_id)
def test_a_plain_json_reader_finds_the_tensors(path: Path) -> None:
    file = path.read_bytes()
    (size,) = struct.unpack_from("<Q", file)
    assert (8 + size) % 4096 == 0
    table = json.loads(file[8 : 8 + size])
    del table["__metadata__"]
    begins = [entry["data_offsets"] for entry in table.values()]
    assert begins[0][0] == 0
    assert begins[-1][1] == len(file) - 8 - size
    assert all(one[1] == other[0] for one, other in pairwise(begins))
