"""Whose KV an engine loads: its own, and that of engines which a probe has found to compute the same.

The probe computes a few hundred tokens with both engines and compares layer by layer. Engines differ by rounding, as
batches of another shape do within one engine. Whatever else may differ (the order of rotary pairs, a layout read
wrongly, a configuration understood otherwise) is larger by far, and is refused with the figures.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.store import ChunkBuffer, ChunkRef, Entry, Match, Namespace, Store
from lmcache_cli.store.acceptances import read_acceptances
from lmcache_cli.store.chain import ChainedNamespace, StoreChain
from lmcache_format.acceptance import Acceptance
from lmcache_format.dtypes import Dtype
from lmcache_format.keys import ChunkKey, MultimodalItem, Tokens

_LOG = logging.getLogger("lmcache.acceptance")
PROBE_TOKENS = 512
MOST_RELATIVE_L2 = 0.03
LEAST_COSINE = 0.99
_SHARDS_REMEMBERED = 1 << 18


@dataclass(frozen=True, slots=True)
class KvDifference:
    """How far two engines' KV of one layer and side are apart. `relative_l2` is the norm of the difference by that of
    the reference; `cosine` is the mean over tokens and heads of the cosine between their vectors."""

    layer: int
    side: str
    relative_l2: float
    cosine: float

    @property
    def is_acceptable(self) -> bool:
        """True for rounding, False for everything else; not a number is everything else."""
        return self.relative_l2 < MOST_RELATIVE_L2 and self.cosine > LEAST_COSINE


def compare_kv(found: Sequence[ChunkBuffer], reference: Sequence[ChunkBuffer]) -> list[KvDifference]:
    """Both engines' KV of the same tokens, whole chunks and perhaps a tail each, for every layer and side."""
    assert [one.num_tokens for one in found] == [one.num_tokens for one in reference]
    identity = reference[0].identity
    differences = []
    for layer in range(identity.layers):
        for side in ("k", "v"):
            ours, theirs = (_vectors(chunks, layer, side, identity.dtype) for chunks in (found, reference))
            differences.append(KvDifference(layer, side, *_apart(ours, theirs)))
    return differences


def _apart(found: npt.NDArray[np.float64], reference: npt.NDArray[np.float64]) -> tuple[float, float]:
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(reference, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_l2 = np.linalg.norm(found - reference) / np.linalg.norm(reference)
        cosines = np.where(norms > 0, (found * reference).sum(axis=-1) / norms, (found == reference).all(axis=-1))
    return float(relative_l2), float(cosines.mean())


def _vectors(chunks: Sequence[ChunkBuffer], layer: int, side: str, dtype: Dtype) -> npt.NDArray[np.float64]:
    """`[H, T, D]` as numbers."""
    arrays = [chunk.array(layer, side) for chunk in chunks]
    if dtype is Dtype.BF16:
        arrays = [(array.astype(np.uint32) << 16).view(np.float32) for array in arrays]
    with np.errstate(invalid="ignore"):  # what is no number stays none
        return np.concatenate(arrays, axis=-2).astype(np.float64)


def signature(producer: Mapping[str, Any]) -> dict[str, str]:
    """Of what a shard says of its producer, that which decides the values: engine, versions, kind of device, attention.
    How many tokens or ranks computed at a time is told in numbers, and left out."""
    return {name: value for name, value in producer.items() if isinstance(value, str)}


def judged(differences: Sequence[KvDifference]) -> tuple[KvDifference, float, float]:
    """The layer and side that are furthest apart, the largest relative L2 of all, and the lowest cosine."""
    worst = max(differences, key=lambda one: (not one.is_acceptable, one.relative_l2))
    return worst, max(one.relative_l2 for one in differences), min(one.cosine for one in differences)


class AcceptedNamespace:
    """A namespace as one engine may use it: a match ends before the first chunk that is neither the engine's own nor of
    one whose KV it takes. See `AcceptedNamespaces`.

    Reads of a chain are held to the same: where the store that a match counted on fails, another one is asked, whose
    shard may be by somebody else.
    """

    def __init__(self, namespace: Namespace, owner: AcceptedNamespaces) -> None:
        self._namespace = namespace
        if isinstance(namespace, ChainedNamespace):
            namespace.takes = self.takes
        self._owner = owner
        self._acceptances: list[Acceptance] = []
        self._read_at = -float("inf")
        self._producers: dict[str, Mapping[str, Any]] = {}
        self._told: set[str] = set()

    @property
    def namespace(self) -> Namespace:
        """The namespace itself, for loading what a match found."""
        return self._namespace

    def root(self, salt: str | bytes | None = None) -> ChunkKey:
        """See `Namespace.root`."""
        return self._namespace.root(salt)

    def match(self, tokens: Tokens, *, salt: str | bytes | None = None, items: Sequence[MultimodalItem] = ()) -> Match:
        """See `Namespace.match`. Reads the headers of shards that it meets for the first time."""
        for _ in range(2):  # where one was listed that is not there, the second match finds what is there instead
            match = self._namespace.match(tokens, salt=salt, items=items)
            chunks = match.chunks()
            shards = [self._namespace.shards(chunk.key) for chunk in chunks]
            unread = self._learn(
                [(one, entry) for one, entries in zip(chunks, shards, strict=True) for entry in entries]
            )
            if all(entry in self._namespace.shards(chunk.key) for chunk, entry in unread):
                break
        for chunk, entries in zip(chunks, shards, strict=True):
            if not entries or not all(self._is_usable(entry) for entry in entries):
                self._owner.counts["lookups_unaccepted"] += 1
                return match.up_to(chunk.depth * match.chunk_tokens)
        return match

    def _learn(self, shards: list[tuple[ChunkRef, Entry]]) -> list[tuple[ChunkRef, Entry]]:
        """Those of which no header can be read."""
        unknown = [(chunk, entry) for chunk, entry in shards if entry.nonce not in self._producers]
        if not unknown:
            return []
        unread = []
        for one, meta in zip(unknown, self._namespace.headers(unknown), strict=True):
            if meta is None:
                unread.append(one)
            else:
                self._producers[one[1].nonce] = meta.producer
        while len(self._producers) > _SHARDS_REMEMBERED:
            self._producers.pop(next(iter(self._producers)), None)
        return unread

    def _is_usable(self, entry: Entry) -> bool:
        producer = self._producers.get(entry.nonce)
        return producer is not None and self.takes(producer)  # None: its header cannot be read now

    def takes(self, producer: Mapping[str, Any]) -> bool:
        """Whether the engine loads what this producer computed."""
        if producer.get("engine") == self._owner.consumer["engine"] or self._is_accepted(producer):
            return True
        self._refresh()
        if self._is_accepted(producer):
            return True
        self._tell(producer)
        return False

    def _is_accepted(self, producer: Mapping[str, Any]) -> bool:
        verdicts = [one.passed for one in self._acceptances if one.concerns(producer)]
        return bool(verdicts) and all(verdicts)

    def _refresh(self) -> None:
        now = self._owner.clock()
        if now - self._read_at < self._owner.recheck_s:
            return
        self._read_at = now
        found = read_acceptances(self._owner.store.backend, self._namespace.fingerprint, self._namespace.events)
        self._acceptances = [one for one in found if one.consumer == self._owner.consumer]

    def _tell(self, producer: Mapping[str, Any]) -> None:
        who = _readable(signature(producer)) or "an engine that does not say its name"
        if who in self._told:
            return
        self._told.add(who)
        failed = [one for one in self._acceptances if one.concerns(producer) and not one.passed]
        why = (
            f"a probe found them too far apart (relative L2 {failed[0].relative_l2:.4f}, cosine {failed[0].cosine:.4f})"
            if failed
            else f"no probe has compared them with {_readable(self._owner.consumer)}; to do so, "
            "run: lmcache warm --engine transformers --probe-engine vllm"
        )
        _LOG.warning("namespace %s: chunks by %s are not loaded: %s", self._namespace.fingerprint, who, why)


class AcceptedNamespaces:
    """What one engine, the `consumer`, may use of the namespaces that `namespace_of` opens.

    Records of probes are read again at most every `recheck_s`, and only when a chunk is met that is not accepted.
    """

    def __init__(
        self,
        store: Store | StoreChain,
        namespace_of: Callable[[str | None], Namespace],
        consumer: Mapping[str, str],
        *,
        recheck_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.consumer = dict(consumer)
        self.counts: Counter[str] = Counter()
        self.recheck_s = recheck_s
        self.clock = clock
        self._namespace_of = namespace_of
        self._open: dict[str | None, AcceptedNamespace] = {}

    def of(self, adapter: str | None) -> AcceptedNamespace:
        """The namespace of the model with an adapter, or without one."""
        found = self._open.get(adapter)
        if found is None:
            found = self._open.setdefault(adapter, AcceptedNamespace(self._namespace_of(adapter), self))
        return found


def _readable(engine: Mapping[str, str]) -> str:
    rest = [f"{name} {value}" for name, value in engine.items() if name != "engine"]
    return " ".join([engine.get("engine", ""), *([f"({', '.join(rest)})"] if rest else [])]).strip()
