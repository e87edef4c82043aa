"""Names of SPEC §4.2, §6 and §9: parts, labels, segments and the paths of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .refusals import Reason, Refused

CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"

_NUMBER = r"(0|[1-9][0-9]{0,6})"
_PART = re.compile(rf"l{_NUMBER}-{_NUMBER}(?:h{_NUMBER}-{_NUMBER})?")
_LABEL = re.compile(r"([a-z0-9]{1,16})(?:-([a-z0-9][a-z0-9-]{0,15}))?")
_SEGMENT = re.compile(rf"([{CROCKFORD}]{{26}})-([a-z0-9]{{1,32}})\.lmi")
_SHARD = re.compile(r"([0-9a-f]{64})\.([a-z0-9-]+)\.([a-z0-9-]+)\.safetensors")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_SUPERBLOCK = re.compile(r"store\.([0-9]{6})\.json")


def _bad(text: str) -> Refused:
    return Refused(Reason.BAD_NAME, text)


@dataclass(frozen=True)
class Part:
    """Layers `layers[0]` … `layers[1]`−1, and heads likewise (None for latents)."""

    layers: tuple[int, int]
    heads: tuple[int, int] | None

    def __str__(self) -> str:
        layers = "l{}-{}".format(*self.layers)
        return layers if self.heads is None else layers + "h{}-{}".format(*self.heads)


def part(text: str) -> Part:
    """A part by its name."""
    match = _PART.fullmatch(text)
    if match is None:
        raise _bad(f"no part: {text[:40]!a}")
    a, b, c, d = (None if number is None else int(number) for number in match.groups())
    heads = None if c is None or d is None else (c, d)
    if a is None or b is None:
        raise _bad("no part")
    for begin, end in filter(None, [(a, b), heads]):
        if begin >= end:
            raise _bad(f"no range: {text[:40]!a}")
    return Part((a, b), heads)


def label(text: str) -> tuple[str, str | None]:
    """(name, quality class) of an encoding by its label."""
    match = _LABEL.fullmatch(text)
    if match is None:
        raise _bad(f"no label: {text[:40]!a}")
    return match[1], match[2]


def segment(text: str) -> str:
    """The writer in the name of a segment."""
    match = _SEGMENT.fullmatch(text)
    if match is None:
        raise _bad(f"no segment name: {text[:40]!a}")
    return match[2]


@dataclass(frozen=True)
class ShardName:
    """What the path of a shard says."""

    fingerprint: str
    key: str
    part: Part
    label: str

    def path(self) -> str:
        """Path in the store."""
        k = self.key
        return f"ns/{self.fingerprint}/c/{k[:2]}/{k[2:4]}/{k}.{self.part}.{self.label}.safetensors"


def shard(path: str) -> ShardName:
    """A shard's path; a path that parses but lies elsewhere than it says does not parse."""
    pieces = path.split("/")
    match = _SHARD.fullmatch(pieces[-1])
    if match is None or len(pieces) != 6:
        raise _bad(f"no shard: {path[-80:]!a}")
    label(match[3])
    name = ShardName(pieces[1], match[1], part(match[2]), match[3])
    if not _FINGERPRINT.fullmatch(name.fingerprint) or name.path() != path:
        raise _bad(f"no place for a shard: {path[-80:]!a}")
    return name


def identity(path: str) -> str:
    """The fingerprint in `ns/<fingerprint>/ns.json`."""
    pieces = path.split("/")
    if len(pieces) != 3 or (pieces[0], pieces[2]) != ("ns", "ns.json") or not _FINGERPRINT.fullmatch(pieces[1]):
        raise _bad(f"no identity: {path[-80:]!a}")
    return pieces[1]


def superblock(path: str) -> int:
    """The generation in `store.<generation>.json`."""
    match = _SUPERBLOCK.fullmatch(path)
    if match is None or int(match[1]) == 0:
        raise _bad(f"no superblock: {path[-40:]!a}")
    return int(match[1])
