"""Write KV into a store by hand and read it back: no model and no tensor library, just arrays.

    python docs/examples/write_and_read.py [DIRECTORY]

Without a directory the store is a temporary one.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from lmcache_cli.backends import Durability
from lmcache_cli.store import Match, Namespace, Store, WriterOptions
from lmcache_format import AttentionKind, Dtype, Identity, LayerGroup, next_key

# Whose KV it is. `identify` says it of a real model (see continue_from_store.py); this one is made up.
IDENTITY = Identity(
    model="example/made-up",
    weights=f"sha256:{'0' * 64}",
    dtype=Dtype.F16,
    layers=2,
    kv_heads=2,
    head_dim_k=8,
    head_dim_v=8,
    groups=(LayerGroup(AttentionKind.FULL, 0, 2),),
    chunk_tokens=16,
)


def made_up_kv(shape: tuple[int, ...], tokens: list[int], layer: int) -> np.ndarray:
    """`[H, T, D]`, a number for every token: stands for what a model computes."""
    row = np.array([token % 1000 + layer for token in tokens], np.float16)
    return np.broadcast_to(row[None, :, None], shape)


def write_document(store: Store, name: str, tokens: list[int]) -> None:
    """Commit the chunks of a document and give it a name."""
    options = WriterOptions(durability=Durability.FULL, encoding="raw")
    with store.namespace(IDENTITY, create=True, writer=options) as namespace:
        parent = namespace.root()
        for depth, start in enumerate(range(0, len(tokens), IDENTITY.chunk_tokens)):
            words = tokens[start : start + IDENTITY.chunk_tokens]
            chunk = namespace.buffer(len(words))
            chunk.fill({spec.name: made_up_kv(spec.shape, words, spec.layer) for spec in chunk.specs})
            key = next_key(parent, words)
            status = namespace.put(chunk, key=key, parent=parent, depth=depth, tokens=words)
            print(f"{name}: chunk {depth} of {len(words)} tokens: {status.value}")
            parent = key
        namespace.label(name, parent, len(tokens), depth)
        namespace.flush()


def read_prompt(namespace: Namespace, prompt: list[int]) -> Match:
    """Read what is stored of a prompt, and look at it."""
    match = namespace.match(prompt)
    buffers, result = namespace.load(match)
    print(f"{result.num_tokens} of {len(prompt)} tokens, {result.num_chunks} chunks, {result.bytes_read} bytes")
    for chunk, buffer in zip(match.chunks(), buffers, strict=False):
        keys = buffer.array(layer=1, side="k")
        start = chunk.depth * IDENTITY.chunk_tokens
        words = prompt[start : start + chunk.num_tokens]
        assert np.array_equal(keys, made_up_kv(keys.shape, words, layer=1))
    return match


def main(directory: Path) -> None:
    document = list(range(100, 140))  # 16 + 16 + a tail of 8 tokens
    with Store.create(str(directory)) as store:
        write_document(store, "document", document)
        write_document(store, "document", document)  # everything is present: nothing is written
    with Store.open(str(directory)) as store, store.namespace(IDENTITY) as namespace:
        print("the document and a question:")
        assert read_prompt(namespace, [*document, 7, 8, 9]).num_tokens == 40
        print("the first 30 tokens of the document, then others:")
        assert read_prompt(namespace, [*document[:30], 7, 8, 9]).num_tokens == 16


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "store")
