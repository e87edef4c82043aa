"""Paths: injective, portable, and refused when this format did not write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import BadName, ChunkKey, Fingerprint, Part, next_key, root_key
from lmcache_format.names import (
    SegmentName,
    ShardName,
    chunk_directory,
    chunks_directory,
    identity_path,
    is_encoding_label,
    is_segment_file_name,
    namespace_directory,
    new_nonce,
    new_ulid,
    new_writer_id,
    parse_identity_path,
    parse_superblock_path,
    superblock_path,
)
from tests.format.identities import plain_identity
from tests.format.test_geometry import PARTS

FINGERPRINTS = st.binary(min_size=16, max_size=16).map(lambda raw: Fingerprint(raw.hex()))
SHARD_NAMES = st.builds(
    ShardName,
    FINGERPRINTS,
    st.binary(min_size=32, max_size=32).map(ChunkKey),
    PARTS,
    st.sampled_from(["raw", "bfx", "uq-near", "x" * 16 + "-" + "y" * 16]),
)
NAME = ShardName(Fingerprint("0123456789abcdef" * 2), ChunkKey(bytes(range(32))), Part(0, 2, 0, 4), "raw")


def is_portable(path: str) -> bool:
    """Every component within `[a-z0-9._-]` and 255 bytes, none of them special."""
    return all(re.fullmatch(r"[a-z0-9._-]{1,255}", part) and part not in (".", "..") for part in path.split("/"))


@given(SHARD_NAMES)
def test_a_shard_name_survives_its_path(name: ShardName) -> None:
    assert ShardName.parse(name.path) == name
    assert name.path.startswith(chunk_directory(name.fingerprint, name.key) + "/")
    assert name.path.startswith(chunks_directory(name.fingerprint) + "/")
    assert name.path.startswith(namespace_directory(name.fingerprint) + "/")
    assert is_portable(name.path)
    assert is_portable(name.quarantine_path)


@given(SHARD_NAMES, SHARD_NAMES)
def test_c09_other_shards_have_other_paths_even_without_case(one: ShardName, other: ShardName) -> None:
    assert (one.path.lower() == other.path.lower()) == (one == other)
    assert one.path.lower() == one.path


def test_c09_models_that_differ_a_little_have_portable_paths_of_their_own() -> None:
    models = [
        "org/model/name",
        "org-SEP-model/name",
        "org/model-SEP-name",
        "a@b",
        "a/../b",
        "p" * 200,
        "modèle é 空 格",
        "Demo",
        "demo",
        "..",
        "con",
        "\u00e9",
        "e\u0301",
    ]
    salts = [None, "s" * 128]
    paths = set()
    for model in models:
        identity = plain_identity(model=model)
        for salt in salts:
            key = next_key(root_key(identity.fingerprint, salt), [1, 2, 3])
            path = ShardName(identity.fingerprint, key, Part(0, 2, 0, 4), "raw").path
            assert is_portable(path)
            paths.add(path.lower())
    assert len(paths) == len(models) * len(salts)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/" + NAME.path,
        "./" + NAME.path,
        NAME.path + "\n",
        NAME.path + "/",
        NAME.path.upper(),
        NAME.path.replace("/c/00/01/", "/c/00/02/"),
        NAME.path.replace("/c/00/01/", "/c/"),
        NAME.path.replace("l0-2h0-4", "l00-2h0-4"),
        NAME.path.replace("l0-2h0-4", "l2-0h0-4"),
        NAME.path.replace("l0-2h0-4", ".."),
        NAME.path.replace(
            ".raw.",
            ".raw-.",
        ),
        NAME.path.replace(".raw.", ".."),
        NAME.path.replace(".safetensors", ".safetensors.tmp"),
        NAME.path.replace("ns/", "ns/../ns/", 1),
        NAME.path.replace("0123456789abcdef", "0123456789abcdeg", 1),
        NAME.path.replace("0", "٠", 1),
    ],
)
def test_what_this_format_did_not_write_is_no_shard(path: str) -> None:
    with pytest.raises(BadName):
        ShardName.parse(path)


def test_segment_names_sort_by_time_and_survive_their_paths() -> None:
    times = [0, 1, 1_795_910_400_000, (1 << 48) - 1]
    ulids = [new_ulid(time_ms) for time_ms in times]
    assert ulids == sorted(ulids)
    for ulid in ulids:
        name = SegmentName(NAME.fingerprint, ulid, new_writer_id())
        assert SegmentName.parse(name.path) == name
        assert is_portable(name.path)
        assert is_segment_file_name(name.file_name)


@pytest.mark.parametrize(
    ("parse", "path"),
    [
        (SegmentName.parse, "ns/" + "0" * 32 + "/m/" + "0" * 25 + "-w.lmi"),
        (SegmentName.parse, "ns/" + "0" * 32 + "/m/" + "i" * 26 + "-w.lmi"),
        (SegmentName.parse, "ns/" + "0" * 32 + "/m/" + "0" * 26 + "-.lmi"),
        (SegmentName.parse, "ns/" + "0" * 32 + "/m/" + "0" * 26 + "-../../x.lmi"),
        (parse_identity_path, "ns/" + "0" * 31 + "/ns.json"),
        (parse_identity_path, "ns/" + "0" * 32 + "/ns.json.bak"),
        (parse_superblock_path, "store.000000.json"),
        (parse_superblock_path, "store.1.json"),
        (parse_superblock_path, "store.0000001.json"),
        (parse_superblock_path, "x/store.000001.json"),
    ],
)
def test_other_paths_are_refused(parse: Any, path: str) -> None:
    with pytest.raises(BadName):
        parse(path)


def test_superblocks_and_identities_survive_their_paths() -> None:
    assert [parse_superblock_path(superblock_path(generation)) for generation in (1, 999_999)] == [1, 999_999]
    assert parse_identity_path(identity_path(NAME.fingerprint)) == NAME.fingerprint
    for generation in (0, 1_000_000, -1):
        with pytest.raises(BadName):
            superblock_path(generation)


def test_segment_file_names_are_no_paths() -> None:
    for text in ("", "x", "../" + "0" * 26 + "-w.lmi", "0" * 26 + "-w.lmi\n", "0" * 26 + "-W.lmi"):
        assert not is_segment_file_name(text)


def test_encoding_labels() -> None:
    assert all(map(is_encoding_label, ("raw", "bfx", "int8", "uq-near", "uq025-fp8-grade")))
    assert not any(map(is_encoding_label, ("", "-", "a-", "a--b", "a/b", "A", "a.b", "x" * 17)))


def test_nonces_and_writers_do_not_repeat() -> None:
    assert len({new_nonce() for _ in range(1000)} | {new_writer_id() for _ in range(1000)}) == 2000
