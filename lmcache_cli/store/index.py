"""The index of one namespace as its segments tell it, read once and never written: for reports, checks and repairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend
from lmcache_format.identity import Fingerprint
from lmcache_format.names import ShardName, chunks_directory
from lmcache_format.segment import Segment

from .events import Event, Events
from .manifest import Manifest
from .state import Entry, State, empty_state, merge

Rows = npt.NDArray[np.int64]
ABSENT_ROW = -1


@dataclass(frozen=True, slots=True)
class SegmentProblem:
    """A segment that was left out, and why. A newer one is no damage."""

    path: str
    reason: str
    is_newer: bool


class Index:
    """`state` is what all segments say that could be read when the index was made; `late` what came since."""

    def __init__(self, backend: Backend, fingerprint: Fingerprint) -> None:
        """Reads every live segment. Raises `BackendError` where listing or reading fails."""
        self.fingerprint = fingerprint
        self._events = _Collected()
        self.manifest = Manifest(backend, fingerprint, self._events)
        self.state = merge(self.manifest.refresh())
        self.late = empty_state()
        self.late_segments: list[Segment] = []

    @property
    def problems(self) -> list[SegmentProblem]:
        """Segments that could not be read, so far."""
        return self._events.problems

    def refresh(self) -> None:
        """Take what other writers flushed since into `late`. Raises `BackendError`."""
        new = self.manifest.refresh()
        if new:
            self.late_segments += new
            self.late = merge(self.late_segments)

    def lists(self, nonce: str) -> bool:
        """True for a write that the index has, or had when it was first read."""
        number = np.uint64(int(nonce, 16))
        return any(bool((state.adds["nonce"] == number).any()) for state in (self.state, self.late))

    def is_removed(self, nonce: str) -> bool:
        """True for a write that somebody took out of the index."""
        number = np.uint64(int(nonce, 16))
        return any(bool((state.removes["nonce"] == number).any()) for state in (self.state, self.late))


def rows_of(state: State, names: Sequence[ShardName]) -> Rows:
    """For each name the row of `state` that lists it, or `ABSENT_ROW`."""
    rows = np.full(len(names), ABSENT_ROW, np.int64)
    if not len(state) or not names:
        return rows
    parts = {part: number for number, part in enumerate(state.parts)}
    encodings = {name: number for number, name in enumerate(state.encodings)}
    blob = b"".join(name.key[:16] for name in names)
    numbers = np.frombuffer(blob, ">u8").reshape(len(names), 2).astype(np.uint64)
    part = np.array([parts.get(name.part, ABSENT_ROW) for name in names], np.int64)
    encoding = np.array([encodings.get(name.encoding, ABSENT_ROW) for name in names], np.int64)
    at = np.searchsorted(state.keys, numbers[:, 0])
    open_ = np.arange(len(names))
    while len(open_):  # one round a shard of the same chunk
        open_ = open_[at[open_] < len(state)]
        here = at[open_]
        same_key = state.keys[here] == numbers[open_, 0]
        open_, here = open_[same_key], here[same_key]
        adds = state.adds[here]
        found = (
            (adds["key_rest"] == numbers[open_, 1])
            & (adds["part"] == part[open_])
            & (adds["encoding"] == encoding[open_])
        )
        rows[open_[found]] = here[found]
        open_ = open_[~found]
        at[open_] += 1
    return rows


def shown_path(fingerprint: Fingerprint, entry: Entry) -> str:
    """Where the shard of an index entry lies. The index keeps half of the key, so the rest stands as `*`."""
    return f"{shown_chunk(fingerprint, entry.key)}.{entry.part}.{entry.encoding}.safetensors"


def shown_chunk(fingerprint: Fingerprint, key: bytes) -> str:
    """Where the shards of a chunk lie, by the first 16 bytes of its key."""
    text = key[:16].hex()
    return f"{chunks_directory(fingerprint)}/{text[:2]}/{text[2:4]}/{text}*"


def is_same_shard(name: ShardName, entry: Entry) -> bool:
    """True where a path is that of an index entry."""
    return name.key[:16] == entry.key and name.part == entry.part and name.encoding == entry.encoding


class _Collected(Events):
    """Keeps what a manifest could not read instead of logging it."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[SegmentProblem] = []

    def problem(self, event: Event, where: str, reason: object) -> None:
        self.count(event)
        self.problems.append(SegmentProblem(where, str(reason), event is Event.SEGMENT_TOO_NEW))
