"""Pins in manifest segments (SPEC §11): what is written is read, and what lies is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcache_format.errors import SegmentError
from lmcache_format.segment import Pin, Segment, decode_segment, encode_segment

SEGMENT = Segment("0" * 32, 1)  # type: ignore[arg-type]
KEY = bytes(range(16))


def test_pins_come_back_as_they_were_written() -> None:
    pins = (Pin(KEY, None, 5), Pin(KEY[::-1], 0, 7), Pin(bytes(16), 1 << 52, 9))
    assert decode_segment(encode_segment(replace(SEGMENT, pins=pins))).pins == pins


def test_a_segment_without_pins_has_no_such_section() -> None:
    assert b"PINS" not in encode_segment(SEGMENT)
    assert decode_segment(encode_segment(SEGMENT)).pins == ()


@pytest.mark.parametrize("pin", [Pin(KEY[:4], None, 1), Pin(KEY, -1, 1), Pin(KEY, None, -1)])
def test_a_pin_that_is_none_is_refused(pin: Pin) -> None:
    with pytest.raises(SegmentError):
        decode_segment(encode_segment(replace(SEGMENT, pins=(pin,))))
