"""JSON as SPEC §2 reads it, and its canonical form."""

from __future__ import annotations

import json
from typing import Any

from .refusals import damaged

MAX_DEPTH = 32
MAX_INTEGER = 1 << 53

_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def _integer(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
        raise damaged("integer beyond 2^53")
    return int(digits)


def _no_fraction(text: str) -> Any:
    raise damaged(f"number with fraction or exponent: {text[:20]}")


def _no_constant(text: str) -> Any:
    raise damaged(f"not a JSON value: {text}")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise damaged("duplicate member name")
    return members


DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_integer, parse_float=_no_fraction, parse_constant=_no_constant
)


def text_of(data: bytes) -> str:
    """UTF-8, with nesting bounded before any parser recurses."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged("not UTF-8") from error
    depth = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH + 1:
                raise damaged(f"nested deeper than {MAX_DEPTH}")
        elif character in "]}":
            depth -= 1
    return text


def parse(data: bytes) -> Any:
    """The value of any JSON text that SPEC §2 lets a reader take; half surrogates stay in it."""
    try:
        value = DECODER.decode(text_of(data))
    except ValueError as error:
        raise damaged(f"not JSON: {error}") from error
    _bounded(value, 0)
    return value


def _bounded(value: Any, around: int) -> None:
    """Refuse a value with more arrays and objects around it than the format allows; an empty one may be the 33rd."""
    if around > MAX_DEPTH:
        raise damaged(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _bounded(inner, around + 1)


def scalar(value: str) -> bool:
    """Whether a string holds Unicode scalar values only."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def canonical(value: Any) -> bytes:
    """The one byte string of a value."""
    return _canonical(value).encode("utf-8")


def _canonical(value: Any) -> str:
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        if not scalar(value):
            raise damaged("half a surrogate pair")
        return '"' + "".join(_SHORT.get(c) or (c if c >= " " else f"\\u{ord(c):04x}") for c in value) + '"'
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return "{" + ",".join(f"{_canonical(name)}:{_canonical(value[name])}" for name in sorted(value)) + "}"


def parse_canonical(data: bytes) -> Any:
    """The value of bytes that are the canonical form of what they say."""
    value = parse(data)
    if canonical(value) != data:
        raise damaged("not canonical JSON")
    return value
