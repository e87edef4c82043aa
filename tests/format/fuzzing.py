"""A structure-aware fuzzer of everything that is read from a store.

Sound files are changed in their bytes or in what they say, checksums are made right again most of the time so that
parsing goes deep, and every outcome but a `FormatError` or a consistent value is a finding.

    python -m tests.format.fuzzing --seed 1 --count 200000
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from _corrupt import (  # noqa: E402
    TINY,
    header_text,
    join_segment,
    seal_checksum,
    seal_header,
    seal_json,
    seal_segment,
    shard_data,
    split_segment,
    tiny_segment,
    tiny_shard,
)
from _golden import dtype_namespace, latent_namespace, main_namespace, superblock  # noqa: E402

from lmcache_format import Dtype, FormatError, Identity  # noqa: E402
from lmcache_format.checks import verify_data  # noqa: E402
from lmcache_format.checksums import xxh3  # noqa: E402
from lmcache_format.segment import Segment, decode_segment, encode_segment  # noqa: E402
from lmcache_format.shard import ShardHeader, header_bytes, parse_header  # noqa: E402
from lmcache_format.superblock import Operation, Superblock  # noqa: E402
from tests.format.judge import decoded  # noqa: E402
from tests.peak_memory import peak_bytes  # noqa: E402

MAX_SECONDS_PER_INPUT = 2.0
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    31,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    4096,
    65535,
    65536,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 32,
    (1 << 53) - 1,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 4096,
    (1 << 64) - 8,
    (1 << 64) - 1,
)
WORDS = (
    "",
    "0",
    "-1",
    "00",
    "1e9",
    "BF16",
    "F16",
    "U8",
    "raw",
    "bfx",
    "l0-2h0-2",
    "l0-1",
    "l0-4096h0-4096",
    "l0-9999999h0-9999999",
    "xxh3-128:",
    "xxh3-128:AAAA",
    "sha256:" + "0" * 64,
    "../../etc/passwd",
    "\0",
    "é",
    "\ud800",
    "A" * 70_000,
    "{}",
    "[]",
    "null",
    "9" * 19,
    "full",
    "latent",
    "sliding",
    "htd-1",
    "9007199254740993",
)
JSON_VALUES = (
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1",
    b"1.5",
    b"1e999",
    b"NaN",
    b"Infinity",
    b'""',
    b'"x"',
    b"[]",
    b"{}",
    b"[[]]",
    b'{"a":1,"a":2}',
    b"18446744073709551616",
    b"9" * 5000,
    b"[" * 1200,
    b'{"a":' * 1200,
    b"[" * 40 + b"]" * 40,
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xff",
    b"[0,0]",
    b"[-1,9223372036854775807]",
    b"\xef\xbb\xbf",
)


@dataclass
class Outcome:
    """What a run of the fuzzer saw."""

    inputs: int = 0
    accepted: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Corpus:
    """Sound files of every kind."""

    shards: Sequence[bytes]
    segments: Sequence[bytes]
    identities: Sequence[bytes]
    superblocks: Sequence[bytes]


def sound_files() -> Corpus:
    """Small files of every kind, dtype and encoding."""
    spaces = [main_namespace(), latent_namespace(), dtype_namespace(Dtype.F8_E4M3), dtype_namespace(Dtype.F16)]
    shards = [tiny_shard().file, tiny_shard("bfx").file, tiny_shard(keep_tokens=True, producer={"engine": "x"}).file]
    return Corpus(
        shards=[*shards, *(shard.file for space in spaces for shard in space.shards[:3])],
        segments=[tiny_segment(), *(data for space in spaces for data in space.segments.values())],
        identities=[TINY.canonical_json(), *(space.identity.canonical_json() for space in spaces)],
        superblocks=[
            superblock().to_json(),
            Superblock("x", 1, incompat=("a",), require={Operation.PRUNE: ("b",)}).to_json(),
        ],
    )


class Fuzzer:
    """One stream of inputs; the same seed gives the same ones."""

    def __init__(self, seed: int, corpus: Corpus) -> None:
        self.random = random.Random(seed)
        self.corpus = corpus
        self.outcome = Outcome()

    def run(self, count: int) -> Outcome:
        """Feed `count` inputs; raises `AssertionError` with the input where one behaves badly."""
        makers: tuple[tuple[Callable[[], bytes], Callable[[bytes], None]], ...] = (
            (self.shard, read_shard),
            (self.shard, read_shard),
            (self.segment, read_segment),
            (self.segment, read_segment),
            (self.identity, read_identity),
            (self.superblock, read_superblock),
        )
        for index in range(count):
            make, read = makers[index % len(makers)]
            self.feed(make(), read)
        return self.outcome

    def feed(self, data: bytes, read: Callable[[bytes], None]) -> None:
        """Read one input and note what came of it."""
        began = time.perf_counter()
        try:
            read(data)
            self.outcome.accepted += 1
        except FormatError as error:
            self.note(error, data)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {read.__name__} of {data!r}") from error
        took = time.perf_counter() - began
        self.outcome.inputs += 1
        self.outcome.slowest_s = max(self.outcome.slowest_s, took)
        assert took < MAX_SECONDS_PER_INPUT, f"{took:.1f} s for {read.__name__} of {data[:400]!r}"

    def note(self, error: FormatError, data: bytes) -> None:
        """Count a refusal, which must be of a documented class and fit on a screen."""
        self.outcome.errors[type(error).__name__] += 1
        assert type(error) is not FormatError, f"undocumented class: {error} from {data[:400]!r}"
        assert len(str(error)) < 2_000, f"message of {len(str(error))} characters from {data[:400]!r}"

    def shard(self) -> bytes:
        """A shard with a changed header, or changed data under right checksums, or changed bytes."""
        file = self.random.choice(self.corpus.shards)
        way = self.random.random()
        if way < 0.6:
            text = header_text(file)
            for _ in range(self.random.choice((1, 1, 1, 2, 4))):
                text = self.text(text)
            return seal_header(text) + shard_data(file)
        if way < 0.7:
            return self.bytes(file)
        if way < 0.85:
            size = header_bytes(file[:8])
            return seal_checksum(bytearray(self.bytes(file[:size]))) + file[size:]
        return self.shard_with_data(file)

    def shard_with_data(self, file: bytes) -> bytes:
        """Changed data whose checksums are right: what decoders must bear."""
        text, data = header_text(file), bytearray(shard_data(file))
        for _ in range(self.random.choice((1, 1, 2, 8))):
            at = self.random.randrange(len(data))
            data[at : at + 1] = bytes([self.random.choice((0, 1, 0x7F, 0x80, 0xFF, self.random.randrange(256)))])
        encoded = b'"dtype":"U8"' in text
        step = None if encoded else re.search(rb'"shape":\[(\d+)', text)
        digests = bytearray()
        for begin, end in re.findall(rb'"data_offsets":\[(\d+),(\d+)\]', text):
            count = int(step[1]) if step and b"latent" not in text else 1
            size = (int(end) - int(begin)) // count
            for index in range(count):
                digests += xxh3(bytes(data[int(begin) + index * size : int(begin) + (index + 1) * size]))
        claim = b'"lmcache.checksums":"xxh3-128:' + base64.b64encode(digests) + b'"'
        return seal_header(re.sub(rb'"lmcache\.checksums":"[^"]*"', claim, text)) + bytes(data)

    def segment(self) -> bytes:
        """A segment with changed sections, a changed table, or changed bytes."""
        data = self.random.choice(self.corpus.segments)
        way = self.random.random()
        if way < 0.6:
            sections = split_segment(data)
            for _ in range(self.random.choice((1, 1, 2))):
                self.change_sections(sections)
            return join_segment(data, sections[:80])
        if way < 0.85:
            end = 64 + 48 * struct.unpack_from("<I", data, 12)[0]
            table = bytearray(data)
            for _ in range(self.random.choice((1, 1, 2))):
                at = self.random.randrange(0, end - 8, 4)
                struct.pack_into(
                    *self.random.choice((("<Q", table, at), ("<I", table, at))),
                    self.random.choice(NUMBERS) & 0xFFFF_FFFF,
                )
            return seal_segment(table, end)
        return self.bytes(data)

    def change_sections(self, sections: list[tuple[bytes, int, bytes, int]]) -> None:
        """Change one section, or their number and order."""
        way = self.random.random()
        at = self.random.randrange(len(sections)) if sections else 0
        if way < 0.05 and sections:
            del sections[at]
        elif way < 0.1 and sections:
            sections.append(self.random.choice(sections))
        elif way < 0.15:
            sections.append(
                (self.random.choice((b"NEW!", b"KEYS", b"\0\0\0\0")), self.random.randrange(2), b"x" * 9, 1)
            )
        elif way < 0.2:
            self.random.shuffle(sections)
        elif sections:
            name, flags, content, records = sections[at]
            is_text = name in (b"NAME", b"SUPR", b"LABL", b"PINS")
            content = self.text(content) if is_text and self.random.random() < 0.8 else self.bytes(content)
            records = self.random.choice(NUMBERS) if self.random.random() < 0.1 else records
            if not is_text and self.random.random() < 0.8:
                size = len(sections[at][2])
                content = content[:size].ljust(size, b"\xff")
            sections[at] = (name, flags, content, records)

    def identity(self) -> bytes:
        """A namespace's identity that says something else, canonically or not."""
        return self.document(self.random.choice(self.corpus.identities), lambda value: json_canonical(value))

    def superblock(self) -> bytes:
        """A superblock that says something else, with the right checksum or not."""
        return self.document(self.random.choice(self.corpus.superblocks), seal_json)

    def document(self, data: bytes, seal: Callable[[dict[str, object]], bytes]) -> bytes:
        """A changed JSON file, sealed again where it can be."""
        if self.random.random() < 0.2:
            return self.bytes(data)
        changed = self.text(data)
        if self.random.random() < 0.2:
            return changed
        try:
            value = json.loads(changed)
            return seal(value) if isinstance(value, dict) else changed
        except (ValueError, RecursionError):
            return changed

    def text(self, text: bytes) -> bytes:
        """Change what a JSON text says: a value, a string, a number, a member."""
        choose, way = self.random.choice, self.random.random()
        if way < 0.1:
            return self.bytes(text)
        pattern = choose(
            (rb'"(?:[^"\\]|\\.)*"', rb"-?\d+", rb"\[[^\[\]{}]*\]", rb'"(?:[^"\\]|\\.)*":(?:"(?:[^"\\]|\\.)*"|\d+),?')
        )
        found = list(re.finditer(pattern, text[:20_000]))
        if not found:
            return self.bytes(text)
        match = choose(found)
        if pattern == rb"-?\d+" and way < 0.7:
            new = str(choose(NUMBERS)).encode()
        elif way < 0.5:
            new = json.dumps(choose(WORDS)).encode()
        elif way < 0.7:
            new = choose(JSON_VALUES)
        elif way < 0.8:
            new = match[0] + match[0]
        elif way < 0.9:
            new = b""
        else:
            new = choose(found)[0]
        return text[: match.start()] + new + text[match.end() :]

    def bytes(self, data: bytes) -> bytes:
        """Change bytes without a thought for what they mean."""
        choose, rand = self.random.choice, self.random.randrange
        changed = bytearray(data)
        at = rand(len(changed)) if changed else 0
        size = choose((1, 1, 2, 4, 8, 16, 64, 4096))
        way = rand(8)
        if way == 0 and changed:
            changed[at] ^= 1 << rand(8)
        elif way == 1:
            del changed[at : at + size]
        elif way == 2:
            changed[at:at] = self.random.randbytes(size)
        elif way == 3:
            del changed[at:]
        elif way == 4:
            changed[at : at + size] = self.random.randbytes(min(size, len(changed) - at))
        elif way == 5:
            changed[at : at + 8] = struct.pack("<Q", choose(NUMBERS))[: len(changed[at : at + 8])]
        elif way == 6:
            changed += changed[at : at + size]
        elif changed:
            other = rand(len(changed))
            changed[at : at + size] = changed[other : other + size]
        return bytes(changed)


def json_canonical(value: object) -> bytes:
    """Canonical by Python's own writer, which allows what ours refuses."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_shard(data: bytes) -> None:
    """All a reader does with the bytes of a shard; what is accepted must hang together."""
    header = parse_header(data[: header_bytes(data[:8], len(data))], len(data))
    check_layout(header)
    verify_data(header, data[header.data_start :])
    decoded(header, data[header.data_start :])


def check_layout(header: ShardHeader) -> None:
    """Tensors tile the data without holes."""
    position = 0
    for tensor in header.tensors:
        assert tensor.begin == position < tensor.end
        position = tensor.end
    assert position == header.data_bytes


def read_segment(data: bytes) -> None:
    """All a reader does with a segment; what is accepted survives being written again."""
    segment = decode_segment(data)
    assert same_segment(decode_segment(encode_segment(segment)), segment)


def same_segment(one: Segment, other: Segment) -> bool:
    """Equality of two segments, arrays included."""
    names = Segment.__dataclass_fields__
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        if isinstance(getattr(one, name), np.ndarray)
        else getattr(one, name) == getattr(other, name)
        for name in names
    )


def read_identity(data: bytes) -> None:
    """What is accepted is canonical."""
    assert Identity.from_json(data).canonical_json() == data


def read_superblock(data: bytes) -> None:
    """Every operation is allowed or refused."""
    block = Superblock.from_json(data)
    for operation in Operation:
        block.check(operation)


def main() -> int:
    """Run in this process under a memory limit; prints one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument(
        "--memory-mib", type=int, default=512, help="address space beyond what the process has at start"
    )
    arguments = parser.parse_args()
    fuzzer = Fuzzer(arguments.seed, sound_files())
    fuzzer.run(600)  # caches and allocator warm
    before = peak_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + arguments.memory_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began = time.perf_counter()
    outcome = fuzzer.run(arguments.count)
    took = time.perf_counter() - began
    after = peak_bytes()
    report = {
        "accepted": outcome.accepted,
        "errors": dict(sorted(outcome.errors.items())),
        "grown_mib": round((after - before) / 1024**2, 1),
        "inputs": arguments.count,
        "inputs_per_s": round(arguments.count / took),
        "slowest_ms": round(1000 * outcome.slowest_s, 1),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
