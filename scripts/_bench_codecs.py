"""Sizes and speeds of encodings, ours and other people's, on the same chunks; see `scripts/bench_codecs`."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import zstandard
from _bench import Row, Sample, row
from _real_kv import Chunk, chunks_of, documents, load_model, prefill

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import Lossy, encoding_names, get_encoding
from lmcache_format.geometry import TensorSpec

BENCH = "codecs"
DOCUMENT_TOKENS = 2048
RATIO_BARS = {"bfx": 1.50, "uq006": 2.5, "uq025": 3.8}
BFX_SPEED = {"encode": 1.0, "decode": 2.0}
"""GB/s a core on a quiet machine; on another one, what counts is the ratio to zipnn there."""
BFX_SPEED_OF_ZIPNN = {"encode": 1379 / 1553, "decode": 2218 / 3990}
"""As measured once with a frame for each tensor, which is what a shard holds."""
SCALING = 1.7


@dataclass(frozen=True, slots=True)
class Codec:
    """`encode(chunk, room)` gives stored byte strings; `decode(stored, chunk, out)` the raw bytes, maybe in `out`."""

    name: str
    encode: Callable[[Chunk, Any], list[Any]]
    decode: Callable[[list[Any], Chunk, Any], Any]
    room: Callable[[Chunk], Any] = lambda chunk: None
    lossy: Lossy | None = None


@dataclass(slots=True)
class Trial:
    """A codec with the chunks it is tried on, and seconds of CPU time for each."""

    codec: Codec
    chunks: Sequence[Chunk]
    stored: list[list[bytes]]
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.ratio_of("code", "prose")

    def ratio_of(self, *kinds: str) -> float:
        pairs = [(chunk, one) for chunk, one in zip(self.chunks, self.stored, strict=True) if chunk.kind in kinds]
        return sum(chunk.data.nbytes for chunk, _ in pairs) / sum(len(part) for _, one in pairs for part in one)

    def speed(self, side: str) -> Sample:
        taken = self.encode_s if side == "encode" else self.decode_s
        return Sample.of(taken).rate(self.chunks[0].data.nbytes / 1e9)


def speed_rows(per_kind: int, repeat: int) -> Iterator[Row]:
    """Size, encode and decode speed of every codec, then how ours scale to two threads."""
    torch.set_num_threads(2)
    chunks = real_chunks(per_kind)
    one_byte = [high_bytes_of(chunk) for chunk in chunks]
    trials = {codec.name: prepare(codec, chunks) for codec in [*other_codecs(), *our_codecs()]}
    trials["huf8"] = prepare(our_codec("huf8"), one_byte)
    for _ in range(repeat):  # in turns, so that what else the machine does falls on all of them
        for trial in trials.values():
            run_once(trial)
    for trial in trials.values():
        yield from rows_of(trial, trials.get("zipnn"))
    yield from scaling_rows(chunks)


def bfx_rows(per_kind: int, repeat: int) -> Iterator[Row]:
    """`bfx` alone, beside zipnn: the group of `scripts/bench_store`."""
    torch.set_num_threads(2)
    chunks = real_chunks(per_kind)
    trials = [
        prepare(codec, chunks) for codec in (*(one for one in other_codecs() if one.name == "zipnn"), our_codec("bfx"))
    ]
    for _ in range(repeat):
        for trial in trials:
            run_once(trial)
    zipnn = next((trial for trial in trials if trial.codec.name == "zipnn"), None)
    for trial in trials:
        yield from rows_of(trial, zipnn)


def real_chunks(per_kind: int) -> list[Chunk]:
    """Every second chunk of the documents."""
    model = load_model(torch.bfloat16)
    return [
        chunk
        for document in documents(per_kind, DOCUMENT_TOKENS)
        for chunk in chunks_of(document.kind, prefill(model, document.tokens))[::2]
    ]


def prepare(codec: Codec, chunks: Sequence[Chunk]) -> Trial:
    """Encode once, and check what comes back."""
    stored = [[bytes(one) for one in codec.encode(chunk, codec.room(chunk))] for chunk in chunks]
    out = np.empty_like(chunks[0].data)
    for chunk, each in zip(chunks, stored, strict=True):
        check(codec, chunk, codec.decode(each, chunk, out))
    return Trial(codec, chunks, stored)


def run_once(trial: Trial) -> None:
    """Encode and decode every chunk, on the clock."""
    codec, room, out = trial.codec, trial.codec.room(trial.chunks[0]), np.empty_like(trial.chunks[0].data)
    for chunk, each in zip(trial.chunks, trial.stored, strict=True):
        start = time.process_time()
        codec.encode(chunk, room)
        middle = time.process_time()
        codec.decode(each, chunk, out)
        trial.decode_s.append(time.process_time() - middle)
        trial.encode_s.append(middle - start)


def rows_of(trial: Trial, zipnn: Trial | None) -> Iterator[Row]:
    name = trial.codec.name
    note = f"code {trial.ratio_of('code'):.3f}, prose {trial.ratio_of('prose'):.3f}"
    yield row(BENCH, f"{name} size", trial.ratio, "x smaller", at_least=RATIO_BARS.get(name), note=note)
    for side in ("encode", "decode"):
        bar = bfx_bar(side, zipnn) if name == "bfx" else {}
        yield row(BENCH, f"{name} {side}", trial.speed(side), "GB/s core", **bar)


def bfx_bar(side: str, zipnn: Trial | None) -> dict[str, Any]:
    """Its speed on a quiet machine, or as much of zipnn's as it reached there."""
    absolute, share = BFX_SPEED[side], BFX_SPEED_OF_ZIPNN[side]
    relative = share * zipnn.speed(side).median if zipnn else absolute
    return {"at_least": min(absolute, relative), "note": f"{absolute:g} GB/s, or {share:.2f} of zipnn"}


def check(codec: Codec, chunk: Chunk, decoded: Any) -> None:
    """Refuse to time what does not decode to the chunk, or for a lossy codec near enough to it."""
    found = np.frombuffer(decoded, np.uint8)
    if codec.lossy is None:
        if not np.array_equal(found, chunk.data):
            raise ValueError(f"{codec.name}: decoded bytes differ from the chunk at {chunk.start_pos}; fix it first")
        return
    raw, near = (torch.from_numpy(each.view(np.int16)).view(torch.bfloat16).double() for each in (chunk.data, found))
    error, bound = (
        float((raw - near).square().mean() / raw.square().mean()),
        codec.lossy.max_relative_mse(chunk.specs[0]),
    )
    if not error <= bound:
        raise ValueError(f"{codec.name}: relative squared error is {error:g}, bound {bound:g}; fix it first")


def our_codecs() -> list[Codec]:
    """All encodings for bf16."""
    return [our_codec(name) for name in encoding_names() if name not in ("raw", "huf8")]


def our_codec(name: str) -> Codec:
    encoding = get_encoding(name)

    def decode(stored: list[Any], chunk: Chunk, out: Any) -> Any:
        encoding.decode_many(stored, chunk.specs, out)
        return out

    return Codec(
        name,
        lambda chunk, into: encoding.encode_many(chunk.data, chunk.specs, start_pos=chunk.start_pos, into=into),
        decode,
        lambda chunk: np.empty(encoding.encode_bound(chunk.specs), np.uint8),
        encoding if isinstance(encoding, Lossy) else None,
    )


def high_bytes_of(chunk: Chunk) -> Chunk:
    """The chunk as an engine with one-byte KV would hold it: e4m3 of the values, unit scale."""
    values = torch.from_numpy(chunk.data.view(np.int16)).view(torch.bfloat16).clamp(-448, 448)
    data = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    specs = tuple(TensorSpec(spec.name, spec.layer, spec.side, spec.shape, Dtype.F8_E4M3) for spec in chunk.specs)
    return Chunk(chunk.kind, chunk.start_pos, data, specs)


def other_codecs() -> Iterator[Codec]:
    """zstd as it comes, and what people use for tensors; on one thread. Those not installed are left out."""
    for level in (1, 3):
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        yield Codec(
            f"zstd-{level}",
            lambda chunk, _, compressor=compressor: [compressor.compress(chunk.data.data)],
            lambda stored, chunk, out, decompressor=decompressor: decompressor.decompress(stored[0]),
        )
    try:
        import blosc2
    except ImportError:
        pass
    else:
        parameters = {
            "codec": blosc2.Codec.ZSTD, "clevel": 1, "typesize": 2, "filters": [blosc2.Filter.SHUFFLE], "nthreads": 1
        }  # fmt: skip
        yield Codec(
            "blosc2 shuffle zstd-1",
            lambda chunk, _: [blosc2.compress2(chunk.data, **parameters)],
            lambda stored, chunk, out: blosc2.decompress2(stored[0], nthreads=1),
        )
    try:
        from zipnn import ZipNN
    except ImportError:
        return
    zipnn = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It changes the buffer it is given.
    yield Codec(
        "zipnn",
        lambda chunk, _: [zipnn.compress(bytearray(chunk.data))],
        lambda stored, chunk, out: zipnn.decompress(stored[0]),
    )


def scaling_rows(chunks: Sequence[Chunk]) -> Iterator[Row]:
    """Two threads against one; beside it what two threads of SHA-256 reach, which share nothing but the cores."""
    codec, megabyte = our_codec("bfx"), bytes(1 << 20)
    stored = [[bytes(one) for one in codec.encode(chunk, codec.room(chunk))] for chunk in chunks]

    def encoder() -> Callable[[], None]:
        room = codec.room(chunks[0])
        return lambda: [codec.encode(chunk, room) for chunk in chunks[:12]] and None

    def decoder() -> Callable[[], None]:
        out = np.empty_like(chunks[0].data)
        return lambda: (
            [codec.decode(each, chunk, out) for chunk, each in zip(chunks[:24], stored, strict=False)] and None
        )

    def hasher() -> Callable[[], None]:
        return lambda: [hashlib.sha256(megabyte) for _ in range(100)] and None

    for side, worker in (("encode", encoder), ("decode", decoder)):
        found = [(scaling(worker), scaling(hasher)) for _ in range(7)]
        control = statistics.median(one[1] for one in found)
        sample = Sample.of([one[0] for one in found])
        note = f"in turns with two threads of SHA-256: {control:.2f}"
        yield row(BENCH, f"bfx {side}, 2 threads", sample, "x", at_least=SCALING, note=note)


def scaling(worker: Callable[[], Callable[[], None]]) -> float:
    """How much more two threads do in the same time than one."""
    return 2 * wall_seconds(worker, 1) / wall_seconds(worker, 2)


def wall_seconds(worker: Callable[[], Callable[[], None]], num_threads: int) -> float:
    barrier = threading.Barrier(num_threads + 1)

    def run() -> None:
        work = worker()
        work()
        barrier.wait()
        work()
        barrier.wait()

    threads = [threading.Thread(target=run) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for thread in threads:
        thread.join()
    return seconds
