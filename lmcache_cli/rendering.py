"""Values as text: cells for people, stable fields for pipes, JSON for programs. Names are data and are never markup."""

import dataclasses
import json
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence, Set
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any, TypeAlias

from lmcache_cli.quantities import show_count, show_duration, show_size

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
Fields: TypeAlias = Mapping[str, JsonValue]

ABSENT = "-"
_UNPRINTABLE = {"Cc", "Zl", "Zp", "Cs"}
_DIRECTION_MARKS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_LAST_SECOND = 253_402_300_799  # of the year 9999
_SECONDS_BY_SUFFIX = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}


def printable(text: str) -> str:
    """The text on one line, literally, but with control characters and bytes that are no text as backslash escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in as_utf8(text))


def as_utf8(text: str) -> str:
    """The same name from every locale: bytes that an ASCII locale kept as lone surrogates are read as UTF-8."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text


def cell(key: str, value: JsonValue) -> str:
    """A value for people: the unit in its key (`_bytes`, `bytes_`, `_s`, `_ms`, …) decides how it is shown."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _shown_number(key, value)
    return field(value)


def heading(key: str) -> str:
    """The title of a column for people, whose cells carry the unit themselves."""
    for suffix in ("_bytes", *_SECONDS_BY_SUFFIX):
        key = key.removesuffix(suffix)
    return key.replace("_", " ")


def field(value: JsonValue) -> str:
    """A value for pipes: one field without tabs or line breaks, numbers in full."""
    match value:
        case None:
            return ABSENT
        case bool():
            return "yes" if value else "no"
        case str():
            return printable(value) or ABSENT
        case int() | float():
            return repr(value)
        case list():
            return ",".join(field(item) for item in value) or ABSENT
        case dict():
            return json_text(value)


def utc_time(milliseconds_since_1970: int) -> str:
    """`2026-11-29T12:00:00Z`; a time beyond the calendar, which only damage can hold, is its last second."""
    at = datetime(1970, 1, 1) + timedelta(seconds=min(milliseconds_since_1970 // 1000, _LAST_SECOND))
    return f"{at.isoformat()}Z"


def utc_day(days_since_1970: int) -> str:
    """`2026-11-29`; a day beyond the calendar is its last one."""
    return (date(1970, 1, 1) + timedelta(days=min(days_since_1970, _LAST_SECOND // 86400))).isoformat()


def json_text(value: JsonValue) -> str:
    """One line of ASCII JSON."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def fields_of(record: object) -> dict[str, JsonValue]:
    """A mapping or dataclass as plain JSON values. Raises TypeError for anything else."""
    value = plain(record)
    if not isinstance(value, dict):
        raise TypeError(f"expected a mapping or a dataclass as record, found {type(record).__name__}")
    return value


def plain(value: Any) -> JsonValue:
    """A value as JSON holds it: bytes as hex, enums by value, paths as text, numbers that are not finite as null."""
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value)
        case str():
            return as_utf8(str(value))
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case bytes():
            return value.hex()
        case os.PathLike():
            return as_utf8(os.fsdecode(value))
        case Mapping():
            return {as_utf8(str(key)): plain(item) for key, item in value.items()}
        case Sequence() | Set():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    raise TypeError(f"expected a value that JSON can hold, found {type(value).__name__}")


def _escaped(character: str) -> str:
    if character not in _DIRECTION_MARKS and unicodedata.category(character) not in _UNPRINTABLE:
        return character
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def _shown_number(key: str, value: int | float) -> str:
    if key.endswith("_bytes") or key == "bytes" or key.startswith("bytes_"):
        return show_size(value)
    for suffix, unit_s in _SECONDS_BY_SUFFIX.items():
        if key.endswith(suffix):
            return show_duration(value * unit_s)
    return show_count(value) if isinstance(value, int) else f"{value:.4g}"
