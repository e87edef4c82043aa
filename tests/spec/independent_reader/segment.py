"""Segments of the manifest and the state that they add up to (SPEC §11)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from . import names, strict_json
from .checksums import xxh3_128
from .refusals import Refused, damaged, later

HEADER = struct.Struct("<8sII16sQQ16s")
ENTRY = struct.Struct("<4sIQQQ16s")
ADD = struct.Struct("<QQQQQIIIIHHI")
REMOVE = struct.Struct("<QQQQIHHHHI")
TOUCH = struct.Struct("<QII")
RECORD_BYTES = {b"KEYS": 8, b"ADDS": ADD.size, b"RMVS": REMOVE.size, b"TOUC": TOUCH.size}
KNOWN = {*RECORD_BYTES, b"NAME", b"SUPR", b"LABL", b"PINS"}
MAX_SECTIONS = 64
MAX_NAMES = 65535
MAX_TOKENS = 65536
NO_VERSION = 0xFFFFFFFF
HAS_CRC32C = 1
SWEPT = 1

ShardId = tuple[bytes, str, str]
"""(first 16 bytes of the key, part, label): one name of a shard, as far as a manifest knows it."""


@dataclass(frozen=True)
class Add:
    """One write."""

    name: ShardId
    parent: bytes
    nonce: str
    size_bytes: int
    created_ms: int
    crc32c: int | None
    num_tokens: int
    depth: int

    @property
    def age(self) -> tuple[int, str, bool]:
        """Orders the writes of one name: the last of them counts. Of one write, the record that has a CRC32C does."""
        return self.created_ms, self.nonce, self.crc32c is not None


@dataclass(frozen=True)
class Remove:
    """One write taken back; `version` is the only object version that may be swept."""

    name: ShardId
    nonce: str
    marked_ms: int
    version: str | None
    reason: int
    flags: int


@dataclass(frozen=True)
class Label:
    """The name people gave to the sequence that ends with the chunk `key` (16 bytes in hex)."""

    key: str
    name: str
    num_tokens: int
    created: int
    depth: int

    @property
    def age(self) -> tuple[int, int, int]:
        """Orders the labels of one name and key: the last of them counts."""
        return self.created, self.num_tokens, self.depth


@dataclass(frozen=True)
class Pin:
    """The wish to keep the chunk `key` (16 bytes, hex) and all before it until `expires` (Unix ms; None: for good)."""

    key: str
    expires: int | None
    created: int

    @property
    def age(self) -> tuple[int, float]:
        """Orders the pins of one key: the last of them counts."""
        return self.created, float("inf") if self.expires is None else self.expires


@dataclass
class Segment:
    """All that one segment says."""

    fingerprint: str
    created_ms: int
    writer: str
    adds: list[Add] = field(default_factory=list)
    removes: list[Remove] = field(default_factory=list)
    touches: list[tuple[bytes, int, int]] = field(default_factory=list)
    supersedes: list[str] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)


def _must(holds: object, text: str) -> None:
    if not holds:
        raise damaged(text)


def _sections(data: bytes, fingerprint: str) -> tuple[int, dict[bytes, tuple[bytes, int]]]:
    """Time of creation, and the known sections: bytes and number of records by id."""
    _must(len(data) >= HEADER.size, "no header")
    magic, version, count, owner, created, size, checksum = HEADER.unpack_from(data)
    _must(magic == b"LMKVSEG1", "magic")
    if version != 1:
        raise later("version of a segment")
    _must(count <= MAX_SECTIONS, "too many sections")
    _must(size == len(data), "bytes of the file")
    end = HEADER.size + ENTRY.size * count
    _must(end <= size, "table of contents")
    if xxh3_128(data[:48] + bytes(16) + data[HEADER.size : end]) != checksum:
        raise damaged("checksum of header and table", checksum=True)
    _must(owner.hex() == fingerprint, "another namespace")
    sections: dict[bytes, tuple[bytes, int]] = {}
    seen, unknown = set(), None
    for index in range(count):
        kind, flags, offset, length, records, digest = ENTRY.unpack_from(data, HEADER.size + ENTRY.size * index)
        _must(offset == (end + 63) // 64 * 64 and length <= size - offset, "place of a section")
        _must(not any(data[end:offset]), "gap is not zero")
        _must(kind not in seen, "section twice")
        content = data[offset : offset + length]
        if xxh3_128(content) != digest:
            raise damaged("checksum of a section", checksum=True)
        end = offset + length
        seen.add(kind)
        if kind in KNOWN:
            sections[kind] = content, records
        elif flags & 1:
            unknown = kind
    _must(end == size, "bytes after the last section")
    if unknown is not None:
        raise later(f"section {unknown!r}")
    return created, sections


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _names(data: bytes) -> dict[str, Any]:
    value = strict_json.parse_canonical(data)
    _must(isinstance(value, dict), "NAME")
    _must(all(_texts(value.get(member)) for member in ("encodings", "parts", "versions")), "arrays of NAME")
    _must(isinstance(value.get("writer"), str), "writer of NAME")
    _must(max(len(value["encodings"]), len(value["parts"])) <= MAX_NAMES, "too many names")
    try:
        for text in value["parts"]:
            names.part(text)
        for text in value["encodings"]:
            names.label(text)
    except Refused as error:
        raise damaged(str(error)) from error
    return value


def _row(row: object, width: int) -> list[Any]:
    """A row of a list whose first member is the first half of a key, in hex."""
    _must(isinstance(row, list) and len(row) == width, "members of a row")
    assert isinstance(row, list)
    key = row[0]
    _must(isinstance(key, str) and len(key) == 32 and not set(key) - set("0123456789abcdef"), "key of a row")
    return row


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _label(row: object) -> Label:
    key, name, *numbers = _row(row, 5)
    _must(isinstance(name, str) and all(map(_count, numbers)), "form of a label")
    return Label(key, name, *numbers)


def _pin(row: object) -> Pin:
    key, expires, created = _row(row, 3)
    _must((expires is None or _count(expires)) and _count(created), "form of a pin")
    return Pin(key, expires, created)


def _supersedes(row: object) -> str:
    _must(isinstance(row, str), "SUPR is not of names")
    try:
        names.segment(str(row))
    except Refused as error:
        raise damaged(str(error)) from error
    return str(row)


def _rows(sections: dict[bytes, tuple[bytes, int]], kind: bytes) -> list[Any]:
    content, records = sections.get(kind, (b"[]", 0))
    rows = strict_json.parse_canonical(content) if kind == b"PINS" else strict_json.parse(content)
    _must(isinstance(rows, list) and len(rows) == records, "records of a list")
    return list(rows)


def parse_segment(data: bytes, fingerprint: str) -> Segment:
    """A segment found in the namespace `fingerprint`, every rule checked."""
    created, sections = _sections(data, fingerprint)
    _must(b"NAME" in sections and sections[b"NAME"][1] == 1, "no names")
    table = _names(sections[b"NAME"][0])
    segment = Segment(fingerprint, created, table["writer"])
    for kind, size in RECORD_BYTES.items():
        content, records = sections.setdefault(kind, (b"", 0))
        _must(len(content) == size * records, "bytes of a section")
    (heads, count), (adds, _) = sections[b"KEYS"], sections[b"ADDS"]
    _must(count * ADD.size == len(adds), "as many keys as adds")

    def shard(key: int, rest: int, part: int, encoding: int) -> ShardId:
        _must(part < len(table["parts"]) and encoding < len(table["encodings"]), "index of a name")
        return (key << 64 | rest).to_bytes(16, "big"), table["parts"][part], table["encodings"][encoding]

    keys = struct.unpack(f"<{count}Q", heads)
    _must(list(keys) == sorted(keys), "keys descend")
    for key, add in zip(keys, ADD.iter_unpack(adds), strict=True):
        rest, parent, nonce, size, created_ms, crc, tokens, depth, flags, part, encoding, _ = add
        _must(1 <= tokens <= MAX_TOKENS, "tokens of an add")
        name = shard(key, rest, part, encoding)
        crc = crc if flags & HAS_CRC32C else None
        segment.adds.append(Add(name, parent.to_bytes(8, "big"), f"{nonce:016x}", size, created_ms, crc, tokens, depth))
    for remove in REMOVE.iter_unpack(sections[b"RMVS"][0]):
        key, rest, nonce, marked, version, part, encoding, reason, flags, _ = remove
        _must(version == NO_VERSION or version < len(table["versions"]), "index of a version")
        text = None if version == NO_VERSION else table["versions"][version]
        name = shard(key, rest, part, encoding)
        segment.removes.append(Remove(name, f"{nonce:016x}", marked, text, reason, flags))
    segment.touches = [
        (key.to_bytes(8, "big"), day, hits) for key, day, hits in TOUCH.iter_unpack(sections[b"TOUC"][0])
    ]
    segment.supersedes = [_supersedes(row) for row in _rows(sections, b"SUPR")]
    segment.labels = [_label(row) for row in _rows(sections, b"LABL")]
    segment.pins = [_pin(row) for row in _rows(sections, b"PINS")]
    return segment


@dataclass
class State:
    """What a namespace holds, from any set of its segments."""

    adds: dict[ShardId, Add] = field(default_factory=dict)
    removed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By nonce: the earliest mark (Unix ms) and all flags."""
    touches: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """By the first 8 bytes of a key: latest day, most hits."""
    labels: dict[tuple[str, str], Label] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)


def merge(segments: Iterable[Segment]) -> State:
    """The state, however often and in whatever order segments come."""
    segments = list(segments)
    state = State()
    for segment in segments:
        for remove in segment.removes:
            marked, flags = state.removed.get(remove.nonce, (remove.marked_ms, 0))
            state.removed[remove.nonce] = min(marked, remove.marked_ms), flags | remove.flags
        for key, day, hits in segment.touches:
            old = state.touches.get(key, (0, 0))
            state.touches[key] = max(old[0], day), max(old[1], hits)
        for label in segment.labels:
            at = label.name, label.key
            if at not in state.labels or state.labels[at].age < label.age:
                state.labels[at] = label
        for pin in segment.pins:
            if pin.key not in state.pins or state.pins[pin.key].age < pin.age:
                state.pins[pin.key] = pin
    for segment in segments:
        for add in segment.adds:
            best = state.adds.get(add.name)
            if add.nonce not in state.removed and (best is None or add.age > best.age):
                state.adds[add.name] = add
    return state
