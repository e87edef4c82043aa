"""What the project writes, the reader that was written from the text reads alike: index, presence, prefixes, bytes.

Where the two differ, SPEC.md says too little or the code does something else.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_format import Dtype, Identity, Part
from lmcache_format.encodings import encoding_names
from lmcache_format.identity import AttentionKind
from lmcache_format.keys import MultimodalItem, chunk_extras, next_key, root_key
from lmcache_format.segment import RemoveReason
from tests.spec.independent_reader import keys, names
from tests.spec.independent_reader import store as independent
from tests.store.pattern import pattern, small_buffer, tiny_identity

SALTS = (None, "a", "é")


# ---- random stores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A prompt whose chunks one writer holds: a part of the model, in one encoding."""

    tokens: tuple[int, ...]
    salt: str | None
    encoding: str
    part: int
    pictures: tuple[MultimodalItem, ...]


documents = st.builds(
    Document,
    st.lists(st.sampled_from((0, 1, 2**32 - 1)), min_size=1, max_size=9).map(tuple),
    st.sampled_from(SALTS),
    st.sampled_from(encoding_names()),
    st.integers(0, 3),
    st.lists(
        st.builds(MultimodalItem, st.integers(0, 8), st.integers(0, 5), st.sampled_from(("sha256:x", "ü"))), max_size=2
    ).map(tuple),
)
operations = st.one_of(documents, st.sampled_from(("remove", "label", "pin", "compact", "lose a segment")))
identities = st.builds(
    tiny_identity,
    name=st.sampled_from(("tiny", "Größe \\ \n")),
    layers=st.integers(1, 2),
    kv_heads=st.sampled_from((1, 2)),
    head_dim=st.sampled_from((1, 4)),
    chunk_tokens=st.sampled_from((1, 2, 3, 4)),
    dtype=st.sampled_from(tuple(Dtype)),
    kind=st.sampled_from((AttentionKind.FULL, AttentionKind.LATENT)),
)


def parts_of(own: Identity) -> list[Part]:
    """The whole model, and pieces that cover it in part."""
    layers, heads = own.layers, (None, None) if own.is_latent else (0, own.kv_heads)
    found = [Part(0, layers, *heads), Part(0, 1, *heads), Part(layers - 1, layers, *heads)]
    return [*found, found[0] if own.is_latent else Part(0, layers, own.kv_heads - 1, own.kv_heads)]


def perform(root: Path, own: Identity, operation: Document | str, rng: random.Random) -> None:
    """Do one thing to the store."""
    encoding = operation.encoding if isinstance(operation, Document) else "raw"
    if operation == "lose a segment":
        segments = sorted((root / "ns" / own.fingerprint / "m").glob("*.lmi"))
        if segments:
            rng.choice(segments).unlink()
        return
    options = WriterOptions(encoding=encoding, keep_tokens=rng.random() < 0.5, producer={"é": [1, None]})
    with Store.open(str(root)) as store, store.namespace(own, create=True, allow_lossy=True, writer=options) as space:
        if isinstance(operation, Document):
            write(space, operation)
        elif operation == "compact":
            space.compact()
        elif len(state := space.state()):
            entry = state.entry(rng.randrange(len(state)))
            if operation == "remove":
                space.remove(entry, rng.choice(list(RemoveReason)), rng.choice((None, "v1")))
            elif operation == "label":
                space.label(rng.choice(("a", "\udcff/b", "ü")), entry.key + bytes(16), entry.num_tokens, entry.depth)
            else:
                space.pin(entry.key + bytes(16), rng.choice((None, 0, 2**53)))


def write(space: Namespace, document: Document) -> None:
    own, tokens = space.identity, document.tokens
    part = parts_of(own)[document.part]
    parent = root_key(own.fingerprint, document.salt)
    for start in range(0, len(tokens), own.chunk_tokens):
        piece = tokens[start : start + own.chunk_tokens]
        key = next_key(parent, piece, chunk_extras(document.pictures, start, len(piece)))
        buffer = small_buffer(own, part, len(piece))
        buffer.fill(pattern(own, part, piece, start))
        plain = not document.pictures
        depth = start // own.chunk_tokens
        space.put(buffer, key=key, parent=parent, depth=depth, tokens=piece, extras_free=plain)
        parent = key


def check_index(space: Namespace, other: independent.Namespace) -> None:
    """The state that both make of the segments. The CRC32C is advice, and may be known to one segment of two."""
    state, mine = space.state(), other.state
    entries = [state.entry(row) for row in range(len(state))]
    assert {(e.key, str(e.part), e.encoding) for e in entries} == set(mine.adds)
    for entry in entries:
        add = mine.adds[entry.key, str(entry.part), entry.encoding]
        assert (entry.nonce, entry.size_bytes, entry.created_ms) == (add.nonce, add.size_bytes, add.created_ms)
        assert (entry.num_tokens, entry.depth) == (add.num_tokens, add.depth)
        assert entry.parent.to_bytes(8, "big") == add.parent
    removes = {f"{row['nonce']:016x}": (int(row["marked_ms"]), int(row["flags"])) for row in state.removes}
    assert removes == mine.removed
    touches = {int(row["key"]).to_bytes(8, "big"): (int(row["day"]), int(row["hits"])) for row in state.touches}
    known = {key[:8] for key, *_ in mine.adds}  # compaction may leave out the touches of chunks that are gone
    assert {key: touches[key] for key in touches if key in known} == {
        key: mine.touches[key] for key in mine.touches if key in known
    }
    labels = {(one.name, one.key.hex(), one.num_tokens, one.created_ms, one.depth) for one in state.labels}
    assert labels == {(one.name, one.key, one.num_tokens, one.created, one.depth) for one in mine.labels.values()}
    pins = {(pin.key.hex(), pin.expires_ms, pin.created_ms) for pin in state.pins}
    assert pins == {(pin.key, pin.expires, pin.created) for pin in mine.pins.values()}


def check_prompts(space: Namespace, other: independent.Namespace, prompts: list[Document]) -> None:
    """Both find the same prefix of every prompt, and the same bytes in it."""
    for prompt in prompts:
        theirs = space.match(prompt.tokens, salt=prompt.salt, items=prompt.pictures)
        pictures = keys.multimodal([(item.start, item.num_tokens, item.identifier) for item in prompt.pictures])
        need = names.part(str(space.need))
        mine = other.match(prompt.tokens, prompt.salt, pictures, need)
        assert mine.tokens == theirs.num_tokens
        assert [chunk.key for chunk in mine.chunks] == [chunk.key for chunk in theirs.chunks()]
        buffers, result = space.load(theirs)
        assert result.num_tokens == theirs.num_tokens
        for chunk, buffer in zip(mine.chunks, buffers, strict=True):
            tensors = other.read(chunk, need)
            assert tensors == {name: array.tobytes() for name, array in buffer.tensors.items()}


def check_store(own: Identity, todo: list[Document | str], seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "store"
        Store.create(str(root)).close()
        for operation in todo:
            perform(root, own, operation, rng)
        mine = independent.open_store(root)
        assert not mine.refused
        if own.fingerprint not in mine.namespaces:
            return
        other = mine.namespaces[own.fingerprint]
        assert (other.refused, other.identity.value) == ({}, own.to_dict())
        written = [one for one in todo if isinstance(one, Document)]
        longer = [Document((*one.tokens, 0), one.salt, "raw", 0, one.pictures) for one in written]
        for part in parts_of(own):
            with Store.open(str(root)) as store, store.namespace(own, need=part, allow_lossy=True) as space:
                check_index(space, other)
                check_prompts(space, other, [*written, *longer])
            other = independent.open_store(root).namespaces[own.fingerprint]  # reading found shards, and touched some
        for name in other.shard_files():
            assert other.read_shard(name.path())


todos = st.lists(operations, min_size=1, max_size=8)
seeds = st.integers(0, 2**32)


@settings(max_examples=12)
@given(identities, todos, seeds)
def test_both_read_random_stores_alike(own: Identity, todo: list[Document | str], seed: int) -> None:
    check_store(own, todo, seed)


@pytest.mark.slow
@settings(max_examples=150)
@given(identities, todos, seeds)
def test_both_read_many_random_stores_alike(own: Identity, todo: list[Document | str], seed: int) -> None:
    check_store(own, todo, seed)
