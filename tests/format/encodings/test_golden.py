"""What earlier releases stored decodes to the same bits for ever; what is stored now says the same."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import Encoding, encoding_names, get_encoding
from lmcache_format.geometry import TensorSpec

GOLDEN = Path(__file__).resolve().parents[3] / "format" / "golden" / "encodings"
FILES = sorted(GOLDEN.glob("*.json"))


def cases(path: Path) -> list[tuple[Encoding, dict[str, Any], TensorSpec]]:
    file = json.loads(path.read_text())
    encoding = get_encoding(file["encoding"], file["parameters"])
    assert encoding.quality == file["quality"]
    return [
        (
            encoding,
            case,
            TensorSpec(
                case["tensor"]["name"],
                0,
                case["tensor"]["side"],
                tuple(case["tensor"]["shape"]),
                Dtype(case["tensor"]["dtype"]),
            ),
        )
        for case in file["cases"]
    ]


def blob(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def decode(encoding: Encoding, stored: bytes | NDArray[np.uint8], spec: TensorSpec) -> bytes:
    out = np.empty(spec.nbytes, np.uint8)
    encoding.decode(stored, spec, out)
    return out.tobytes()


def test_every_encoding_has_a_golden_file() -> None:
    assert {path.stem for path in FILES} >= set(encoding_names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_bytes_decode_to_the_golden_bits(path: Path) -> None:
    for encoding, case, spec in cases(path):
        assert decode(encoding, blob(case["stored"]), spec) == blob(case["decoded"]), case["what"]
        if encoding.lossless:
            assert case["decoded"] == case["raw"], case["what"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_encoding_again_decodes_to_the_golden_bits(path: Path) -> None:
    for encoding, case, spec in cases(path):
        again = encoding.encode(blob(case["raw"]), spec, start_pos=case["start_pos"])
        assert decode(encoding, again, spec) == blob(case["decoded"]), case["what"]
