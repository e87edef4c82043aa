"""Acceptances (SPEC §9.1): whether KV that one engine computed is what another one computes, within rounding.

Measured once for a model, a producer and a consumer, and kept beside the namespace's shards. For engines that care who
computed what they load; no reader of shards needs them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .canonical_json import MAX_INTEGER, dump_canonical, load_strict
from .errors import AcceptanceError, UnsupportedVersion
from .identity import Fingerprint

MAX_ACCEPTANCE_BYTES = 65_536
_FORMAT = "lmcache-acceptance"
_VERSION = 1
_LARGEST = 1e15
_DECIMAL = re.compile(r"-?[0-9]{1,16}(\.[0-9]{1,16})?")
_FIELDS = ("consumer", "cosine", "created", "fingerprint", "num_tokens", "passed", "producer", "relative_l2")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a probe of `num_tokens` tokens found. `producer` and `consumer` are flat objects of text: the engine, its
    version and what else decides the values. `relative_l2` is the largest, `cosine` the lowest of all layers and sides.
    """

    fingerprint: Fingerprint
    producer: Mapping[str, str]
    consumer: Mapping[str, str]
    passed: bool
    relative_l2: float
    cosine: float
    num_tokens: int
    created_ms: int

    @property
    def name(self) -> str:
        """32 hex digits that stand for producer and consumer: a later probe of the two takes the place of this one."""
        pair = dump_canonical({"consumer": dict(self.consumer), "producer": dict(self.producer)}, error=AcceptanceError)
        return hashlib.sha256(pair).hexdigest()[:32]

    def concerns(self, producer: Mapping[str, Any]) -> bool:
        """True for KV of the producer that was probed, as a shard names it: other members do not matter."""
        return all(producer.get(field) == value for field, value in self.producer.items())

    def to_json(self) -> bytes:
        """Canonical JSON; numbers that are none of JSON's whole ones are text. A figure that is no number, or too long
        a one, is written as the worst there is: a probe that failed like that must count."""
        value = {
            "consumer": dict(self.consumer),
            "cosine": _decimal(self.cosine, worst=-1.0),
            "created": self.created_ms,
            "fingerprint": self.fingerprint,
            "format": _FORMAT,
            "num_tokens": self.num_tokens,
            "passed": self.passed,
            "producer": dict(self.producer),
            "relative_l2": _decimal(self.relative_l2, worst=_LARGEST),
            "version": _VERSION,
        }
        return dump_canonical(value, error=AcceptanceError)

    @classmethod
    def from_json(cls, data: bytes) -> Acceptance:
        """Raises `AcceptanceError`, or `UnsupportedVersion` for one of a later release."""
        if len(data) > MAX_ACCEPTANCE_BYTES:
            raise AcceptanceError("acceptance is too long", expected=f"{MAX_ACCEPTANCE_BYTES} bytes", found=len(data))
        value = load_strict(data, error=AcceptanceError)
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise AcceptanceError("not an acceptance", expected=_FORMAT, found=str(value)[:100])
        if isinstance(value.get("version"), bool) or value.get("version") != _VERSION:
            raise UnsupportedVersion("acceptance of another version", expected=_VERSION, found=value.get("version"))
        if dump_canonical(value, error=AcceptanceError) != data:
            raise AcceptanceError("acceptance is not in its canonical form")
        missing = [field for field in _FIELDS if field not in value]
        if missing:
            raise AcceptanceError("acceptance lacks a member", expected=missing[0])
        if not isinstance(value["passed"], bool):
            raise AcceptanceError("'passed' is true or false", found=value["passed"])
        return cls(
            Fingerprint(_text(value, "fingerprint")),
            _texts(value, "producer"),
            _texts(value, "consumer"),
            value["passed"],
            _number(value, "relative_l2"),
            _number(value, "cosine"),
            _count(value, "num_tokens"),
            _count(value, "created"),
        )


def _text(value: Mapping[str, Any], field: str) -> str:
    if not isinstance(value[field], str):
        raise AcceptanceError(f"{field!r} is text", found=value[field])
    return str(value[field])


def _texts(value: Mapping[str, Any], field: str) -> dict[str, str]:
    found = value[field]
    is_flat = isinstance(found, dict) and all(isinstance(one, str) for one in found.values())
    if not is_flat or "engine" not in found:
        raise AcceptanceError(f"{field!r} is an object of text with an 'engine'", found=str(found)[:100])
    return dict(found)


def _decimal(figure: float, worst: float) -> str:
    return f"{worst if math.isnan(figure) else min(max(figure, -_LARGEST), _LARGEST):.6f}"


def _number(value: Mapping[str, Any], field: str) -> float:
    text = _text(value, field)
    if _DECIMAL.fullmatch(text) is None:
        raise AcceptanceError(f"{field!r} is a number as decimal text", found=text[:100])
    return float(text)


def _count(value: Mapping[str, Any], field: str) -> int:
    found = value[field]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= MAX_INTEGER:
        raise AcceptanceError(f"{field!r} is a whole number", found=found)
    return found
