"""What lies in a store besides shards and segments: what is ours, what is not, what was left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from lmcache_cli.backends import Backend, NoSpace, ObjectInfo, Unavailable
from lmcache_cli.backends.local.staging import is_stale, parse_staging_component
from lmcache_format.errors import BadName, FormatError, UnsupportedVersion
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.names import (
    CACHEDIR_TAG,
    NAMESPACES,
    QUARANTINE,
    STAGING,
    SegmentName,
    acceptance_directory,
    identity_path,
    is_acceptance_path,
    namespace_directory,
    parse_superblock_path,
    segment_directory,
)
from lmcache_format.superblock import MAX_SUPERBLOCK_BYTES, Superblock

from .errors import NoSuchNamespace, StoreDamaged, StoreTooNew
from .store import Store, read_start

STAGING_GRACE_MS = 900_000
_MAINTENANCE = "maint"
_LEASE = f"{_MAINTENANCE}/lease.json"


class Place(StrEnum):
    """What kind of file a listing showed."""

    FOREIGN = "foreign"
    QUARANTINED = "quarantined"
    STAGING = "staging"
    STALE_STAGING = "stale staging"
    DAMAGED = "damaged"
    NEWER = "newer"


@dataclass(frozen=True, slots=True)
class Located:
    """A file outside the shards, and why it is worth mentioning."""

    place: Place
    path: str
    size_bytes: int = 0
    reason: str = ""


def outside_namespaces(backend: Backend) -> Iterator[Located]:
    """Everything noteworthy in a store's root. A foreign directory is named once and not entered.

    Raises `BackendError`."""
    for info in backend.list("", recursive=False):
        name = info.name.removesuffix("/")
        if info.is_prefix and name == QUARANTINE:
            for inner in backend.list(QUARANTINE):
                yield Located(Place.QUARANTINED, inner.name, inner.size_bytes)
        elif info.is_prefix and name == STAGING:
            yield from _staging(backend)
        elif info.is_prefix and name == NAMESPACES:
            yield from _foreign_namespaces(backend)
        elif info.is_prefix and name == _MAINTENANCE:
            yield from (_foreign(inner) for inner in backend.list(_MAINTENANCE) if inner.name != _LEASE)
        elif info.is_prefix or name != CACHEDIR_TAG:
            yield from _superblock_or_foreign(backend, info)


def inside_namespace(backend: Backend, fingerprint: Fingerprint) -> Iterator[Located]:
    """Foreign files beside a namespace's shards. Raises `BackendError`."""
    directory = namespace_directory(fingerprint)
    acceptances = acceptance_directory(fingerprint)
    known = (f"{directory}/c/", f"{directory}/m/", f"{acceptances}/", identity_path(fingerprint))
    yield from (_foreign(info) for info in backend.list(directory, recursive=False) if info.name not in known)
    for info in backend.list(segment_directory(fingerprint), recursive=False):
        try:
            SegmentName.parse(info.name)
        except BadName:
            yield _foreign(info)
    yield from (_foreign(info) for info in backend.list(acceptances) if not is_acceptance_path(info.name))


@dataclass(frozen=True, slots=True)
class FoundIdentity:
    """A namespace's identity, or why there is none to be had."""

    fingerprint: Fingerprint
    identity: Identity | None
    problem: str = ""
    is_newer: bool = False


def find_identity(store: Store, fingerprint: Fingerprint) -> FoundIdentity:
    """The identity of a namespace; what is wrong with its `ns.json` is told, not raised. Raises `BackendError`."""
    try:
        return FoundIdentity(fingerprint, store.identity(fingerprint))
    except NoSuchNamespace:
        return FoundIdentity(fingerprint, None, "ns.json is missing")
    except StoreTooNew as problem:
        return FoundIdentity(fingerprint, None, str(problem), is_newer=True)
    except StoreDamaged as problem:
        return FoundIdentity(fingerprint, None, str(problem))


def chosen_namespaces(store: Store, fingerprint: Fingerprint | None) -> list[Fingerprint]:
    """All namespaces, or the one asked for. Raises `NoSuchNamespace`, `BackendError`."""
    there = sorted(set(store.fingerprints()))  # a back-end may list a thing twice
    if fingerprint is None:
        return there
    if fingerprint not in there:
        raise NoSuchNamespace(f"{store.url} has no namespace {fingerprint}", next_step="see: lmcache ls")
    return [fingerprint]


IDENTITY_ADVICE = (
    "an identity cannot be made from shards alone; let any writer of that model open the store once "
    "(lmcache warm --model …), it puts the same ns.json back and every shard counts again"
)


def _staging(backend: Backend) -> Iterator[Located]:
    """Staging files. Where the store's clock cannot be asked, for it takes a write, none is called stale."""
    now_ms: int | None = None
    for info in backend.list(STAGING):
        component = info.name.rpartition("/")[2]
        if parse_staging_component(component) is None:
            yield _foreign(info)
            continue
        if now_ms is None:
            try:
                now_ms = backend.now_ms()
            except (Unavailable, NoSpace):
                now_ms = 0
        stale = is_stale(component, age_ms=now_ms - info.modified_ms, older_than_ms=STAGING_GRACE_MS)
        place = Place.STALE_STAGING if stale else Place.STAGING
        yield Located(place, info.name, info.size_bytes, "left behind by a writer that ended" if stale else "")


def _foreign_namespaces(backend: Backend) -> Iterator[Located]:
    for info in backend.list(NAMESPACES, recursive=False):
        name = info.name.removesuffix("/").rpartition("/")[2]
        if not info.is_prefix or len(name) != 32 or set(name) - set("0123456789abcdef"):
            yield _foreign(info)


def _superblock_or_foreign(backend: Backend, info: ObjectInfo) -> Iterator[Located]:
    try:
        generation = parse_superblock_path(info.name)
    except BadName:
        yield _foreign(info)
        return
    try:
        Superblock.from_json(read_start(backend, info.name, MAX_SUPERBLOCK_BYTES), generation)
    except UnsupportedVersion as problem:
        yield Located(Place.NEWER, info.name, info.size_bytes, str(problem))
    except FormatError as problem:
        yield Located(Place.DAMAGED, info.name, info.size_bytes, str(problem))


def _foreign(info: ObjectInfo) -> Located:
    kind = "directory" if info.is_prefix else "file"
    return Located(Place.FOREIGN, info.name, info.size_bytes, f"a {kind} that is none of ours; left alone")
