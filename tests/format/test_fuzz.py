"""Whatever bytes a store holds, reading them ends in a value or a documented error: soon, and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.format.fuzzing import Fuzzer, read_identity, read_segment, read_shard, read_superblock, sound_files

ROOT = Path(__file__).resolve().parents[2]
SLOW_INPUTS = 220_000
EVERY_CLASS = {
    "ChecksumMismatch",
    "EncodingError",
    "IdentityError",
    "SegmentError",
    "ShardError",
    "SuperblockError",
    "UnsupportedVersion",
}


def test_sound_files_are_accepted() -> None:
    corpus = sound_files()
    for files, read in (
        (corpus.shards, read_shard),
        (corpus.segments, read_segment),
        (corpus.identities, read_identity),
        (corpus.superblocks[:1], read_superblock),
    ):
        for data in files:
            read(data)


def test_some_thousands_of_fuzzed_inputs_end_in_documented_errors() -> None:
    outcome = Fuzzer(20_261_129, sound_files()).run(4_000)
    assert outcome.inputs == 4_000
    assert set(outcome.errors) == EVERY_CLASS
    assert outcome.accepted > 100  # so that the fuzzer does not stop at the first check


@pytest.mark.slow
def test_200_000_fuzzed_inputs_end_in_documented_errors_within_a_memory_limit() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.format.fuzzing",
        "--seed",
        "4",
        "--count",
        str(SLOW_INPUTS),
        "--memory-mib",
        "256",
    ]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["inputs"] >= 200_000
    assert set(report["errors"]) == EVERY_CLASS
    assert report["grown_mib"] < 64


def test_memory_stays_within_a_small_multiple_of_the_input() -> None:
    fuzzer = Fuzzer(7, sound_files())
    makers = (
        (fuzzer.shard, read_shard),
        (fuzzer.segment, read_segment),
        (fuzzer.identity, read_identity),
        (fuzzer.superblock, read_superblock),
    )
    fuzzer.run(200)
    tracemalloc.start()
    try:
        for index in range(1_200):
            make, read = makers[index % 4]
            data = make()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            fuzzer.feed(data, read)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 40 * len(data) + (2 << 20), f"{peak} bytes for {read.__name__} of {len(data)}: {data[:300]!r}"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "bomb",
    [b"[" * 10**6, b'{"a":' * 10**6, b"[[]," * 10**5, b'{"a":1,' * 10**5, b"9" * 10**6, b'"' + b"\\u0041" * 10**5],
)
def test_json_bombs_are_refused_everywhere(bomb: bytes) -> None:
    from _corrupt import header_text, join_segment, seal_header, split_segment, tiny_segment, tiny_shard

    fuzzer = Fuzzer(1, sound_files())
    text, segment = header_text(tiny_shard().file), tiny_segment()
    sections = split_segment(segment)
    bombs = [(seal_header(text[:-1] + b',"x":' + bomb + b"}"), read_shard), (seal_header(bomb), read_shard)]
    bombs += [(bomb, read_identity), (bomb, read_superblock)]
    for index in (4, 5, 6):
        name, flags, _, records = sections[index]
        bombs.append(
            (
                join_segment(segment, [*sections[:index], (name, flags, bomb, records), *sections[index + 1 :]]),
                read_segment,
            )
        )
    for data, read in bombs:
        fuzzer.feed(data, read)
    assert fuzzer.outcome.accepted == 0
