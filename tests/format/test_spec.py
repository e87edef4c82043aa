"""SPEC.md tells the truth: its tables, vectors and example are read and compared with the code."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from _corrupt import TINY, header_text, seal_header, tiny_segment, tiny_shard, with_field

import lmcache_format.segment as segment_module
from lmcache_format import Dtype, Identity, ShardError, UnsupportedVersion
from lmcache_format.canonical_json import MAX_DEPTH
from lmcache_format.checksums import crc32c, xxh3_hex
from lmcache_format.geometry import MAX_HEADS, MAX_LAYERS
from lmcache_format.identity import KEY_ALGORITHM, LAYOUT, MAX_CHUNK_TOKENS, MAX_IDENTITY_BYTES
from lmcache_format.segment import (
    ADD_DTYPE,
    MAX_NAMES,
    MAX_SECTIONS,
    NO_VERSION,
    REMOVE_DTYPE,
    TOUCH_DTYPE,
    AddFlags,
    RemoveFlags,
    RemoveReason,
)
from lmcache_format.shard import FORMAT, MAX_HEADER_BYTES, build_header, header_bytes, parse_header
from lmcache_format.superblock import MAX_SUPERBLOCK_BYTES, Operation, Superblock

ROOT = Path(__file__).resolve().parents[2]
SPEC = (ROOT / "format" / "SPEC.md").read_text("utf-8")


def table_after(marker: str) -> list[list[str]]:
    """Rows of the first table behind `marker`, cells without backticks."""
    lines = SPEC[SPEC.index(marker) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(
    ("marker", "dtype"), [("**`ADDS`**", ADD_DTYPE), ("**`RMVS`**", REMOVE_DTYPE), ("**`TOUC`**", TOUCH_DTYPE)]
)
def test_record_tables_are_the_dtypes_of_the_code(marker: str, dtype: np.dtype[np.void]) -> None:
    told = [(name, int(offset), int(size)) for offset, size, name, _ in table_after(marker)]
    assert dtype.fields is not None
    assert told == [(name, dtype.fields[name][1], dtype.fields[name][0].itemsize) for name in dtype.names or ()]
    assert f"{marker}, {dtype.itemsize} bytes a record" in SPEC
    assert all(kind.str in ("<u2", "<u4", "<u8") for kind, *_ in dtype.fields.values())


@pytest.mark.parametrize(
    ("marker", "form"), [("**Header**", segment_module._HEADER), ("**Table of contents**", segment_module._ENTRY)]
)
def test_segment_header_and_entry_are_the_structs_of_the_code(marker: str, form: struct.Struct) -> None:
    sizes = [int(size) for _, size, _ in table_after(marker)]
    offsets = [int(offset) for offset, _, _ in table_after(marker)]
    assert offsets == [sum(sizes[:index]) for index in range(len(sizes))]
    assert sum(sizes) == form.size
    assert form.format.startswith("<")
    code = re.findall(r"\d*[a-zA-Z]", form.format[1:])
    assert [struct.calcsize("<" + item) for item in code] == sizes


def test_sections_are_those_of_the_code() -> None:
    pinned = replace(segment_module.decode_segment(tiny_segment()), pins=(segment_module.Pin(bytes(16), None, 1),))
    data = segment_module.encode_segment(pinned)
    count = struct.unpack_from("<I", data, 12)[0]
    written = [struct.unpack_from("<4sI", data, 64 + 48 * index) for index in range(count)]
    assert [(row[0].encode(), int(row[1])) for row in table_after("**Sections**")] == written
    assert {row[0].encode() for row in table_after("**Sections**")} == set(segment_module._SECTIONS)


def test_flags_and_reasons_are_those_of_the_code() -> None:
    assert [flag.value for flag in (AddFlags.HAS_CRC32C, RemoveFlags.SWEPT)] == [1, 1]
    assert NO_VERSION == 0xFFFF_FFFF
    reason = next(row[3] for row in table_after("**`RMVS`**") if row[2] == "reason")
    assert reason == ", ".join(f"{each.value} {(each.name or '').lower()}" for each in RemoveReason)


def test_identity_members_are_those_of_the_code() -> None:
    assert [row[0] for row in table_after("## 3. Identity")] == list(TINY.to_dict()) == sorted(TINY.to_dict())
    assert set(TINY.to_dict()) == set(Identity.__dataclass_fields__)
    told = {row[0]: row[1] for row in table_after("## 3. Identity")}
    assert (told["keys"].split()[0], told["layout"].split()[0]) == (f'"{KEY_ALGORITHM}"', f'"{LAYOUT}"')


def test_element_types_are_those_of_the_code() -> None:
    assert [(row[0], int(row[1])) for row in table_after("### 4.1")] == [(d.value, d.itemsize) for d in Dtype]


def test_key_vectors_are_the_golden_ones() -> None:
    golden = json.loads((ROOT / "format" / "golden" / "keys.json").read_text("utf-8"))
    told = {row[0]: row[1] for row in table_after("### 5.4")}
    assert told == {name: golden[name] for name in told}
    assert len(told) == len(golden) - 3


def test_metadata_members_are_those_of_the_code() -> None:
    rows = table_after("### 8.3")
    plain = json.loads(header_text(tiny_shard().file))["__metadata__"]
    shard = tiny_shard("bfx", keep_tokens=True, producer={"x": 1}, provenance={"x": 1})
    everything = json.loads(header_text(shard.file))["__metadata__"]
    parsed = parse_header(tiny_shard().file[: header_bytes(tiny_shard().file)])
    of_tensors = build_header(parsed.meta, parsed.checksums, tensor_checksums=bytes(16 * len(parsed.tensors)))
    everything |= json.loads(header_text(of_tensors))["__metadata__"]
    assert {row[0] for row in rows} == set(everything)
    assert {row[0] for row in rows if row[1] == "!"} == set(plain) - {"lmcache.writer"}
    assert everything["lmcache.format"] == FORMAT


def test_required_members_are_those_without_which_a_header_is_refused() -> None:
    text = header_text(tiny_shard().file)
    required = {row[0].removeprefix("lmcache.") for row in table_after("### 8.3") if row[1] == "!"} - {
        "header_checksum"
    }
    for name in required:
        with pytest.raises((ShardError, UnsupportedVersion)):
            parse_header(seal_header(with_field(text, name, None)))
    parse_header(seal_header(with_field(text, "writer", None)))


def test_the_example_is_the_shard_that_the_code_writes() -> None:
    shard = tiny_shard()
    example = SPEC[SPEC.index("```json") + 8 :]
    assert example[: example.index("```")].replace("\n", "").encode() == header_text(shard.file)
    spaces = header_bytes(shard.file) - 8 - len(header_text(shard.file))
    assert f"{spaces} spaces follow" in SPEC
    dump = re.findall(r"^    ([0-9a-f]{8})  ((?:[0-9a-f]{2} ?)+)  ", SPEC, re.MULTILINE)
    assert len(dump) == 5
    for offset, pairs in dump:
        raw = bytes.fromhex(pairs)
        assert shard.file[int(offset, 16) : int(offset, 16) + len(raw)] == raw
    assert build_header(shard.meta, parse_header(shard.file[:4096]).checksums) == shard.file[:4096]


def test_superblock_members_are_those_of_the_code() -> None:
    value = json.loads(Superblock("x", 1).to_json())
    assert [row[0] for row in table_after("## 10. Superblock")] == sorted(value)
    told = {row[0]: row[1] for row in table_after("## 10. Superblock")}
    assert told["features"].startswith("{" + ", ".join(sorted(value["features"])) + "}")
    assert told["require"].startswith("{" + ", ".join(sorted(operation.value for operation in Operation)) + "}")


def test_limits_are_those_of_the_code() -> None:
    told = {row[0]: int(row[1].split()[0]) for row in table_after("## 15. Limits")}
    assert told == {
        "header of a shard": MAX_HEADER_BYTES,
        "identity, superblock": MAX_IDENTITY_BYTES,
        "tokens of a chunk": MAX_CHUNK_TOKENS,
        "layers of a shard": MAX_LAYERS,
        "heads of a shard": MAX_HEADS,
        "parts and encodings of a segment": MAX_NAMES,
        "sections of a segment": MAX_SECTIONS,
        "nesting of JSON": MAX_DEPTH,
    }
    assert MAX_IDENTITY_BYTES == MAX_SUPERBLOCK_BYTES


def test_checksums_are_those_of_the_text() -> None:
    assert f"`{xxh3_hex(b'')}`" in SPEC
    assert f"0x{crc32c(b'123456789'):08X}" in SPEC


def test_every_section_that_the_code_cites_exists() -> None:
    numbers = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", SPEC, re.MULTILINE))
    for folder in ("format", "lmcache_cli", "kernels", "tests/format", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            cited = re.findall(r"SPEC(?:\.md)? §(\d+(?:\.\d+)?)", path.read_text("utf-8"))
            assert set(cited) <= numbers, path
