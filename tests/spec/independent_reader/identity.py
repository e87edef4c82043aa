"""The identity of a namespace (SPEC §3) and the superblock of a store (SPEC §10)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from . import strict_json
from .checksums import xxh3_128
from .names import Part
from .refusals import Reason, Refused, damaged, later

MAX_JSON = 1 << 20
MAX_CHUNK_TOKENS = 65536
MAX_AXIS = 1 << 20
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1}
KINDS = ("full", "sliding", "latent")
MEMBERS = {
    "adapter", "chunk_tokens", "dtype", "groups", "head_dim_k", "head_dim_v", "keys", "kv_heads", "layers", "layout",
    "model", "rope", "scale", "weights",
}  # fmt: skip

_WEIGHTS = re.compile(r"sha256:[0-9a-f]{64}|revision:[^@\0]{1,512}@[^@\0]{1,512}|unverified:[^\0]{0,512}")
LATER_DTYPE = re.compile(r"[A-Z][A-Z0-9_]{0,31}")
_LATER_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_ANY = re.compile(r".*", re.DOTALL)


@dataclass(frozen=True)
class Identity:
    """What reading needs of `ns.json`."""

    fingerprint: str
    dtype: str
    chunk_tokens: int
    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    value: dict[str, Any]

    @property
    def latent(self) -> bool:
        """Whether layers store latents instead of keys and values."""
        return self.head_dim_v == 0

    @property
    def whole(self) -> Part:
        """The part that holds all of the model."""
        return Part((0, self.layers), None if self.latent else (0, self.kv_heads))


def fingerprint(data: bytes) -> str:
    """Fingerprint of an `ns.json` of these bytes."""
    return hashlib.sha256(data).digest()[:16].hex()


def _must(holds: object, text: str) -> None:
    if not holds:
        raise damaged(text)


def _count(value: object, low: int, high: int = strict_json.MAX_INTEGER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _weights(value: object) -> bool:
    return isinstance(value, str) and _WEIGHTS.fullmatch(value) is not None


def _without_numbers(value: object) -> bool:
    """Whether a rotary parameter holds no JSON number, at any depth."""
    if isinstance(value, dict):
        return all(map(_without_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_without_numbers, value))
    return isinstance(value, bool) or not isinstance(value, int)


def _newer(value: dict[str, Any]) -> None:
    """Names that only a later release knows, before anything else is judged."""
    known = {"layout": (("htd-1",), _ANY), "keys": (("sha256-chain-1",), _ANY), "dtype": (ITEM_BYTES, LATER_DTYPE)}
    for member, (names, form) in known.items():
        name = value.get(member)
        if isinstance(name, str) and name not in names and form.fullmatch(name):
            raise later(f"{member} {name!a}")
    groups = value.get("groups")
    for group in groups if isinstance(groups, list) else []:
        kind = group.get("kind") if isinstance(group, dict) else None
        if isinstance(kind, str) and kind not in KINDS and _LATER_KIND.fullmatch(kind):
            raise later(f"kind {kind!a}")


def _groups(value: dict[str, Any]) -> bool:
    """Check the layer groups; whether they are latent."""
    groups, at, kinds = value["groups"], 0, set()
    _must(isinstance(groups, list) and groups, "no groups")
    for group in groups:
        _must(isinstance(group, dict) and set(group) == {"kind", "start", "stop", "window"}, "members of a group")
        _must(group["kind"] in KINDS, "kind of a group")
        _must(_count(group["start"], at, at) and _count(group["stop"], at + 1), "layers of a group")
        _must(_count(group["window"], 1) if group["kind"] == "sliding" else group["window"] is None, "window")
        at = group["stop"]
        kinds.add(group["kind"])
    _must(at == value["layers"], "groups do not end with the layers")
    _must("latent" not in kinds or len(kinds) == 1, "latent and other groups")
    return "latent" in kinds


def parse_identity(data: bytes, claimed: str) -> Identity:
    """The identity in an `ns.json` whose directory names the fingerprint `claimed`."""
    _must(len(data) <= MAX_JSON, "too long")
    _must(fingerprint(data) == claimed, "not the fingerprint of its directory")
    value = strict_json.parse_canonical(data)
    _must(isinstance(value, dict), "not an object")
    _newer(value)
    _must(set(value) == MEMBERS, "members of an identity")
    _must(isinstance(value["dtype"], str) and value["dtype"] in ITEM_BYTES, "dtype")
    _must(_count(value["chunk_tokens"], 1, MAX_CHUNK_TOKENS), "chunk_tokens")
    for member in ("layers", "kv_heads", "head_dim_k"):
        _must(_count(value[member], 1, MAX_AXIS), member)
    latent = _groups(value)
    _must(_count(value["head_dim_v"], 0, 0) if latent else _count(value["head_dim_v"], 1, MAX_AXIS), "head_dim_v")
    _must(not latent or value["kv_heads"] == 1, "latents with heads")
    _must(isinstance(value["model"], str) and value["model"], "model")
    _must(isinstance(value["rope"], dict) and _without_numbers(value["rope"]), "rope")
    _must(isinstance(value["scale"], str) and value["scale"], "scale")
    _must(_weights(value["weights"]), "weights")
    _must(value["adapter"] is None or _weights(value["adapter"]), "adapter")
    if (value["layout"], value["keys"]) != ("htd-1", "sha256-chain-1"):
        raise later("layout or keys that is not even text")
    names = ("dtype", "chunk_tokens", "layers", "kv_heads", "head_dim_k", "head_dim_v")
    return Identity(claimed, *(value[name] for name in names), value)


OPERATIONS = ("prune", "read", "verify", "write")
_SUPERBLOCK = {"checksum", "created", "features", "format", "generation", "require", "store", "version", "writer"}


def _names(value: object, members: tuple[str, ...]) -> bool:
    """Whether members of an object are arrays of names; others in it are a later release's."""
    if not isinstance(value, dict):
        return False
    found = [value.get(member) for member in members]
    return all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in found)


def parse_superblock(data: bytes, generation: int) -> dict[str, Any]:
    """A superblock whose name says `generation`. Features are judged by `permit`, since they bar operations."""
    _must(len(data) <= MAX_JSON, "too long")
    value = strict_json.parse(data)
    _must(isinstance(value, dict), "not an object")
    if value.get("format") != "lmcache-store":
        raise Refused(Reason.NOT_OURS, "no superblock")
    checksum = value.get("checksum")
    if not isinstance(checksum, str) or not checksum.startswith("xxh3-128:"):
        raise later("checksum algorithm of a superblock")
    _must(strict_json.canonical(value) == data, "not canonical")
    digest = xxh3_128(strict_json.canonical({**value, "checksum": "xxh3-128:"})).hex()
    if checksum != "xxh3-128:" + digest:
        raise damaged("checksum of a superblock", checksum=True)
    _must(_count(value.get("version"), 1), "version")
    if value["version"] > 1:
        raise later("version of a superblock")
    _must(set(value) >= _SUPERBLOCK, "members of a superblock")
    _must(_count(value["generation"], 1, 999999) and value["generation"] == generation, "generation")
    _must(_count(value["created"], 0), "created")
    _must(isinstance(value["store"], str), "store")
    _must(isinstance(value["writer"], str), "writer")
    _must(_names(value["features"], ("compat", "incompat", "ro_compat")), "features")
    _must(isinstance(value["require"], dict), "require")
    _must(_names({operation: [] for operation in OPERATIONS} | value["require"], OPERATIONS), "require")
    return value


def permit(superblock: dict[str, Any], operation: str) -> None:
    """Refuse an operation that a feature bars; version 1 knows no features."""
    barred = [*superblock["features"]["incompat"], *superblock["require"].get(operation, [])]
    if operation in ("write", "prune"):
        barred += superblock["features"]["ro_compat"]
    if barred:
        raise later(f"features {barred[:3]!a} bar {operation}")
