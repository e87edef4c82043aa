"""A whole store in a directory (SPEC §9, §10, §12.2): what is present, and the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import encodings, keys, names
from .identity import Identity, parse_identity, parse_superblock, permit
from .names import Part, ShardName
from .refusals import Refused
from .segment import Add, Segment, ShardId, State, merge, parse_segment
from .shard import Header, check_asked, check_place, parse_header, read_tensors


def _children(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


@dataclass(frozen=True)
class Chunk:
    """One chunk of a sequence: what finds it, and what a shard must say to stand for it."""

    key: bytes
    parent: bytes
    depth: int
    num_tokens: int


@dataclass(frozen=True)
class Match:
    """The longest stored prefix of a prompt; of its chunks the last may be a tail."""

    tokens: int
    chunks: list[Chunk]


@dataclass
class Namespace:
    """One namespace of a store."""

    root: Path
    identity: Identity
    segments: dict[str, Segment]
    refused: dict[str, Refused]
    """Segments that could not be taken in, by file name."""
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = merge(self.segments.values())

    def shard_files(self) -> list[ShardName]:
        """Every file of the namespace that has the path of a shard."""
        directory = f"ns/{self.identity.fingerprint}/c"
        found = []
        for one in _children(self.root / directory):
            for two in _children(self.root / directory / one):
                found += self._named(f"{directory}/{one}/{two}")
        return found

    def _named(self, directory: str) -> list[ShardName]:
        found = []
        for name in _children(self.root / directory):
            try:
                found.append(names.shard(f"{directory}/{name}"))
            except Refused:
                continue
        return found

    def present(self) -> dict[str, Add]:
        """The adds that no remove names, by the path of their shard; only of shards that are there."""
        adds = {name.path(): self.state.adds.get(_shard_id(name)) for name in self.shard_files()}
        return {path: add for path, add in adds.items() if add is not None}

    def shards_of(self, key: bytes, is_tail: bool = False) -> list[ShardName]:
        """Shards of a chunk that a reader may use, raw ones first: those of the manifest, and those found by name.

        A shard that the manifest does not list counts when its header is sound and no remove names its nonce. Tails
        are not looked for.
        """
        directory = f"ns/{self.identity.fingerprint}/c/{key.hex()[:2]}/{key.hex()[2:4]}"
        named = [name for name in self._named(directory) if name.key == key.hex() and encodings.is_known(name.label)]
        listed = [name for name in named if _shard_id(name) in self.state.adds]
        found = [] if is_tail else [n for n in named if n not in listed and self._is_adoptable(n.path())]
        return sorted(listed + found, key=lambda name: (name.label != "raw", name.path()))

    def _is_adoptable(self, path: str) -> bool:
        try:
            return self.header(path, (self.root / path).read_bytes()).nonce not in self.state.removed
        except Refused:
            return False

    def is_present(self, key: bytes, need: Part | None = None, is_tail: bool = False) -> bool:
        """Whether the parts of a chunk cover what is needed (all, unless told)."""
        have: set[tuple[int, int]] = set()
        for name in self.shards_of(key, is_tail):
            have |= _cells(name.part)
        return _cells(need or self.identity.whole) <= have

    def match(
        self,
        tokens: Sequence[int],
        salt: str | bytes | None = None,
        extras: keys.Extras = keys.no_extras,
        need: Part | None = None,
    ) -> Match:
        """The longest prefix of present chunks, then the longest tail behind it that agrees in all its tokens."""
        size = self.identity.chunk_tokens
        parent, at, chunks = keys.root(self.identity.fingerprint, salt), 0, []
        while at + size <= len(tokens):
            key = keys.chunk_key(parent, tokens[at : at + size], extras(at, at + size))
            if not self.is_present(key, need):
                break
            chunks.append(Chunk(key, parent, len(chunks), size))
            parent, at = key, at + size
        lengths = {add.num_tokens for add in self.state.adds.values() if add.parent == parent[:8]}
        for length in sorted(lengths, reverse=True):
            if length < size and at + length <= len(tokens):
                key = keys.chunk_key(parent, tokens[at : at + length], extras(at, at + length))
                if self.is_present(key, need, is_tail=True):
                    return Match(at + length, [*chunks, Chunk(key, parent, len(chunks), length)])
        return Match(at, chunks)

    def header(self, path: str, data: bytes) -> Header:
        """The header of a shard at a path, checks (1) to (8)."""
        name = names.shard(path)
        header = parse_header(data, len(data))
        check_place(header, name, self.identity)
        return header

    def read_shard(self, path: str, chunk: Chunk | None = None) -> dict[str, bytes]:
        """All tensors of one shard, every byte checked; `chunk`, where given, is the one that it must be."""
        data = (self.root / path).read_bytes()
        header = self.header(path, data)
        if chunk is not None:
            check_asked(header, chunk.key, chunk.parent, chunk.depth, chunk.num_tokens)
        return read_tensors(header, lambda begin, end: data[begin:end])

    def read(self, chunk: Chunk, need: Part | None = None) -> dict[str, bytes] | None:
        """The tensors of a chunk, put together from whatever shards are sound, or None: a miss."""
        need = need or self.identity.whole
        slabs: dict[tuple[str, int], bytes] = {}
        for name in self.shards_of(chunk.key, chunk.num_tokens < self.identity.chunk_tokens):
            try:
                tensors = self.read_shard(name.path(), chunk)
            except Refused:
                continue
            first, last = name.part.heads or (0, 1)
            for tensor, content in tensors.items():
                size = len(content) // (last - first)
                for head in range(first, last):
                    slabs.setdefault((tensor, head), content[(head - first) * size : (head - first + 1) * size])
        first, last = need.heads or (0, 1)
        sides = ("latent",) if need.heads is None else ("k", "v")
        wanted = [f"layers.{layer}.{side}" for layer in range(*need.layers) for side in sides]
        try:
            return {tensor: b"".join(slabs[tensor, head] for head in range(first, last)) for tensor in wanted}
        except KeyError:
            return None


def _shard_id(name: ShardName) -> ShardId:
    return bytes.fromhex(name.key)[:16], str(name.part), name.label


def _cells(part: Part) -> set[tuple[int, int]]:
    return {(layer, head) for layer in range(*part.layers) for head in range(*(part.heads or (0, 1)))}


@dataclass
class Store:
    """An opened store."""

    root: Path
    superblock: dict[str, Any]
    namespaces: dict[str, Namespace]
    refused: dict[str, Refused]
    """Namespaces that cannot be used, by fingerprint."""


def _superblock(root: Path) -> dict[str, Any]:
    generations = []
    for name in _children(root):
        try:
            generations.append((names.superblock(name), name))
        except Refused:
            continue
    if not generations:
        raise FileNotFoundError("no superblock, no store")
    generation, name = max(generations)
    return parse_superblock((root / name).read_bytes(), generation)


def _namespace(root: Path, fingerprint: str) -> Namespace:
    directory = root / "ns" / fingerprint
    identity = parse_identity((directory / "ns.json").read_bytes(), names.identity(f"ns/{fingerprint}/ns.json"))
    segments: dict[str, Segment] = {}
    refused: dict[str, Refused] = {}
    for name in _children(directory / "m"):
        try:
            names.segment(name)
            segments[name] = parse_segment((directory / "m" / name).read_bytes(), fingerprint)
        except Refused as error:
            refused[name] = error
    return Namespace(root, identity, segments, refused)


def open_store(root: Path) -> Store:
    """Read the superblock, all identities and all manifests of a store."""
    superblock = _superblock(root)
    permit(superblock, "read")
    store = Store(root, superblock, {}, {})
    for fingerprint in _children(root / "ns"):
        try:
            store.namespaces[fingerprint] = _namespace(root, fingerprint)
        except Refused as error:
            store.refused[fingerprint] = error
    return store
