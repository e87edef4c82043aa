"""C41: zstd streams that another writer made otherwise, in shards whose own checksums are right.

What is not exactly one frame of exactly the recorded size is damage to `verify`, a miss to readers, and nothing that
`compress` or `migrate` would take for KV; frames of any level that keep to the rule give the very same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard

from lmcache_cli.store import Store, WriterOptions
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.migrate import MigrateOptions, apply_migrate, plan_migrate
from lmcache_cli.store.verify import verify
from lmcache_format.checksums import xxh3
from lmcache_format.encodings import get_encoding
from lmcache_format.encodings.frame import PREFIX
from lmcache_format.shard import build_header, header_bytes, parse_header
from tests.peak_memory import forget_peak, peak_bytes
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document, refs

TOKENS = document(3 * CHUNK_TOKENS)
KEYS = [ref.key.hex() for ref in refs(KV_IDENTITY, TOKENS)]
FRAME_STREAM = 1
Mutation = Callable[[bytes, bytes], bytes]


def one_frame(data: bytes, level: int = 3, *, checksum: bool = True, content_size: bool = True) -> bytes:
    coder = zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=content_size)
    return coder.compress(data)


def three_frames(data: bytes, frame: bytes) -> bytes:
    third = len(data) // 3
    return one_frame(data[:third]) + one_frame(data[third : 2 * third]) + one_frame(data[2 * third :])


def claims_a_terabyte(data: bytes, frame: bytes) -> bytes:
    """The same blocks behind a header with eight bytes of content size."""
    size = zstandard.frame_header_size(frame)
    return frame[:4] + bytes([0b1110_0100]) + struct.pack("<Q", 1 << 40) + frame[size:]


def cut(tenth: int, data: bytes, frame: bytes) -> bytes:
    return frame[: len(frame) * tenth // 10]


MUTATIONS: dict[str, Mutation] = {
    "three frames": three_frames,
    "no content size": lambda data, frame: one_frame(data, content_size=False),
    "no checksum": lambda data, frame: one_frame(data, checksum=False),
    "one byte more": lambda data, frame: frame + b"\x00",
    "a second frame": lambda data, frame: frame + one_frame(b"more"),
    "a skippable frame": lambda data, frame: frame + struct.pack("<II", 0x184D2A50, 4) + b"skip",
    "shorter content": lambda data, frame: one_frame(data[:-1]),
    "longer content": lambda data, frame: one_frame(data + b"\x00"),
    "a terabyte": claims_a_terabyte,
    **{f"cut at {tenth}/10": partial(cut, tenth) for tenth in range(10)},
}


def rewrite(path: Path, mutation: Mutation) -> None:
    """Replace the zstd stream of the first tensor; all lengths and checksums of the shard fit the new bytes."""
    data = path.read_bytes()
    start = header_bytes(data)
    header = parse_header(data[:start], len(data))
    stored = [data[start + tensor.begin : start + tensor.end] for tensor in header.tensors]
    first = bytearray(stored[0])
    magic, flags, sink, zero, raw_bytes, *sizes = PREFIX.unpack_from(first)
    begin = PREFIX.size + sum(sizes[:FRAME_STREAM])
    end = begin + sizes[FRAME_STREAM]
    frame = bytes(first[begin:end])
    new = mutation(zstandard.ZstdDecompressor().decompress(frame), frame)
    sizes[FRAME_STREAM] = len(new)
    prefix = PREFIX.pack(magic, flags, sink, zero, raw_bytes, *sizes)
    stored[0] = bytes(prefix + first[PREFIX.size : begin] + new + first[end:])
    checksums = b"".join(map(xxh3, stored))
    head = build_header(header.meta, checksums, [len(piece) for piece in stored], header.decoded_checksums)
    path.write_bytes(head + b"".join(stored))
    for segment in path.parents[3].rglob("*.lmi"):
        segment.unlink()  # the index would tell by the length


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chunks in bfx, each a whole prompt's worth."""
    path = tmp_path / "kv"
    with Store.create(str(path)) as store:
        with store.namespace(KV_IDENTITY, create=True, writer=WriterOptions(encoding="bfx")) as namespace:
            put_kv(namespace, TOKENS)
    return path


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_every_other_form_is_damage_everywhere(root: Path, tmp_path: Path, mutation: Mutation) -> None:
    path = next(root.rglob(f"{KEYS[1]}.*"))
    rewrite(path, mutation)
    before = path.read_bytes()
    forget_peak()
    peak_before = peak_bytes()
    with Store.open(str(root)) as store, Store.create(str(tmp_path / "other")) as other:
        report = verify(store)
        assert report.num_damaged == 1
        options = CompressOptions(encoding=get_encoding("raw"))
        compressed = apply_compress(store, plan_compress(store, options))
        assert (compressed.num_encoded, compressed.num_damaged, compressed.num_removed) == (2, 1, 2)
        moved = apply_migrate(store, other, plan_migrate(store, other, MigrateOptions(delete_source=True)))
        assert (moved.num_copied, moved.num_damaged, moved.num_deleted) == (2, 1, 2)
        assert path.read_bytes() == before
        put_back = MigrateOptions()
        apply_migrate(other, store, plan_migrate(other, store, put_back))
        with store.namespace(KV_IDENTITY) as namespace:
            assert read_kv(namespace, TOKENS) == CHUNK_TOKENS
    assert peak_bytes() - peak_before < 64 * 1024 * 1024


@pytest.mark.parametrize("level", [1, 3, 9, 19])
def test_frames_of_any_level_give_the_same_bytes(root: Path, level: int) -> None:
    rewrite(next(root.rglob(f"{KEYS[1]}.*")), lambda data, frame: one_frame(data, level))
    with Store.open(str(root)) as store:
        assert verify(store).is_sound
        with store.namespace(KV_IDENTITY) as namespace:
            assert read_kv(namespace, TOKENS) == len(TOKENS)


def test_what_we_write_says_its_size_and_carries_a_checksum(root: Path) -> None:
    data = next(root.rglob(f"{KEYS[0]}.*")).read_bytes()
    start = header_bytes(data)
    header = parse_header(data[:start], len(data))
    for tensor in header.tensors:
        stored = data[start + tensor.begin : start + tensor.end]
        *_, raw_bytes, level, frame_bytes, low, none = PREFIX.unpack_from(stored)
        assert (raw_bytes, none) == (tensor.spec.nbytes, 0)
        frame = np.frombuffer(stored, np.uint8)[PREFIX.size + level : PREFIX.size + level + frame_bytes].tobytes()
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == low == tensor.spec.nbytes // 2
        assert parameters.has_checksum
