"""Which encoding suits a place: the rule of effective speed, and why it chose as it did.

What a reader gets is min(link × ratio, decoding × threads): the link delivers fewer bytes when they are encoded, the
CPU must decode them. Ratios and speeds are those of docs/log.md: real KV in bf16, one core.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import Encoding, get_encoding

GB = 1e9


@dataclass(frozen=True, slots=True)
class _Speed:
    ratio: float
    decode_bytes_per_s: float


_RAW = _Speed(1.0, float("inf"))
_LOSSLESS = {
    Dtype.BF16: ("bfx", _Speed(1.50, 2.2 * GB)),
    Dtype.F16: ("bfx", _Speed(1.17, 2.2 * GB)),
    Dtype.F8_E4M3: ("huf8", _Speed(1.18, 1.0 * GB)),
    Dtype.F8_E5M2: ("huf8", _Speed(1.18, 1.0 * GB)),
    Dtype.U8: ("huf8", _Speed(1.18, 1.0 * GB)),
    Dtype.I8: ("huf8", _Speed(1.18, 1.0 * GB)),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """An encoding, and one sentence that says why."""

    encoding: Encoding
    reason: str


def choose_encoding(dtype: Dtype, *, link_bytes_per_s: float | None = None, threads: int = 1) -> Choice:
    """The lossless encoding for KV of a dtype. Lossy ones are never chosen, only asked for.

    With `link_bytes_per_s`, what the place delivers to readers, it is the one that gives them most; without, the
    smallest.
    """
    name, coded = _LOSSLESS.get(dtype, ("raw", _RAW))
    if name == "raw":
        return Choice(get_encoding("raw"), f"{dtype.value} has no lossless encoding that is smaller than raw")
    saving = f"{name} makes {dtype.value} about {coded.ratio:.2f} times smaller, without loss"
    if link_bytes_per_s is None:
        return Choice(get_encoding(name), f"{saving}; where places read faster than it decodes, raw serves faster")
    plain, encoded = _effective(_RAW, link_bytes_per_s, threads), _effective(coded, link_bytes_per_s, threads)
    speeds = f"{encoded / GB:.2f} GB/s in {name}, {plain / GB:.2f} GB/s raw"
    if encoded > plain:
        return Choice(get_encoding(name), f"{saving}, and readers get more: {speeds}")
    return Choice(get_encoding("raw"), f"decoding would be the limit: {speeds}")


def _effective(speed: _Speed, link_bytes_per_s: float, threads: int) -> float:
    return min(link_bytes_per_s * speed.ratio, speed.decode_bytes_per_s * threads)
