"""Sizes, durations and subsets as people write them, and as they are shown to people."""

import re
from dataclasses import dataclass
from decimal import Decimal

from lmcache_cli.errors import QuantityError

_DECIMAL_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE_UNITS = {**_DECIMAL_UNITS, "KB": 10**3, **_BINARY_UNITS}
_SIZE_UNITS_BY_LOWER = {name.lower(): factor for name, factor in _SIZE_UNITS.items()}
_DURATION_UNITS_S = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_LARGEST = 2**63 - 1

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]{1,18}[wdhms])+", re.ASCII)
_SUBSET = re.compile(r"(auto|[0-9]{1,9})/([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Subset:
    """One of `count` equal shares of a store, `index` from 1; None takes another one every day."""

    index: int | None
    count: int

    def index_on(self, day: int) -> int:
        """The share to read on a day, given as days since 1970; over `count` days in a row every share comes up."""
        return self.index if self.index is not None else day % self.count + 1

    def __str__(self) -> str:
        return f"{'auto' if self.index is None else self.index}/{self.count}"


def parse_size_bytes(text: str) -> int:
    """Reads `500GB` (powers of 1000) or `500GiB` (powers of 1024) as bytes. Raises QuantityError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise QuantityError(f"expected a size such as 500GB or 500GiB, found {text!r}")
    number, unit = match[1], match[2]
    if not unit:
        raise QuantityError(
            f"expected a size with a unit, found the bare number {text!r}",
            f"write {number}B, {number}GB or {number}GiB",
        )
    factor = _SIZE_UNITS.get(unit) or _factor_in_one_case(unit)
    if factor is None:
        raise QuantityError(
            f"expected a size in B, kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024), "
            f"found the unit {unit!r} in {text!r}"
        )
    return _within_64_bits(int(Decimal(number) * factor), text)


def parse_duration_s(text: str) -> int:
    """Reads `30d`, `12h`, `90m`, `45s`, `2w` or `1d12h` as seconds. Raises QuantityError."""
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit():
        raise QuantityError(
            f"expected a duration with a unit, found the bare number {text!r}",
            f"write {stripped}d for days, {stripped}h for hours, {stripped}m for minutes or {stripped}s for seconds",
        )
    if not _DURATION.fullmatch(stripped):
        raise QuantityError(f"expected a duration such as 30d, 12h, 90m or 1d12h, found {text!r}")
    parts = re.findall(r"([0-9]+)([wdhms])", stripped)
    return _within_64_bits(sum(int(number) * _DURATION_UNITS_S[unit] for number, unit in parts), text)


def parse_subset(text: str) -> Subset:
    """Reads `1/7` (the first of seven shares) or `auto/30` (another share every day). Raises QuantityError."""
    match = _SUBSET.fullmatch(text.strip())
    if match is None or not int(match[2]):
        raise QuantityError(f"expected a share such as 1/7 or auto/30, found {text!r}")
    count = int(match[2])
    if match[1] == "auto":
        return Subset(None, count)
    if not 1 <= int(match[1]) <= count:
        raise QuantityError(f"expected a share from 1/{count} to {count}/{count}, found {text!r}")
    return Subset(int(match[1]), count)


def show_size(size_bytes: float) -> str:
    """`1.5 GiB`; exact below 1 KiB."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    for unit, factor in _BINARY_UNITS.items():
        value = size_bytes / factor
        if abs(value) < 999.95 or unit == "PiB":
            break
    return f"{value:.1f} {unit}"


def show_duration(duration_s: float) -> str:
    """`850 ms`, `12.5 s`, `4 min 10 s`, `3 h 20 min`, `12 d 3 h`."""
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.3g} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    whole_s = round(duration_s)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60} s"
    if whole_s < 86400:
        return f"{whole_s // 3600} h {whole_s % 3600 // 60} min"
    return f"{whole_s // 86400} d {whole_s % 86400 // 3600} h"


def show_count(number: int) -> str:
    """`1,234,567`."""
    return f"{number:,}"


def _factor_in_one_case(unit: str) -> int | None:
    """Units typed all in one case are clear enough; `Gb` could mean bits."""
    return _SIZE_UNITS_BY_LOWER.get(unit.lower()) if unit in (unit.lower(), unit.upper()) else None


def _within_64_bits(value: int, text: str) -> int:
    if value > _LARGEST:
        raise QuantityError(f"expected at most {_LARGEST}, found {text!r}")
    return value
