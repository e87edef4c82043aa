"""Segments, shards and encoded tensors with something changed and their checksums made right again.

Both readers take them, or both refuse them; what both take they read alike. See `test_changed_text.py`.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from lmcache_format import Dtype, TensorSpec
from lmcache_format.encodings import get_encoding
from lmcache_format.segment import decode_segment
from lmcache_format.shard import ShardHeader, header_bytes, parse_header
from tests.spec.changes import CHANGES, GOLDEN, STORES, agree, each_seed, edited, packed, patched
from tests.spec.independent_reader import encodings, segment, shard
from tests.spec.independent_reader.checksums import xxh3_128

# ---- segments -----------------------------------------------------------------------------------------------------

LISTS = {
    b"SUPR": ["01m8j9nrk00000000000000001-a.lmi"],
    b"LABL": [["0" * 32, "a", 1, 2, 3]],
    b"PINS": [["1" * 32, None, 2]],
}


@dataclass
class Section:
    """One section, as the table of contents and the file have it."""

    kind: bytes
    flags: int
    content: bytes
    records: int


def sections_of(data: bytes) -> list[Section]:
    count = struct.unpack_from("<I", data, 12)[0]
    entries = [segment.ENTRY.unpack_from(data, 64 + 48 * index) for index in range(count)]
    return [Section(kind, flags, data[at : at + size], records) for kind, flags, at, size, records, _ in entries]


def segment_of(head: bytes, sections: list[Section], shift: int, gap_byte: bytes, more: int) -> bytes:
    """A file of these sections; the last is told `shift` bytes off, the size `more` than it is."""
    position, entries, body = 64 + 48 * len(sections), b"", b""
    for index, one in enumerate(sections):
        gap = -position % 64
        at = position + gap + (shift if index + 1 == len(sections) else 0)
        entries += segment.ENTRY.pack(one.kind, one.flags, at, len(one.content), one.records, xxh3_128(one.content))
        body += gap_byte * gap + one.content
        position += gap + len(one.content)
    head = head[:12] + struct.pack("<I", len(sections)) + head[16:40] + struct.pack("<Q", position + more)
    return head + xxh3_128(head + bytes(16) + entries) + entries + body


def change_section(one: Section, rng: random.Random) -> None:
    """Other bytes in records, other lists and names, other flags and counts."""
    change = rng.choice(("content", "content", "content", "content", "records", "kind", "flags"))
    if change == "records":
        one.records = max(0, one.records + rng.choice((1, -1, 1 << 60)))
    elif change == "kind":
        one.kind = rng.choice((b"NEW!", b"KEYS", b"ADDS", b"TOUC"))
    elif change == "flags":
        one.flags = rng.choice((0, 1, 2, 3))
    elif one.kind in LISTS:
        value = edited(json.loads(one.content) or LISTS[one.kind], rng)
        one.content, one.records = json.dumps(value, separators=(",", ":")).encode(), len(value)
        if rng.random() < 0.3:
            one.content = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    elif one.kind == b"NAME" and one.content[:1] == b"{":
        one.content = packed(edited(json.loads(one.content), rng))
    elif one.content:
        changed, width = bytearray(one.content), rng.choice((1, 2, 4, 8))
        at = rng.randrange(len(changed)) // width * width
        changed[at : at + width] = rng.choice((bytes(width), b"\xff" * width, rng.randbytes(width)))
        one.content = bytes(changed)


@each_seed
def test_segments(seed: int) -> None:
    rng = random.Random(seed)
    originals = [path.read_bytes() for store in STORES for path in sorted(store.glob("ns/*/m/*.lmi"))]
    for _ in range(CHANGES):
        original = rng.choice(originals)
        sections = sections_of(original)
        if rng.random() < 0.3:
            sections.append(Section(b"PINS", 0, packed(LISTS[b"PINS"]), 1))
        for _ in range(rng.choice((0, 1, 1, 2))):
            change_section(rng.choice(sections), rng)
        if rng.random() < 0.1:
            sections.pop(rng.randrange(len(sections)))
        if rng.random() < 0.1:
            sections.insert(rng.randrange(len(sections)), Section(b"NEW2", rng.choice((0, 1, 2)), b"x" * 5, 1))
        wrong = rng.choice((None, None, None, None, "shift", "gap", "more", "cut", "magic", "version"))
        head = bytearray(original[:64])
        head[0] ^= wrong == "magic"
        head[8] ^= 2 * (wrong == "version")
        shift, more = rng.choice((64, -64, 8)) * (wrong == "shift"), rng.choice((1, -1, 64)) * (wrong == "more")
        data = segment_of(bytes(head), sections, shift, b"\x01" if wrong == "gap" else b"\0", more)
        data = data[: rng.randrange(len(data))] if wrong == "cut" else data
        fingerprint = bytes(head[16:32]).hex()
        both = agree(segment.parse_segment, decode_segment, data, fingerprint)
        if both is not None:
            check_segments(*both)


def check_segments(mine: segment.Segment, theirs: Any) -> None:
    assert (mine.created_ms, mine.writer, mine.supersedes) == (
        theirs.created_ms,
        theirs.writer,
        list(theirs.supersedes),
    )
    adds = [(int(key), int(row["key_rest"])) for key, row in zip(theirs.keys, theirs.adds, strict=True)]
    assert [add.name[0] for add in mine.adds] == [(key << 64 | rest).to_bytes(16, "big") for key, rest in adds]
    assert [add.nonce for add in mine.adds] == [f"{row['nonce']:016x}" for row in theirs.adds]
    assert [gone.nonce for gone in mine.removes] == [f"{row['nonce']:016x}" for row in theirs.removes]
    assert [day for _, day, _ in mine.touches] == [int(row["day"]) for row in theirs.touches]
    assert [(one.key, one.name) for one in mine.labels] == [(one.key.hex(), one.name) for one in theirs.labels]
    assert [(one.key, one.expires) for one in mine.pins] == [(one.key.hex(), one.expires_ms) for one in theirs.pins]


# ---- shards -------------------------------------------------------------------------------------------------------

TEXTS: list[Any] = [
    "", "0", "1", "2", "00", "-1", "1.0", "16", "17", "65536", "65537", "9007199254740992", "9007199254740993", "F4",
    "4294967295", "4294967296", "é", "l0-1", "l0-2h0-2", "l0-2h0-4", "l0-4097h0-2", "0" * 64, "A" * 64, "0" * 32,
    "0" * 16, "8,8", "8,0", "0,8", "08,8", "9999999,9999999", "12345678,8", "BF16", "F32", "bf16", "U8", "{}", "[]",
    '{"must_understand":true,"name":"raw","parameters":{},"quality":null}', '{"a":"\\ud800"}', '{"a":1.0}',
    '{"must_understand":false,"name":"bfx","parameters":{"version":1},"quality":null,"x":1}', 1, None, {},
    '{"must_understand":true,"name":"bfx","parameters":{"version":2},"quality":"a-b"}', "blake:", "\ud800",
    "xxh3-128:" + "A" * 22 + "==", "AAAA", "AAAAAA==", "AAAAAB==", "A",
]  # fmt: skip


def sealed(text: bytes, data: bytes) -> bytes:
    """A shard of this JSON and data, padded, with the right header checksum."""
    size = len(text) + -(8 + len(text)) % 4096
    header = bytearray(struct.pack("<Q", size) + text.ljust(size))
    at = 8 + len(shard.START)
    header[at : at + 32] = b"0" * 32
    header[at : at + 32] = xxh3_128(bytes(header)).hex().encode()
    return bytes(header) + data


def changed_metadata(text: bytes, rng: random.Random) -> bytes:
    members = json.loads(text)["__metadata__"]
    optional = ["tokens", "producer", "provenance", "decoded_checksums", "tensor_checksums", "zz"]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*list(members)[1:], *(f"lmcache.{one}" for one in optional)])
        if rng.random() < 0.2:
            members.pop(name, None)
        else:
            members[name] = rng.choice([*TEXTS, *members.values()])
    spaced = json.dumps(members, separators=rng.choice(((",", ":"), (", ", ": "))))
    start = spaced.replace('{"lmcache.header_checksum": ', '{"lmcache.header_checksum":').encode(
        "utf-8", "surrogatepass"
    )
    return b'{"__metadata__":' + start + text[text.index(b'},"layers.') + 1 :]


def parsed_by_the_code(data: bytes) -> ShardHeader:
    return parse_header(data[: header_bytes(data, len(data))], len(data))


@each_seed
def test_shards(seed: int) -> None:
    rng = random.Random(seed)
    originals = [path.read_bytes() for store in STORES for path in sorted(store.rglob("*.safetensors"))]
    pieces = [bytes([byte]) for byte in b'01 ,}"-kv{\\\xff\x00'] + [b"\\ud800", b"\\u0041", b""]
    for _ in range(CHANGES):
        original = rng.choice(originals)
        size = struct.unpack_from("<Q", original)[0]
        text, data = original[8 : 8 + size].rstrip(b" "), original[8 + size :]
        where = rng.choice(("metadata", "metadata", "metadata", "table", "anywhere"))
        if where == "metadata":
            text = changed_metadata(text, rng)
        else:
            text = patched(text, rng, pieces, start=text.index(b'},"layers.') if where == "table" else 80)
        file = sealed(text, data[: len(data) - rng.choice((0, 0, 0, 1))])
        both = agree(lambda file: shard.parse_header(file, len(file)), parsed_by_the_code, file)
        if both is not None:
            mine, theirs, meta = both[0], both[1], both[1].meta
            assert (mine.fingerprint, mine.key, mine.parent) == (meta.fingerprint, meta.key, meta.parent)
            assert (mine.depth, mine.num_tokens, str(mine.part)) == (meta.depth, meta.num_tokens, str(meta.part))
            assert (mine.label, mine.parameters) == (meta.encoding.label, dict(meta.encoding.parameters))
            assert (mine.nonce, mine.created, mine.dtype) == (meta.nonce, meta.created_ms, meta.dtype)
            places = [(tensor.spec.name, tensor.begin, tensor.end) for tensor in theirs.tensors]
            assert [(tensor.name, tensor.begin, tensor.end) for tensor in mine.tensors] == places
            assert b"".join(mine.digests) == theirs.checksums


# ---- encoded tensors ----------------------------------------------------------------------------------------------


def cases() -> list[tuple[str, dict[str, Any], bytes]]:
    """Encoding, tensor and stored bytes of all golden vectors that have a prefix."""
    found = []
    for name in sorted(set(encodings.KNOWN) - {"raw"}):
        vectors = json.loads((GOLDEN / "encodings" / f"{name}.json").read_text("utf-8"))
        found += [(name, case["tensor"], base64.b64decode(case["stored"])) for case in vectors["cases"]]
    return found


def changed_stream(stream: bytes, rng: random.Random) -> bytes:
    """Numbers at the edge of their types in place of others, or a stream of another length; a zstd frame made again."""
    if stream[:4] == b"\x28\xb5\x2f\xfd" and rng.random() < 0.7:
        content = patched(zstandard.ZstdDecompressor().decompress(stream), rng, [b"\x80", b"\x7f", b"\xff", b"\0"])
        return zstandard.ZstdCompressor(write_checksum=rng.random() < 0.9).compress(content)
    changed, width = bytearray(stream), rng.choice((1, 2, 4))
    at = rng.randrange(len(changed)) // width * width
    edges = {
        1: [b"\x80", b"\x7f"],
        2: [b"\0\x7c", b"\0\x80", b"\1\0"],
        4: [b"\0\0\x80\x7f", b"\0\0\0\x80", b"\1\0\0\0"],
    }
    changed[at : at + width] = rng.choice([bytes(width), b"\xff" * width, rng.randbytes(width), *edges[width]])
    return bytes(changed) + b"\0" * rng.choice((0, 0, 0, 0, 1, 6))


@each_seed
def test_encoded_tensors(seed: int) -> None:
    rng = random.Random(seed)
    prefix, known = struct.Struct("<4sBBHQ4I"), cases()
    for _ in range(2 * CHANGES):
        name, tensor, stored = rng.choice(known)
        magic, flags, sink, zero, size, *lengths = prefix.unpack_from(stored)
        begins = [32 + sum(lengths[:index]) for index in range(4)]
        streams = [stored[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
        change = rng.choice(("prefix", "stream", "stream", "stream", "escapes", "bits"))
        if change == "prefix":
            magic = rng.choice((magic, magic, b"bfx1", b"uqs1", b"i8h1"))
            flags, sink = rng.choice((flags, 0, 1, 2, 3, 4)), rng.choice((sink, sink, 0, 1, 23, 24, 255))
            zero, size = rng.choice((0, 0, 1)), rng.choice((size, size, size + 1, 1 << 40))
        elif change == "stream":
            filled = [index for index, stream in enumerate(streams) if stream]
            streams[index] = changed_stream(streams[index := rng.choice(filled)], rng)
        elif change == "escapes":
            places = rng.sample(range(24 * 16 + 2), 3)
            places = sorted(places) if rng.random() < 0.8 else places
            symbols = [rng.choice((0, 1, 128, 32767, -32768)) for _ in places]
            streams[2] = b"".join(struct.pack("<Ih", *pair) for pair in zip(places, symbols, strict=True))
        data = prefix.pack(magic, flags, sink, zero, size, *map(len, streams)) + b"".join(streams)
        if change == "bits":
            data = patched(data, rng, [rng.randbytes(1)])
        spec = TensorSpec(tensor["name"], 0, tensor["side"], tuple(tensor["shape"]), Dtype(tensor["dtype"]))

        def decoded(data: bytes, name: str = name, spec: TensorSpec = spec) -> bytes:
            return encodings.KNOWN[name][2](data, spec.side, spec.shape, spec.dtype.value)

        def decoded_by_the_code(data: bytes, name: str = name, spec: TensorSpec = spec) -> bytes:
            out = np.zeros(spec.nbytes, np.uint8)
            get_encoding(name).decode(data, spec, out)
            return out.tobytes()

        both = agree(decoded, decoded_by_the_code, data)
        assert both is None or both[0] == both[1], (name, tensor)
