"""JSON, identities, superblocks and names with something changed: both readers take them, or both refuse them.

A reader that takes what the other refuses means a rule that SPEC.md does not tell, or that the code does not keep. What
both take they must read alike. All a failure needs to be repeated is its seed.
"""

from __future__ import annotations

import json
import random
import re
from hashlib import sha256
from typing import Any

from lmcache_format import Identity, Part
from lmcache_format.canonical_json import dump_canonical, load_strict
from lmcache_format.names import SegmentName, ShardName, parse_identity_path, parse_superblock_path
from lmcache_format.superblock import Operation, Superblock
from tests.spec.changes import CHANGES, STORES, agree, each_seed, edited, packed, patched
from tests.spec.independent_reader import identity, names, strict_json
from tests.spec.independent_reader.checksums import xxh3_128


@each_seed
def test_json(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [bytes([byte]) for byte in b'"\\0123456789e.-+{[]},: \n\x00\xff/']
    pieces += [b"\\ud800", b"NaN", b"\xef\xbb\xbf", b"9" * 17, b"\\u00E9"]
    for _ in range(4 * CHANGES):
        value: Any = edited({"a": [1, 2, {"b": None}], "c": "x\u00e9\n", "d": -5}, rng)
        for _ in range(rng.choice((0, 0, 0, 28, 29, 30, 31, 32, 33))):
            value = [value]
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        data = patched(data, rng, pieces) if rng.random() < 0.6 else data
        both = agree(strict_json.parse, load_strict, data)
        if both is not None:
            assert both[0] == both[1]
            forms = agree(strict_json.canonical, dump_canonical, both[0])
            assert forms is None or forms[0] == forms[1]


@each_seed
def test_identities(seed: int) -> None:
    rng = random.Random(seed)
    originals = [json.loads(path.read_bytes()) for store in STORES for path in sorted(store.glob("ns/*/ns.json"))]
    for _ in range(CHANGES):
        value = edited(rng.choice(originals), rng)
        data = packed(value)
        both = agree(identity.parse_identity, Identity.from_json, data, sha256(data).hexdigest()[:32])
        if both is not None:
            assert both[0].value == both[1].to_dict()
            assert both[0].fingerprint == both[1].fingerprint


def permitted(data: bytes, operation: str) -> None:
    identity.permit(identity.parse_superblock(data, 1), operation)


def permitted_by_the_code(data: bytes, operation: str) -> None:
    Superblock.from_json(data, 1).check(Operation(operation))


@each_seed
def test_superblocks(seed: int) -> None:
    rng = random.Random(seed)
    originals = [json.loads(path.read_bytes()) for store in STORES for path in sorted(store.glob("store.*.json"))]
    for _ in range(CHANGES):
        value = edited(rng.choice(originals), rng)
        if isinstance(value.get("checksum"), str) and rng.random() < 0.9:
            value["checksum"] = "xxh3-128:" + xxh3_128(packed({**value, "checksum": "xxh3-128:"})).hex()
        for operation in identity.OPERATIONS:
            agree(permitted, permitted_by_the_code, packed(value), operation)


PATHS = [
    f"ns/{'0' * 32}/c/aa/aa/{'a' * 64}.l0-2h0-2.raw.safetensors",
    f"ns/{'0' * 32}/c/aa/aa/{'a' * 64}.l0-2.uq-near.safetensors",
    f"ns/{'0' * 32}/c/aa/aa/{'a' * 64}.l0-2.uq025-fp8-grade.safetensors",
    f"ns/{'0' * 32}/m/01m8j9nrk00000000000000001-writera.lmi",
    f"ns/{'0' * 32}/ns.json",
    "store.000001.json",
]
PIECES = [
    "", "ns", "c", "m", "0" * 32, "a" * 64, "l0-2", "l0-9999", "l00-2", "h0-2", "0", "10000000", "raw", "ab", "é", "\n",
    "x" * 16, "x" * 17, "w" * 33, "A", "store", "000000", "json", "lmi", "81m8j9nrk00000000000000001",
]  # fmt: skip


@each_seed
def test_names(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2 * CHANGES):
        cut = re.split(r"([/.\-h])", rng.choice(PATHS))
        for _ in range(rng.choice((0, 1, 1, 2))):
            cut[rng.randrange(len(cut))] = rng.choice(PIECES + cut)
        path = "".join(cut)
        both = agree(names.shard, ShardName.parse, path)
        assert both is None or both[0].path() == both[1].path == path
        agree(names.identity, parse_identity_path, path)
        agree(names.superblock, parse_superblock_path, path)
        agree(names.part, Part.parse, rng.choice(cut))
        directory, _, file_name = path.rpartition("/")
        if directory == f"ns/{'0' * 32}/m":
            agree(names.segment, lambda name: SegmentName.parse(f"ns/{'0' * 32}/m/{name}"), file_name)
