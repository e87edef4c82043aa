"""Identity: everything besides the tokens that decides the bytes of a KV cache (SPEC §3).

Two caches may be exchanged exactly when their identities are equal; the fingerprint of an identity is its name on disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

from .canonical_json import dump_canonical, load_strict
from .dtypes import NEWER_DTYPE, Dtype
from .errors import IdentityError, UnsupportedVersion

Fingerprint = NewType("Fingerprint", str)

LAYOUT = "htd-1"
KEY_ALGORITHM = "sha256-chain-1"
CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 65_536
MAX_IDENTITY_BYTES = 1 << 20
_MAX_AXIS = 1 << 20
_CONTENT = re.compile(r"sha256:[0-9a-f]{64}|revision:[^\x00@]{1,512}@[^\x00@]{1,512}|unverified:[^\x00]{0,512}")
_NEWER_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")


class AttentionKind(StrEnum):
    """How a layer attends, as far as it changes what is cached."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers `start` (inclusive) to `stop` (exclusive) that attend in one way; `window` in tokens for sliding ones."""

    kind: AttentionKind
    start: int
    stop: int
    window: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"kind": self.kind.value, "start": self.start, "stop": self.stop, "window": self.window}


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal before the KV of one computation may stand in for another's.

    `model` is a name for people, never a path. `weights` is `sha256:<64 hex>`, `revision:<repository>@<commit>` or
    `unverified:<name>`; `adapter` the same for a LoRA adapter, or None. `dtype` is the type the cache really has, never
    "auto"; `scale` names the scheme of its scales ("none" unless quantised). `rope` holds the rotary parameters with
    every number written as a string. Rank counts are no part of it. `kv_heads` counts the whole model, and is 1 for
    latents, whose width is `head_dim_k` (`head_dim_v` is then 0).
    """

    model: str
    weights: str
    dtype: Dtype
    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    groups: tuple[LayerGroup, ...]
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    adapter: str | None = None
    scale: str = "none"
    chunk_tokens: int = CHUNK_TOKENS
    layout: str = LAYOUT
    keys: str = KEY_ALGORITHM

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        _check_text(self)
        _check_numbers(self)
        _check_groups(self)
        object.__setattr__(self, "rope", _checked_rope(self.rope))
        size = len(self.canonical_json())
        if size > MAX_IDENTITY_BYTES:
            raise IdentityError("identity is too long", expected=f"at most {MAX_IDENTITY_BYTES} bytes", found=size)

    @property
    def is_verified(self) -> bool:
        """True where the weights, and the adapter if any, are known by content or by an immutable revision."""
        return not (self.weights.startswith("unverified:") or (self.adapter or "").startswith("unverified:"))

    @property
    def is_latent(self) -> bool:
        """True for MLA: one latent a layer instead of keys and values."""
        return self.groups[0].kind is AttentionKind.LATENT

    def to_dict(self) -> dict[str, Any]:
        """The JSON object whose canonical bytes are hashed."""
        return {
            "adapter": self.adapter,
            "chunk_tokens": self.chunk_tokens,
            "dtype": self.dtype.value,
            "groups": [group.to_dict() for group in self.groups],
            "head_dim_k": self.head_dim_k,
            "head_dim_v": self.head_dim_v,
            "keys": self.keys,
            "kv_heads": self.kv_heads,
            "layers": self.layers,
            "layout": self.layout,
            "model": self.model,
            "rope": dict(self.rope),
            "scale": self.scale,
            "weights": self.weights,
        }

    def canonical_json(self) -> bytes:
        """The exact bytes of `ns.json`."""
        return dump_canonical(self.to_dict(), error=IdentityError)

    @property
    def fingerprint(self) -> Fingerprint:
        """First 128 bits of the SHA-256 of the canonical JSON, as 32 hex digits."""
        return fingerprint_of(self.canonical_json())

    @classmethod
    def from_json(cls, data: bytes, fingerprint: Fingerprint | None = None) -> Identity:
        """Read `ns.json`; `fingerprint`, where given, is the one its path says.

        Bytes that are not canonical or hash to another name raise `IdentityError`; a newer layout or key algorithm,
        or a dtype or kind of attention of a later release raises `UnsupportedVersion`."""
        if len(data) > MAX_IDENTITY_BYTES:
            raise IdentityError("identity is too long", expected=f"at most {MAX_IDENTITY_BYTES} bytes", found=len(data))
        found = fingerprint_of(data)
        if fingerprint is not None and found != fingerprint:
            raise IdentityError("identity does not hash to its name", expected=fingerprint, found=found)
        value = load_strict(data, error=IdentityError)
        if not isinstance(value, dict):
            raise IdentityError("identity is not a JSON object", found=type(value).__name__)
        _refuse_newer(value)
        identity = cls._from_dict(value)
        if identity.canonical_json() != bytes(data):
            raise IdentityError("identity is not in canonical form")
        return identity

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Identity:
        names = set(cls.__dataclass_fields__)
        if set(value) != names:
            raise IdentityError("identity has other fields", expected=sorted(names), found=sorted(map(str, value)))
        try:
            groups = tuple(
                LayerGroup(AttentionKind(g["kind"]), g["start"], g["stop"], g["window"]) for g in value["groups"]
            )
            fields = dict(value, groups=groups, dtype=Dtype(value["dtype"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise IdentityError("identity has a field of the wrong form", found=problem) from None
        return cls(**fields)


def fingerprint_of(canonical: bytes) -> Fingerprint:
    """Fingerprint of canonical identity bytes, as 32 lower-case hex digits."""
    return Fingerprint(hashlib.sha256(canonical).hexdigest()[:32])


def _refuse_newer(value: dict[str, Any]) -> None:
    for name, known in (("layout", LAYOUT), ("keys", KEY_ALGORITHM)):
        found = value.get(name)
        if isinstance(found, str) and found != known:
            raise UnsupportedVersion(f"identity uses another {name}", expected=known, found=found)
    groups = value.get("groups")
    kinds = [group.get("kind") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    for found in kinds:
        _refuse_newer_name("kind of attention", found, tuple(AttentionKind), _NEWER_KIND)
    _refuse_newer_name("dtype", value.get("dtype"), tuple(Dtype), NEWER_DTYPE)


def _refuse_newer_name(what: str, found: object, known: tuple[str, ...], form: re.Pattern[str]) -> None:
    """A well-formed name that this release does not know is one of a later release, and no damage."""
    if isinstance(found, str) and found not in known and form.fullmatch(found):
        raise UnsupportedVersion(f"identity uses another {what}", expected=", ".join(known), found=found)


def _checked_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing with the caller. Numbers must be text: 1e5, 100000 and 100000.0 are one value."""
    if not isinstance(rope, Mapping):
        raise IdentityError("rope is not an object", expected="rotary parameters by name", found=repr(rope)[:80])
    copy: dict[str, Any] = load_strict(dump_canonical(dict(rope), error=IdentityError), error=IdentityError)
    _refuse_numbers(copy)
    return copy


def _refuse_numbers(value: object) -> None:
    if type(value) is int:
        raise IdentityError("rope parameters hold numbers as text", expected=repr(repr(float(value))), found=value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_numbers(inner)


def _check_text(identity: Any) -> None:
    if not isinstance(identity.model, str) or not identity.model:
        raise IdentityError("model needs a name", found=repr(identity.model))
    if not isinstance(identity.weights, str) or not _CONTENT.fullmatch(identity.weights):
        raise IdentityError(
            "weights are not identified",
            expected="sha256:<64 hex>, revision:<repository>@<commit> or unverified:<name>",
            found=repr(identity.weights),
        )
    if identity.adapter is not None and not (
        isinstance(identity.adapter, str) and _CONTENT.fullmatch(identity.adapter)
    ):
        raise IdentityError(
            "adapter is not identified",
            expected="sha256:<64 hex>, revision:<repository>@<commit>, unverified:<name> or null",
            found=repr(identity.adapter),
        )
    if not isinstance(identity.scale, str) or not identity.scale:
        raise IdentityError("scale needs a name", expected='"none" or a scheme', found=repr(identity.scale))
    for name, value, known in (("layout", identity.layout, LAYOUT), ("keys", identity.keys, KEY_ALGORITHM)):
        if value != known:
            raise UnsupportedVersion(f"identity uses another {name}", expected=known, found=repr(value))


def _check_numbers(identity: Any) -> None:
    for name in ("layers", "kv_heads", "head_dim_k", "head_dim_v", "chunk_tokens"):
        value = getattr(identity, name)
        least = 0 if name == "head_dim_v" else 1
        most = MAX_CHUNK_TOKENS if name == "chunk_tokens" else _MAX_AXIS
        if type(value) is not int or not least <= value <= most:
            raise IdentityError(f"{name} is out of range", expected=f"{least} to {most}", found=repr(value))
    if not isinstance(identity.dtype, Dtype):
        raise IdentityError("dtype is unknown", expected=[d.value for d in Dtype], found=repr(identity.dtype))


def _check_groups(identity: Any) -> None:
    position = 0
    for group in identity.groups:
        if type(group.start) is not int or type(group.stop) is not int or group.start != position:
            raise IdentityError("layer groups must follow each other", expected=f"start {position}", found=group)
        if group.stop <= group.start:
            raise IdentityError("layer group is empty", found=group)
        is_windowed = type(group.window) is int and group.window > 0
        if (group.kind is AttentionKind.SLIDING) != is_windowed or (not is_windowed and group.window is not None):
            raise IdentityError("exactly the sliding groups have a window of at least one token", found=group)
        position = group.stop
    if position != identity.layers:
        raise IdentityError("layer groups do not cover the layers", expected=identity.layers, found=position)
    latent = {group.kind is AttentionKind.LATENT for group in identity.groups}
    if len(latent) > 1:
        raise IdentityError("latent and other layers cannot be mixed in this version")
    if latent == {True} and (identity.kv_heads != 1 or identity.head_dim_v != 0):
        raise IdentityError("latents have one head and no value width", found=(identity.kv_heads, identity.head_dim_v))
    if latent == {False} and identity.head_dim_v == 0:
        raise IdentityError("head_dim_v is out of range", expected="at least 1", found=0)
