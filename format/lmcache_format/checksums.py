"""The two checksums (SPEC §7): XXH3-128 for every slab on the hot path, CRC32C for whole objects.

Neither guards against an attacker, only against accidents; see the threat model in SPEC §14.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import crc32c as _crc32c
import xxhash

Buffer = bytes | bytearray | memoryview
DIGEST_BYTES = 16
_CRC32C_POLYNOMIAL = 0x82F63B78


xxh3: Callable[[Buffer], bytes] = xxhash.xxh3_128_digest
"""XXH3-128 with seed 0, 16 bytes in canonical (big-endian) order. Not wrapped: it runs a thousand times a chunk."""


def xxh3_hex(data: Buffer) -> str:
    """XXH3-128 with seed 0, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C (Castagnoli) of `data`, going on from `value`."""
    return int(_crc32c.crc32c(data, value))


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two byte strings back to back, from the CRC32C of each and the length of the second."""
    return _apply(_zeros_operator(second_bytes), first) ^ second


def _apply(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    index = 0
    while vector:
        if vector & 1:
            result ^= matrix[index]
        vector >>= 1
        index += 1
    return result


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(matrix, column) for column in matrix)


@lru_cache(maxsize=64)
def _zeros_operator(num_bytes: int) -> tuple[int, ...]:
    """The GF(2) matrix that appends `num_bytes` zero bytes to a CRC."""
    one_bit = (_CRC32C_POLYNOMIAL, *(1 << bit for bit in range(31)))
    power = _square(_square(_square(one_bit)))  # one zero byte
    operator = tuple(1 << bit for bit in range(32))
    while num_bytes:
        if num_bytes & 1:
            operator = tuple(_apply(power, column) for column in operator)
        power = _square(power)
        num_bytes >>= 1
    return operator
