"""The state of one namespace: adds minus removes, with touches, merged from segments as whole arrays (SPEC §11).

Merging is a pure function of a set of segments, in any order, read once or twice: readers and compactors agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_format.geometry import Part
from lmcache_format.segment import (
    ADD_DTYPE,
    KEY_DTYPE,
    NO_VERSION,
    REMOVE_DTYPE,
    TOUCH_DTYPE,
    AddFlags,
    Label,
    Pin,
    Records,
    Segment,
    key_number,
)

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Entry:
    """One shard as the manifest knows it. `key` is its first 16 bytes, `parent` the first 8 of its parent's key."""

    key: bytes
    parent: int
    depth: int
    num_tokens: int
    part: Part
    encoding: str
    nonce: str
    size_bytes: int
    created_ms: int
    crc32c: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Arrays of all present shards, sorted by key; fields `part` and `encoding` of `adds` index the name tuples.

    Of several writes of one shard name the latest is present; the others are kept in `shadowed_*` (not sorted), because
    a remove of the latest, not heard of so far, brings the next one forward.
    """

    keys: U64
    adds: Records
    shadowed_keys: U64
    shadowed_adds: Records
    parts: tuple[Part, ...]
    encodings: tuple[str, ...]
    removes: Records
    remove_versions: tuple[str, ...]
    remove_parts: tuple[str, ...]
    remove_encodings: tuple[str, ...]
    touches: Records
    labels: tuple[Label, ...]
    pins: tuple[Pin, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def entry(self, row: int) -> Entry:
        """Row `row` as a value."""
        add = self.adds[row]
        has_crc32c = int(add["flags"]) & AddFlags.HAS_CRC32C
        return Entry(
            key=int(self.keys[row]).to_bytes(8, "big") + int(add["key_rest"]).to_bytes(8, "big"),
            parent=int(add["parent"]),
            depth=int(add["depth"]),
            num_tokens=int(add["num_tokens"]),
            part=self.parts[int(add["part"])],
            encoding=self.encodings[int(add["encoding"])],
            nonce=f"{int(add['nonce']):016x}",
            size_bytes=int(add["size_bytes"]),
            created_ms=int(add["created_ms"]),
            crc32c=int(add["crc32c"]) if has_crc32c else None,
        )

    def rows_of(self, key: bytes) -> range:
        """Rows of all shards of a chunk, by its key (at least 16 bytes)."""
        number, rest = key_number(key), key_number(key, 8)
        start = int(np.searchsorted(self.keys, np.uint64(number)))
        stop = start
        first = None
        while stop < len(self.keys) and int(self.keys[stop]) == number:
            if int(self.adds["key_rest"][stop]) == rest:
                first = stop if first is None else first
            elif first is not None:
                break
            stop += 1
        return range(0) if first is None else range(first, stop)


def empty_state() -> State:
    """The state of a namespace nobody wrote to."""
    return merge(())


def merge(segments: Iterable[Segment]) -> State:
    """Union of the adds minus the removes (by nonce), latest touches, all labels."""
    live = list(segments)
    parts = _Names(segment.parts for segment in live)
    encodings = _Names(segment.encodings for segment in live)
    versions = _Names(segment.versions for segment in live)
    removes = _merge_removes(live, parts, encodings, versions)
    keys, adds, is_shadowed = _merge_adds(live, parts, encodings, removes)
    return State(
        keys=keys if is_shadowed is None else keys[~is_shadowed],
        adds=adds if is_shadowed is None else adds[~is_shadowed],
        shadowed_keys=keys[:0] if is_shadowed is None else keys[is_shadowed],
        shadowed_adds=adds[:0] if is_shadowed is None else adds[is_shadowed],
        parts=tuple(Part.parse(name) for name in parts.names),
        encodings=tuple(encodings.names),
        removes=removes,
        remove_versions=tuple(versions.names),
        remove_parts=tuple(parts.names),
        remove_encodings=tuple(encodings.names),
        touches=merge_touches([segment.touches for segment in live]),
        labels=_merge_labels(live),
        pins=_merge_pins(live),
    )


def merge_touches(tables: Sequence[Records]) -> Records:
    """Latest day and most hits of every key. Order and repetition do not matter; hits are a lower bound."""
    touches: Records = np.concatenate([np.empty(0, TOUCH_DTYPE), *tables])
    if len(tables) == 1 and len(touches) < 2:
        return touches
    order = np.argsort(touches["key"], kind="stable")
    touches = touches[order]
    if len(touches) == 0:
        return touches
    starts = np.flatnonzero(np.concatenate([[True], touches["key"][1:] != touches["key"][:-1]]))
    merged = np.empty(len(starts), TOUCH_DTYPE)
    merged["key"] = touches["key"][starts]
    merged["day"] = np.maximum.reduceat(touches["day"], starts)
    merged["hits"] = np.maximum.reduceat(touches["hits"], starts)
    return merged


class _Names:
    """One numbering for names that every segment numbers in its own way."""

    def __init__(self, tables: Iterable[Sequence[str]]) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._maps: list[npt.NDArray[np.int64]] = []
        for table in tables:
            self._maps.append(np.array([self._number(name) for name in table], np.int64))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def is_identity(self, segment: int) -> bool:
        """True where the segment's own numbers are the common ones."""
        table = self._maps[segment]
        return bool((table == np.arange(len(table))).all())

    def translate(self, segment: int, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Common numbers for the segment's own."""
        return self._maps[segment][numbers] if len(numbers) else numbers


def _merge_adds(
    segments: Sequence[Segment], parts: _Names, encodings: _Names, removes: Records
) -> tuple[U64, Records, npt.NDArray[np.bool_] | None]:
    """Keys and adds in order, and which of them a later write of the same name shadows (None: not one)."""
    filled = [number for number, segment in enumerate(segments) if len(segment.keys)]
    tables = []
    for number in filled:
        adds = segments[number].adds
        if not (parts.is_identity(number) and encodings.is_identity(number)):
            adds = adds.copy()
            adds["part"] = parts.translate(number, adds["part"])
            adds["encoding"] = encodings.translate(number, adds["encoding"])
        tables.append(adds)
    if not filled:
        return np.empty(0, KEY_DTYPE), np.empty(0, ADD_DTYPE), None
    keys = segments[filled[0]].keys if len(filled) == 1 else np.concatenate([segments[n].keys for n in filled])
    adds = tables[0] if len(filled) == 1 else np.concatenate(tables)
    if len(removes):
        kept = ~np.isin(adds["nonce"], removes["nonce"])
        if not kept.all():
            keys, adds = keys[kept], adds[kept]
    if _is_strictly_sorted(keys):
        return keys, adds, None
    return _sorted_and_unique(keys, adds)


def _is_strictly_sorted(keys: U64) -> bool:
    return bool((keys[1:] > keys[:-1]).all())


def _sorted_and_unique(keys: U64, adds: Records) -> tuple[U64, Records, npt.NDArray[np.bool_] | None]:
    """Sorted by key, part, encoding; every write once; of several writes of one shard name the latest counts."""
    order = np.lexsort((adds["nonce"], adds["created_ms"], adds["encoding"], adds["part"], adds["key_rest"], keys))
    keys, adds = keys[order], adds[order]
    same_name = _same_name(keys, adds)
    if not same_name.any():
        return keys, adds, None
    again = same_name & (adds["nonce"][1:] == adds["nonce"][:-1])
    if again.any():
        keys, adds = _one_record_a_write(keys, adds, again)
        same_name = _same_name(keys, adds)
    return keys, adds, np.concatenate([same_name, [False]]) if same_name.any() else None


def _one_record_a_write(keys: U64, adds: Records, again: npt.NDArray[np.bool_]) -> tuple[U64, Records]:
    """Records of one write say the same, but that some may lack the CRC32C: one that has it counts (SPEC §11).

    `again` says of every row but the last that the next one is of the same write. Of two CRC32Cs, which no writer
    makes, the higher counts: whichever record was read first, the result is the same.
    """
    starts = np.flatnonzero(np.concatenate([[True], ~again]))
    has_crc32c = (adds["flags"] & AddFlags.HAS_CRC32C) != 0
    crc32c = np.maximum.reduceat(np.where(has_crc32c, adds["crc32c"], np.uint32(0)), starts)
    is_known = np.logical_or.reduceat(has_crc32c, starts)
    keys, adds = keys[starts], adds[starts]
    adds["crc32c"][is_known] = crc32c[is_known]
    adds["flags"][is_known] |= np.uint32(AddFlags.HAS_CRC32C)
    return keys, adds


def _same_name(keys: U64, adds: Records) -> npt.NDArray[np.bool_]:
    """For every row but the last: is the next one a write of the same shard name?"""
    same: npt.NDArray[np.bool_] = keys[1:] == keys[:-1]
    for name in ("key_rest", "part", "encoding"):
        same &= adds[name][1:] == adds[name][:-1]
    return same


def _merge_removes(segments: Sequence[Segment], parts: _Names, encodings: _Names, versions: _Names) -> Records:
    tables = [np.empty(0, REMOVE_DTYPE)]
    for number, segment in enumerate(segments):
        if not len(segment.removes):
            continue
        table = segment.removes.copy()
        table["part"] = parts.translate(number, table["part"])
        table["encoding"] = encodings.translate(number, table["encoding"])
        has_version = table["version"] != NO_VERSION
        table["version"][has_version] = versions.translate(number, table["version"][has_version])
        tables.append(table)
    removes: Records = np.concatenate(tables)
    if len(removes) < 2:
        return removes
    rank = np.append(np.argsort(np.argsort(np.array(versions.names, np.str_))), len(versions.names))
    version = rank[
        np.minimum(removes["version"], len(versions.names))
    ]  # by name: numbers depend on the order of reading
    order = np.lexsort((version, removes["reason"], removes["marked_ms"], removes["nonce"]))
    removes = removes[order]
    starts = np.flatnonzero(np.concatenate([[True], removes["nonce"][1:] != removes["nonce"][:-1]]))
    merged: Records = removes[starts]
    merged["flags"] = np.bitwise_or.reduceat(removes["flags"], starts)
    return merged


def _merge_labels(segments: Sequence[Segment]) -> tuple[Label, ...]:
    labels: dict[tuple[str, bytes], Label] = {}
    for segment in segments:
        for label in segment.labels:
            known = labels.get((label.name, label.key))
            if known is None or _age(known) < _age(label):
                labels[(label.name, label.key)] = label
    return tuple(labels[key] for key in sorted(labels))


def _merge_pins(segments: Sequence[Segment]) -> tuple[Pin, ...]:
    """One pin a key: the one made last, of those the one that holds longest."""
    pins: dict[bytes, Pin] = {}
    for segment in segments:
        for pin in segment.pins:
            known = pins.get(pin.key)
            if known is None or _pin_age(known) < _pin_age(pin):
                pins[pin.key] = pin
    return tuple(pins[key] for key in sorted(pins))


def _pin_age(pin: Pin) -> tuple[int, float]:
    return pin.created_ms, float("inf") if pin.expires_ms is None else pin.expires_ms


def _age(label: Label) -> tuple[int, int, int]:
    """Orders labels of one name and key by time; those of one moment in some way that all readers share."""
    return label.created_ms, label.num_tokens, label.depth
