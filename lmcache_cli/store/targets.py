"""What people name when they mean chunks: the start of a key, the label of a document, a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmcache_format.geometry import whole_part
from lmcache_format.identity import Fingerprint
from lmcache_format.keys import Tokens, chunk_keys, next_key, root_key, token_words

from .chunk_table import ChunkTable, chunk_table
from .clocks import looked_at_ms
from .documents import chunk_of
from .index import Index
from .objects import chosen_namespaces, find_identity
from .store import Store
from .victims import Family, find_chunks
from .view import View


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """One chunk. `key`: its first 16 bytes; `end_tokens`: how long the sequence is that ends with it; `labels` its."""

    namespace: Fingerprint
    model: str
    key: bytes
    end_tokens: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPin:
    """A pin that holds. `end_tokens` None: its chunk is not there, and so it keeps nothing. `num_chunks`, `size_bytes`:
    what it keeps, the chunks before it included."""

    namespace: Fingerprint
    key: bytes
    labels: tuple[str, ...]
    end_tokens: int | None
    expires_ms: int | None
    num_chunks: int
    size_bytes: int


def chunks_by_key(store: Store, start: str, namespace: Fingerprint | None = None) -> list[NamedChunk]:
    """Chunks whose key starts so, in all namespaces or one. Raises `BackendError`."""
    return _named(store, namespace, key_start=start)


def chunks_by_label(store: Store, name: str, namespace: Fingerprint | None = None) -> list[NamedChunk]:
    """The last present chunk of every document of that name. Raises `BackendError`."""
    return _named(store, namespace, label=name)


def chunks_of_prompt(store: Store, namespace: Fingerprint, tokens: Tokens, salt: str | None) -> list[bytes]:
    """First 16 bytes of the keys of all chunks that a prompt has or had, and of the present tails it begins with."""
    identity = store.identity(namespace)
    words = token_words(tokens)
    root = root_key(namespace, salt)
    keys = chunk_keys(root, words, identity.chunk_tokens)
    index = Index(store.backend, namespace)
    view = View(index.state, whole_part(identity), lambda label: True, identity.chunk_tokens)
    parent = keys[-1] if len(keys) else root
    rest = words[len(keys) * identity.chunk_tokens :]
    tails = view.tails(parent, len(keys), len(rest), lambda count: next_key(parent, rest[:count]))
    return [*(key[:16] for key in keys), *(key[:16] for key, _ in tails)]


def held_pins(store: Store, namespace: Fingerprint) -> list[HeldPin]:
    """Pins of a namespace that hold now, by what they keep. Raises `BackendError`."""
    identity = find_identity(store, namespace).identity
    index = Index(store.backend, namespace)
    now_ms = looked_at_ms(store.backend)
    table = chunk_table(index.state, None if identity is None else whole_part(identity))
    family = Family.of(table)
    chunk_tokens = 0 if identity is None else identity.chunk_tokens
    labels = _labels(index)
    found = []
    for pin in index.state.pins:
        if pin.expires_ms is not None and pin.expires_ms <= now_ms:
            continue
        chunk = chunk_of(table, pin.key)
        kept = np.zeros(len(table), np.bool_)
        if chunk is not None:
            kept[chunk] = True
            kept = family.with_ancestors(kept)
        end = None if chunk is None else int(table.depths[chunk]) * chunk_tokens + int(table.num_tokens[chunk])
        names = labels.get(pin.key, ())
        size = int(table.size_bytes[kept].sum()) if len(table) else 0
        found.append(HeldPin(namespace, pin.key, names, end, pin.expires_ms, int(kept.sum()), size))
    return found


def _named(
    store: Store, namespace: Fingerprint | None, *, key_start: str | None = None, label: str | None = None
) -> list[NamedChunk]:
    found = []
    for fingerprint in chosen_namespaces(store, namespace):
        identity = find_identity(store, fingerprint).identity
        if identity is None:
            continue
        index = Index(store.backend, fingerprint)
        table = chunk_table(index.state, None)
        if key_start is not None:
            numbers = np.flatnonzero(find_chunks(index.state, table, key_start)).tolist()
        else:
            numbers = _last_of_label(index, table, label or "")
        labels = _labels(index)
        for number in numbers:
            key = table.key_of(number)
            end = int(table.depths[number]) * identity.chunk_tokens + int(table.num_tokens[number])
            found.append(NamedChunk(fingerprint, identity.model, key, end, labels.get(key, ())))
    return found


def _last_of_label(index: Index, table: ChunkTable, name: str) -> list[int]:
    present = [
        (label.num_tokens, chunk)
        for label in index.state.labels
        if label.name == name and (chunk := chunk_of(table, label.key)) is not None
    ]
    return [max(present)[1]] if present else []


def _labels(index: Index) -> dict[bytes, tuple[str, ...]]:
    names: dict[bytes, tuple[str, ...]] = {}
    for label in index.state.labels:
        names[label.key] = (*names.get(label.key, ()), label.name)
    return names
