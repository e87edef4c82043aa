"""Pattern KV: every element tells where it belongs, so that a mix-up of any kind shows in the values.

An element is a mix of position, token id, layer, side, head, dim and identity. Two chunks, heads or layers that were
exchanged agree in one of 65,536 elements by chance, never in all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.store import ChunkBuffer, ChunkRef, Match, Namespace, PutStatus
from lmcache_format.dtypes import Dtype
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import AttentionKind, Identity, LayerGroup
from lmcache_format.keys import chunk_keys, next_key, root_key

Array = npt.NDArray[Any]
SIDES = {"k": 1, "v": 2, "latent": 3}


def tiny_identity(
    *,
    name: str = "tiny",
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 4,
    chunk_tokens: int = 4,
    dtype: Dtype = Dtype.BF16,
    kind: AttentionKind = AttentionKind.FULL,
) -> Identity:
    """A model whose chunks are a few hundred bytes."""
    is_latent = kind is AttentionKind.LATENT
    return Identity(
        model=f"example/{name}",
        weights="sha256:" + hashlib.sha256(name.encode()).hexdigest(),
        dtype=dtype,
        layers=layers,
        kv_heads=1 if is_latent else kv_heads,
        head_dim_k=head_dim,
        head_dim_v=0 if is_latent else head_dim,
        groups=(LayerGroup(kind, 0, layers),),
        rope={"type": "default", "theta": "10000.0"},
        chunk_tokens=chunk_tokens,
    )


def real_identity(name: str = "real") -> Identity:
    """The geometry of SmolLM2-135M: chunks of 5,898,240 bytes."""
    return tiny_identity(name=name, layers=30, kv_heads=3, head_dim=64, chunk_tokens=256)


def pattern(identity: Identity, part: Part, tokens: Sequence[int], start: int) -> dict[str, Array]:
    """What the model would compute for `tokens` at positions from `start` on, for the layers and heads of `part`."""
    ids = np.asarray(tokens, np.uint64)
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    seed = np.uint64(int(identity.fingerprint[:8], 16))
    where = _mixed(ids * np.uint64(0x9E3779B97F4A7C15) + positions * np.uint64(0xC2B2AE3D27D4EB4F) + seed)
    buffer = ChunkBuffer(identity, part, len(ids), memoryview(bytearray(part_size(identity, part, len(ids)))))
    return {spec.name: _tensor(spec, part, where) for spec in buffer.specs}


def part_size(identity: Identity, part: Part, num_tokens: int) -> int:
    width = identity.head_dim_k + identity.head_dim_v
    return part.num_layers * part.num_heads * num_tokens * width * identity.dtype.itemsize


def _tensor(spec: Any, part: Part, where: Array) -> Array:
    heads = np.arange(spec.num_slabs, dtype=np.uint64) + np.uint64(part.head_start or 0)
    dims = np.arange(spec.shape[-1], dtype=np.uint64)
    place = np.uint64((spec.layer * 4 + SIDES[spec.side]) * 0x165667B19E3779F9 % 2**64)
    mixed = _mixed(
        where[None, :, None]
        + place
        + heads[:, None, None] * np.uint64(0x27D4EB2F165667C5)
        + dims[None, None, :] * np.uint64(0x85EBCA77C2B2AE63)
    )
    itemsize = spec.dtype.itemsize
    words = (mixed >> np.uint64(64 - 8 * itemsize)).astype(f"u{itemsize}")
    return words.view(spec.dtype.numpy).reshape(spec.shape)


def _mixed(values: Array) -> Array:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)


def small_buffer(identity: Identity, part: Part, num_tokens: int) -> ChunkBuffer:
    """A buffer without the cost of huge pages."""
    return ChunkBuffer(identity, part, num_tokens, memoryview(bytearray(part_size(identity, part, num_tokens))))


def filled(identity: Identity, part: Part, tokens: Sequence[int], start: int) -> ChunkBuffer:
    """A buffer that holds the pattern."""
    buffer = small_buffer(identity, part, len(tokens))
    buffer.fill(pattern(identity, part, tokens, start))
    return buffer


def document(length: int, seed: int = 0) -> list[int]:
    """Token ids, repeatable."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 2**32, length, np.uint64)]


def refs(identity: Identity, tokens: Sequence[int], *, salt: str | None = None, tail: bool = True) -> list[ChunkRef]:
    """All chunks of a prompt, the tail last."""
    size = identity.chunk_tokens
    parent = root_key(identity.fingerprint, salt)
    found = []
    for depth, key in enumerate(chunk_keys(parent, tokens, size)):
        found.append(ChunkRef(key, parent, depth, size))
        parent = key
    rest = tokens[len(found) * size :]
    if tail and rest:
        found.append(ChunkRef(next_key(parent, rest), parent, len(found), len(rest)))
    return found


def put_chunk(namespace: Namespace, ref: ChunkRef, tokens: Sequence[int], part: Part | None = None) -> PutStatus:
    """Write the chunk `ref` of the prompt `tokens`."""
    identity = namespace.identity
    start = ref.depth * identity.chunk_tokens
    own = tokens[start : start + ref.num_tokens]
    buffer = filled(identity, part or whole_part(identity), own, start)
    return namespace.put(buffer, key=ref.key, parent=ref.parent, depth=ref.depth, tokens=own)


def put_document(
    namespace: Namespace,
    tokens: Sequence[int],
    *,
    part: Part | None = None,
    salt: str | None = None,
    tail: bool = True,
) -> list[PutStatus]:
    """Write all chunks of a prompt."""
    chunks = refs(namespace.identity, tokens, salt=salt, tail=tail)
    return [put_chunk(namespace, ref, tokens, part) for ref in chunks]


def wrong_elements(identity: Identity, buffer: ChunkBuffer, tokens: Sequence[int], start: int) -> int:
    """How many elements of a buffer are not those of the pattern."""
    return differing(buffer.tensors, pattern(identity, buffer.part, tokens, start))


def differing(found: Mapping[str, Array], expected: Mapping[str, Array]) -> int:
    """Elements whose bits differ, over all tensors."""
    assert set(found) == set(expected)
    total = 0
    for name, want in expected.items():
        have = np.ascontiguousarray(found[name])
        total += int((have.view(f"u{want.itemsize}") != want.view(f"u{want.itemsize}")).sum())
    return total


def read_match(namespace: Namespace, match: Match, tokens: Sequence[int]) -> int:
    """Read a match into small buffers, compare every element that counts as read; returns the tokens read."""
    chunks = match.chunks()
    buffers = [small_buffer(namespace.identity, namespace.need, chunk.num_tokens) for chunk in chunks]
    result = namespace.read(chunks, buffers)
    assert result.num_chunks <= len(chunks)
    assert result.num_tokens == sum(chunk.num_tokens for chunk in chunks[: result.num_chunks])
    assert (result.fault is None) == (result.num_chunks == len(chunks))
    for chunk, buffer in zip(chunks[: result.num_chunks], buffers, strict=False):
        start = chunk.depth * namespace.identity.chunk_tokens
        own = tokens[start : start + chunk.num_tokens]
        assert wrong_elements(namespace.identity, buffer, own, start) == 0, "bytes of another place were handed out"
    return result.num_tokens


def hit(namespace: Namespace, tokens: Sequence[int], *, salt: str | None = None) -> int:
    """Tokens that a prompt gets from the store, every element compared."""
    return read_match(namespace, namespace.match(tokens, salt=salt), tokens)


def renamed(identity: Identity, **changes: Any) -> Identity:
    """The identity with fields changed."""
    return replace(identity, **changes)
