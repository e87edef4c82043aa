"""SPEC.md says enough to read a store: a reader that was written from it alone reads all that `format/golden` holds."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import crc32c as crc32c_package
import pytest
import xxhash
import zstandard

from tests.spec.independent_reader import encodings, identity, keys, names, segment, shard, zstd
from tests.spec.independent_reader.checksums import crc32c, xxh3_128, xxh64
from tests.spec.independent_reader.refusals import Reason, Refused
from tests.spec.independent_reader.store import Store, open_store

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "format" / "golden"
CORRUPT = GOLDEN / "corrupt"
RELEASES = sorted(path.name for path in GOLDEN.glob("v1-by-*"))
CASES = sorted(path.name for path in CORRUPT.iterdir() if path.is_dir())
ENCODINGS = sorted(path.stem for path in (GOLDEN / "encodings").glob("*.json"))
STEPS = {"header": range(1, 7), "name": (7,), "identity": (8,), "encoding": (10,), "data": (11,), "decode": (12,)}
"""Checks of SPEC §8.5 by the name that a corrupt shard's description gives them."""


def golden(release: str) -> tuple[Store, list[dict[str, Any]]]:
    """A golden store, and what its description says of each namespace."""
    expected = json.loads((GOLDEN / release / "expected.json").read_text("utf-8"))
    return open_store(GOLDEN / release / "store"), expected["namespaces"]


def sequence(told: dict[str, Any]) -> tuple[list[int], keys.Extras]:
    """Token ids and extras of a golden sequence, by the rule of `format/golden/README.md`."""
    pairs = [(extra["tag"], bytes.fromhex(extra["payload"])) for extra in told["extras"]]
    tokens = [(1009 * told["seed"] + 7919 * i) % 49_152 for i in range(told["tokens"])]
    return tokens, lambda begin, end: keys.extras(pairs) if begin == 0 else b""


# ---- primitives ---------------------------------------------------------------------------------------------------


def test_the_reader_imports_nothing_but_the_standard_library() -> None:
    for path in (Path(__file__).parent / "independent_reader").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [] if node.level == 1 else [node.module or ""]
            else:
                continue
            assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names, path.name


def test_xxh3_128_has_the_digest_that_the_text_gives() -> None:
    assert xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_xxh3_128_agrees_with_xxhash_at_every_length() -> None:
    data = random.Random(1).randbytes(70_000)
    for size in [*range(2049), 3071, 3072, 3073, 4096, 65_535, 65_536, 70_000]:
        assert xxh3_128(data[:size]) == xxhash.xxh3_128(data[:size]).digest(), size


def test_crc32c_and_xxh64_agree_with_other_implementations() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    data = random.Random(2).randbytes(400)
    for size in range(len(data)):
        assert crc32c(data[:size]) == crc32c_package.crc32c(data[:size])
        assert xxh64(data[:size]) == xxhash.xxh64(data[:size]).intdigest()


def zstd_contents(size: int) -> list[bytes]:
    """Data that makes zstd use stored, repeated, Huffman-coded and matched blocks."""
    rng = random.Random(size)
    return [
        rng.randbytes(size),
        bytes(size),
        bytes(int(abs(rng.gauss(0, 6))) % 256 for _ in range(size)),
        (b"a store of prefixes of prompts, " * size)[:size],
        bytes(rng.choice(b"abcdefgh") for _ in range(size)),
    ]


@pytest.mark.parametrize("size", [1, 7, 300, 4000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_zstd_frames_of_every_kind_are_decoded(size: int) -> None:
    for content in zstd_contents(size):
        for level in (1, 3, 19, -5):
            packed = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(content)
            assert zstd.decompress(packed, size) == content


def test_zstd_frames_that_are_not_alone_or_not_as_agreed_are_refused() -> None:
    content = zstd_contents(500)[2]
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    frames = [packed + b"\0", packed + packed, packed + skippable, skippable + packed, packed[:-1], b""]
    frames.append(zstandard.ZstdCompressor(write_checksum=False).compress(content))
    frames.append(zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(content))
    for frame in frames:
        with pytest.raises(Refused):
            zstd.decompress(frame, 500)
    for size in (499, 501):
        with pytest.raises(Refused):
            zstd.decompress(packed, size)


# ---- golden files -------------------------------------------------------------------------------------------------


def test_golden_keys_follow_from_the_rule() -> None:
    told = json.loads((GOLDEN / "keys.json").read_text("utf-8"))
    tokens = [(1009 + 7919 * i) % 49_152 for i in range(600)]
    fingerprint = told["fingerprint"]
    chain = keys.chain(keys.root(fingerprint), tokens, told["chunk_tokens"])
    salted = keys.root(fingerprint, "a")
    picture = keys.multimodal([(4, 6, "sha256:picture")])
    found = {
        "root": keys.root(fingerprint),
        "root_with_salt_a": salted,
        "root_with_salt_é": keys.root(fingerprint, "é"),
        **dict(zip(("chunk_0", "chunk_1", "tail_of_88"), chain, strict=True)),
        "chunk_0_with_salt_a": keys.chain(salted, tokens[:256], 256)[0],
        "chunk_0_with_picture": keys.chain(keys.root(fingerprint), tokens[:256], 256, picture)[0],
    }
    assert {name: key.hex() for name, key in found.items()} == {name: told[name] for name in found}
    assert len(found) == len(told) - 3


@pytest.mark.parametrize("release", RELEASES)
def test_identities_shards_and_the_manifest_are_as_told(release: str) -> None:
    store, spaces = golden(release)
    assert not store.refused
    assert set(store.namespaces) == {told["fingerprint"] for told in spaces}
    for told in spaces:
        space = store.namespaces[told["fingerprint"]]
        assert space.identity.value == told["identity"]
        assert not space.refused
        shards = {entry["path"]: entry for entry in told["shards"]}
        assert {name.path() for name in space.shard_files()} == set(shards)
        present = space.present()
        assert set(present) == set(shards) - set(told.get("marked", ()))
        for path, entry in shards.items():
            data = (store.root / path).read_bytes()
            header = space.header(path, data)
            assert (len(data), crc32c(data)) == (entry["file_bytes"], entry["crc32c"])
            assert (header.depth, header.num_tokens) == (entry["depth"], entry["num_tokens"])
            assert (header.nonce, header.parent.hex()) == (entry["nonce"], entry["parent"])
            raw = b"".join(space.read_shard(path).values())
            assert hashlib.sha256(raw).hexdigest() == entry["raw_sha256"]
            if path in present:
                add = present[path]
                assert (add.nonce, add.parent) == (header.nonce, header.parent[:8])
                assert (add.depth, add.num_tokens, add.created_ms) == (header.depth, header.num_tokens, header.created)
                assert add.size_bytes == len(data)
                assert add.crc32c in (None, entry["crc32c"])


@pytest.mark.parametrize("release", RELEASES)
def test_removes_touches_labels_and_superseded_segments_are_as_told(release: str) -> None:
    store, spaces = golden(release)
    for told in spaces:
        space = store.namespaces[told["fingerprint"]]
        nonces = {entry["path"]: entry["nonce"] for entry in told["shards"]}
        removed = space.state.removed
        assert {nonces[path] for path in told.get("marked", ())} == {
            n for n, (_, flags) in removed.items() if not flags
        }
        assert sum(flags == segment.SWEPT for _, flags in removed.values()) == len(told.get("swept", ()))
        touches = {key.hex(): list(touch) for key, touch in space.state.touches.items()}
        assert touches == told.get("touches", {})
        labels = {key: name.encode("utf-8", "backslashreplace").decode() for name, key in space.state.labels}
        assert labels == told.get("labels", {})
        superseded = {old for one in space.segments.values() for old in one.supersedes}
        kept = [one for name, one in space.segments.items() if name not in superseded]
        assert segment.merge(kept) == space.state == segment.merge([*reversed(space.segments.values()), *kept])


@pytest.mark.parametrize("release", RELEASES)
def test_prefixes_of_golden_sequences_are_found_and_read(release: str) -> None:
    store, spaces = golden(release)
    for told in spaces:
        space = store.namespaces[told["fingerprint"]]
        live = {
            names.shard(entry["path"]).key for entry in told["shards"] if entry["path"] not in told.get("marked", ())
        }
        for one in told["sequences"]:
            tokens, extras = sequence(one)
            chain = keys.chain(keys.root(told["fingerprint"], one["salt"]), tokens, space.identity.chunk_tokens, extras)
            assert [key.hex() for key in chain] == one["keys"]
            count = next((i for i, key in enumerate(one["keys"]) if key not in live), len(chain))
            expected = min(len(tokens), count * space.identity.chunk_tokens)
            for prompt in (tokens, [*tokens, 1, 2, 3]):
                match = space.match(prompt, one["salt"], extras)
                assert match.tokens == expected
                assert [chunk.key for chunk in match.chunks] == chain[:count]
            for chunk in match.chunks:
                tensors = space.read(chunk)
                assert tensors is not None
                digest = hashlib.sha256(b"".join(tensors.values())).hexdigest()
                whole = [
                    entry["raw_sha256"]
                    for entry in told["shards"]
                    if names.shard(entry["path"]).key == chunk.key.hex()
                    and names.shard(entry["path"]).part == space.identity.whole
                ]
                assert set(whole) <= {digest}
            assert space.match([*tokens[:3], 49_152, *tokens], one["salt"], extras).tokens == 0


@pytest.mark.parametrize("name", ENCODINGS)
def test_golden_encodings_decode_to_the_bit(name: str) -> None:
    vectors = json.loads((GOLDEN / "encodings" / f"{name}.json").read_text("utf-8"))
    decode = encodings.find(name, vectors["quality"], vectors["parameters"])
    for case in vectors["cases"]:
        tensor = case["tensor"]
        stored, decoded = base64.b64decode(case["stored"]), base64.b64decode(case["decoded"])
        assert decode(stored, tensor["side"], tuple(tensor["shape"]), tensor["dtype"]) == decoded, case["what"]


# ---- corrupt files ------------------------------------------------------------------------------------------------


def read_corrupt(told: dict[str, str], data: bytes) -> None:
    """Read a corrupt file as what its path says it is."""
    path = told["path"]
    if told["file"] == "ns.json":
        identity.parse_identity(data, names.identity(path))
    elif told["file"] == "store.json":
        identity.permit(identity.parse_superblock(data, names.superblock(path)), told["operation"])
    elif told["file"] == "segment.lmi":
        names.segment(path.rpartition("/")[2])
        segment.parse_segment(data, path.split("/")[1])
    else:
        name = names.shard(path)
        space = (CORRUPT / "ns.json").read_bytes()
        header = shard.parse_header(data, len(data))
        shard.check_place(header, name, identity.parse_identity(space, identity.fingerprint(space)))
        shard.read_tensors(header, lambda begin, end: data[begin:end])


@pytest.mark.parametrize("case", CASES)
def test_corrupt_files_are_refused_for_the_reason_that_is_told(case: str) -> None:
    told = json.loads((CORRUPT / case / "expected.json").read_text("utf-8"))
    with pytest.raises(Refused) as refused:
        read_corrupt(told, (CORRUPT / case / told["file"]).read_bytes())
    error, check, refusal = told["error"], told["check"], refused.value
    assert (error == "UnsupportedVersion") == (refusal.reason is Reason.LATER)
    assert (error == "BadName") == (refusal.reason is Reason.BAD_NAME)
    assert (check in ("name", "identity")) == (refusal.reason is Reason.WRONG_PLACE)
    assert (error == "ChecksumMismatch") == refusal.checksum
    if told["file"] == "shard.safetensors" and check != "path":
        assert refusal.step in STEPS[check]


def test_every_class_of_refusal_has_corrupt_files() -> None:
    told = [json.loads((CORRUPT / case / "expected.json").read_text("utf-8")) for case in CASES]
    assert set(STEPS) <= {one["check"] for one in told}
    assert min(Counter(one["file"] for one in told).values()) > 20
