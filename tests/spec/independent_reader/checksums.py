"""XXH3-128, XXH64 and CRC32C in plain Python: slow, and sharing no code with what the project uses.

All take bytes and give what SPEC §7 compares: XXH3-128 as 16 canonical (big-endian) bytes, the others as numbers.
"""

from __future__ import annotations

import struct

_M32 = (1 << 32) - 1
_M64 = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _swap(value: int, width: int) -> int:
    return int.from_bytes(value.to_bytes(width, "little"), "big")


def _fold(a: int, b: int) -> int:
    """Low and high half of a 128-bit product, xored."""
    product = a * b
    return (product & _M64) ^ (product >> 64)


def _avalanche(h: int) -> int:
    h = ((h ^ (h >> 37)) * 0x165667919E3779F9) & _M64
    return h ^ (h >> 32)


def _avalanche64(h: int) -> int:
    h = ((h ^ (h >> 33)) * _P2) & _M64
    h = ((h ^ (h >> 29)) * _P3) & _M64
    return h ^ (h >> 32)


def _upto16(data: bytes) -> tuple[int, int]:
    """(low, high) for 0 to 16 bytes: three formulas of their own."""
    n = len(data)
    if n == 0:
        low = _u64(_SECRET, 64) ^ _u64(_SECRET, 72)
        return _avalanche64(low), _avalanche64(_u64(_SECRET, 80) ^ _u64(_SECRET, 88))
    if n <= 3:
        low = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        high = _swap(low, 4)
        high = (high << 13 | high >> 19) & _M32
        low ^= _u32(_SECRET, 0) ^ _u32(_SECRET, 4)
        return _avalanche64(low), _avalanche64(high ^ _u32(_SECRET, 8) ^ _u32(_SECRET, 12))
    if n <= 8:
        keyed = (_u32(data, 0) | _u32(data, n - 4) << 32) ^ _u64(_SECRET, 16) ^ _u64(_SECRET, 24)
        product = keyed * (_P1 + (n << 2))
        low, high = product & _M64, product >> 64
        high = (high + (low << 1)) & _M64
        low ^= high >> 3
        low = ((low ^ (low >> 35)) * 0x9FB21C651E98DF25) & _M64
        return low ^ (low >> 28), _avalanche(high)
    first, last = _u64(data, 0), _u64(data, n - 8)
    product = (first ^ last ^ _u64(_SECRET, 32) ^ _u64(_SECRET, 40)) * _P1
    low, high = ((product & _M64) + ((n - 1) << 54)) & _M64, (product >> 64) & _M64
    last ^= _u64(_SECRET, 48) ^ _u64(_SECRET, 56)
    high = (high + last + (last & _M32) * (_P32_2 - 1)) & _M64
    low ^= _swap(high, 8)
    product = low * _P2
    return _avalanche(product & _M64), _avalanche(((product >> 64) + high * _P2) & _M64)


def _mix16(data: bytes, at: int, secret: int) -> int:
    return _fold(_u64(data, at) ^ _u64(_SECRET, secret), _u64(data, at + 8) ^ _u64(_SECRET, secret + 8))


def _mix32(acc: tuple[int, int], data: bytes, one: int, two: int, secret: int) -> tuple[int, int]:
    low = (acc[0] + _mix16(data, one, secret)) & _M64
    high = (acc[1] + _mix16(data, two, secret + 16)) & _M64
    return (
        low ^ ((_u64(data, two) + _u64(data, two + 8)) & _M64),
        high ^ ((_u64(data, one) + _u64(data, one + 8)) & _M64),
    )


def _upto240(data: bytes) -> tuple[int, int]:
    """(low, high) for 17 to 240 bytes: pairs of 16 bytes, from the outside in up to 128, from the front beyond."""
    n = len(data)
    acc = ((n * _P1) & _M64, 0)
    if n <= 128:
        for i in range((n - 1) // 32, -1, -1):
            acc = _mix32(acc, data, 16 * i, n - 16 * (i + 1), 32 * i)
    else:
        for i in range(32, 160, 32):
            acc = _mix32(acc, data, i - 32, i - 16, i - 32)
        acc = _avalanche(acc[0]), _avalanche(acc[1])
        for i in range(160, n + 1, 32):
            acc = _mix32(acc, data, i - 32, i - 16, 3 + i - 160)
        acc = _mix32(acc, data, n - 16, n - 32, 136 - 17 - 16)
    high = (acc[0] * _P1 + acc[1] * _P4 + n * _P2) & _M64
    return _avalanche((acc[0] + acc[1]) & _M64), -_avalanche(high) & _M64


def _accumulate(acc: list[int], stripe: tuple[int, ...], secret: tuple[int, ...]) -> None:
    for i in range(8):
        value = stripe[i]
        key = value ^ secret[i]
        acc[i ^ 1] += value
        acc[i] += (key & _M32) * (key >> 32)


def _merge(acc: list[int], secret: int, start: int) -> int:
    for i in range(4):
        start += _fold(acc[2 * i] ^ _u64(_SECRET, secret + 16 * i), acc[2 * i + 1] ^ _u64(_SECRET, secret + 16 * i + 8))
    return _avalanche(start & _M64)


_STRIPE = struct.Struct("<8Q")
_STRIPE_SECRETS = [_STRIPE.unpack_from(_SECRET, 8 * i) for i in range(17)]


def _long(data: bytes) -> tuple[int, int]:
    """(low, high) beyond 240 bytes: eight lanes over stripes of 64 bytes, scrambled after every 16 of them."""
    n = len(data)
    acc = [_P32_3, _P1, _P2, _P3, _P4, _P32_2, _P5, _P32_1]
    for at in range(0, (n - 1) // 64 * 64, 64):
        stripe = at // 64 % 16
        _accumulate(acc, _STRIPE.unpack_from(data, at), _STRIPE_SECRETS[stripe])
        if stripe == 15:
            for i, key in enumerate(_STRIPE_SECRETS[16]):
                lane = acc[i] & _M64
                acc[i] = ((lane ^ (lane >> 47) ^ key) * _P32_1) & _M64
    _accumulate(acc, _STRIPE.unpack_from(data, n - 64), _STRIPE.unpack_from(_SECRET, 192 - 64 - 7))
    acc = [lane & _M64 for lane in acc]
    return _merge(acc, 11, (n * _P1) & _M64), _merge(acc, 192 - 64 - 11, ~(n * _P2) & _M64)


def xxh3_128(data: bytes | memoryview) -> bytes:
    """XXH3-128 with seed 0, as its 16 canonical bytes: high half first, each half big-endian."""
    data = bytes(data)
    short = _upto16 if len(data) <= 16 else _upto240 if len(data) <= 240 else _long
    low, high = short(data)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0: its low 32 bits are the content checksum of a zstd frame."""
    n, at = len(data), 0

    def rotate(value: int, by: int) -> int:
        value &= _M64
        return (value << by | value >> (64 - by)) & _M64

    def step(acc: int, value: int) -> int:
        return (rotate(acc + value * _P2, 31) * _P1) & _M64

    if n >= 32:
        lanes = [(_P1 + _P2) & _M64, _P2, 0, -_P1 & _M64]
        while at + 32 <= n:
            lanes = [step(lane, _u64(data, at + 8 * i)) for i, lane in enumerate(lanes)]
            at += 32
        h = sum(rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _M64
        for lane in lanes:
            h = ((h ^ step(0, lane)) * _P1 + _P4) & _M64
    else:
        h = _P5
    h = (h + n) & _M64
    while at + 8 <= n:
        h = (rotate(h ^ step(0, _u64(data, at)), 27) * _P1 + _P4) & _M64
        at += 8
    if at + 4 <= n:
        h = (rotate(h ^ (_u32(data, at) * _P1 & _M64), 23) * _P2 + _P3) & _M64
        at += 4
    for byte in data[at:]:
        h = (rotate(h ^ (byte * _P5 & _M64), 11) * _P1) & _M64
    return _avalanche64(h)


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC32C (Castagnoli, reflected, start and end inverted)."""
    crc = _M32
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _M32
