"""What the scheduler's half tells the workers' half each step, and what it hears back. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmcache_cli.runtime.pages import BlockSpan
from lmcache_cli.store import ChunkRef
from lmcache_format.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Fill the slots of tokens `start` to `stop` from `chunks`. `is_async`: the request waits until it is reported
    as finished; otherwise the forward of this step needs them. `is_cancelled`: nobody wants them any more, and all
    there is to do is to report."""

    request_id: str
    epoch: int
    adapter: str | None
    chunks: tuple[ChunkRef, ...]
    start: int
    stop: int
    span: BlockSpan
    is_async: bool
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class SaveOp:
    """Save `chunks`, whose last token is computed by the forward of this step. `epoch` is the request's own: it
    advances when saves that were not taken are planned anew. `is_suspect`: some rank could not load one of these, so
    that what another rank's index says of them is worth nothing."""

    request_id: str
    epoch: int
    adapter: str | None
    chunks: tuple[ChunkRef, ...]
    span: BlockSpan
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. `epoch` advances when the scheduler has heard of a failed load: saves planned before that may
    rest on it. Saves of the steps `confirmed` may be written; those of `refused` are to be forgotten."""

    step: int
    epoch: int
    loads: tuple[LoadOp, ...] = ()
    saves: tuple[SaveOp, ...] = ()
    confirmed: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DroppedSave:
    """From chunk `depth` on, a request's chunks of `epoch` were not saved, or not loaded (`is_load`)."""

    epoch: int
    depth: int
    is_load: bool = False

    def merged(self, other: DroppedSave) -> DroppedSave:
        """Both as one."""
        epoch, depth = max(self.epoch, other.epoch), min(self.depth, other.depth)
        return DroppedSave(epoch, depth, self.is_load or other.is_load)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk that every rank has written, for those who follow what is where. `parent` is None for a first chunk."""

    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank, or several together (`merged`), have to say after a step.

    `done` counts for each step the ranks that are through with it, `failed` names steps in which a load that a forward
    needed has failed on some rank. Loads that failed are in `dropped`, too: their chunks are to be saved again.
    `stored` counts for each key the ranks that have written their part of that chunk, where anybody wants to know.
    `unreadable` are chunks that could not be loaded, whether their request still lives or not.
    """

    done: Mapping[int, int] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()
    dropped: Mapping[str, DroppedSave] = field(default_factory=dict)
    stored: dict[bytes, int] = field(default_factory=dict)
    unreadable: frozenset[ChunkKey] = frozenset()

    def merged(self, other: StepReport) -> StepReport:
        """Both reports as one; in any order."""
        done = {step: self.done.get(step, 0) + other.done.get(step, 0) for step in {*self.done, *other.done}}
        dropped = dict(self.dropped)
        for request_id, drop in other.dropped.items():
            dropped[request_id] = drop.merged(dropped.get(request_id, drop))
        stored = {key: self.stored.get(key, 0) + other.stored.get(key, 0) for key in self.stored | other.stored}
        unreadable = self.unreadable | other.unreadable
        return StepReport(done, self.failed | other.failed, dropped, stored, unreadable)
