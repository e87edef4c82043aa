"""One file for every way a file can lie: a sound golden file, one thing changed, the checksums made right again.

Every case is a folder `corrupt/<kind>-<what-is-wrong>/` with the file and `expected.json`: which check refuses it
(`check`: a header, the data, the place, the namespace, the encoding, …) and with which error class.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _golden import (
    CREATED_MS,
    FULL,
    Namespace,
    Shard,
    add_records,
    json_bytes,
    main_namespace,
    make_shard,
    remove_records,
    superblock,
    tokens_of,
    touch_records,
)

from lmcache_format import Dtype, Fingerprint, Identity, Part, next_key, root_key
from lmcache_format.canonical_json import dump_canonical
from lmcache_format.checksums import xxh3, xxh3_hex
from lmcache_format.identity import fingerprint_of
from lmcache_format.names import identity_path, superblock_path
from lmcache_format.segment import Label, RemoveReason, Segment, encode_segment

START = b'{"__metadata__":{"lmcache.header_checksum":"'
TINY = Identity(
    model="golden/tiny",
    weights="unverified:golden tiny",
    dtype=Dtype.BF16,
    layers=2,
    kv_heads=2,
    head_dim_k=4,
    head_dim_v=4,
    groups=FULL,
    rope={"rope_theta": "10000.0"},
    chunk_tokens=4,
)


@dataclass(frozen=True)
class Case:
    """One lie: the file, where it would lie in a store, which check finds it, and as what."""

    name: str
    file_name: str
    content: bytes
    error: str
    check: str
    path: str
    more: dict[str, Any] = field(default_factory=dict)


def tiny_shard(encoding: str = "raw", **changes: Any) -> Shard:
    """The shard that most cases begin from: 2 layers × 2 heads × 4 tokens × 4, bf16."""
    root = root_key(TINY.fingerprint)
    tokens = tokens_of(9, 4)
    return make_shard(TINY, next_key(root, tokens), root, 0, tokens, encoding=encoding, **changes)


def seal_header(text: bytes) -> bytes:
    """A header around `text`, padded and with the right length and checksum, whatever the text says."""
    padded = text.ljust(-(8 + len(text)) % 4096 + len(text), b" ")
    header = bytearray(struct.pack("<Q", len(padded)) + padded)
    return seal_checksum(header)


def seal_checksum(header: bytearray) -> bytes:
    """`header` with the right checksum in its place, where it has that place."""
    at = 8 + len(START)
    if header[8:at] == START and len(header) >= at + 32:
        header[at : at + 32] = b"0" * 32
        header[at : at + 32] = xxh3_hex(header).encode()
    return bytes(header)


def header_text(file: bytes) -> bytes:
    """The JSON of a shard's header, without padding."""
    (size,) = struct.unpack_from("<Q", file)
    return file[8 : 8 + size].rstrip(b" ")


def shard_data(file: bytes) -> bytes:
    """The bytes after a shard's header."""
    (size,) = struct.unpack_from("<Q", file)
    return file[8 + size :]


def replaced(text: bytes, old: str, new: str) -> bytes:
    """`text` with the one `old` in it changed."""
    assert text.count(old.encode()) == 1, (old, text.count(old.encode()))
    return text.replace(old.encode(), new.encode("utf-8", "surrogatepass"))


def with_field(text: bytes, name: str, value: str | None) -> bytes:
    """Header text with metadata field `lmcache.<name>` set to `value`, or left out."""
    pattern = re.compile(rf',"lmcache\.{name}":"(?:[^"\\]|\\.)*"'.encode())
    new = "" if value is None else f',"lmcache.{name}":{json.dumps(value)}'
    if not pattern.search(text):
        return text.replace(b'},"layers', new.encode() + b'},"layers', 1)
    return pattern.sub(lambda _: new.encode(), text, count=1)


def _shard_cases() -> Iterator[Case]:
    shard = tiny_shard()
    text, data, path = header_text(shard.file), shard.data, shard.name.path

    def case(name: str, content: bytes, error: str = "ShardError", check: str = "header", **more: Any) -> Case:
        return Case(f"shard-{name}", "shard.safetensors", content, error, check, more.pop("path", path), more)

    def says(name: str, new_text: bytes, error: str = "ShardError", check: str = "header") -> Case:
        assert new_text != text, name
        return case(name, seal_header(new_text) + data, error, check)

    file = shard.file
    yield case("empty", b"")
    yield case("seven-bytes", file[:7])
    yield case("length-only", file[:8])
    yield case("half-a-header", file[:2000])
    yield case("header-only", file[:4096])
    yield case("half-the-data", file[: 4096 + len(data) // 2])
    yield case("one-byte-short", file[:-1])
    yield case("one-byte-more", file + b"\0")
    yield case("header-length-2-63", struct.pack("<Q", 1 << 63) + file[8:])
    yield case("header-length-2-64", struct.pack("<Q", (1 << 64) - 8) + file[8:])
    yield case("header-length-100-mb", struct.pack("<Q", 100_663_296 - 8) + file[8:])
    yield case("header-length-unaligned", struct.pack("<Q", 4096) + file[8:])
    yield case("header-length-zero", struct.pack("<Q", 0) + file[8:])
    yield case("other-safetensors", struct.pack("<Q", 4088) + b'{"__metadata__":{}}'.ljust(4088))
    yield case("header-bit-flipped", _flipped(file, 8 * 300 + 1), "ChecksumMismatch")
    yield case("header-checksum-upper-case", _upper_checksum(file), "ChecksumMismatch")
    yield case("padding-bit-flipped", _flipped(file, 8 * 4090), "ChecksumMismatch")
    yield case("data-bit-flipped", _flipped(file, 8 * 4100), "ChecksumMismatch", "data")
    yield case("last-data-bit-flipped", _flipped(file, 8 * len(file) - 1), "ChecksumMismatch", "data")
    yield case("heads-swapped", file[:4096] + data[32:64] + data[:32] + data[64:], "ChecksumMismatch", "data")

    yield says("json-cut", text[:-1])
    yield says("json-goes-on", text + b"{}")
    yield says("json-not-utf-8", replaced(text, '"layers.0.k"', '"layers.0.\udcff"'))
    yield says("json-nested", text.replace(b'"shape":[2', b'"shape":' + b"[" * 3000, 1))
    yield says("metadata-only", text[: text.index(b',"layers')] + b"}")
    yield says("metadata-field-twice", with_field(text, "zzz", "1").replace(b'"lmcache.zzz"', b'"lmcache.nonce"'))
    yield says("metadata-holds-a-number", text.replace(b'"lmcache.depth":"0"', b'"lmcache.depth":0'))
    yield says("metadata-holds-an-object", text.replace(b'"lmcache.depth":"0"', b'"lmcache.depth":{}'))
    yield says("metadata-half-surrogate", text.replace(b'"golden-0.1.0"', b'"golden-\\ud800"'))
    yield says("format-missing", with_field(text, "format", None), "UnsupportedVersion")
    yield says("format-2", with_field(text, "format", "2"), "UnsupportedVersion")
    for name, wrong in _WRONG_FIELDS:
        for index, value in enumerate(wrong):
            suffix = "missing" if value is None else f"wrong-{index}"
            yield says(f"{name.replace('_', '-')}-{suffix}", with_field(text, name, value))
    yield says("dtype-newer", with_field(text, "dtype", "F4_E2M1"), "UnsupportedVersion")
    yield says("dtype-other-in-metadata", with_field(text, "dtype", "F16"))
    yield says("dtype-other-in-table", text.replace(b'"dtype":"BF16"', b'"dtype":"F16"'))
    yield says("dtype-other-throughout", text.replace(b'"BF16"', b'"F16"'), check="identity")
    yield says("part-other", with_field(text, "part", "l0-2h0-1"))
    yield says("part-shifted", with_field(text, "part", "l0-2h2-4"), check="name")
    yield says("part-latent", with_field(text, "part", "l0-2"))
    yield says("latent-with-values", _latent(text))
    yield says("part-of-4096-layers", with_field(text, "part", "l0-4096h0-4096"))
    yield says("part-of-9999999-layers", with_field(text, "part", "l0-9999999h0-2"))
    yield says("checksums-unknown", with_field(text, "checksums", "blake9:AAAA"), "UnsupportedVersion")
    yield says("checksums-too-few", with_field(text, "checksums", "xxh3-128:" + "A" * 24))
    yield says("decoded-checksums-on-raw", with_field(text, "decoded_checksums", "xxh3-128:" + "A" * 24))
    unknown = seal_header(_unknown_encoding(text)) + data
    unknown_path = path.replace(".raw.", ".holo-dream.")
    yield case("encoding-unknown", unknown, "UnsupportedVersion", "encoding", path=unknown_path)
    yield says("tensor-hole", replaced(text, "[64,128]", "[72,136]"))
    yield says("tensor-overlap", replaced(text, "[64,128]", "[32,96]"))
    yield says("tensor-offset-2-63", replaced(text, "[64,128]", f"[64,{1 << 63}]"))
    yield says("tensor-backwards", replaced(text, "[64,128]", "[128,64]"))
    yield says("tensor-other-shape", text.replace(b"[2,4,4]", b"[4,2,4]", 1))
    yield says("tensor-shape-2-63", text.replace(b"[2,4,4]", b"[9223372036854775808,4,4]", 1))
    yield says("tensor-missing", re.sub(rb',"layers\.1\.v":\{[^}]*\}', b"", text))
    yield says("tensor-added", text[:-1] + b',"x":{"dtype":"U8","shape":[0],"data_offsets":[256,256]}}')
    yield says("tensor-twice", text[:-1] + re.search(rb',"layers\.1\.v":\{[^}]*\}', text)[0] + b"}")  # type: ignore[index]
    yield says("tensors-in-another-order", _swapped_tensors(text))
    yield says("tensor-other-name", replaced(text, '"layers.1.v"', '"layers.1.V"'))

    other = make_shard(TINY, next_key(shard.meta.key, [1]), shard.meta.parent, 0, tokens_of(9, 4))
    yield case("other-key", other.file, check="name")
    yield case("other-suffix", file, "BadName", "path", path=path + ".tmp")
    yield case("wrong-fan-out", file, "BadName", "path", path=re.sub(r"/c/../", "/c/00/", path))
    bigger = Identity(**{**_fields(TINY), "chunk_tokens": 8})
    alien = make_shard(bigger, shard.meta.key, shard.meta.parent, 0, tokens_of(9, 4), fingerprint=TINY.fingerprint)
    yield case("other-chunk-tokens", alien.file, check="identity")
    wider = Identity(**{**_fields(TINY), "kv_heads": 4})
    out = make_shard(
        wider,
        shard.meta.key,
        shard.meta.parent,
        0,
        tokens_of(9, 4),
        part=Part(0, 2, 2, 4),
        fingerprint=TINY.fingerprint,
    )
    yield case(
        "heads-outside-the-model",
        out.file,
        check="identity",
        path=out.name.path.replace(wider.fingerprint, TINY.fingerprint),
    )
    yield from _encoded_shard_cases()


_WRONG_FIELDS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("fingerprint", (None, "ABCDEF" + "0" * 26, "0" * 31)),
    ("key", (None, "0" * 63, "g" * 64)),
    ("parent", (None, "0" * 65)),
    ("depth", (None, "-1", "4294967296", "1" * 400)),
    ("num_tokens", (None, "0", "5", "04", "4.0", "٤")),
    ("chunk_tokens", (None, "0", "65537")),
    ("part", (None, "l0-2h0-02", "l2-0h0-2", "l0-2h0-0", "../../etc")),
    ("dtype", (None, "bf16", "")),
    ("head_dims", (None, "0,4", "4", "4,99999999")),
    ("encoding", (None, "raw", "[]", "{}", '{"name":"raw"}', "[" * 5_000)),
    ("checksums", ("xxh3-128:AAAA*", "xxh3-128:é")),
    ("nonce", (None, "0" * 15, "ABCDEF0123456789")),
    ("created", (None, "-1", "9007199254740993", "now")),
    ("producer", ("[]", "{", '{"a":1.5}', '{"a":1,"a":1}')),
    ("provenance", ('"x"',)),
    ("tokens", ("", "AAAA", "*" * 24, "A" * 28)),
)


def _encoded_shard_cases() -> Iterator[Case]:
    shard = tiny_shard("bfx")
    text, data = header_text(shard.file), shard.data
    table = text[text.index(b',"layers') :]
    size = int(re.search(rb'"shape":\[(\d+)\]', table)[1])  # type: ignore[index]

    def case(
        name: str, new_text: bytes, error: str = "ShardError", check: str = "header", content: bytes = data
    ) -> Case:
        assert (new_text, content) != (text, data), name
        sealed = seal_header(new_text) + content
        return Case(f"encoded-{name}", "shard.safetensors", sealed, error, check, shard.name.path, {})

    yield case("decoded-checksums-missing", with_field(text, "decoded_checksums", None))
    yield case("decoded-checksums-too-few", with_field(text, "decoded_checksums", "xxh3-128:" + "A" * 24))
    yield case("decoded-checksums-unknown", with_field(text, "decoded_checksums", "crc9:AAAA"), "UnsupportedVersion")
    yield case("lossy-with-decoded-checksums", _edit_encoding(text, quality="near"))
    for name, changes in (
        ("encoding-is-a-path", {"name": "../x"}),
        ("encoding-is-too-long", {"name": "x" * 17}),
        ("encoding-quality-is-a-path", {"quality": "a/b"}),
        ("encoding-parameters-are-a-list", {"parameters": []}),
        ("encoding-must-understand-is-text", {"must_understand": "yes"}),
        ("encoding-claims-raw", {"name": "raw"}),
    ):
        yield case(name, _edit_encoding(text, **changes))
    yield case("parameters-newer", _edit_encoding(text, parameters={"version": 2}), "UnsupportedVersion", "encoding")
    yield case("hole", re.sub(rb'"data_offsets":\[0,', b'"data_offsets":[1,', text, count=1))
    yield case("overlap", text.replace(b'"data_offsets":[%d,' % size, b'"data_offsets":[%d,' % (size - 1), 1))
    yield case("size-lies", text.replace(b'"shape":[%d]' % size, b'"shape":[%d]' % (size + 1), 1))
    yield case("offset-2-63", text.replace(b'"data_offsets":[0,%d]' % size, b'"data_offsets":[0,%d]' % (1 << 63), 1))
    yield case("empty-tensor", _emptied(text, size))
    yield case("longer-than-any-encoding-needs", _lengthened(text))
    yield case("two-dimensions", text.replace(b'"shape":[%d]' % size, b'"shape":[1,%d]' % size, 1))
    yield case("another-dtype", text.replace(b'"dtype":"U8"', b'"dtype":"I8"', 1))
    yield case("offsets-of-text", text.replace(b'"data_offsets":[0,', b'"data_offsets":["0",', 1))
    yield case("tensor-twice", text[:-1] + b',"layers.0.k":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')
    yield case("tensor-missing", re.sub(rb',"layers\.1\.v":\{[^}]*\}', b"", text))
    yield case("table-with-spaces", text.replace(b'"shape":[', b'"shape": [', 1))
    for name, begin in (("magic", 0), ("flags", 4), ("decoded-size", 8), ("stream-size", 16)):
        broken = bytearray(data)
        broken[begin] ^= 0x40
        digest = base64.b64encode(b"".join(_digests(text, broken)))
        claim = "xxh3-128:" + digest.decode()
        yield case(f"{name}-wrong", with_field(text, "checksums", claim), "EncodingError", "decode", bytes(broken))


def _digests(text: bytes, data: bytes | bytearray) -> Iterator[bytes]:
    for begin, end in re.findall(rb'"data_offsets":\[(\d+),(\d+)\]', text):
        yield xxh3(bytes(data[int(begin) : int(end)]))


def _edit_encoding(text: bytes, **changes: Any) -> bytes:
    found = re.search(rb'"lmcache\.encoding":("(?:[^"\\]|\\.)*")', text)
    assert found
    value = json.loads(json.loads(found[1])) | changes
    return with_field(text, "encoding", json.dumps(value, sort_keys=True, separators=(",", ":")))


def _unknown_encoding(text: bytes) -> bytes:
    """A later release's lossy encoding, sound in all that this release knows."""
    for layer in range(2):
        for side in "kv":
            entry = re.compile(rf'"layers\.{layer}\.{side}":{{"dtype":"BF16","shape":\[2,4,4\]'.encode())
            text = entry.sub(f'"layers.{layer}.{side}":{{"dtype":"U8","shape":[64]'.encode(), text)
    text = with_field(text, "checksums", "xxh3-128:" + base64.b64encode(bytes(64)).decode())
    return _edit_encoding(text, name="holo", quality="dream")


def _emptied(text: bytes, size: int) -> bytes:
    text = text.replace(b'"shape":[%d],"data_offsets":[0,%d]' % (size, size), b'"shape":[0],"data_offsets":[0,0]', 1)
    return text.replace(b'"data_offsets":[%d,' % size, b'"data_offsets":[0,', 1)


def _lengthened(text: bytes) -> bytes:
    """The last tensor grows beyond what its raw form could ever need."""
    return re.sub(rb'"shape":\[(\d+)\],"data_offsets":\[(\d+),(\d+)\]\}\}$', _grow_last, text)


def _grow_last(match: re.Match[bytes]) -> bytes:
    more = 1 << 40
    shape, begin, end = (int(number) for number in match.groups())
    return b'"shape":[%d],"data_offsets":[%d,%d]}}' % (shape + more, begin, end + more)


def _latent(text: bytes) -> bytes:
    """A latent's header that claims a value width."""
    text = with_field(with_field(text, "part", "l0-1"), "checksums", "xxh3-128:" + base64.b64encode(bytes(16)).decode())
    table = b',"layers.0.latent":{"dtype":"BF16","shape":[4,4],"data_offsets":[0,32]}}'
    return text[: text.index(b',"layers')] + table


def _swapped_tensors(text: bytes) -> bytes:
    entries = re.findall(rb',"layers\.[^}]*\}', text)
    return text[: text.index(b',"layers')] + b"".join([entries[1], entries[0], *entries[2:]]) + b"}"


def _flipped(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _upper_checksum(file: bytes) -> bytes:
    at = 8 + len(START)
    return file[:at] + file[at : at + 32].upper() + file[at + 32 :]


def _fields(identity: Identity) -> dict[str, Any]:
    return {name: getattr(identity, name) for name in Identity.__dataclass_fields__}


HEADER = struct.Struct("<8sII16sQQ16s")
ENTRY = struct.Struct("<4sIQQQ16s")
Section = tuple[bytes, int, bytes, int]


def seal_segment(table: bytearray, table_bytes: int) -> bytes:
    """Segment bytes with the right checksum over their first `table_bytes`."""
    table[48:64] = bytes(16)
    table[48:64] = xxh3(bytes(table[:table_bytes]))
    return bytes(table)


def split_segment(data: bytes) -> list[Section]:
    """Sections of a sound segment: id, flags, content, records."""
    count = struct.unpack_from("<I", data, 12)[0]
    sections = []
    for index in range(count):
        name, flags, offset, length, records, _ = ENTRY.unpack_from(data, 64 + 48 * index)
        sections.append((name, flags, data[offset : offset + length], records))
    return sections


def join_segment(data: bytes, sections: Sequence[Section]) -> bytes:
    """The segment `data` with other sections, sound in every checksum."""
    position = 64 + 48 * len(sections)
    entries, body = [], []
    for name, flags, content, records in sections:
        gap = -position % 64
        entries.append(ENTRY.pack(name, flags, position + gap, len(content), records, xxh3(content)))
        body += [bytes(gap), content]
        position += gap + len(content)
    magic, version, _, fingerprint, created_ms, _, _ = HEADER.unpack_from(data)
    head = HEADER.pack(magic, version, len(sections), fingerprint, created_ms, position, bytes(16))
    return seal_segment(bytearray(b"".join([head, *entries, *body])), 64 + 48 * len(sections))


def tiny_segment() -> bytes:
    """The segment that most cases begin from: two adds, two removes, a touch, a label, a superseded segment."""
    space: Namespace = main_namespace()
    shards = space.shards[:2]
    content = add_records(shards)
    removes = remove_records(shards, content, RemoveReason.PRUNED, swept=False)
    removes["version"][1] = 0
    segment = Segment(
        fingerprint=space.fingerprint,
        created_ms=CREATED_MS,
        writer="tiny",
        **content,
        versions=("v",),
        removes=removes,
        touches=touch_records([shards[0].meta.key], 1, 1),
        supersedes=("0" * 26 + "-w.lmi",),
        labels=(Label(shards[0].meta.key[:16], "x", 16, CREATED_MS, 0),),
    )
    return encode_segment(segment)


def _segment_cases() -> Iterator[Case]:
    data = tiny_segment()
    sections = split_segment(data)
    by_name = {section[0]: index for index, section in enumerate(sections)}
    fingerprint = data[16:32].hex()
    path = f"ns/{fingerprint}/m/{'0' * 26}-tiny.lmi"

    def case(name: str, content: bytes, error: str = "SegmentError") -> Case:
        assert content != data, name
        return Case(f"segment-{name}", "segment.lmi", content, error, "segment", path)

    def section_case(
        name: str, section: bytes, edit: Callable[[Section], Section], error: str = "SegmentError"
    ) -> Case:
        changed = list(sections)
        changed[by_name[section]] = edit(changed[by_name[section]])
        return case(name, join_segment(data, changed), error)

    def entry_case(name: str, index: int, at: int, value: int, error: str = "SegmentError") -> Case:
        changed = bytearray(data)
        struct.pack_into("<Q", changed, 64 + 48 * index + at, value)
        return case(name, seal_segment(changed, 64 + 48 * len(sections)), error)

    def header_case(name: str, form: str, at: int, value: int, error: str = "SegmentError") -> Case:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        return case(name, seal_segment(changed, 64 + 48 * len(sections)), error)

    def record(section: Section, at: int, form: str, value: int) -> Section:
        changed = bytearray(section[2])
        struct.pack_into(form, changed, at, value)
        return (section[0], section[1], bytes(changed), section[3])

    def text(section: Section, change: Callable[[Any], Any]) -> Section:
        return (section[0], section[1], dump_canonical(change(json.loads(section[2]))), section[3])

    yield case("empty", b"")
    yield case("too-short", data[:63])
    yield case("header-only", data[:64])
    yield case("half", data[: len(data) // 2])
    yield case("one-byte-short", data[:-1])
    yield case("one-byte-more", data + b"\0")
    yield case("other-magic", b"LMKVSEG0" + data[8:])
    yield header_case("version-2", "<I", 8, 2, "UnsupportedVersion")
    yield header_case("no-sections", "<I", 12, 0, "ChecksumMismatch")
    yield header_case("2-32-sections", "<I", 12, 0xFFFF_FFFF)
    yield header_case("length-2-63", "<Q", 40, 1 << 63)
    yield case("table-bit-flipped", _flipped(data, 8 * 70), "ChecksumMismatch")
    yield case("checksum-bit-flipped", _flipped(data, 8 * 50), "ChecksumMismatch")
    yield case("last-bit-flipped", _flipped(data, 8 * len(data) - 1), "ChecksumMismatch")
    elsewhere = path.replace(fingerprint, "f" * 32)
    yield Case("segment-other-namespace", "segment.lmi", data, "SegmentError", "segment", elsewhere)
    yield entry_case("offset-2-63", 0, 8, 1 << 63)
    yield entry_case("length-2-64", 0, 16, (1 << 64) - 1)
    yield entry_case("records-2-63", 1, 24, 1 << 63)
    yield entry_case("section-overlap", 1, 8, struct.unpack_from("<Q", data, 64 + 8)[0])
    yield entry_case("section-hole", 2, 8, struct.unpack_from("<Q", data, 64 + 48 * 2 + 8)[0] + 64)
    yield case("gap-not-zero", _gap_filled(data))
    yield case("bytes-after-the-last-section", _appended(data))
    yield case("section-twice", join_segment(data, [*sections, sections[3]]))
    yield case(
        "section-must-be-understood", join_segment(data, [*sections, (b"NEW!", 1, b"", 0)]), "UnsupportedVersion"
    )
    yield case("65-sections", join_segment(data, [(b"%04d" % index, 0, b"", 0) for index in range(65)]))
    yield case("names-missing", join_segment(data, [s for s in sections if s[0] != b"NAME"]))
    yield case("keys-missing", join_segment(data, [s for s in sections if s[0] != b"KEYS"]))
    yield section_case("keys-descend", b"KEYS", lambda s: record(s, 7, "B", 255))
    yield section_case("keys-more-than-adds", b"KEYS", lambda s: (s[0], s[1], s[2] + b"\xff" * 8, s[3] + 1))
    yield section_case("half-a-record", b"ADDS", lambda s: (s[0], s[1], s[2][:-8], s[3]))
    yield section_case("part-out-of-range", b"ADDS", lambda s: record(s, 56, "<H", 9))
    yield section_case("encoding-out-of-range", b"ADDS", lambda s: record(s, 58, "<H", 9))
    yield section_case("no-tokens", b"ADDS", lambda s: record(s, 44, "<I", 0))
    yield section_case("too-many-tokens", b"ADDS", lambda s: record(s, 44, "<I", 65_537))
    yield section_case("removed-part-out-of-range", b"RMVS", lambda s: record(s, 36, "<H", 9))
    yield section_case("removed-version-out-of-range", b"RMVS", lambda s: record(s, 32, "<I", 1))
    yield section_case("names-not-json", b"NAME", lambda s: (s[0], s[1], s[2][:-1], s[3]))
    yield section_case("names-a-list", b"NAME", lambda s: (s[0], s[1], b"[]", s[3]))
    yield section_case("names-with-spaces", b"NAME", lambda s: (s[0], s[1], s[2].replace(b":", b": "), s[3]))
    yield section_case("names-nested", b"NAME", lambda s: (s[0], s[1], b"[" * 5_000, s[3]))
    yield section_case(
        "names-without-writer", b"NAME", lambda s: text(s, lambda v: {k: v[k] for k in v if k != "writer"})
    )
    yield section_case("names-of-numbers", b"NAME", lambda s: text(s, lambda v: v | {"versions": [1]}))
    yield section_case("part-of-no-form", b"NAME", lambda s: text(s, lambda v: v | {"parts": ["../../x"]}))
    yield section_case("encoding-of-no-form", b"NAME", lambda s: text(s, lambda v: v | {"encodings": ["a/b", "raw"]}))
    yield section_case("supersedes-a-path", b"SUPR", lambda s: text(s, lambda v: ["../../store.000001.json"]))
    yield section_case("supersedes-an-object", b"SUPR", lambda s: (s[0], s[1], b"{}", s[3]))
    yield section_case("supersedes-count-lies", b"SUPR", lambda s: (s[0], s[1], s[2], 2))
    yield section_case("labels-count-lies", b"LABL", lambda s: (s[0], s[1], s[2], 0))
    yield section_case("label-too-short", b"LABL", lambda s: text(s, lambda v: [v[0][:4]]))
    yield section_case("label-key-wrong", b"LABL", lambda s: text(s, lambda v: [["0" * 31, *v[0][1:]]]))
    yield section_case("label-number-wrong", b"LABL", lambda s: text(s, lambda v: [[*v[0][:4], -1]]))
    yield section_case(
        "label-number-2-63", b"LABL", lambda s: (s[0], s[1], s[2].replace(b",0]", b",9223372036854775808]"), s[3])
    )
    yield section_case("touches-half-a-record", b"TOUC", lambda s: (s[0], s[1], s[2][:8], s[3]))


def _gap_filled(data: bytes) -> bytes:
    """The segment with one byte that no section covers set."""
    changed = bytearray(data)
    end = 64 + 48 * struct.unpack_from("<I", data, 12)[0]
    for index in range(struct.unpack_from("<I", data, 12)[0]):
        offset, length = struct.unpack_from("<QQ", data, 64 + 48 * index + 8)
        if offset > end:
            changed[end] = 1
            return bytes(changed)
        end = offset + length
    raise AssertionError("the segment has no gap")


def _appended(data: bytes) -> bytes:
    """The segment with bytes behind its last section that its header counts."""
    changed = bytearray(data + b"more")
    struct.pack_into("<Q", changed, 40, len(changed))
    return seal_segment(changed, 64 + 48 * struct.unpack_from("<I", data, 12)[0])


def _identity_cases() -> Iterator[Case]:
    sound = TINY.canonical_json()
    fields = TINY.to_dict()

    def case(name: str, content: bytes, error: str = "IdentityError", fingerprint: str = "") -> Case:
        path = identity_path(Fingerprint(fingerprint or fingerprint_of(content)))
        return Case(f"identity-{name}", "ns.json", content, error, "namespace", path)

    def says(name: str, error: str = "IdentityError", **changes: Any) -> Case:
        return case(name, dump_canonical(fields | changes), error)

    def group(**changes: Any) -> list[dict[str, Any]]:
        return [{"kind": "full", "start": 0, "stop": 2, "window": None} | changes]

    yield case("empty", b"")
    yield case("cut", sound[:-1])
    yield case("not-utf-8", sound.replace(b"golden", b"\xff\xfe"))
    yield case("a-list", b"[" + sound + b"]")
    yield case("byte-order-mark", b"\xef\xbb\xbf" + sound)
    yield case("final-newline", sound + b"\n")
    yield case("spaces", sound.replace(b",", b", "))
    yield case(
        "keys-in-another-order",
        b'{"weights":' + dump_canonical(TINY.weights) + b"," + sound[1:-1].rpartition(b',"weights"')[0] + b"}",
    )
    yield case("field-twice", sound[:-1] + b',"weights":"unverified:x"}')
    yield case("field-missing", dump_canonical({k: v for k, v in fields.items() if k != "scale"}))
    yield says("field-added", extra=1)
    yield case("escaped-text", sound.replace(b"golden/tiny", b"golden\\u002ftiny"))
    yield case("float", sound.replace(b'"chunk_tokens":4', b'"chunk_tokens":4.0'))
    yield case("nan", sound.replace(b'"chunk_tokens":4', b'"chunk_tokens":NaN'))
    yield case("exponent", sound.replace(b'"chunk_tokens":4', b'"chunk_tokens":4e0'))
    yield case("integer-of-1000-digits", sound.replace(b'"chunk_tokens":4', b'"chunk_tokens":' + b"4" * 1000))
    yield case("half-surrogate", sound.replace(b"golden", b"\\ud800"))
    yield case("nested", b'{"rope":' + b"[" * 5_000)
    yield case("nested-within-the-parser", sound.replace(b'"10000.0"', b"[" * 40 + b"]" * 40))
    yield case("under-another-name", sound, fingerprint="0" * 32)
    yield says("layout-newer", "UnsupportedVersion", layout="dht-2")
    yield says("key-algorithm-newer", "UnsupportedVersion", keys="blake3-chain-1")
    yield says("dtype-newer", "UnsupportedVersion", dtype="F4_E2M1")
    yield says("attention-newer", "UnsupportedVersion", groups=group(kind="recurrent"))
    yield says("dtype-auto", dtype="auto")
    yield says("dtype-a-number", dtype=16)
    yield says("model-empty", model="")
    yield says("weights-a-name", weights="main")
    yield says("weights-short-digest", weights="sha256:abc")
    yield says("revision-without-commit", weights="revision:golden/tiny")
    yield says("adapter-a-name", adapter="mine")
    yield says("scale-missing", scale=None)
    yield says("rope-with-a-number", rope={"rope_theta": 10_000})
    yield says("rope-a-list", rope=[])
    yield says("chunk-tokens-zero", chunk_tokens=0)
    yield says("chunk-tokens-true", chunk_tokens=True)
    yield says("chunk-tokens-2-53", chunk_tokens=1 << 53)
    yield says("kv-heads-zero", kv_heads=0)
    yield says("layers-text", layers="2")
    yield says("head-dim-v-zero", head_dim_v=0)
    yield says("groups-empty", groups=[])
    yield says("groups-an-object", groups={})
    yield says("groups-short", groups=group(stop=1))
    yield says("groups-long", groups=group(stop=3))
    yield says("groups-overlap", groups=group() + group(start=1))
    yield says("groups-gap", groups=group(stop=1) + group(start=2, stop=3), layers=3)
    yield says("group-with-more-fields", groups=group(more=1))
    yield says("group-empty", groups=group(stop=0) + group())
    yield says("window-on-full", groups=group(window=64))
    yield says("sliding-without-window", groups=group(kind="sliding"))
    yield says("window-zero", groups=group(kind="sliding", window=0))
    yield says("latent-with-heads", groups=group(kind="latent"))
    yield says("latent-mixed", groups=group(kind="latent", stop=1) + group(start=1), kv_heads=1)


def _superblock_cases() -> Iterator[Case]:
    sound = superblock().to_json()
    fields = json.loads(sound)

    def case(
        name: str, content: bytes, error: str = "SuperblockError", operation: str = "read", generation: int = 1
    ) -> Case:
        assert content != sound or generation != 1, name
        path = superblock_path(generation)
        return Case(f"superblock-{name}", "store.json", content, error, "superblock", path, {"operation": operation})

    def says(name: str, error: str = "SuperblockError", operation: str = "read", **changes: Any) -> Case:
        value = {k: v for k, v in (fields | changes).items() if v is not Ellipsis}
        return case(name, seal_json(value), error, operation)

    yield case("empty", b"")
    yield case("cut", sound[:-1])
    yield case("a-list", b"[]")
    yield case("nested", b'{"features":' * 5_000)
    yield case("field-twice", sound[:-1] + b',"writer":"x"}')
    yield case("final-newline", sound + b"\n")
    yield case("other-file", b'{"format":"something-else"}')
    yield case("bit-flipped", sound.replace(b'"golden-0.1.0"', b'"golden-0.1.1"'), "ChecksumMismatch")
    yield case(
        "checksum-missing", dump_canonical({k: v for k, v in fields.items() if k != "checksum"}), "UnsupportedVersion"
    )
    yield case("checksum-of-another-kind", dump_canonical(fields | {"checksum": "sha3:00"}), "UnsupportedVersion")
    yield case("checksum-empty", dump_canonical(fields | {"checksum": "xxh3-128:"}), "ChecksumMismatch")
    yield case("under-another-name", sound, generation=2)
    yield says("version-2", "UnsupportedVersion", version=2)
    yield says("version-0", version=0)
    yield says("version-text", version="1")
    yield says("generation-0", generation=0)
    yield says("generation-negative", generation=-1)
    yield says("store-missing", store=...)
    yield says("features-missing", features=...)
    yield says("features-a-list", features=[])
    yield says("features-of-numbers", features=fields["features"] | {"incompat": [1]})
    yield says("features-text", features=fields["features"] | {"incompat": "all"})
    yield says("require-a-list", require=[])
    yield says("incompat-unknown", "UnsupportedVersion", features=fields["features"] | {"incompat": ["packs"]})
    yield says(
        "ro-compat-unknown", "UnsupportedVersion", "write", features=fields["features"] | {"ro_compat": ["packs"]}
    )
    yield says(
        "prune-requirement-unknown", "UnsupportedVersion", "prune", require=fields["require"] | {"prune": ["leases"]}
    )


def seal_json(value: dict[str, Any]) -> bytes:
    """Superblock bytes with the right checksum, whatever they say."""
    blank = dump_canonical(value | {"checksum": "xxh3-128:"})
    return dump_canonical(value | {"checksum": "xxh3-128:" + xxh3_hex(blank)})


def corrupt_cases() -> list[Case]:
    """All of them, each with its own name."""
    cases = [*_shard_cases(), *_segment_cases(), *_identity_cases(), *_superblock_cases()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return cases


def corrupt_files() -> dict[str, bytes]:
    """Every file below `format/golden/corrupt`, and the sound identity that shards are held against."""
    files = {"ns.json": TINY.canonical_json()}
    for case in corrupt_cases():
        expected = {"check": case.check, "error": case.error, "file": case.file_name, "path": case.path} | case.more
        files[f"{case.name}/{case.file_name}"] = case.content
        files[f"{case.name}/expected.json"] = json_bytes(expected)
    return files
