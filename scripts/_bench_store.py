"""The cases of `scripts/bench_store`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from _bench import ROOT, Row, Sample, row

from lmcache_cli.backends import Durability
from lmcache_cli.store import ChunkBuffer, Namespace, Store, WriterOptions
from lmcache_format import AttentionKind, Dtype, Identity, LayerGroup, chunk_keys, whole_part
from lmcache_format.keys import KeyList

BENCH = "store"
MIB = 1 << 20
ALIGNMENT = 4096


def rows(groups: Sequence[str], directory: Path | None, repeat: int) -> Iterator[Row]:
    """Rows of the groups asked for."""
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=directory) as scratch:
        for group in groups:
            yield from _GROUPS[group](Path(scratch) / group, repeat)
            shutil.rmtree(Path(scratch) / group, ignore_errors=True)


def big_identity() -> Identity:
    """256 tokens × 32 layers × 8 heads × 128: 32 MiB a chunk in bf16, as of an 8B model with grouped heads."""
    return _identity("bench/32-mib", layers=32, heads=8, dim=128)


def small_identity() -> Identity:
    """The geometry of SmolLM2-135M: 5.9 MB a chunk."""
    return _identity("bench/6-mb", layers=30, heads=3, dim=64)


def _identity(name: str, *, layers: int, heads: int, dim: int) -> Identity:
    return Identity(
        model=name,
        weights="sha256:" + "0" * 64,
        dtype=Dtype.BF16,
        layers=layers,
        kv_heads=heads,
        head_dim_k=dim,
        head_dim_v=dim,
        groups=(LayerGroup(AttentionKind.FULL, 0, layers),),
        rope={"rope_theta": "10000.0"},
    )


class Filled:
    """A store with `count` chunks of one prompt, and buffers to read them into."""

    def __init__(self, directory: Path, identity: Identity, count: int) -> None:
        self.identity, self.count = identity, count
        self.tokens = np.random.default_rng(1).integers(0, 50_000, count * identity.chunk_tokens)
        self.store = Store.create(str(directory))
        with self.store.namespace(identity, create=True, writer=WriterOptions(durability=Durability.DATA)) as namespace:
            buffer = namespace.buffer()
            bits = np.frombuffer(buffer.memory, np.uint8)
            bits[...] = np.random.default_rng(2).integers(0, 256, len(bits), np.uint8)
            write_chunks(namespace, [buffer] * count, self.tokens)
        self.namespace = self.store.namespace(identity)
        self.buffers = [self.namespace.buffer() for _ in range(count)]
        self.files = sorted(directory.glob("ns/*/c/*/*/*.safetensors"))
        assert len(self.files) == count, f"{len(self.files)} files for {count} chunks"

    @property
    def gigabytes(self) -> float:
        return self.count * self.buffers[0].size_bytes / 1e9

    def retrieve(self) -> None:
        match = self.namespace.match(self.tokens)
        result = self.namespace.read(match.chunks(), self.buffers)
        assert result.num_tokens == len(self.tokens), result

    def drop_caches(self) -> None:
        for path in self.files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def write_chunks(namespace: Namespace, buffers: Sequence[ChunkBuffer], tokens: np.ndarray, threads: int = 1) -> None:
    """Put one chunk a buffer."""
    root = namespace.root()
    keys = chunk_keys(root, tokens, namespace.identity.chunk_tokens)
    parents = [root, *keys]

    def put(depth: int) -> None:
        namespace.put(buffers[depth], key=keys[depth], parent=parents[depth], depth=depth)

    run_in_threads([lambda depth=depth: put(depth) for depth in range(len(buffers))], threads)
    namespace.flush()


def run_in_threads(jobs: Sequence[Callable[[], object]], threads: int) -> None:
    """All jobs, `threads` at a time."""
    if threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def rounds(
    variants: dict[str, Callable[[], object]], repeat: int, before: Callable[[], object] | None = None
) -> dict[str, Sample]:
    """Seconds of every variant, taken in turns so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeat + 1):
        for name, work in variants.items():
            if before is not None:
                before()
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: Sample.of(values) for name, values in seconds.items()}


def against(case: str, samples: dict[str, Sample], gigabytes: float, bar: float | None, note: str = "") -> Row:
    """`ours` as a rate against the best of the others."""
    limits = {name: gigabytes / sample.median for name, sample in samples.items() if name != "ours"}
    best = max(limits, key=lambda name: limits[name])
    told = ", ".join(f"{name} {rate:.2f}" for name, rate in limits.items())
    return row(
        BENCH,
        case,
        samples["ours"].rate(gigabytes),
        "GB/s",
        limit=limits[best],
        at_least=bar,
        note=f"limits: {told}" + (f"; {note}" if note else ""),
    )


def _plain_reads(
    files: Sequence[Path], memory: Sequence[memoryview], threads: int, *, direct: bool
) -> Callable[[], None]:
    """Whole data of the files into memory that is reused, one call a file."""

    def read(path: Path, view: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            offset = os.fstat(fd).st_size - view.nbytes
            done = 0
            while done < view.nbytes:
                done += os.preadv(fd, [view[done:]], offset + done)
        finally:
            os.close(fd)

    return lambda: run_in_threads([lambda p=p, v=v: read(p, v) for p, v in zip(files, memory, strict=True)], threads)


def _retrieve(directory: Path, repeat: int) -> Iterator[Row]:
    for name, identity, count in (("32 MiB", big_identity(), 32), ("6 MB", small_identity(), 64)):
        filled = Filled(directory / name.replace(" ", ""), identity, count)
        memory = [buffer.memory for buffer in filled.buffers]
        variants: dict[str, Callable[[], object]] = {
            f"readinto x{threads}": _plain_reads(filled.files, memory, threads, direct=False) for threads in (1, 2, 3)
        }
        samples = rounds({**variants, "ours": filled.retrieve}, repeat)
        bar = 0.80 if identity == big_identity() else None
        yield against(f"retrieve, page cache, {count} x {name}", samples, filled.gigabytes, bar, "every byte checked")
        shutil.rmtree(directory, ignore_errors=True)


def _cold(directory: Path, repeat: int) -> Iterator[Row]:
    for name, identity, count in (("32 MiB", big_identity(), 16), ("6 MB", small_identity(), 64)):
        filled = Filled(directory / name.replace(" ", ""), identity, count)
        huge = [buffer.memory for buffer in filled.buffers]
        small = [_small_page_memory(buffer.size_bytes) for buffer in filled.buffers]
        variants: dict[str, Callable[[], object]] = {}
        for threads in (1, 2, 4):
            variants[f"buffered x{threads}"] = _plain_reads(filled.files, small, threads, direct=False)
            variants[f"direct x{threads}"] = _plain_reads(filled.files, small, threads, direct=True)
            variants[f"direct huge x{threads}"] = _plain_reads(filled.files, huge, threads, direct=True)
        samples = rounds({**variants, "ours": filled.retrieve}, repeat, before=filled.drop_caches)
        yield against(f"retrieve, cold, {count} x {name}", samples, filled.gigabytes, 0.90, "every byte checked")
        shutil.rmtree(directory, ignore_errors=True)


def _small_page_memory(size: int) -> memoryview:
    """Aligned to 4096 as direct I/O wants it, on ordinary pages, faulted in."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    memory[...] = 1
    return memory[start : start + size].data


class Writing:
    """A store to write 32 chunks of 32 MiB to, and a directory beside it for plain writes of the same memory."""

    def __init__(self, directory: Path) -> None:
        self.count, self.identity = 32, big_identity()
        self.store = Store.create(str(directory / "store"))
        whole = whole_part(self.identity)
        self.buffers = [ChunkBuffer(self.identity, whole, self.identity.chunk_tokens) for _ in range(self.count)]
        for number, buffer in enumerate(self.buffers):
            np.frombuffer(buffer.memory, np.uint8)[...] = number
        self.memory = [buffer.memory for buffer in self.buffers]
        self.gigabytes = self.count * self.buffers[0].size_bytes / 1e9
        self.directory, self.plain = directory, directory / "plain"
        self.plain.mkdir(parents=True)
        self.turn = iter(range(1 << 30))

    def clean(self) -> None:
        for path in (*self.plain.iterdir(), *(self.directory / "store").glob("ns/*/c")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    def ours(self, durability: Durability, threads: int) -> Callable[[], None]:
        def work() -> None:
            tokens = np.full(self.count * self.identity.chunk_tokens, next(self.turn))
            options = WriterOptions(durability=durability)
            with self.store.namespace(self.identity, create=True, writer=options) as namespace:
                write_chunks(namespace, self.buffers, tokens, threads)

        return work

    def writes(self, memory: Sequence[memoryview], threads: int, *, sync: bool, direct: bool) -> Callable[[], None]:
        paths = [self.plain / str(number) for number in range(len(memory))]
        return lambda: run_in_threads(
            [
                lambda p=path, m=part: _plain_write(p, m, sync=sync, direct=direct)
                for path, part in zip(paths, memory, strict=True)
            ],
            threads,
        )


def _write(directory: Path, repeat: int) -> Iterator[Row]:
    to = Writing(directory)
    variants = {f"buffered x{n}": to.writes(to.memory, n, sync=False, direct=False) for n in (1, 2)}
    samples = rounds({**variants, "ours": to.ours(Durability.NONE, 2)}, repeat, before=to.clean)
    yield against(f"store, none, {to.count} x 32 MiB", samples, to.gigabytes, 0.70, "checksums included")


def _sync(directory: Path, repeat: int) -> Iterator[Row]:
    to = Writing(directory)
    small = [_small_page_memory(buffer.size_bytes) for buffer in to.buffers]
    variants = {}
    for threads in (1, 2, 4):
        variants[f"buffered x{threads}"] = to.writes(to.memory, threads, sync=True, direct=False)
        variants[f"direct x{threads}"] = to.writes(small, threads, sync=True, direct=True)
        variants[f"direct huge x{threads}"] = to.writes(to.memory, threads, sync=True, direct=True)
    samples = rounds({**variants, "ours": to.ours(Durability.FULL, 4)}, repeat, before=to.clean)
    yield against(f"store, full, {to.count} x 32 MiB", samples, to.gigabytes, 0.85, "checksums included")


def _plain_write(path: Path, memory: memoryview, *, sync: bool, direct: bool) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0), 0o644)
    try:
        os.posix_fallocate(fd, 0, memory.nbytes)
        done = 0
        while done < memory.nbytes:
            done += os.pwrite(fd, memory[done:], done)
        if sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def million_store(
    directory: Path, shards: int = 1_000_000, *, prefix_tokens: int = 128 * 256
) -> tuple[Store, Identity, np.ndarray]:
    """A store whose compacted manifest names shards that do not exist, and a prompt whose 128 chunks it names."""
    from lmcache_cli.store.manifest import Manifest
    from lmcache_format.segment import ADD_DTYPE, TOUCH_DTYPE, Segment

    identity = small_identity()
    store = Store.create(str(directory))
    store.namespace(identity, create=True).close()
    random = np.random.default_rng(3)
    tokens = random.integers(0, 50_000, prefix_tokens)
    from lmcache_format.keys import root_key

    keys = chunk_keys(root_key(identity.fingerprint), tokens, identity.chunk_tokens)
    known = np.frombuffer(keys.blob, ">u8").reshape(-1, 4)
    numbers = np.concatenate([known[:, 0].astype(np.uint64), random.integers(0, 2**64, shards - len(known), np.uint64)])
    adds = np.zeros(shards, ADD_DTYPE)
    adds["key_rest"] = random.integers(0, 2**64, shards, np.uint64)
    adds["key_rest"][: len(known)] = known[:, 1]
    adds["parent"][1:] = numbers[:-1]
    adds["nonce"] = random.integers(0, 2**64, shards, np.uint64)
    adds["size_bytes"] = 5_910_528
    adds["created_ms"] = 1_780_000_000_000 + np.arange(shards)
    adds["num_tokens"] = identity.chunk_tokens
    adds["depth"] = np.arange(shards) % 128
    order = np.argsort(numbers, kind="stable")
    touches = np.zeros(shards, TOUCH_DTYPE)
    touches["key"], touches["day"], touches["hits"] = numbers[order], 20_000 + np.arange(shards) % 60, 1
    segment = Segment(
        identity.fingerprint,
        1_780_000_000_000,
        "bench",
        (str(whole_part(identity)),),
        ("raw",),
        keys=numbers[order],
        adds=adds[order],
        touches=touches,
    )
    Manifest(store.backend, identity.fingerprint, store.events).write(segment, Durability.NONE)
    return store, identity, tokens


def _match(directory: Path, repeat: int) -> Iterator[Row]:
    store, identity, tokens = million_store(directory / "million")
    note = "manifest of 1,000,000 shards without data files"
    seconds, peaks = [], []
    for _ in range(5):
        told = _in_child(_OPEN, str(directory / "million")).split()
        seconds.append(float(told[0]))
        peaks.append(float(told[1]))
    yield row(BENCH, "open, 1,000,000 shards", Sample.of(seconds), "s", at_most=1.0, note=note)
    yield row(BENCH, "open, 1,000,000 shards, peak memory", Sample.of(peaks), "MB", at_most=250, note=note)
    with store.namespace(identity) as namespace:
        keys = chunk_keys(namespace.root(), tokens, identity.chunk_tokens)
        assert namespace.match_keys(keys) == 128
        others = [KeyList(np.random.default_rng(n).bytes(32 * 128)) for n in range(64)]
        times = []
        for turn in range(2000):
            start = time.perf_counter()
            namespace.match_keys(keys)
            times.append(time.perf_counter() - start)
            if turn % 50 == 0:
                namespace.match_keys(others[turn // 50 % 64])
    yield row(BENCH, "match of 128 keys, 1,000,000 shards", Sample.of(times).scaled(1e6), "us", at_most=50, note=note)
    commands = {"ls": 3.0, "stats": 3.0, "prune --dry-run": 5.0}
    for command, bar in commands.items():
        arguments = (
            ["prune", "--unused-for", "30d", "--max-size", "1TB", "--dry-run"] if "prune" in command else [command]
        )
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "lmcache_cli", *arguments, "--store", str(directory / "million"), "--json"],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )
            times.append(time.perf_counter() - start)
        yield row(BENCH, f"lmcache {command}, 1,000,000 shards", Sample.of(times), "s", at_most=bar, note=note)


# The kernel's own high-water mark: ru_maxrss of a child starts with what its parent had in memory.
_PEAK = """
def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
"""

_OPEN = (
    _PEAK
    + """
import sys, time
from lmcache_cli.store import Store
import numpy
start = time.perf_counter()
store = Store.open(sys.argv[1])
namespace = store.namespace(store.identity(store.fingerprints()[0]))
print(time.perf_counter() - start, peak_kib() * 1024 / 1e6)
"""
)


def _in_child(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return done.stdout.strip()


def _keys(directory: Path, repeat: int) -> Iterator[Row]:
    tokens = np.random.default_rng(5).integers(0, 150_000, 131_072)
    root = chunk_keys(b"\0" * 32, tokens[:256], 256)[0]  # type: ignore[arg-type]
    times = []
    for _ in range(50):
        start = time.perf_counter()
        chunk_keys(root, tokens, 256)
        times.append(time.perf_counter() - start)
    yield row(BENCH, "keys of 131,072 tokens", Sample.of(times).scaled(1e3), "ms", at_most=2.5)


def _start(directory: Path, repeat: int) -> Iterator[Row]:
    times = []
    for _ in range(max(repeat, 5)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lmcache_cli", "--help"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        times.append(time.perf_counter() - start)
    yield row(BENCH, "lmcache --help", Sample.of(times), "s", at_most=0.25)
    code = (
        "import sys; from lmcache_cli.app import main; sys.argv=['lmcache','--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(len({'numpy','torch','s3fs','transformers'} & set(sys.modules)))"
    )
    heavy = int(_in_child(code).splitlines()[-1])
    yield row(
        BENCH, "lmcache --help, heavy imports", heavy, "modules", at_most=0, note="numpy, torch, s3fs, transformers"
    )


_RETRIEVE = (
    _PEAK
    + """
import sys
import numpy
from lmcache_cli.store import Store
store = Store.open(sys.argv[1])
namespace = store.namespace(store.identity(store.fingerprints()[0]))
tokens = numpy.random.default_rng(1).integers(0, 50_000, int(sys.argv[2]) * 256)
chunks = namespace.match(tokens).chunks()
buffers = [namespace.buffer() for _ in chunks]
for buffer in buffers:
    numpy.frombuffer(buffer.memory, numpy.uint8)[...] = 1
before = peak_kib()
result = namespace.read(chunks, buffers)
assert result.num_chunks == len(chunks), result
print((peak_kib() - before) / 1024)
"""
)


def _memory(directory: Path, repeat: int) -> Iterator[Row]:
    for encoding in ("raw", "bfx"):
        place = directory / encoding
        identity = big_identity()
        with Store.create(str(place)) as store:
            with store.namespace(identity, create=True, writer=WriterOptions(encoding=encoding)) as namespace:
                buffer = namespace.buffer()
                values = np.frombuffer(buffer.memory, np.uint16)
                normal = np.random.default_rng(4).standard_normal(len(values)).astype(np.float32)
                values[...] = (normal.view(np.uint32) >> 16).astype(np.uint16)
                write_chunks(namespace, [buffer] * 8, np.random.default_rng(1).integers(0, 50_000, 8 * 256))
        extra = float(_in_child(_RETRIEVE, str(place), "8"))
        yield row(BENCH, f"retrieve of 8 x 32 MiB {encoding}, memory beyond the buffers", extra, "MiB", at_most=64)


def _bfx(directory: Path, repeat: int) -> Iterator[Row]:
    from _bench_codecs import bfx_rows

    yield from bfx_rows(per_kind=2, repeat=repeat)


def _warm(directory: Path, repeat: int) -> Iterator[Row]:
    from _bench_warm import rows as warm_rows

    yield from warm_rows(directory)


_GROUPS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "retrieve": _retrieve,
    "cold": _cold,
    "write": _write,
    "sync": _sync,
    "match": _match,
    "keys": _keys,
    "start": _start,
    "memory": _memory,
    "bfx": _bfx,
    "warm": _warm,
}
