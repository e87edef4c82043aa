"""Records of which engine may load whose KV (SPEC §9.1)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from . import strict_json
from .refusals import damaged, later

MAX_BYTES = 65536
_DECIMAL = re.compile(r"-?[0-9]{1,16}(\.[0-9]{1,16})?")
_MEMBERS = ("consumer", "cosine", "created", "fingerprint", "num_tokens", "passed", "producer", "relative_l2")


@dataclass(frozen=True)
class Acceptance:
    """What a probe found, and the path where it belongs."""

    path: str
    passed: bool
    producer: dict[str, str]
    value: dict[str, Any]

    def concerns(self, producer: dict[str, Any]) -> bool:
        """Whether shards with this `lmcache.producer` are those that were probed."""
        return all(producer.get(name) == text for name, text in self.producer.items())


def parse_acceptance(data: bytes) -> Acceptance:
    """Refuses what breaks a rule."""
    if len(data) > MAX_BYTES:
        raise damaged("too long")
    value = strict_json.parse(data)
    if not isinstance(value, dict) or value.get("format") != "lmcache-acceptance":
        raise damaged("no acceptance")
    if value.get("version") != 1 or isinstance(value["version"], bool):
        raise later("version")
    if strict_json.canonical(value) != data:
        raise damaged("not canonical JSON")
    if any(name not in value for name in _MEMBERS):
        raise damaged("a member is missing")
    for name in ("producer", "consumer"):
        engine = value[name]
        if (
            not isinstance(engine, dict)
            or "engine" not in engine
            or not all(isinstance(t, str) for t in engine.values())
        ):
            raise damaged(f"{name}: not an object of text with an engine")
    for name in ("cosine", "relative_l2"):
        if not isinstance(value[name], str) or _DECIMAL.fullmatch(value[name]) is None:
            raise damaged(f"{name}: not decimal text")
    for name in ("created", "num_tokens"):
        if not isinstance(value[name], int) or isinstance(value[name], bool) or value[name] < 0:
            raise damaged(f"{name}: not a count")
    if not isinstance(value["passed"], bool) or not isinstance(value["fingerprint"], str):
        raise damaged("passed or fingerprint")
    pair = strict_json.canonical({name: value[name] for name in ("consumer", "producer")})
    name = hashlib.sha256(pair).hexdigest()[:32]
    path = f"ns/{value['fingerprint']}/a/{name}.json"
    return Acceptance(path, value["passed"], value["producer"], value)
