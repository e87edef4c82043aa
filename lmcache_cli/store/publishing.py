"""Put a shard under its name, whatever stands there: what is sound stays, what is damaged goes to quarantine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from lmcache_cli.backends import (
    AlreadyExists,
    Backend,
    BackendError,
    Durability,
    NotFound,
    ObjectInfo,
    Obstructed,
    Unavailable,
)
from lmcache_format.identity import Identity
from lmcache_format.names import ShardName, new_nonce
from lmcache_format.shard import ShardHeader

from .checking import Checked, Health, check_shard
from .errors import StoreError

_TRIES = 4


class Publication(Enum):
    """What became of a shard. `PRESENT`: another sound write stands under the name, and stays."""

    STORED = "stored"
    REPLACED = "replaced"
    PRESENT = "present"


@dataclass(frozen=True, slots=True)
class Published:
    """`info` is the object's where this write was put; `found` the header of the sound one that stood there.

    `quarantined` tells why what stood there before was moved aside.
    """

    how: Publication
    info: ObjectInfo | None = None
    found: ShardHeader | None = None
    quarantined: str = ""


class Blocked(StoreError):
    """What stands under a name can be neither used nor put out of the way: a shard of a newer format, say."""


def publish(
    backend: Backend,
    name: ShardName,
    identity: Identity,
    parts: Sequence[bytes | memoryview],
    *,
    is_removed: Callable[[str], bool],
) -> Published:
    """Put the bytes of a shard, unless a sound one stands there that nobody removed.

    Its bytes are on the device on return, its name once `sync_names` was called. Raises `Blocked`, `NoSpace`,
    `Unavailable`.
    """
    replace, quarantined = False, ""
    for _ in range(_TRIES):
        try:
            info = backend.put(name.path, parts, durability=Durability.DATA, if_absent=not replace)
            how = Publication.REPLACED if replace or quarantined else Publication.STORED
            return Published(how, info, quarantined=quarantined)
        except (AlreadyExists, Obstructed):
            pass
        standing = check_shard(backend, name, identity, with_data=True)
        match standing.health:
            case Health.SOUND:
                assert standing.header is not None
                if not is_removed(standing.header.meta.nonce):
                    return Published(Publication.PRESENT, found=standing.header, quarantined=quarantined)
                replace = True
            case Health.DAMAGED | Health.FOREIGN:
                set_aside(backend, name, standing.version)
                quarantined = standing.reason
            case _:
                refuse(name, standing)
    raise Blocked(f"{name.path} keeps changing", next_step="run it again")


def refuse(name: ShardName, standing: Checked) -> None:
    """Raise for what is neither sound nor damaged; what is gone is no reason to."""
    if standing.health is Health.UNKNOWN:
        raise Unavailable(f"{name.path} could not be read: {standing.reason}", name=name.path)
    if standing.health is Health.NEWER:
        raise Blocked(f"{name.path} is of a newer format: {standing.reason}", next_step="use a newer release")


def set_aside(backend: Backend, name: ShardName, version: str) -> None:
    """Move what stands under a shard's name to quarantine, if it is of that version ("" stands for any): what another
    writer put there meanwhile stays, or comes back. Raises `Blocked`, `Unavailable`."""
    aside = name.quarantine_path
    try:
        if _is_other(backend, name.path, version):
            return
        try:
            backend.move(name.path, aside)
        except AlreadyExists:
            aside += f".{new_nonce()}"
            backend.move(name.path, aside)
        if _is_other(backend, aside, version):
            backend.move(aside, name.path)
    except NotFound:
        return
    except Obstructed as problem:
        raise Blocked(f"{name.path} is in the way and cannot be moved: {problem}") from problem
    except Unavailable:
        raise
    except BackendError as problem:
        raise Blocked(f"{name.path} cannot be moved to quarantine: {problem}") from problem


def _is_other(backend: Backend, path: str, version: str) -> bool:
    """True for an object that is surely not of that version. Where a move copies, versions tell nothing."""
    if not version or not backend.capabilities.rename:
        return False
    try:
        info = backend.stat(path)
    except Obstructed:
        return True
    return info is not None and info.version != version
