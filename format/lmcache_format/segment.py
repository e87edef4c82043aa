"""Manifest segments (SPEC §11): immutable lists of what was added, removed and used, as fixed-size records.

The state of a namespace is the union of the adds of all its segments, minus the removes (by nonce), with the latest
of the touches. All of it can be rebuilt from the shards. Reader and writer share the tables of offsets below.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from .canonical_json import MAX_INTEGER, dump_canonical, load_strict
from .checksums import Buffer, xxh3
from .errors import ChecksumMismatch, GeometryError, SegmentError, UnsupportedVersion
from .geometry import Part
from .identity import MAX_CHUNK_TOKENS, Fingerprint
from .names import is_encoding_label, is_segment_file_name

MAGIC = b"LMKVSEG1"
VERSION = 1
SECTION_ALIGNMENT = 64
MAX_SECTIONS = 64
NO_VERSION = 0xFFFF_FFFF
MAX_NAMES = 65_535

_HEADER = struct.Struct("<8sII16sQQ16s")  # magic, version, sections, fingerprint, created_ms, file_bytes, checksum
_CHECKSUM_AT = 48
_ENTRY = struct.Struct("<4sIQQQ16s")  # id, flags, offset, length, records, checksum
_MUST_UNDERSTAND = 1
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")

_LABEL_KEY = re.compile(r"[0-9a-f]{32}")
KEY_DTYPE = np.dtype("<u8")
ADD_DTYPE = np.dtype(
    [
        ("key_rest", "<u8"),
        ("parent", "<u8"),
        ("nonce", "<u8"),
        ("size_bytes", "<u8"),
        ("created_ms", "<u8"),
        ("crc32c", "<u4"),
        ("num_tokens", "<u4"),
        ("depth", "<u4"),
        ("flags", "<u4"),
        ("part", "<u2"),
        ("encoding", "<u2"),
        ("reserved", "<u4"),
    ]
)
REMOVE_DTYPE = np.dtype(
    [
        ("key", "<u8"),
        ("key_rest", "<u8"),
        ("nonce", "<u8"),
        ("marked_ms", "<u8"),
        ("version", "<u4"),
        ("part", "<u2"),
        ("encoding", "<u2"),
        ("reason", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
    ]
)
TOUCH_DTYPE = np.dtype([("key", "<u8"), ("day", "<u4"), ("hits", "<u4")])
Records = npt.NDArray[np.void]


class AddFlags(IntFlag):
    """Bits of an add record."""

    HAS_CRC32C = 1


class RemoveReason(IntFlag):
    """Why a shard was removed."""

    PRUNED = 1
    DAMAGED = 2
    REPLACED = 4
    MISSING = 8


class RemoveFlags(IntFlag):
    """Bits of a remove record."""

    SWEPT = 1


@dataclass(frozen=True, slots=True)
class Label:
    """A name people gave to the sequence that ends with the chunk `key` (first 16 bytes) after `num_tokens` tokens."""

    key: bytes
    name: str
    num_tokens: int
    created_ms: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """The wish to keep the chunk `key` (first 16 bytes) and all before it until `expires_ms`; None for good.

    Of several pins of one key the one made last counts; a pin that is over when it is made takes an earlier one back.
    """

    key: bytes
    expires_ms: int | None
    created_ms: int


def _empty(dtype: np.dtype[Any]) -> Any:
    return np.empty(0, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The content of one segment. `keys[i]` (first 8 bytes of a key as a big-endian number, ascending) belongs to
    `adds[i]`; `part` and `encoding` fields index `parts` and `encodings`, `version` fields index `versions`."""

    fingerprint: Fingerprint
    created_ms: int
    writer: str = ""
    parts: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    keys: npt.NDArray[np.uint64] = field(default_factory=lambda: _empty(KEY_DTYPE))
    adds: Records = field(default_factory=lambda: _empty(ADD_DTYPE))
    removes: Records = field(default_factory=lambda: _empty(REMOVE_DTYPE))
    touches: Records = field(default_factory=lambda: _empty(TOUCH_DTYPE))
    supersedes: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    pins: tuple[Pin, ...] = ()


def key_number(key: bytes, start: int = 0) -> int:
    """Eight bytes of a key as the number that `KEYS` holds; numbers order as the hex text does."""
    return int.from_bytes(key[start : start + 8], "big")


def encode_segment(segment: Segment) -> bytes:
    """The bytes of a segment. Raises `SegmentError` for records that `decode_segment` would refuse."""
    _check_records(segment)
    if not _FINGERPRINT.fullmatch(segment.fingerprint) or not 0 <= segment.created_ms <= MAX_INTEGER:
        raise SegmentError("segment has no usable fingerprint or time", found=(segment.fingerprint, segment.created_ms))
    names = {
        "encodings": list(segment.encodings),
        "parts": list(segment.parts),
        "versions": list(segment.versions),
        "writer": segment.writer,
    }
    sections: list[tuple[bytes, int, bytes, int]] = [
        (b"KEYS", _MUST_UNDERSTAND, segment.keys.astype(KEY_DTYPE, copy=False).tobytes(), len(segment.keys)),
        (b"ADDS", _MUST_UNDERSTAND, segment.adds.tobytes(), len(segment.adds)),
        (b"RMVS", _MUST_UNDERSTAND, segment.removes.tobytes(), len(segment.removes)),
        (b"TOUC", 0, segment.touches.tobytes(), len(segment.touches)),
        (b"NAME", _MUST_UNDERSTAND, dump_canonical(names, error=SegmentError), 1),
        (b"SUPR", 0, dump_canonical(list(segment.supersedes), error=SegmentError), len(segment.supersedes)),
        (b"LABL", 0, _dump_labels(segment.labels), len(segment.labels)),
    ]
    if segment.pins:
        sections.append((b"PINS", 0, _dump_pins(segment.pins), len(segment.pins)))
    return _assemble(bytes.fromhex(segment.fingerprint), segment.created_ms, sections)


def decode_segment(data: Buffer, fingerprint: Fingerprint | None = None) -> Segment:
    """Read and check every byte of a segment; record arrays are views of `data`.

    Raises `SegmentError` or `ChecksumMismatch` for damage or another namespace, `UnsupportedVersion` for a newer
    version or a section that must be understood and is not known.
    """
    view = memoryview(data).toreadonly().cast("B")
    raw_fingerprint, created_ms, sections = _dissect(view)
    found = Fingerprint(raw_fingerprint.hex())
    if fingerprint is not None and found != fingerprint:
        raise SegmentError("segment belongs to another namespace", expected=fingerprint, found=found)
    names = _load_names(sections.get(b"NAME"))
    segment = Segment(
        fingerprint=found,
        created_ms=created_ms,
        writer=names["writer"],
        parts=tuple(names["parts"]),
        encodings=tuple(names["encodings"]),
        versions=tuple(names["versions"]),
        keys=_records(sections, b"KEYS", KEY_DTYPE),
        adds=_records(sections, b"ADDS", ADD_DTYPE),
        removes=_records(sections, b"RMVS", REMOVE_DTYPE),
        touches=_records(sections, b"TOUC", TOUCH_DTYPE),
        supersedes=_load_supersedes(_rows(sections, b"SUPR")),
        labels=_load_labels(_rows(sections, b"LABL")),
        pins=_load_pins(sections),
    )
    _check_records(segment)
    return segment


def check_length(start: Buffer, file_bytes: int) -> None:
    """Raise unless the first bytes of a file say that a segment of so many bytes begins here: before memory is spent.

    Raises as `decode_segment` does.
    """
    _check_header(memoryview(start).toreadonly().cast("B"), file_bytes)


def _assemble(fingerprint: bytes, created_ms: int, sections: Sequence[tuple[bytes, int, bytes, int]]) -> bytes:
    position = _HEADER.size + _ENTRY.size * len(sections)
    entries, body = [], []
    for name, flags, content, records in sections:
        gap = -position % SECTION_ALIGNMENT
        body += [bytes(gap), content]
        entries.append(_ENTRY.pack(name, flags, position + gap, len(content), records, xxh3(content)))
        position += gap + len(content)
    header = bytearray(
        _HEADER.pack(MAGIC, VERSION, len(sections), fingerprint, created_ms, position, bytes(16)) + b"".join(entries)
    )
    header[_CHECKSUM_AT : _CHECKSUM_AT + 16] = xxh3(header)
    return b"".join([bytes(header), *body])


def _dissect(view: memoryview) -> tuple[bytes, int, dict[bytes, tuple[memoryview, int]]]:
    """Fingerprint, creation time and sections, once the table and every section have the right checksum."""
    count, fingerprint, created_ms = _check_header(view, len(view))
    sections: dict[bytes, tuple[memoryview, int]] = {}
    position = _HEADER.size + _ENTRY.size * count
    for index in range(count):
        name, flags, offset, length, records, digest = _ENTRY.unpack_from(view, _HEADER.size + index * _ENTRY.size)
        gap = -position % SECTION_ALIGNMENT
        if offset != position + gap or offset + length > len(view) or any(view[position:offset]):
            raise SegmentError("section is out of place", where=str(name), expected=position + gap, found=offset)
        if name in sections:
            raise SegmentError("section stands twice", where=str(name))
        if name not in _SECTIONS and flags & _MUST_UNDERSTAND:
            raise UnsupportedVersion("segment has a section that must be understood", found=str(name))
        content = view[offset : offset + length]
        if xxh3(content) != digest:
            raise ChecksumMismatch(
                "section checksum", where=str(name), expected=digest.hex(), found=xxh3(content).hex()
            )
        sections[name] = (content, records)
        position = offset + length
    if position != len(view):
        raise SegmentError("bytes follow the last section", expected=position, found=len(view))
    return fingerprint, created_ms, sections


def _check_header(view: memoryview, found_bytes: int) -> tuple[int, bytes, int]:
    """Number of sections, fingerprint and creation time, where header and table are those of a file of that length."""
    if len(view) < _HEADER.size:
        raise SegmentError(
            "file is too short for a segment", expected=f"at least {_HEADER.size} bytes", found=len(view)
        )
    magic, version, count, fingerprint, created_ms, file_bytes, checksum = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise SegmentError("not a manifest segment", expected=MAGIC, found=magic)
    if version != VERSION:
        raise UnsupportedVersion("segment is of another version", expected=VERSION, found=version)
    table_end = _HEADER.size + _ENTRY.size * count
    if count > MAX_SECTIONS or table_end > len(view):
        raise SegmentError("file ends within its table of sections", expected=f"{count} sections", found=len(view))
    table = bytearray(view[:table_end])
    table[_CHECKSUM_AT : _CHECKSUM_AT + 16] = bytes(16)
    if xxh3(table) != checksum:
        raise ChecksumMismatch("segment table checksum", expected=checksum.hex(), found=xxh3(table).hex())
    if file_bytes != found_bytes:
        raise SegmentError("file has another length than its header says", expected=file_bytes, found=found_bytes)
    return count, fingerprint, created_ms


_SECTIONS = frozenset((b"KEYS", b"ADDS", b"RMVS", b"TOUC", b"NAME", b"SUPR", b"LABL", b"PINS"))


def _records(sections: dict[bytes, tuple[memoryview, int]], name: bytes, dtype: np.dtype[Any]) -> Any:
    content, count = sections.get(name, (memoryview(b""), 0))
    if len(content) != count * dtype.itemsize:
        raise SegmentError("section is not as long as its records", where=str(name), expected=count, found=len(content))
    return np.frombuffer(content, dtype)


def _rows(sections: dict[bytes, tuple[memoryview, int]], name: bytes) -> list[Any]:
    """A section that is a JSON array of as many values as it has records; a missing one is empty."""
    if name not in sections:
        return []
    content, count = sections[name]
    rows = load_strict(content, error=SegmentError)
    if not isinstance(rows, list):
        raise SegmentError("section is not a JSON array", where=str(name), found=type(rows).__name__)
    if len(rows) != count:
        raise SegmentError("section holds another number of records", where=str(name), expected=count, found=len(rows))
    return rows


def _load_names(section: tuple[memoryview, int] | None) -> dict[str, Any]:
    if section is None:
        raise SegmentError("NAME section is missing")
    content, count = section
    if count != 1:
        raise SegmentError("NAME section is one record", expected=1, found=count)
    names = load_strict(content, error=SegmentError)
    if not isinstance(names, dict) or not isinstance(names.get("writer"), str):
        raise SegmentError("NAME section is of the wrong form")
    for field_name in ("encodings", "parts", "versions"):
        values = names.get(field_name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise SegmentError("NAME section has a field of the wrong form", where=field_name)
    if dump_canonical(names, error=SegmentError) != content:
        raise SegmentError("NAME section is not in canonical form")
    return names


def _load_supersedes(names: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in names):
        raise SegmentError("SUPR section is not a list of names")
    return tuple(names)


def _dump_labels(labels: Sequence[Label]) -> bytes:
    """ASCII JSON, so that names which are not valid Unicode (PEP 383 surrogates) survive."""
    rows = [[label.key.hex(), label.name, label.num_tokens, label.created_ms, label.depth] for label in labels]
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _load_labels(rows: list[Any]) -> tuple[Label, ...]:
    labels = []
    try:
        for key, name, num_tokens, created_ms, depth in rows:
            numbers = (num_tokens, created_ms, depth)
            if not _LABEL_KEY.fullmatch(key) or not isinstance(name, str) or not all(map(_is_count, numbers)):
                raise SegmentError("label has a field of the wrong form", found=str(key)[:80])
            labels.append(Label(bytes.fromhex(key), name, num_tokens, created_ms, depth))
    except (TypeError, ValueError) as problem:
        if isinstance(problem, SegmentError):
            raise
        raise SegmentError("LABL section is of the wrong form", found=problem) from None
    return tuple(labels)


def _dump_pins(pins: Sequence[Pin]) -> bytes:
    return dump_canonical([[pin.key.hex(), pin.expires_ms, pin.created_ms] for pin in pins], error=SegmentError)


def _load_pins(sections: dict[bytes, tuple[memoryview, int]]) -> tuple[Pin, ...]:
    pins = []
    rows = _rows(sections, b"PINS")
    try:
        for key, expires_ms, created_ms in rows:
            is_sound = _is_count(created_ms) and (expires_ms is None or _is_count(expires_ms))
            if not _LABEL_KEY.fullmatch(key) or not is_sound:
                raise SegmentError("pin has a field of the wrong form", found=str(key)[:80])
            pins.append(Pin(bytes.fromhex(key), expires_ms, created_ms))
    except (TypeError, ValueError) as problem:
        if isinstance(problem, SegmentError):
            raise
        raise SegmentError("PINS section is of the wrong form", found=problem) from None
    if b"PINS" in sections and _dump_pins(pins) != sections[b"PINS"][0]:
        raise SegmentError("PINS section is not in canonical form")
    return tuple(pins)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_records(segment: Segment) -> None:
    _check_dtypes(segment)
    if len(segment.keys) != len(segment.adds):
        raise SegmentError("KEYS and ADDS differ in length", expected=len(segment.keys), found=len(segment.adds))
    if len(segment.keys) > 1 and bool((segment.keys[1:] < segment.keys[:-1]).any()):
        raise SegmentError("KEYS are not in ascending order")
    for records, where in ((segment.adds, "ADDS"), (segment.removes, "RMVS")):
        _check_index(records, "part", len(segment.parts), where)
        _check_index(records, "encoding", len(segment.encodings), where)
    num_tokens = segment.adds["num_tokens"]
    if len(num_tokens) and not 1 <= int(num_tokens.min()) <= int(num_tokens.max()) <= MAX_CHUNK_TOKENS:
        raise SegmentError(
            "chunk holds an impossible number of tokens", where="ADDS", expected=f"1 to {MAX_CHUNK_TOKENS}"
        )
    versions = segment.removes["version"]
    if len(versions) and bool(((versions != NO_VERSION) & (versions >= len(segment.versions))).any()):
        raise SegmentError("record names a version that is not in NAME", where="RMVS", expected=len(segment.versions))
    try:
        for part in segment.parts:
            Part.parse(part)
    except GeometryError as problem:
        raise SegmentError("NAME section has a part of the wrong form", found=problem.found) from None
    if not all(map(is_encoding_label, segment.encodings)):
        raise SegmentError("NAME section has an encoding of the wrong form", found=segment.encodings)
    if max(len(segment.parts), len(segment.encodings)) > MAX_NAMES:
        raise SegmentError("NAME section has too many names", expected=MAX_NAMES)
    if not all(map(is_segment_file_name, segment.supersedes)):
        raise SegmentError("SUPR section names what is no segment", expected="<ulid>-<writer>.lmi")
    for label in segment.labels:
        if len(label.key) != 16 or not all(map(_is_count, (label.num_tokens, label.created_ms, label.depth))):
            raise SegmentError("label has a field of the wrong form", found=label.name[:80])


def _check_dtypes(segment: Segment) -> None:
    for records, dtype, where in (
        (segment.keys, KEY_DTYPE, "KEYS"),
        (segment.adds, ADD_DTYPE, "ADDS"),
        (segment.removes, REMOVE_DTYPE, "RMVS"),
        (segment.touches, TOUCH_DTYPE, "TOUC"),
    ):
        if records.ndim != 1 or records.dtype != dtype:
            raise SegmentError("records are of another type", where=where, expected=dtype, found=records.dtype)


def _check_index(records: Records, name: str, count: int, where: str) -> None:
    if len(records) and int(records[name].max()) >= count:
        raise SegmentError(
            f"record names a {name} that is not in NAME",
            where=where,
            expected=f"below {count}",
            found=int(records[name].max()),
        )
