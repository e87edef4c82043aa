"""Where the shards of index entries lie: the index keeps half of a key, so names come from listings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_cli.backends import Backend
from lmcache_format.errors import BadName
from lmcache_format.geometry import Part
from lmcache_format.identity import Fingerprint
from lmcache_format.names import ShardName, chunks_directory

from .errors import IncompleteListing
from .state import Entry

SlotName = tuple[bytes, Part, str]
"""First 16 bytes of a key, part, encoding: what the index knows of a shard's name."""
_OBJECTS_A_DIRECTORY = 32  # listing so many objects at once takes about as long as listing one directory
_CLOCK_STEP_MS = 2_000
_FEW_ABSENT = 16
_MOST_LOOKED_FOR_AGAIN = 1024


@dataclass(frozen=True, slots=True)
class FoundObject:
    """Where a shard of the index lies, and in which version; which write it is only its header tells."""

    path: str
    version: str
    size_bytes: int
    modified_ms: int


def slot_of(entry: Entry) -> SlotName:
    """What names the shard of an entry."""
    return entry.key, entry.part, entry.encoding


def find_objects(
    backend: Backend,
    fingerprint: Fingerprint,
    entries: Sequence[Entry],
    *,
    num_listed: int | None = None,
    started_ms: int | None = None,
) -> dict[SlotName, FoundObject]:
    """What stands under the names of index entries; `num_listed`: how many shards the namespace has, roughly;
    `started_ms`: the time now, where the store cannot be asked for it and nothing is removed by what is found.

    What is not found (of very many a sample) is looked for once more, each in its own directory. Raises
    `IncompleteListing` where it is there then, `Unavailable` where that cannot be known.
    """
    started_ms = backend.now_ms() if started_ms is None else started_ms
    wanted = {slot_of(entry) for entry in entries}
    directories = _directories(fingerprint, wanted)
    if num_listed is not None and len(directories) * _OBJECTS_A_DIRECTORY > num_listed:
        directories = [chunks_directory(fingerprint)]
    found = _listed(backend, directories, wanted)
    missing = sorted(wanted - found.keys(), key=lambda slot: slot[0])
    absent = set(missing[:: -(-len(missing) // _MOST_LOOKED_FOR_AGAIN) or 1])
    again = _listed(backend, _directories(fingerprint, absent), absent)
    left_out = [place for place in again.values() if place.modified_ms < started_ms - _CLOCK_STEP_MS]
    if left_out:
        raise IncompleteListing(
            f"a listing of {chunks_directory(fingerprint)} left out {len(left_out)} of {len(wanted)} shards that are"
            f" there, such as {left_out[0].path}; nothing was done",
            next_step="run it again; if it stays so, the back-end's listing cannot be trusted",
        )
    return {**found, **again}


def refuse_mostly_absent(fingerprint: Fingerprint, num_absent: int, num_wanted: int) -> None:
    """Raise `IncompleteListing` where most of what an index lists seems to be gone."""
    if num_absent > _FEW_ABSENT and num_absent * 2 > num_wanted:
        raise IncompleteListing(
            f"{num_absent} of {num_wanted} shards of {fingerprint} are not in the listing; nothing was done",
            next_step="if they are gone for good: lmcache repair --accept-missing",
        )


def _listed(backend: Backend, directories: Sequence[str], wanted: set[SlotName]) -> dict[SlotName, FoundObject]:
    found: dict[SlotName, FoundObject] = {}
    for directory in directories:
        for info in backend.list(directory):
            try:
                name = ShardName.parse(info.name)
            except BadName:
                continue
            slot = (name.key[:16], name.part, name.encoding)
            if slot in wanted:
                found[slot] = FoundObject(info.name, info.version, info.size_bytes, info.modified_ms)
    return found


def _directories(fingerprint: Fingerprint, slots: set[SlotName]) -> list[str]:
    texts = sorted({key.hex()[:4] for key, _, _ in slots})
    return [f"{chunks_directory(fingerprint)}/{text[:2]}/{text[2:]}" for text in texts]
