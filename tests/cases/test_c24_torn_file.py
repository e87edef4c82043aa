"""C24: truncated, empty, torn and lying files in a cache of four chunks."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import FindingKind, VerifyOptions, verify
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName
from tests.store.pattern import document, hit, put_chunk, put_document, refs, tiny_identity

TOKENS = document(16, 24)


def header_text(content: bytes) -> tuple[int, bytes]:
    size = int.from_bytes(content[:8], "little")
    return 8 + size, content[8 : 8 + size]


def with_header(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The shard with another header text of the same length."""
    data_start, text = header_text(content)
    changed = change(text.rstrip(b" "))
    assert len(changed) <= data_start - 8
    return content[:8] + changed.ljust(data_start - 8, b" ") + content[data_start:]


def duplicate_keys(text: bytes) -> bytes:
    return text.replace(
        b',"layers.0.k":', b',"layers.0.k":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"layers.0.k":'
    )


def overlapping(text: bytes) -> bytes:
    header = json.loads(text)
    offsets = header["layers.0.v"]["data_offsets"]
    header["layers.0.v"]["data_offsets"] = [offsets[0] - 8, offsets[1] - 8]
    return json.dumps(header, separators=(",", ":")).encode()


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


MUTATIONS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda c: b"",
    "7 bytes": lambda c: c[:7],
    "8 bytes": lambda c: c[:8],
    "header only": lambda c: c[: header_text(c)[0]],
    "header and half": lambda c: c[: (header_text(c)[0] + len(c)) // 2],
    "minus 1 byte": lambda c: c[:-1],
    "plus 1 byte": lambda c: c + b"\0",
    "bit in the header": lambda c: flip(c, 500),
    "bit in the data": lambda c: flip(c, len(c) - 5),
    "length 2^63": lambda c: struct.pack("<Q", 2**63) + c[8:],
    "length 2^40": lambda c: struct.pack("<Q", 2**40 - 8) + c[8:],
    "length 4 MiB": lambda c: struct.pack("<Q", (4 << 20) - 8) + c[8:],
    "duplicate keys": lambda c: with_header(c, duplicate_keys),
    "overlapping offsets": lambda c: with_header(c, overlapping),
    "zeros": lambda c: bytes(len(c)),
}


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def root(tmp_path: Path, identity: Identity) -> Path:
    with Store.create(str(tmp_path / "s")) as store, store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    return tmp_path / "s"


def path_of(root: Path, identity: Identity, number: int) -> Path:
    key = refs(identity, TOKENS)[number].key
    return root / ShardName(identity.fingerprint, key, whole_part(identity), "raw").path


@pytest.mark.parametrize("mutation", [*MUTATIONS, "directory"])
def test_a_torn_chunk_is_a_miss_named_by_verify_and_repaired_by_the_next_put(
    root: Path, identity: Identity, mutation: str
) -> None:
    victim = path_of(root, identity, 2)
    good = {number: path_of(root, identity, number).read_bytes() for number in (0, 1, 3)}
    content = victim.read_bytes()
    if mutation == "directory":
        victim.unlink()
        victim.mkdir()
    else:
        victim.write_bytes(MUTATIONS[mutation](content))
    with Store.open(str(root)) as store:
        report = verify(store, VerifyOptions(Level.FULL))
        (finding,) = [f for f in report.findings if f.kind is FindingKind.DAMAGED]
        assert str(victim.relative_to(root)).startswith(finding.path.split("*")[0])
        assert finding.reason
        with store.namespace(identity, create=True) as namespace:
            tracemalloc.start()
            assert hit(namespace, TOKENS) == 8
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
            tracemalloc.stop()
            assert namespace.match(TOKENS).num_tokens == 8
            put_chunk(namespace, refs(identity, TOKENS)[2], TOKENS)
            assert hit(namespace, TOKENS) == 16
        assert verify(store, VerifyOptions(Level.FULL)).findings == []
    assert {number: path_of(root, identity, number).read_bytes() for number in good} == good


@pytest.mark.parametrize(
    "mutation", ["empty", "8 bytes", "minus 1 byte", "plus 1 byte", "bit in the middle", "directory"]
)
def test_a_torn_index_costs_nothing_but_its_entries(root: Path, identity: Identity, mutation: str) -> None:
    (segment,) = root.rglob("*.lmi")
    content = segment.read_bytes()
    if mutation == "directory":
        segment.unlink()
        segment.mkdir()
    elif mutation == "bit in the middle":
        segment.write_bytes(flip(content, len(content) // 2))
    else:
        segment.write_bytes(MUTATIONS[mutation](content))
    with Store.open(str(root)) as store:
        with store.namespace(identity, create=True) as namespace:
            assert hit(namespace, TOKENS) == 16
        with store.namespace(identity) as namespace:
            assert len(namespace.state()) == 4
