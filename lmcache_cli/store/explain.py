"""Why would a prompt miss? How much of it hits, the first chunk that does not, and what is different about that one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from lmcache_cli.backends import Backend, BackendError
from lmcache_format.encodings import is_known_label
from lmcache_format.errors import BadName, FormatError
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import Fingerprint, Identity
from lmcache_format.keys import (
    ChunkKey,
    KeyList,
    MultimodalItem,
    Tokens,
    chunk_extras,
    chunk_keys,
    next_key,
    root_key,
    token_words,
)
from lmcache_format.names import ShardName
from lmcache_format.segment import key_number

from .coverage import covers
from .index import Index
from .objects import find_identity
from .reading import read_header
from .store import Store
from .view import View

_SIBLINGS_READ = 8


class Cause(StrEnum):
    """Why a prompt hits no further than it does."""

    HIT = "all of it hits"
    OTHER_IDENTITY = "stored under another identity"
    OTHER_SALT = "stored under another salt"
    NO_NAMESPACE = "nothing is stored under this identity"
    INCOMPLETE = "parts of the chunk are missing"
    UNREADABLE = "stored in an encoding that this reader does not take"
    OTHER_TOKENS = "other tokens follow the same beginning"
    TOO_SHORT = "the prompt is shorter than a chunk, and no tail like it is stored"
    NOT_STORED = "nothing that follows this beginning is stored"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the identity: what the prompt asks for, and what the namespace has."""

    field: str
    wanted: object
    stored: object


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace of the store in which the same tokens hit further."""

    namespace: Fingerprint
    model: str
    hit_tokens: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """`hit_tokens` of `num_tokens` hit. The first chunk that does not is number `chunk` (from 0), of the tokens from
    `chunk_start` to `chunk_stop`; None where everything hits.

    `first_other_token` is the position of the first token that is another one than in the most similar stored chunk,
    None where writers did not keep token ids. `num_siblings` chunks follow the same beginning with other tokens.
    `unsalted_tokens` would hit without the salt; `num_salted_firsts` first chunks lie under other salts than this.
    """

    namespace: Fingerprint
    num_tokens: int
    chunk_tokens: int
    hit_tokens: int
    cause: Cause
    sentences: tuple[str, ...]
    chunk: int | None = None
    chunk_start: int | None = None
    chunk_stop: int | None = None
    key: bytes | None = None
    first_other_token: int | None = None
    num_siblings: int = 0
    unsalted_tokens: int = 0
    num_salted_firsts: int = 0
    elsewhere: tuple[Elsewhere, ...] = ()


def explain_prompt(
    store: Store,
    identity: Identity,
    tokens: Tokens,
    salt: str | bytes | None = None,
    *,
    items: Sequence[MultimodalItem] = (),
    allow_lossy: bool = False,
) -> Explanation:
    """Look a prompt up as a reader of `identity` would, then under everything else the store has. Changes nothing.

    Raises `KeyInputError` for ids that are none, `BackendError` where the store does not answer.
    """
    words = token_words(tokens)
    prompt = _Prompt(words, items)
    mine = _Lookup(store.backend, identity, allow_lossy)
    hit = mine.hit(prompt, salt)
    if hit.num_tokens == len(words):
        sentence = f"all {len(words)} tokens hit"
        return Explanation(mine.fingerprint, len(words), identity.chunk_tokens, hit.num_tokens, Cause.HIT, (sentence,))
    elsewhere = sorted(
        _elsewhere(store, identity, prompt, salt, allow_lossy, hit.num_tokens), key=lambda other: -other.hit_tokens
    )
    unsalted = mine.hit(prompt, None).num_tokens if salt else 0
    siblings = mine.siblings(hit.parent, hit.depth)
    start, stop = hit.start, min(hit.start + identity.chunk_tokens, len(words))
    finding = _Finding(
        is_known=len(mine.index.state) > 0 or store.backend.stat(f"ns/{mine.fingerprint}/ns.json") is not None,
        gap=mine.gap(hit.next_key) if hit.next_key is not None else "",
        num_siblings=len(siblings),
        unsalted_tokens=unsalted if unsalted > hit.num_tokens else 0,
        num_salted_firsts=mine.num_firsts_under_other_salts(salt) if hit.depth == 0 else 0,
        elsewhere=tuple(elsewhere),
    )
    other_token = mine.first_other_token(siblings, words[start:], start)
    cause = finding.cause(hit, prompt, identity.chunk_tokens)
    return Explanation(
        namespace=mine.fingerprint,
        num_tokens=len(words),
        chunk_tokens=identity.chunk_tokens,
        hit_tokens=hit.num_tokens,
        cause=cause,
        sentences=tuple(_sentences(cause, finding, hit, len(words), stop, other_token)),
        chunk=hit.depth,
        chunk_start=start,
        chunk_stop=stop,
        key=hit.next_key,
        first_other_token=other_token,
        num_siblings=finding.num_siblings,
        unsalted_tokens=finding.unsalted_tokens,
        num_salted_firsts=finding.num_salted_firsts,
        elsewhere=finding.elsewhere,
    )


@dataclass(frozen=True, slots=True)
class _Prompt:
    words: np.ndarray[tuple[int], np.dtype[np.uint32]]
    items: Sequence[MultimodalItem]

    def keys(self, root: ChunkKey, chunk_tokens: int) -> KeyList:
        extras = None
        if self.items:
            starts = range(0, len(self.words) - chunk_tokens + 1, chunk_tokens)
            extras = [chunk_extras(self.items, start, chunk_tokens) for start in starts]
        return chunk_keys(root, self.words, chunk_tokens, extras)


@dataclass(frozen=True, slots=True)
class _Hit:
    """`depth` full chunks (`start` tokens) hit, the last of them `parent`; `next_key` is the next full chunk's."""

    num_tokens: int
    depth: int
    start: int
    parent: ChunkKey
    next_key: ChunkKey | None


@dataclass(frozen=True, slots=True)
class _Finding:
    is_known: bool
    gap: str
    num_siblings: int
    unsalted_tokens: int
    num_salted_firsts: int
    elsewhere: tuple[Elsewhere, ...] = field(default=())

    def cause(self, hit: _Hit, prompt: _Prompt, chunk_tokens: int) -> Cause:
        if self.gap:
            return Cause.INCOMPLETE if self.gap.startswith("no part") else Cause.UNREADABLE
        if self.unsalted_tokens:
            return Cause.OTHER_SALT
        if self.elsewhere:
            return Cause.OTHER_IDENTITY
        if not self.is_known:
            return Cause.NO_NAMESPACE
        if len(prompt.words) < chunk_tokens:
            return Cause.TOO_SHORT
        return Cause.OTHER_TOKENS if self.num_siblings else Cause.NOT_STORED


def _sentences(
    cause: Cause, finding: _Finding, hit: _Hit, num_tokens: int, stop: int, other_token: int | None
) -> Iterator[str]:
    yield f"{hit.num_tokens} of {num_tokens} tokens hit"
    yield f"the first chunk that does not is number {hit.depth}, tokens {hit.start} to {stop}: {cause.value}"
    if finding.gap:
        yield finding.gap
    if finding.unsalted_tokens:
        yield f"without the salt {finding.unsalted_tokens} tokens hit"
    for other in finding.elsewhere:
        fields = "; ".join(f"{d.field}: asked for {d.wanted}, stored {d.stored}" for d in other.differences)
        yield f"{other.hit_tokens} tokens hit in namespace {other.namespace} ({other.model}), which differs in {fields}"
    if other_token is not None:
        yield f"the most similar stored chunk has another token at position {other_token}"
    elif finding.num_siblings:
        yield f"{finding.num_siblings} other chunks follow the same beginning, so one of these tokens differs"
    if finding.num_salted_firsts:
        yield f"{finding.num_salted_firsts} first chunks of the namespace lie under other salts than this one"


class _Lookup:
    """One namespace, looked at as a reader does, without leaving a trace."""

    def __init__(self, backend: Backend, identity: Identity, allow_lossy: bool) -> None:
        self._backend = backend
        self._identity = identity
        self._allow_lossy = allow_lossy
        self.fingerprint = identity.fingerprint
        self.index = Index(backend, self.fingerprint)
        self._whole = whole_part(identity)
        self._view = View(self.index.state, self._whole, self._can_read, identity.chunk_tokens)

    def hit(self, prompt: _Prompt, salt: str | bytes | None) -> _Hit:
        root = root_key(self.fingerprint, salt)
        size = self._identity.chunk_tokens
        keys = prompt.keys(root, size)
        count = self._view.match(keys)
        while count < len(keys) and self._is_on_disk(keys[count]):
            count += 1
            while count < len(keys) and self._view.is_present(keys[count]):
                count += 1
        parent = keys[count - 1] if count else root
        start = count * size
        tail = self._tail(prompt, parent, count, start)
        return _Hit(start + tail, count, start, parent, keys[count] if count < len(keys) else None)

    def _tail(self, prompt: _Prompt, parent: ChunkKey, depth: int, start: int) -> int:
        rest = prompt.words[start:]

        def key_of(count: int) -> ChunkKey:
            return next_key(parent, rest[:count], chunk_extras(prompt.items, start, count))

        return next((count for _, count in self._view.tails(parent, depth, len(rest), key_of)), 0)

    def gap(self, key: ChunkKey) -> str:
        """Why a chunk that is here in part is no hit; empty where nothing of it is here."""
        parts: list[Part] = []
        unreadable = set()
        for row in self.index.state.rows_of(key):
            entry = self.index.state.entry(row)
            if self._can_read(entry.encoding):
                parts.append(entry.part)
            else:
                unreadable.add(entry.encoding)
        if parts:
            there = ", ".join(map(str, parts))
            return f"no part covers all of {self._whole}; there are {there}"
        if unreadable:
            return f"it is stored as {', '.join(sorted(unreadable))} alone, which is lossy or of a later release"
        return ""

    def siblings(self, parent: ChunkKey, depth: int) -> list[bytes]:
        """First 16 bytes of the keys of chunks that follow `parent`."""
        adds = self.index.state.adds
        rows = np.flatnonzero((adds["parent"] == np.uint64(key_number(parent))) & (adds["depth"] == depth))
        return sorted({self.index.state.entry(int(row)).key for row in rows})

    def num_firsts_under_other_salts(self, salt: str | bytes | None) -> int:
        """First chunks whose parent is neither the root of this salt nor that of none."""
        roots = {key_number(root_key(self.fingerprint, salt)), key_number(root_key(self.fingerprint))}
        adds = self.index.state.adds
        parents = adds["parent"][adds["depth"] == 0]
        return int((~np.isin(parents, np.array(sorted(roots), np.uint64))).sum())

    def first_other_token(
        self, siblings: list[bytes], words: np.ndarray[tuple[int], np.dtype[np.uint32]], start: int
    ) -> int | None:
        """Where the prompt leaves the sibling that it agrees with longest, if token ids were kept."""
        best = None
        for key in siblings[:_SIBLINGS_READ]:
            kept = self._kept_tokens(key)
            if kept is None:
                continue
            count = min(len(kept), len(words))
            differs = np.flatnonzero(np.asarray(kept[:count], np.uint32) != words[:count])
            if len(differs):
                best = max(best or 0, start + int(differs[0]))
        return best

    def _kept_tokens(self, key: bytes) -> tuple[int, ...] | None:
        for name in self._names(key):
            try:
                with self._backend.open_read(name.path) as handle:
                    return read_header(handle).meta.tokens
            except (BackendError, FormatError):
                continue
        return None

    def _is_on_disk(self, key: ChunkKey) -> bool:
        """True where shards that the index has not heard of make the chunk present, as readers find out, too."""
        if not self._backend.capabilities.cheap_stat:
            return False
        parts = [entry.part for entry in self._view.entries(key)]
        parts += [name.part for name in self._names(key) if name.key == key and self._can_read(name.encoding)]
        removed = self.index.state.removes
        if len(removed) and bool((removed["key"] == np.uint64(key_number(key))).any()):
            return False
        return covers(parts, self._whole)

    def _names(self, key: bytes) -> Iterator[ShardName]:
        text = key.hex()
        for info in self._backend.list(f"ns/{self.fingerprint}/c/{text[:2]}/{text[2:4]}", recursive=False):
            try:
                name = ShardName.parse(info.name)
            except BadName:
                continue
            if name.key.startswith(key):
                yield name

    def _can_read(self, label: str) -> bool:
        return is_known_label(label) and (self._allow_lossy or "-" not in label)


def _elsewhere(
    store: Store, identity: Identity, prompt: _Prompt, salt: str | bytes | None, allow_lossy: bool, least: int
) -> Iterator[Elsewhere]:
    for fingerprint in store.fingerprints():
        other = find_identity(store, fingerprint).identity
        if other is None or fingerprint == identity.fingerprint:
            continue
        hit = _Lookup(store.backend, other, allow_lossy).hit(prompt, salt).num_tokens
        if hit > least:
            yield Elsewhere(fingerprint, other.model, hit, differences(identity, other))


def differences(wanted: Identity, stored: Identity) -> tuple[Difference, ...]:
    """The fields in which two identities differ."""
    mine, theirs = wanted.to_dict(), stored.to_dict()
    return tuple(Difference(name, mine[name], theirs[name]) for name in sorted(mine) if mine[name] != theirs[name])
