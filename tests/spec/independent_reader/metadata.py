"""The members of a shard's `__metadata__` (SPEC §8.3): each is read in one form or refused, as check (5)."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from . import strict_json
from .refusals import Refused, damaged, later

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,15}")
_HEAD_DIMS = re.compile(r"([1-9][0-9]{0,6}),(0|[1-9][0-9]{0,6})")


def _must(holds: object, text: str) -> None:
    if not holds:
        raise damaged(text, 5)


class Metadata:
    """The members of `__metadata__`, each read in one form or refused."""

    def __init__(self, members: dict[str, Any]) -> None:
        self._members = members

    def text(self, name: str) -> str:
        """A member that must be there."""
        value = self._members.get("lmcache." + name)
        _must(isinstance(value, str), f"{name} is missing")
        return str(value)

    def hex(self, name: str, size: int) -> bytes:
        """`size` bytes in lower-case hex."""
        text = self.text(name)
        _must(len(text) == 2 * size and not set(text) - set("0123456789abcdef"), f"form of {name}")
        return bytes.fromhex(text)

    def number(self, name: str, low: int, high: int) -> int:
        """A decimal without sign and leading zeros."""
        text = self.text(name)
        _must(_DECIMAL.fullmatch(text) and low <= int(text) <= high, f"form of {name}")
        return int(text)

    def head_dims(self) -> tuple[int, int]:
        """D_k and D_v."""
        match = _HEAD_DIMS.fullmatch(self.text("head_dims"))
        _must(match, "form of head_dims")
        assert match is not None
        return int(match[1]), int(match[2])

    def base64(self, name: str, text: str, unit: int) -> bytes:
        """Whole units of so many bytes."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise damaged(f"form of {name}", 5) from error
        _must(len(data) % unit == 0, f"form of {name}")
        return data

    def digests(self, name: str) -> list[bytes]:
        """Digests of 16 bytes."""
        algorithm, _, rest = self._members.get("lmcache." + name, "").partition(":")
        if algorithm != "xxh3-128":
            raise later(f"checksum algorithm {algorithm!a}", 5)
        data = self.base64(name, rest, 16)
        return [data[at : at + 16] for at in range(0, len(data), 16)]

    def json_object(self, name: str) -> dict[str, Any]:
        """A JSON object in a string."""
        text = self.text(name)
        try:
            value = strict_json.parse(text.encode("utf-8"))
        except Refused as error:
            raise damaged(f"form of {name}: {error}", 5) from error
        _must(isinstance(value, dict), f"form of {name}")
        return dict(value)

    def __contains__(self, name: str) -> bool:
        return "lmcache." + name in self._members
