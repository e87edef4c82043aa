"""Every way the file of a chunk can be wrong is found on read, is a miss, and heals by the next put."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability
from lmcache_cli.backends.fault import Fault, FaultBackend, FaultScript, FlipBit, Hold
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.memory import MemoryBackend
from lmcache_cli.store import ChunkRef, Namespace, PutStatus, Store, WriterOptions
from lmcache_cli.store import Fault as Kind
from lmcache_cli.store.events import Event
from lmcache_cli.store.reading import ReadFault, Wanted, read_part
from lmcache_format.geometry import Part, whole_part
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, chunk_keys, root_key
from lmcache_format.names import QUARANTINE, ShardName
from tests.store.pattern import (
    document,
    hit,
    put_chunk,
    put_document,
    real_identity,
    refs,
    small_buffer,
    tiny_identity,
    wrong_elements,
)

TOKENS = document(14, 5)  # three full chunks and a tail of two
SAMPLED_FLIPS = 2_000


def shard_path(root: Path, identity: Identity, key: bytes, part: Part | None = None) -> Path:
    return root / ShardName(identity.fingerprint, ChunkKey(key), part or whole_part(identity), "raw").path


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def check_miss_and_recovery(
    store: Store, root: Path, identity: Identity, victim: Path, *, quarantined: bool = True
) -> None:
    """The file `victim` of the second chunk is wrong: found once, put aside, not promised again, written again."""
    shards = [shard_path(root, identity, ref.key) for ref in refs(identity, TOKENS)]
    neighbours = {path: path.read_bytes() for path in shards if path != victim}
    with store.namespace(identity, create=True) as namespace:
        assert hit(namespace, TOKENS) == identity.chunk_tokens
        assert namespace.match(TOKENS).num_tokens == identity.chunk_tokens
    with store.namespace(identity, create=True) as namespace:
        assert hit(namespace, TOKENS) == identity.chunk_tokens
        aside = list((root / QUARANTINE).iterdir()) if (root / QUARANTINE).exists() else []
        assert len(aside) == int(quarantined)
        status = put_chunk(namespace, refs(identity, TOKENS)[1], TOKENS)
        assert status in (PutStatus.STORED, PutStatus.REPLACED)
        assert hit(namespace, TOKENS) == len(TOKENS)
    with store.namespace(identity) as namespace:
        assert hit(namespace, TOKENS) == len(TOKENS)
    assert {path: path.read_bytes() for path in neighbours} == neighbours


@pytest.fixture
def filled_store(store: Store, identity: Identity) -> Store:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    return store


class Reader:
    """Reads one shard, given as bytes, the way the store does."""

    def __init__(self, identity: Identity, ref: ChunkRef, content: bytes) -> None:
        self._backend = MemoryBackend()
        self._identity, self._ref = identity, ref
        self._wanted = Wanted(
            identity, ref.key, ref.num_tokens, ref.depth, whole_part(identity), "raw", parent=ref.parent
        )
        self._content = content
        self._objects = self._backend._objects
        self.out = small_buffer(identity, whole_part(identity), ref.num_tokens)
        self._backend.put(self._wanted.name.path, [content], durability=Durability.NONE)

    def fault_of(self, content: bytes) -> Kind | None:
        """What reading the shard with this content raises."""
        path = self._wanted.name.path
        self._objects[path] = replace(self._objects[path], content=content)
        try:
            read_part(self._backend, self._wanted, whole_part(self._identity), self.out)
        except ReadFault as fault:
            return fault.fault
        return None


def shard_of(store: Store, root: Path, identity: Identity, number: int) -> tuple[ChunkRef, bytes]:
    ref = refs(identity, TOKENS)[number]
    return ref, shard_path(root, identity, ref.key).read_bytes()


def flips(content: bytes, bits: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    damaged = bytearray(content)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)
        damaged[bit // 8] ^= 1 << bit % 8


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_every_flipped_bit_of_a_small_shard_is_found(
    filled_store: Store, root: Path, identity: Identity, number: int
) -> None:
    """Header, padding and data of a full chunk and of a tail: no bit is without a guard."""
    ref, content = shard_of(filled_store, root, identity, number)
    reader = Reader(identity, ref, content)
    assert reader.fault_of(content) is None
    unseen = [bit for bit, damaged in flips(content, range(8 * len(content))) if reader.fault_of(damaged) is None]
    assert not unseen
    assert reader.fault_of(content) is None


def test_every_truncation_of_a_small_shard_is_found(filled_store: Store, root: Path, identity: Identity) -> None:
    ref, content = shard_of(filled_store, root, identity, 1)
    reader = Reader(identity, ref, content)
    for length in range(len(content)):
        assert reader.fault_of(content[:length]) in (Kind.DAMAGED, Kind.TOO_NEW), length
    for extra in (b"\0", b" ", b"x" * 4096, content):
        assert reader.fault_of(content + extra) is Kind.DAMAGED


@pytest.mark.slow
def test_flipped_bits_of_a_real_shard_are_found(store: Store, root: Path) -> None:
    """5.9 MB: 2,000 bits anywhere, half of them in the header, at the edges of slabs and in the last byte."""
    identity = real_identity()
    tokens = document(256, 1)
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, tokens)
    (ref,) = refs(identity, tokens)
    content = shard_path(root, identity, ref.key).read_bytes()
    assert len(content) > 5_898_240
    chance = random.Random(1)
    data_start = len(content) - 5_898_240
    bits = [chance.randrange(8 * len(content)) for _ in range(SAMPLED_FLIPS // 2)]
    bits += [chance.randrange(8 * data_start) for _ in range(SAMPLED_FLIPS // 4)]
    edges = range(data_start, len(content), 256 * 64 * 2)
    bits += [8 * chance.choice(edges) + chance.choice((-1, 0)) for _ in range(SAMPLED_FLIPS // 4)]
    bits.append(8 * len(content) - 1)
    unseen = []
    path = shard_path(root, identity, ref.key)
    wanted = Wanted(identity, ref.key, 256, 0, whole_part(identity), "raw", parent=ref.parent)
    out = small_buffer(identity, whole_part(identity), 256)
    backend = LocalBackend(root)
    with path.open("r+b") as file:
        for bit in bits:
            byte = content[bit // 8]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))
            file.flush()
            try:
                read_part(backend, wanted, whole_part(identity), out)
                unseen.append(bit)
            except ReadFault:
                pass
            file.seek(bit // 8)
            file.write(bytes([byte]))
            file.flush()
    assert not unseen
    read_part(backend, wanted, whole_part(identity), out)
    assert wrong_elements(identity, out, tokens, 0) == 0


@pytest.mark.parametrize("where", ["length", "first brace", "metadata", "padding", "first data", "last data"])
def test_a_flipped_bit_is_a_miss_and_heals(filled_store: Store, root: Path, identity: Identity, where: str) -> None:
    victim = shard_path(root, identity, refs(identity, TOKENS)[1].key)
    content = bytearray(victim.read_bytes())
    data_start = 8 + int.from_bytes(content[:8], "little")
    at = {
        "length": 1,
        "first brace": 8,
        "metadata": 400,
        "padding": data_start - 1,
        "first data": data_start,
        "last data": len(content) - 1,
    }[where]
    content[at] ^= 1
    victim.write_bytes(content)
    check_miss_and_recovery(filled_store, root, identity, victim)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 4095, 4096, 4097, -1])
def test_a_cut_file_is_a_miss_and_heals(filled_store: Store, root: Path, identity: Identity, length: int) -> None:
    victim = shard_path(root, identity, refs(identity, TOKENS)[1].key)
    victim.write_bytes(victim.read_bytes()[:length])
    check_miss_and_recovery(filled_store, root, identity, victim)


def test_an_extended_file_is_a_miss_and_heals(filled_store: Store, root: Path, identity: Identity) -> None:
    victim = shard_path(root, identity, refs(identity, TOKENS)[1].key)
    victim.write_bytes(victim.read_bytes() + b"\0")
    check_miss_and_recovery(filled_store, root, identity, victim)


@pytest.mark.parametrize("make", ["directory", "symbolic link", "full directory"])
def test_something_else_under_the_name_is_a_miss_and_heals(
    filled_store: Store, root: Path, identity: Identity, make: str
) -> None:
    victim = shard_path(root, identity, refs(identity, TOKENS)[1].key)
    good = victim.with_name("kept")
    victim.rename(good)
    if make == "symbolic link":
        victim.symlink_to(good)
    else:
        victim.mkdir()
        if make == "full directory":
            (victim / "inside").write_text("x")
    check_miss_and_recovery(filled_store, root, identity, victim)


def foreign_shards(store: Store, root: Path, identity: Identity) -> dict[str, bytes]:
    """Sound shards, each of another place than that of the second chunk of `TOKENS`."""
    ref = refs(identity, TOKENS)[1]
    other_identity = tiny_identity(name="other")
    same_shape = tiny_identity(name="tiny", chunk_tokens=8)
    found = {"chunk 0": shard_path(root, identity, refs(identity, TOKENS)[0].key).read_bytes()}
    found["tail"] = shard_path(root, identity, refs(identity, TOKENS)[3].key).read_bytes()
    for name, made in (("namespace", other_identity), ("chunk size", same_shape)):
        with store.namespace(made, create=True) as namespace:
            put_document(namespace, TOKENS)
        key = refs(made, TOKENS)[min(1, len(refs(made, TOKENS)) - 1)].key
        found[name] = shard_path(root, made, key).read_bytes()
    with Namespace(MemoryBackend(), identity) as elsewhere:
        sibling = [*TOKENS[:4], 1, 2, 3, 4]
        put_document(elsewhere, sibling)
        found["sibling"] = elsewhere._backend.read(
            ShardName(identity.fingerprint, refs(identity, sibling)[1].key, whole_part(identity), "raw").path
        )
    lies = {
        "depth": ChunkRef(ref.key, ref.parent, 7, 4),
        "parent": ChunkRef(ref.key, ChunkKey(bytes(32)), 1, 4),
        "tokens": ChunkRef(ref.key, ref.parent, 1, 3),
    }
    path = shard_path(root, identity, ref.key)
    kept = path.read_bytes()
    for name, lie in lies.items():
        path.unlink()
        with Namespace(MemoryBackend(), identity) as elsewhere:
            buffer = small_buffer(identity, whole_part(identity), lie.num_tokens)
            buffer.memory[:] = bytes(len(buffer.memory))
            elsewhere.put(buffer, key=lie.key, parent=lie.parent, depth=lie.depth)
            found[name] = elsewhere._backend.read(ShardName.parse(str(path.relative_to(root))).path)
        path.write_bytes(kept)
    with Namespace(MemoryBackend(), identity) as elsewhere:
        half = Part(0, 1, 0, 2)
        put_chunk(elsewhere, ref, TOKENS, half)
        found["part"] = elsewhere._backend.read(ShardName(identity.fingerprint, ref.key, half, "raw").path)
    return found


@pytest.mark.parametrize(
    "kind", ["chunk 0", "tail", "sibling", "namespace", "chunk size", "depth", "parent", "tokens", "part"]
)
def test_the_file_of_another_place_is_a_miss_and_heals(
    filled_store: Store, root: Path, identity: Identity, kind: str
) -> None:
    victim = shard_path(root, identity, refs(identity, TOKENS)[1].key)
    victim.write_bytes(foreign_shards(filled_store, root, identity)[kind])
    check_miss_and_recovery(filled_store, root, identity, victim)
    assert filled_store.events[Event.READ_FOREIGN] >= 1


def test_two_chunks_whose_files_were_exchanged_are_both_misses(
    filled_store: Store, root: Path, identity: Identity
) -> None:
    one, two = (shard_path(root, identity, refs(identity, TOKENS)[n].key) for n in (0, 2))
    aside = root / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    with filled_store.namespace(identity, create=True) as namespace:
        assert hit(namespace, TOKENS) == 0
        put_document(namespace, TOKENS)
        assert hit(namespace, TOKENS) == len(TOKENS)


def test_a_bit_that_flips_on_the_way_once_condemns_nothing(root: Path, identity: Identity) -> None:
    Store.create(str(root)).close()
    key = refs(identity, TOKENS)[1].key.hex()
    script = FaultScript(Fault("read_into", FlipBit(8 * 4096), on_call=2, name=key))
    with Store.open(FaultBackend(LocalBackend(root), script)) as store:
        with store.namespace(identity, create=True) as namespace:
            put_document(namespace, TOKENS)
            assert hit(namespace, TOKENS) == len(TOKENS)
            assert store.events[Event.QUARANTINED] == 0
            assert store.events[Event.READ_DAMAGED] == 0


def test_a_chunk_that_was_written_again_meanwhile_is_not_put_aside(root: Path, identity: Identity) -> None:
    """A reader finds damage; before it acts, another process has put the file aside and written a sound one."""
    Store.create(str(root)).close()
    ref = refs(identity, TOKENS)[1]
    victim = shard_path(root, identity, ref.key)
    for operation in ("move", "open_read"):
        hold = Hold(threading.Event(), threading.Event())
        calls = 3 if operation == "open_read" else 1
        script = FaultScript(Fault(operation, hold, on_call=calls, name=ref.key.hex()))
        with Store.open(str(root)) as other_store, other_store.namespace(identity, create=True) as other:
            put_document(other, TOKENS)
            content = bytearray(victim.read_bytes())
            content[-1] ^= 1
            victim.write_bytes(content)
            with Store.open(FaultBackend(LocalBackend(root), script)) as store:
                with store.namespace(identity, create=True) as namespace:
                    lengths: list[int] = []
                    reader = threading.Thread(target=lambda: lengths.append(hit(namespace, TOKENS)))  # noqa: B023
                    reader.start()
                    assert hold.reached.wait(30)
                    assert hit(other, TOKENS) == 4
                    put_document(other, TOKENS)
                    assert hit(other, TOKENS) == len(TOKENS)
                    hold.go_on.set()
                    reader.join(30)
                    assert lengths == [4]
            assert victim.exists(), operation
            assert hit(other, TOKENS) == len(TOKENS)


@pytest.mark.slow
def test_an_encoded_chunk_is_guarded_as_well(root: Path, identity: Identity) -> None:
    with Store.create(str(root)) as store:
        with store.namespace(identity, create=True, writer=WriterOptions(encoding="bfx")) as namespace:
            put_document(namespace, TOKENS)
            assert hit(namespace, TOKENS) == len(TOKENS)
            ref = refs(identity, TOKENS)[1]
            name = ShardName(identity.fingerprint, ref.key, whole_part(identity), "bfx")
            content = (root / name.path).read_bytes()
            out = small_buffer(identity, whole_part(identity), 4)
            wanted = Wanted(identity, ref.key, 4, 1, whole_part(identity), "bfx", parent=ref.parent)
            data_start = 8 + int.from_bytes(content[:8], "little")
            for bit in range(8 * data_start, 8 * len(content), 5):
                damaged = bytearray(content)
                damaged[bit // 8] ^= 1 << bit % 8
                (root / name.path).write_bytes(damaged)
                with pytest.raises(ReadFault):
                    read_part(store.backend, wanted, whole_part(identity), out)
            assert hit(namespace, TOKENS) == 4
            shutil.rmtree(root / "ns" / identity.fingerprint / "c")
            assert hit(namespace, TOKENS) == 0


def test_a_damaged_shard_is_no_loss_where_another_holds_the_same(root: Path, identity: Identity) -> None:
    """Raw and encoded, whole and in parts: the reader takes what is sound."""
    halves = (Part(0, 1, 0, 2), Part(1, 2, 0, 2))
    with Store.create(str(root)) as store:
        with store.namespace(identity, create=True, writer=WriterOptions(encoding="bfx"), need=halves[0]) as writer:
            put_document(writer, TOKENS, part=halves[0])
        with store.namespace(identity, create=True, need=halves[1]) as writer:
            put_document(writer, TOKENS, part=halves[1])
        with store.namespace(identity, create=True) as writer:
            put_document(writer, TOKENS)
        for path in root.rglob(f"*.{whole_part(identity)}.raw.safetensors"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        with store.namespace(identity) as reader:
            assert hit(reader, TOKENS) == len(TOKENS)
            assert hit(reader, TOKENS) == len(TOKENS)
        assert store.events[Event.QUARANTINED] == 4
        assert store.events[Event.READ_DAMAGED] == 4


def test_a_stale_root_key_never_helps(identity: Identity) -> None:
    """Sanity of the pattern: keys and values of two identities or salts have nothing in common."""
    keys = {root_key(identity.fingerprint), root_key(identity.fingerprint, "a"), root_key("00" * 16)}
    assert len(keys) == 3
    assert len({key for parent in keys for key in chunk_keys(parent, TOKENS, 4)}) == 9
