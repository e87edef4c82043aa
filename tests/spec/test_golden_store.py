"""The store that a release wrote is opened, matched, read and verified by this one: what was there is what is found."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.store import ChunkBuffer, Match, Namespace, Store
from lmcache_cli.store.verify import Level, VerifyOptions, verify
from lmcache_format import Dtype, Part, TensorSpec
from lmcache_format.keys import MultimodalItem
from lmcache_format.names import ShardName
from lmcache_format.segment import RemoveFlags
from lmcache_format.superblock import Operation

GOLDEN = Path(__file__).resolve().parents[2] / "format" / "golden"
RELEASES = sorted(path.name for path in GOLDEN.glob("v1-by-*"))
SIDES = {"k": 0, "v": 1, "latent": 2}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(release: str, tmp_path: Path) -> Path:
    """A copy of a golden store, which reading may add to."""
    return Path(shutil.copytree(GOLDEN / release / "store", tmp_path / "store"))


def described(release: str) -> list[dict[str, Any]]:
    spaces: list[dict[str, Any]] = json.loads((GOLDEN / release / "expected.json").read_text("utf-8"))["namespaces"]
    return spaces


def opened(store: Store, told: dict[str, Any], need: Part | None = None) -> Namespace:
    identity = store.identity(told["fingerprint"])
    assert identity.to_dict() == told["identity"]
    return store.namespace(identity, need=need, allow_unverified=True)


def live_shards(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Shards that readers find, by path."""
    return {one["path"]: one for one in told["shards"] if one["path"] not in told.get("marked", ())}


def tokens_of(sequence: dict[str, Any]) -> list[int]:
    return [(1009 * sequence["seed"] + 7919 * i) % 49_152 for i in range(sequence["tokens"])]


def items_of(sequence: dict[str, Any]) -> list[MultimodalItem]:
    """Pictures by the extras of the first chunk; the golden sequences have no others."""
    items = []
    for extra in sequence["extras"]:
        payload = bytes.fromhex(extra["payload"])
        assert extra["tag"] == 1
        items.append(MultimodalItem(*struct.unpack_from("<qI", payload), payload[12:].decode("utf-8")))
    return items


def matched(space: Namespace, sequence: dict[str, Any], more: list[int]) -> Match:
    return space.match([*tokens_of(sequence), *more], salt=sequence["salt"], items=items_of(sequence))


def expected_tokens(told: dict[str, Any], sequence: dict[str, Any]) -> int:
    """Tokens of the first chunks that have a live shard; golden chunks are live in whole or not at all."""
    live = {ShardName.parse(path).key.hex() for path in live_shards(told)}
    count = next((i for i, key in enumerate(sequence["keys"]) if key not in live), len(sequence["keys"]))
    return min(int(sequence["tokens"]), count * int(told["identity"]["chunk_tokens"]))


def golden_values(dtype: Dtype, spec: TensorSpec, part: Part, tokens: list[int], start: int) -> bytes:
    """Bits of one tensor by the rule of `format/golden/README.md`."""
    wrap = np.uint64(131)
    heads = np.arange(part.head_start or 0, part.head_stop or 1, dtype=np.uint64)[:, None, None]
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)[None, :, None]
    dims = np.arange(spec.shape[-1], dtype=np.uint64)[None, None, :]
    n = positions * wrap + np.array(tokens, np.uint64)[None, :, None]
    for place in (np.uint64(spec.layer), np.uint64(SIDES[spec.side]), heads, dims):
        n = n * wrap + place
    m = n * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
    sign, e, f = m >> np.uint64(31), m >> np.uint64(28) & np.uint64(7), m & np.uint64(0x7FFFFF)
    u = np.uint64
    bits = {
        Dtype.BF16: sign << u(15) | (u(120) + e) << u(7) | f >> u(16),
        Dtype.F16: sign << u(15) | (u(10) + e) << u(10) | f >> u(13),
        Dtype.F32: sign << u(31) | (u(120) + e) << u(23) | f,
        Dtype.F8_E4M3: sign << u(7) | f % u(127),
        Dtype.F8_E5M2: sign << u(7) | f % u(124),
        Dtype.U8: m >> u(24),
        Dtype.I8: m >> u(24),
    }[dtype]
    return bits.astype(f"<u{dtype.itemsize}").tobytes()


def check_values(buffer: ChunkBuffer, tokens: list[int], start: int) -> None:
    own = tokens[start : start + buffer.num_tokens]
    for spec in buffer.specs:
        expected = golden_values(buffer.identity.dtype, spec, buffer.part, own, start)
        assert buffer.tensors[spec.name].tobytes() == expected, spec.name


def test_every_operation_is_allowed_and_nothing_is_wrong(root: Path, release: str) -> None:
    spaces = described(release)
    for operation in Operation:
        with Store.open(str(root), operation) as store:
            assert set(store.fingerprints()) == {told["fingerprint"] for told in spaces}
    with Store.open(str(root)) as store:
        for level in Level:
            report = verify(store, VerifyOptions(level=level))
            assert (report.is_sound, report.findings) == (True, [])
            assert report.num_namespaces == len(spaces)
            assert report.num_listed == sum(len(told["shards"]) for told in spaces)
            assert report.num_indexed == report.num_good == sum(len(live_shards(told)) for told in spaces)
            assert report.num_awaiting_sweep == sum(len(told.get("marked", ())) for told in spaces)
        assert report.listed_bytes == sum(one["file_bytes"] for told in spaces for one in told["shards"])


def test_the_index_says_what_is_told(root: Path, release: str) -> None:
    with Store.open(str(root)) as store:
        for told in described(release):
            shards = {one["path"]: one for one in told["shards"]}
            with opened(store, told) as space:
                state = space.state()
            entries = [state.entry(row) for row in range(len(state))]
            found = {(entry.key.hex(), str(entry.part), entry.encoding): entry for entry in entries}
            names = {path: ShardName.parse(path) for path in live_shards(told)}
            expected = {(n.key.hex()[:32], str(n.part), n.encoding): shards[path] for path, n in names.items()}
            assert set(found) == set(expected)
            for name, one in expected.items():
                entry = found[name]
                assert (entry.nonce, entry.depth, entry.num_tokens) == (one["nonce"], one["depth"], one["num_tokens"])
                assert f"{entry.parent:016x}" == one["parent"][:16]
                assert entry.size_bytes == one["file_bytes"]
                assert entry.crc32c in (None, one["crc32c"])
            marked = {int(shards[path]["nonce"], 16) for path in told.get("marked", ())}
            swept = (state.removes["flags"] & RemoveFlags.SWEPT) != 0
            assert set(state.removes["nonce"][~swept].tolist()) == marked
            assert int(swept.sum()) == len(told.get("swept", ()))
            touches = {f"{row['key']:016x}": [int(row["day"]), int(row["hits"])] for row in state.touches}
            assert touches == told.get("touches", {})
            labels = {one.key.hex(): one.name.encode("utf-8", "backslashreplace").decode() for one in state.labels}
            assert labels == told.get("labels", {})


@pytest.mark.parametrize("more", [[], [1, 2, 3]], ids=["the-sequence", "a-longer-prompt"])
def test_sequences_are_matched_and_read_to_the_last_bit(root: Path, release: str, more: list[int]) -> None:
    with Store.open(str(root)) as store:
        for told in described(release):
            with opened(store, told) as space:
                for sequence in told["sequences"]:
                    match = matched(space, sequence, more)
                    assert match.num_tokens == expected_tokens(told, sequence)
                    keys = [chunk.key.hex() for chunk in match.chunks()]
                    assert keys == sequence["keys"][: len(keys)]
                    buffers, result = space.load(match)
                    assert (result.num_tokens, result.num_chunks, result.fault) == (match.num_tokens, len(keys), None)
                    for chunk, buffer in zip(match.chunks(), buffers, strict=True):
                        check_values(buffer, tokens_of(sequence), chunk.depth * space.identity.chunk_tokens)


@pytest.mark.parametrize("gone", [None, "raw"], ids=["all-shards", "without-the-raw-ones"])
def test_every_shard_is_read_through_the_store(root: Path, release: str, gone: str | None) -> None:
    """Each part by a reader that needs just that, the encoded ones also where the raw one beside them is gone."""
    with Store.open(str(root)) as store:
        for told in described(release):
            shards = live_shards(told)
            chunks = {key: (sequence, i) for sequence in told["sequences"] for i, key in enumerate(sequence["keys"])}
            encoded = [ShardName.parse(path) for path in shards if ".raw." not in path]
            chosen = [ShardName.parse(path) for path in shards] if gone is None else encoded
            if gone is not None:
                for name in encoded:
                    (root / name.path.replace(f".{name.encoding}.", f".{gone}.")).unlink()
            for name in chosen:
                sequence, index = chunks[name.key.hex()]
                with opened(store, told, need=name.part) as space:
                    buffers, result = space.load(matched(space, sequence, []))
                    assert result.num_chunks > index
                    digest = hashlib.sha256(buffers[index].memory).hexdigest()
                    assert digest == shards[name.path]["raw_sha256"]


def test_what_was_removed_is_a_miss_though_its_file_is_there(root: Path, release: str) -> None:
    """The file of a marked shard is still there; its nonce keeps readers from taking it for one nobody listed."""
    with Store.open(str(root)) as store:
        for told in described(release):
            for path in told.get("marked", ()):
                assert (root / path).is_file()
                key = ShardName.parse(path).key.hex()
                sequence = next(one for one in told["sequences"] if key in one["keys"])
                with opened(store, told) as space:
                    assert key not in {chunk.key.hex() for chunk in matched(space, sequence, []).chunks()}


def test_a_golden_store_can_be_read_when_its_index_is_lost(root: Path, release: str) -> None:
    """Full chunks are found by their names. Tails are not, since only the manifest lists what follows a chunk."""
    with Store.open(str(root)) as store:
        for told in described(release):
            if "marked" in told:
                continue
            shutil.rmtree(root / "ns" / told["fingerprint"] / "m")
            size = told["identity"]["chunk_tokens"]
            with opened(store, told) as space:
                for sequence in told["sequences"]:
                    assert matched(space, sequence, []).num_tokens == expected_tokens(told, sequence) // size * size
