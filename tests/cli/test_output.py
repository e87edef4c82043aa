"""The output object by itself: progress lines by a clock of its own, values as text and JSON."""

import io
import json
import math
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.output import Output
from lmcache_cli.rendering import as_utf8, cell, field, plain, printable


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def streams():
    return io.StringIO(), io.StringIO()


def test_plain_progress_is_at_most_one_line_in_ten_seconds_with_rate_and_time_left(clock, streams):
    output = Output("lmcache fake", stdout=streams[0], stderr=streams[1], clock=clock)
    with output.progress("verify", total=100, unit="chunks") as meter:
        for _ in range(50):
            clock.now_s += 0.5
            meter.advance()
    assert streams[1].getvalue().splitlines() == [
        "verify: 20 of 100 chunks (20%), 2.0 chunks/s, 40.0 s left",
        "verify: 40 of 100 chunks (40%), 2.0 chunks/s, 30.0 s left",
    ]
    assert streams[0].getvalue() == ""


def test_progress_in_bytes_shows_sizes(clock, streams):
    output = Output(stdout=streams[0], stderr=streams[1], clock=clock)
    with output.progress("read", total=None, unit="bytes") as meter:
        clock.now_s += 10
        meter.advance(100 * 2**20)
    assert streams[1].getvalue() == "read: 100.0 MiB, 10.0 MiB/s\n"


def test_progress_counts_from_many_threads(clock, streams):
    output = Output(stdout=streams[0], stderr=streams[1], clock=clock)
    with output.progress("read", total=8000, unit="chunks") as meter:
        workers = [threading.Thread(target=lambda: [meter.advance() for _ in range(1000)]) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert meter.done == 8000


@pytest.mark.parametrize("total", [0, 5])
def test_progress_past_its_total_is_harmless(clock, streams, total):
    output = Output(stdout=streams[0], stderr=streams[1], clock=clock)
    with output.progress("read", total=total, unit="chunks") as meter:
        clock.now_s += 20
        meter.advance(7)
    assert "left" not in streams[1].getvalue()


def test_the_text_of_a_summary_shows_the_counts_of_its_json(clock, streams):
    for json_lines in (False, True):
        output = Output("lmcache fake", json_lines=json_lines, stdout=streams[0], stderr=streams[1], clock=clock)
        output.summary("{num_chunks} chunks, {stored_bytes}", num_chunks=1234, stored_bytes=2**30)
        output.finish(ExitCode.DAMAGE)
    assert streams[1].getvalue() == "1,234 chunks, 1.0 GiB\n"
    assert json.loads(streams[0].getvalue()) == {
        "schema": "lmcache.summary/1",
        "command": "lmcache fake",
        "exit_code": 3,
        "num_chunks": 1234,
        "stored_bytes": 2**30,
    }


def test_a_record_is_a_property_a_line(clock, streams):
    @dataclass(frozen=True, slots=True)
    class Report:
        url: str
        size_bytes: int
        parts: tuple[str, ...]
        note: str | None = None

    report = Report("/srv/kv", 2048, ("l0-30", "l30-60"))
    output = Output(stdout=streams[0], stderr=streams[1])
    output.record("store", report)
    output.finish(ExitCode.OK)
    assert streams[0].getvalue() == "url\t/srv/kv\nsize_bytes\t2048\nparts\tl0-30,l30-60\nnote\t-\n"


def test_rows_are_printed_as_they_come(streams, clock):
    output = Output(json_lines=True, stdout=streams[0], stderr=streams[1], clock=clock)

    def rows():
        for number in range(3):
            yield {"number": number}
            clock.now_s += 2
        assert len(streams[0].getvalue().splitlines()) >= 2

    assert output.table("row", rows(), columns=("number",)) == 3


def test_a_reader_who_left_stderr_changes_nothing(streams):
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    output = Output(stdout=streams[0], stderr=Gone())
    output.note("x")
    output.warning("y")
    output.finish(ExitCode.OK)


@given(st.text())
def test_printable_text_is_one_harmless_line(text):
    shown = printable(text)
    assert len(f"{shown}x".splitlines()) == 1
    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in shown)
    shown.encode("utf-8")


@given(st.binary())
def test_any_bytes_survive_as_json(name):
    for locale in ("utf-8", "ascii"):
        text = name.decode(locale, "surrogateescape")
        assert json.loads(json.dumps(plain(text))).encode("utf-8", "surrogateescape") == name


@given(st.text(st.characters(codec="utf-8")))
def test_text_stays_as_it_is(text):
    assert as_utf8(text) == text


def test_values_become_json():
    class Kind(StrEnum):
        RAW = "raw"

    values = {"kind": Kind.RAW, "key": b"\x01\xff", "path": Path("/a"), "ratio": math.nan, "set": (1, 2), "no": None}
    assert plain(values) == {"kind": "raw", "key": "01ff", "path": "/a", "ratio": None, "set": [1, 2], "no": None}
    with pytest.raises(TypeError, match="complex"):
        plain(1j)


@pytest.mark.parametrize(
    ("key", "value", "for_people", "for_pipes"),
    [
        ("size_bytes", 1536, "1.5 KiB", "1536"),
        ("ttft_ms", 120.5, "120 ms", "120.5"),
        ("age_s", 90, "1 min 30 s", "90"),
        ("num_chunks", 1_000_000, "1,000,000", "1000000"),
        ("ratio", 1.23456, "1.235", "1.23456"),
        ("pinned", True, "yes", "yes"),
        ("name", "", "-", "-"),
        ("name", None, "-", "-"),
        ("name", "a\tb", r"a\tb", r"a\tb"),
        ("parts", [], "-", "-"),
        ("extra", {"a": 1}, '{"a": 1}', '{"a": 1}'),
    ],
)
def test_a_value_reads_well_and_stays_exact_in_pipes(key, value, for_people, for_pipes):
    assert (cell(key, value), field(value)) == (for_people, for_pipes)
