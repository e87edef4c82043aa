"""Manifest segments: what is written is read back, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from _corrupt import join_segment, split_segment, tiny_segment
from hypothesis import given
from hypothesis import strategies as st

from lmcache_format import ChecksumMismatch, Fingerprint, SegmentError, UnsupportedVersion
from lmcache_format.segment import (
    ADD_DTYPE,
    KEY_DTYPE,
    NO_VERSION,
    REMOVE_DTYPE,
    TOUCH_DTYPE,
    Label,
    Segment,
    decode_segment,
    encode_segment,
    key_number,
)
from tests.format.fuzzing import same_segment

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


def records(draw: st.DrawFn, dtype: np.dtype[Any], count: int, **limits: Any) -> Any:
    """`count` records whose fields hold anything, but for those in `limits`."""
    rows = np.frombuffer(
        draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), dtype
    ).copy()
    for name, strategy in limits.items():
        rows[name] = draw(st.lists(strategy, min_size=count, max_size=count))
    return rows


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Any segment."""
    parts = tuple(
        draw(st.lists(st.sampled_from(["l0-2", "l0-2h0-4", "l2-3h1-2"]), min_size=1, max_size=3, unique=True))
    )
    encodings = tuple(draw(st.lists(st.sampled_from(["raw", "bfx", "uq-near"]), min_size=1, max_size=3, unique=True)))
    versions = tuple(draw(st.lists(st.sampled_from(["", "1-2", "é"]), max_size=2)))
    part, encoding = st.integers(0, len(parts) - 1), st.integers(0, len(encodings) - 1)
    keys = sorted(draw(st.lists(U64, max_size=5)))
    version = st.sampled_from([NO_VERSION, *range(len(versions))])
    text = st.text(max_size=6)
    label = st.builds(
        Label, st.binary(min_size=16, max_size=16), text, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
    )
    return Segment(
        fingerprint=Fingerprint(draw(st.binary(min_size=16, max_size=16)).hex()),
        created_ms=draw(st.integers(0, 1 << 53)),
        writer=draw(st.sampled_from(["", "w", "é"])),
        parts=parts,
        encodings=encodings,
        versions=versions,
        keys=np.array(keys, KEY_DTYPE),
        adds=records(draw, ADD_DTYPE, len(keys), part=part, encoding=encoding, num_tokens=st.integers(1, 65_536)),
        removes=records(draw, REMOVE_DTYPE, draw(st.integers(0, 3)), part=part, encoding=encoding, version=version),
        touches=records(draw, TOUCH_DTYPE, draw(st.integers(0, 3))),
        supersedes=tuple(draw(st.lists(st.sampled_from(["0" * 26 + "-w.lmi", "1" * 26 + "-x.lmi"]), max_size=2))),
        labels=tuple(draw(st.lists(label, max_size=2))),
    )


@given(segments())
def test_a_segment_survives(segment: Segment) -> None:
    data = encode_segment(segment)
    again = decode_segment(data, segment.fingerprint)
    assert same_segment(again, segment)
    assert encode_segment(again) == data


def test_labels_keep_names_that_are_no_unicode() -> None:
    label = Label(bytes(16), "caf\udce9.txt", 1, 2, 3)
    segment = Segment(Fingerprint("0" * 32), 1, labels=(label,))
    assert decode_segment(encode_segment(segment)).labels == (label,)


def test_every_flipped_bit_is_noticed() -> None:
    data = tiny_segment()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((SegmentError, ChecksumMismatch, UnsupportedVersion)):
            decode_segment(flipped)


def test_every_cut_is_noticed() -> None:
    data = tiny_segment()
    for size in range(len(data)):
        with pytest.raises((SegmentError, ChecksumMismatch)):
            decode_segment(data[:size])


def test_unknown_optional_sections_are_skipped() -> None:
    data = tiny_segment()
    more = join_segment(data, [*split_segment(data), (b"FUTR", 0, b"whatever", 7)])
    assert same_segment(decode_segment(more), decode_segment(data))


def test_optional_sections_may_be_missing() -> None:
    data = tiny_segment()
    fewer = join_segment(
        data, [section for section in split_segment(data) if section[0] in (b"KEYS", b"ADDS", b"NAME")]
    )
    segment = decode_segment(fewer)
    assert len(segment.adds) == 2
    assert len(segment.removes) == len(segment.touches) == len(segment.labels) == len(segment.supersedes) == 0


def test_records_are_views_of_the_bytes() -> None:
    data = tiny_segment()
    assert not decode_segment(data).adds.flags.owndata


def test_key_numbers_order_as_hex_text_does() -> None:
    keys = sorted(bytes([a, b]) + bytes(30) for a in (0, 1, 127, 128, 255) for b in (0, 255))
    assert [key_number(key) for key in keys] == sorted(key_number(key) for key in keys)
    assert key_number(bytes(range(16)), 8) == int.from_bytes(bytes(range(8, 16)), "big")


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "0" * 31},
        {"fingerprint": "0" * 34},
        {"created_ms": -1},
        {"created_ms": 1 << 54},
        {"keys": np.array([2, 1], KEY_DTYPE)},
        {"keys": np.array([1], KEY_DTYPE)},
        {"keys": np.array([1, 2], np.float64)},
        {"adds": np.zeros(2, TOUCH_DTYPE)},
        {"adds": np.zeros(2, ADD_DTYPE)},
        {"touches": np.zeros((1, 1), TOUCH_DTYPE)},
        {"parts": ("../x",)},
        {"encodings": ("A", "raw")},
        {"supersedes": ("../x",)},
        {"labels": (Label(b"short", "x", 1, 1),)},
        {"labels": (Label(bytes(16), "x", -1, 1),)},
        {"writer": "\ud800"},
    ],
)
def test_a_segment_that_could_not_be_read_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(SegmentError):
        encode_segment(replace(decode_segment(tiny_segment()), **change))
