"""What a store holds, counted from its manifests: a row for every namespace, and their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from lmcache_cli.rendering import utc_day, utc_time

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lmcache_cli.store import Namespace, State, Store
    from lmcache_format import Fingerprint, Identity


class NamespaceStatus(StrEnum):
    """Whether this release can read a namespace."""

    OK = "ok"
    TOO_NEW = "newer format"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Usage:
    """Chunks (all parts and encodings of one key count once), their shards and tokens, and how they were used."""

    num_chunks: int = 0
    num_shards: int = 0
    num_tokens: int = 0
    size_bytes: int = 0
    bytes_by_encoding: dict[str, int] = field(default_factory=dict)
    num_hits: int = 0
    first_added: str | None = None
    last_added: str | None = None
    last_used: str | None = None

    def __add__(self, other: Usage) -> Usage:
        encodings = sorted({*self.bytes_by_encoding, *other.bytes_by_encoding})
        return Usage(
            num_chunks=self.num_chunks + other.num_chunks,
            num_shards=self.num_shards + other.num_shards,
            num_tokens=self.num_tokens + other.num_tokens,
            size_bytes=self.size_bytes + other.size_bytes,
            bytes_by_encoding={
                name: self.bytes_by_encoding.get(name, 0) + other.bytes_by_encoding.get(name, 0) for name in encodings
            },
            num_hits=self.num_hits + other.num_hits,
            first_added=min(filter(None, (self.first_added, other.first_added)), default=None),
            last_added=max(filter(None, (self.last_added, other.last_added)), default=None),
            last_used=max(filter(None, (self.last_used, other.last_used)), default=None),
        )


@dataclass(frozen=True, slots=True)
class NamespaceOverview:
    """One namespace. Where it cannot be read, `identity` is None, `usage` empty, and `problem` says why."""

    fingerprint: str
    status: NamespaceStatus
    identity: Identity | None = None
    usage: Usage = field(default_factory=Usage)
    problem: str | None = None

    def row(self) -> dict[str, object]:
        """As `lmcache ls` shows it."""
        identity = self.identity
        return {
            "namespace": self.fingerprint,
            "model": None if identity is None else identity.model,
            "dtype": None if identity is None else identity.dtype,
            "weights": None if identity is None else identity.weights,
            "adapter": None if identity is None else identity.adapter,
            "chunk_tokens": None if identity is None else identity.chunk_tokens,
            "status": self.status,
            "problem": self.problem,
            **{name: getattr(self.usage, name) for name in Usage.__dataclass_fields__},
        }


def namespace_overviews(store: Store) -> Iterator[NamespaceOverview]:
    """Every namespace of the store, one that cannot be read included. Raises `BackendError`."""
    for fingerprint in store.fingerprints():
        yield _overview(store, fingerprint)


def total_usage(overviews: Sequence[NamespaceOverview]) -> Usage:
    """The sum over namespaces."""
    return sum((overview.usage for overview in overviews), start=Usage())


def usage_of(state: State) -> Usage:
    """Counted over whole arrays: a million shards take well under a second."""
    if not len(state):
        return Usage()
    adds, touches = state.adds, state.touches
    is_first = _is_first_of_chunk(state)
    return Usage(
        num_chunks=int(is_first.sum()),
        num_shards=len(state),
        num_tokens=int(adds["num_tokens"][is_first].sum()),
        size_bytes=int(adds["size_bytes"].sum()),
        bytes_by_encoding={
            name: int(adds["size_bytes"][adds["encoding"] == number].sum())
            for number, name in sorted(enumerate(state.encodings), key=lambda item: item[1])
        },
        num_hits=int(touches["hits"].sum()),
        first_added=utc_time(int(adds["created_ms"].min())),
        last_added=utc_time(int(adds["created_ms"].max())),
        last_used=utc_day(int(touches["day"].max())) if len(touches) else None,
    )


def _overview(store: Store, fingerprint: Fingerprint) -> NamespaceOverview:
    from lmcache_cli.store import NoSuchNamespace, StoreDamaged, StoreTooNew

    try:
        identity = store.identity(fingerprint)
    except StoreTooNew as newer:
        return NamespaceOverview(fingerprint, NamespaceStatus.TOO_NEW, problem=str(newer))
    except (StoreDamaged, NoSuchNamespace) as damaged:
        return NamespaceOverview(fingerprint, NamespaceStatus.DAMAGED, problem=str(damaged))
    with open_for_reading(store, identity) as namespace:
        return NamespaceOverview(fingerprint, NamespaceStatus.OK, identity, usage_of(namespace.state()))


def open_for_reading(store: Store, identity: Identity) -> Namespace:
    """A namespace to look at: of whatever weights, in whatever encodings."""
    return store.namespace(identity, allow_lossy=True, allow_unverified=True)


def _is_first_of_chunk(state: State) -> npt.NDArray[np.bool_]:
    """True in the first row of every chunk; rows are sorted by key."""
    import numpy as np

    rest = state.adds["key_rest"]
    changes = (state.keys[1:] != state.keys[:-1]) | (rest[1:] != rest[:-1])
    first: npt.NDArray[np.bool_] = np.concatenate([[True], changes])
    return first
