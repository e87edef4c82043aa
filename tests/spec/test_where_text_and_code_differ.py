"""What SPEC.md asks and the code does not do yet. Each must fail today: who mends one takes its mark away.

The reader that was written from the text does all of these as the text says.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmcache_cli.store.state import merge
from lmcache_format import (
    Dtype,
    EncodingError,
    Identity,
    IdentityError,
    SegmentError,
    ShardError,
    TensorSpec,
    UnsupportedVersion,
)
from lmcache_format.encodings import get_encoding
from lmcache_format.segment import AddFlags, decode_segment
from tests.spec.changes import STORES, packed
from tests.spec.independent_reader import encodings, identity, segment, shard
from tests.spec.independent_reader.refusals import Reason, Refused
from tests.spec.test_changed_files import Section, parsed_by_the_code, sealed, sections_of, segment_of

STORE = STORES[0]


def differs(reason: str, raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError) -> Any:
    """A mark for a difference; `raises` is how it shows."""
    return pytest.mark.xfail(strict=True, reason=reason, raises=raises)


# ---- identities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [None, 5, True, "text", [1]], ids=repr)
@differs("a `rope` that is no object raises an error of another kind", raises=(TypeError, ValueError))
def test_an_identity_whose_rope_is_no_object_is_damaged(rope: object) -> None:
    value = json.loads(next(STORE.glob("ns/*/ns.json")).read_bytes())
    data = packed({**value, "rope": rope})
    with pytest.raises(Refused):
        identity.parse_identity(data, identity.fingerprint(data))
    with pytest.raises(IdentityError):
        Identity.from_json(data)


# ---- segments -----------------------------------------------------------------------------------------------------


def changed(kind: bytes, content: bytes | None, records: int) -> tuple[bytes, str]:
    """A golden segment with one section changed or added, and its fingerprint."""
    original = sorted(STORE.glob("ns/*/m/*.lmi"))[0].read_bytes()
    sections = sections_of(original)
    old = next((one for one in sections if one.kind == kind), None)
    if old is None:
        sections.append(Section(kind, 0, content or b"", records))
    else:
        old.content, old.records = old.content if content is None else content, records
    return segment_of(original[:64], sections, 0, b"\0", 0), original[16:32].hex()


@pytest.mark.parametrize(
    ("kind", "content", "records"),
    [
        pytest.param(b"NAME", None, 0, id="NAME-of-no-record"),
        pytest.param(b"NAME", None, 2, id="NAME-of-two-records"),
        pytest.param(b"LABL", b"{}", 0, id="LABL-an-object"),
        pytest.param(b"LABL", b'""', 0, id="LABL-text"),
        pytest.param(b"PINS", b"{}", 0, id="PINS-an-object"),
        pytest.param(b"PINS", b"[ ]", 0, id="PINS-not-canonical"),
    ],
)
@differs("a rule of SPEC §11 is not checked", raises=pytest.fail.Exception)
def test_segments_that_break_a_rule_are_refused(kind: bytes, content: bytes | None, records: int) -> None:
    data, fingerprint = changed(kind, content, records)
    with pytest.raises(Refused):
        segment.parse_segment(data, fingerprint)
    with pytest.raises(SegmentError):
        decode_segment(data, fingerprint)  # type: ignore[arg-type]


@differs("of two records of one write the one that was read last counts (SPEC §11, State)")
def test_the_crc32c_of_a_write_is_known_whichever_record_is_read_first() -> None:
    written = decode_segment(sorted(STORE.glob("ns/983885c3*/m/*.lmi"))[0].read_bytes())
    with_crc, without = (replace(written, adds=written.adds.copy()) for _ in range(2))
    with_crc.adds["flags"], without.adds["flags"] = AddFlags.HAS_CRC32C, 0
    for order in ([with_crc, without], [without, with_crc]):
        assert len(merge(order).adds)
        assert all(row["flags"] & AddFlags.HAS_CRC32C for row in merge(order).adds)


# ---- shards -------------------------------------------------------------------------------------------------------


def with_member(name: str, value: str, label: str = "raw") -> bytes:
    """A golden shard in this encoding with one member of its metadata set."""
    original = sorted(STORE.rglob(f"*.{label}.safetensors"))[0].read_bytes()
    size = struct.unpack_from("<Q", original)[0]
    text = original[8 : 8 + size].rstrip(b" ")
    members = {**json.loads(text)["__metadata__"], name: value}
    made = b'{"__metadata__":' + json.dumps(members, separators=(",", ":")).encode()
    return sealed(made + text[text.index(b'},"layers.') + 1 :], original[8 + size :])


@pytest.mark.parametrize(
    ("label", "name"), [("raw", "decoded_checksums"), ("raw", "tensor_checksums"), ("bfx", "tensor_checksums")]
)
@differs("checksums that are there and empty are taken for none", raises=pytest.fail.Exception)
def test_no_digests_are_not_as_good_as_no_member(label: str, name: str) -> None:
    data = with_member(f"lmcache.{name}", "xxh3-128:", label)
    with pytest.raises(Refused):
        shard.parse_header(data, len(data))
    with pytest.raises(ShardError):
        parsed_by_the_code(data)


@differs("shards take at most 16 characters for a dtype, identities 32 (SPEC §4.1)", raises=ShardError)
def test_a_dtype_of_a_later_release_is_no_damage_however_long() -> None:
    data = with_member("lmcache.dtype", "F" * 17)
    with pytest.raises(Refused) as refused:
        shard.parse_header(data, len(data))
    assert refused.value.reason is Reason.LATER
    with pytest.raises(UnsupportedVersion):
        parsed_by_the_code(data)


@pytest.mark.parametrize("dtype", [dtype for dtype in Dtype if dtype not in (Dtype.BF16, Dtype.F16)])
@differs("a tensor without streams, of a dtype that `int8` does not encode, raises another error", raises=ValueError)
def test_an_encoded_tensor_of_a_dtype_that_is_not_encoded_is_refused(dtype: Dtype) -> None:
    spec = TensorSpec("layers.0.k", 0, "k", (2, 3, 4), dtype)
    data = struct.pack("<4sBBHQ4I", b"i8f1", 0, 0, 0, spec.nbytes, 0, 0, 0, 0)
    with pytest.raises(Refused):
        encodings.KNOWN["int8"][2](data, "k", spec.shape, dtype.value)
    with pytest.raises(EncodingError):
        get_encoding("int8").decode(data, spec, np.zeros(spec.nbytes, np.uint8))


@differs("parameters are compared as Python compares them: 1 is True", raises=pytest.fail.Exception)
def test_parameters_are_compared_as_json() -> None:
    with pytest.raises(Refused):
        encodings.find("bfx", None, {"version": True})
    with pytest.raises(UnsupportedVersion):
        get_encoding("bfx", {"version": True})
