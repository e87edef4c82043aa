"""Canonical JSON (SPEC §2): one byte string for one value, and a reader that refuses everything ambiguous.

Values are null, booleans, integers of at most 53 bits, Unicode text, lists and objects, nested at most 32 deep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import FormatError

MAX_DEPTH = 32
MAX_INTEGER = 1 << 53


def dump_canonical(value: object, *, error: type[FormatError] = FormatError) -> bytes:
    """Bytes of `value`: keys sorted by code point, no spaces, UTF-8, no floats.

    Raises `error` for floats, larger integers, non-string keys, lone surrogates, deep nesting and types outside JSON.
    """
    _refuse_non_canonical(value, error, 0)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")
    except (TypeError, ValueError, UnicodeEncodeError) as problem:
        raise error("value has no canonical JSON form", found=problem) from problem


def load_strict(data: bytes | bytearray | memoryview | str, *, error: type[FormatError] = FormatError) -> Any:
    """Parse JSON that may come from anywhere: duplicate keys, floats, NaN, bad UTF-8 and deep nesting raise `error`."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        value = STRICT_DECODER.decode(text)
    except _Refused as problem:
        raise error(str(problem)) from None
    except (ValueError, RecursionError) as problem:  # RecursionError: the parser's own depth limit
        raise error("not valid JSON", found=problem) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # so few cannot nest too deeply
        _refuse_non_canonical(value, error, 0)
    return value


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("JSON object names a key twice")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise _Refused(f"JSON number {text!r} is not an integer")


def _bounded_int(text: str) -> int:
    number = int(text) if len(text) <= 17 else MAX_INTEGER + 1
    if not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise _Refused("JSON integer has more than 53 bits")
    return number


STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_refuse_constant, parse_constant=_refuse_constant, parse_int=_bounded_int
)


def _refuse_non_canonical(value: object, error: type[FormatError], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise error("value is nested too deeply", expected=f"at most {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise error("integer has more than 53 bits; write it as text", found=value)
        return
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_non_canonical(item, error, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise error("JSON keys must be strings", found=repr(key))
            _refuse_non_canonical(item, error, depth + 1)
    else:
        raise error("canonical JSON holds strings, integers, booleans, null, lists and objects", found=repr(value))
