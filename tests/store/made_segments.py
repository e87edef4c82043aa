"""Hypothesis strategies for segments: few keys, parts and writes, so that everything meets everything.

A nonce stands for one write, so all records of a nonce agree. Some keys share their first 8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from lmcache_cli.store.manifest import Pending, Remove, segment_of_pending
from lmcache_cli.store.state import Entry, State
from lmcache_format.geometry import Part
from lmcache_format.identity import Fingerprint
from lmcache_format.segment import Label, RemoveReason, Segment, decode_segment, encode_segment, key_number

FINGERPRINT = Fingerprint("0123456789abcdef" * 2)
WHOLE = Part(0, 4, 0, 4)
PARTS = (WHOLE, Part(0, 2, 0, 4), Part(2, 4, 0, 4), Part(0, 4, 0, 2), Part(0, 4, 2, 4), Part(1, 3, 1, 3))
ENCODINGS = ("raw", "bfx", "uq-near", "future")
KEYS = tuple(bytes([first]) * 8 + bytes([second]) * 24 for first in (0, 255) for second in (0, 1, 255))
CHUNK_TOKENS = 8
NUM_WRITES = 24


def _write(number: int) -> Entry:
    """The write `number`: what it wrote follows from the number, so that no two tests can disagree on it."""
    key = KEYS[number % len(KEYS)]
    return Entry(
        key=key[:16],
        parent=key_number(KEYS[number * 5 % len(KEYS)]),
        depth=number % 3,
        num_tokens=CHUNK_TOKENS if number % 4 else 1 + number % 7,
        part=PARTS[number // len(KEYS) % 2],
        encoding=ENCODINGS[number % 2],
        nonce=f"{number * 0x0123456789ABCDEF % 2**64:016x}",
        size_bytes=4096 + number,
        created_ms=1_000 + number * 17 % 5,
        crc32c=number if number % 2 else None,
    )


WRITES = tuple(_write(number) for number in range(NUM_WRITES))
writes = st.sampled_from(WRITES)
removes = st.builds(
    Remove,
    writes,
    st.sampled_from(list(RemoveReason)),
    st.integers(2_000, 2_003),
    st.sampled_from((None, "v1", "v2")),
    st.booleans(),
)
touches = st.dictionaries(
    st.sampled_from([key_number(key) for key in KEYS]), st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4
)
labels = st.builds(
    Label,
    st.sampled_from([key[:16] for key in KEYS]),
    st.sampled_from(("a", "b [red]", "\udcff")),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """One segment, as it comes back from disk."""
    pending = Pending(
        draw(st.lists(writes, max_size=6)),
        draw(st.lists(removes, max_size=4)),
        draw(touches),
        draw(st.lists(labels, max_size=2)),
    )
    return decode_segment(encode_segment(segment_of_pending(FINGERPRINT, pending, "w", 0)))


@dataclass(frozen=True, slots=True)
class Content:
    """What a state says, whatever the order of its tables. Of several writes of one name, one is its entry."""

    entries: frozenset[Entry]
    removes: frozenset[tuple[object, ...]]
    touches: frozenset[tuple[int, int, int]]
    labels: tuple[Label, ...]


def content(state: State) -> Content:
    """A state as sets."""
    return Content(
        frozenset(state.entry(row) for row in range(len(state))),
        frozenset(
            (
                int(gone["nonce"]),
                int(gone["key"]),
                int(gone["key_rest"]),
                state.remove_parts[int(gone["part"])],
                state.remove_encodings[int(gone["encoding"])],
                int(gone["marked_ms"]),
                None if int(gone["version"]) == 0xFFFF_FFFF else state.remove_versions[int(gone["version"])],
                int(gone["reason"]),
                int(gone["flags"]),
            )
            for gone in state.removes
        ),
        frozenset((int(touch["key"]), int(touch["day"]), int(touch["hits"])) for touch in state.touches),
        state.labels,
    )
