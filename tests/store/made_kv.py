"""KV that looks like a model's: normal values in bf16, so that codecs have something to take away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.store import ChunkBuffer, Namespace, Store
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import refs, small_buffer, tiny_identity

CHUNK_TOKENS = 32
KV_IDENTITY = tiny_identity(name="kv", layers=2, kv_heads=4, head_dim=32, chunk_tokens=CHUNK_TOKENS)


def kv(identity: Identity, part: Part, key: bytes, num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """The tensors of one part of the chunk `key`: the same for every part that holds a layer and head."""
    whole = whole_part(identity)
    made = {}
    for spec in small_buffer(identity, part, num_tokens).specs:
        generator = np.random.default_rng([*key[:8], spec.layer, *spec.side.encode()])
        shape = (whole.num_heads, num_tokens, spec.shape[-1])
        words = generator.standard_normal(shape, np.float32).view(np.uint32) >> 16
        tensor = words.astype(np.uint16)
        made[spec.name] = tensor[part.head_start : part.head_stop] if part.head_start is not None else tensor[0]
    return made


def filled_kv(identity: Identity, part: Part, key: bytes, num_tokens: int) -> ChunkBuffer:
    """A buffer that holds them."""
    buffer = small_buffer(identity, part, num_tokens)
    buffer.fill(kv(identity, part, key, num_tokens))
    return buffer


def put_kv(namespace: Namespace, tokens: Sequence[int], *, part: Part | None = None) -> None:
    """Write all chunks of a prompt."""
    part = part or whole_part(namespace.identity)
    for ref in refs(namespace.identity, tokens):
        buffer = filled_kv(namespace.identity, part, ref.key, ref.num_tokens)
        namespace.put(buffer, key=ref.key, parent=ref.parent, depth=ref.depth)


@contextmanager
def store_of_kv(root: Path, tokens: Sequence[int]) -> Iterator[Store]:
    """A new store at `root` with one prompt, open."""
    with Store.create(str(root)) as made:
        with made.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, tokens)
        yield made


def read_kv(namespace: Namespace, tokens: Sequence[int]) -> int:
    """Tokens that a prompt gets; every element that counts as read is compared, bit by bit."""
    chunks = namespace.match(tokens).chunks()
    buffers = [small_buffer(namespace.identity, namespace.need, chunk.num_tokens) for chunk in chunks]
    result = namespace.read(chunks, buffers)
    for chunk, buffer in zip(chunks[: result.num_chunks], buffers, strict=False):
        for name, want in kv(namespace.identity, buffer.part, chunk.key, chunk.num_tokens).items():
            assert np.array_equal(buffer.tensors[name], want), f"{name} of chunk {chunk.depth} holds other bytes"
    return result.num_tokens
