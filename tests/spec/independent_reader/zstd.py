"""A zstd decoder (RFC 8878) for the streams that encodings.md §3 allows: one frame, sized, checksummed, no dictionary.

Slow and small: for golden files and tests. Every broken rule is damage.
"""

from __future__ import annotations

from .checksums import xxh64
from .refusals import damaged

BLOCK_MAX = 128 << 10
_PAD = 8

_LL_EXTRA = [0] * 16 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_ML_EXTRA = [0] * 32 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_LL_DEFAULT = [4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4]
_ML_DEFAULT = [1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7]
_OF_DEFAULT = [*[1] * 6, *[2] * 3, *[1] * 15, *[-1] * 5]


def _bases(first: int, extra: list[int]) -> list[int]:
    bases = [first]
    for bits in extra[:-1]:
        bases.append(bases[-1] + (1 << bits))
    return bases


_LL_BASE, _ML_BASE = _bases(0, _LL_EXTRA), _bases(3, _ML_EXTRA)

FseTable = tuple[int, list[tuple[int, int, int]]]
"""Accuracy in bits, and (symbol, bits to read, base of the next state) by state."""
HuffmanTable = tuple[int, list[tuple[int, int]]]
"""Bits of the longest code, and (symbol, bits of its code) by that many bits."""


def _must(holds: object, text: str) -> None:
    if not holds:
        raise damaged(f"zstd: {text}")


class _Backward:
    """Bits from the end of a stream to its start; beyond the start they are zeros, and `left` goes below zero."""

    def __init__(self, data: bytes) -> None:
        _must(data and data[-1], "no end mark of a bit stream")
        self._data = bytes(_PAD) + data
        self.left = 8 * len(data) - 9 + data[-1].bit_length()

    def peek(self, bits: int) -> int:
        at = self.left - bits + 8 * _PAD
        _must(at >= 0, "bit stream overrun")
        return int.from_bytes(self._data[at >> 3 : (at >> 3) + 8], "little") >> (at & 7) & ((1 << bits) - 1)

    def read(self, bits: int) -> int:
        value = self.peek(bits)
        self.left -= bits
        return value


def _fse_build(accuracy: int, counts: list[int]) -> FseTable:
    size = 1 << accuracy
    symbols = [0] * size
    high, at = size, 0
    for symbol, count in enumerate(counts):
        if count == -1:
            high -= 1
            symbols[high] = symbol
    for symbol, count in enumerate(counts):
        for _ in range(max(count, 0)):
            symbols[at] = symbol
            at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1)
            while at >= high:
                at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1)
    following = [abs(count) for count in counts]
    states = []
    for symbol in symbols:
        state = following[symbol]
        following[symbol] += 1
        bits = accuracy - state.bit_length() + 1
        states.append((symbol, bits, (state << bits) - size))
    return accuracy, states


def _fse_read(data: bytes, max_accuracy: int, max_symbols: int) -> tuple[FseTable, int]:
    """A table from its description, and the bytes that this takes."""
    value, at = int.from_bytes(data[:512], "little"), 4
    accuracy = (value & 15) + 5
    _must(accuracy <= max_accuracy, "accuracy of a table")
    left, counts = 1 << accuracy, []
    while left > 0:
        bits = (left + 1).bit_length()
        number = value >> at & ((1 << bits) - 1)
        low = (1 << (bits - 1)) - 1
        few = (1 << bits) - 2 - left
        at += bits
        if number & low < few:
            number &= low
            at -= 1
        elif number > low:
            number -= few
        counts.append(number - 1)
        left -= abs(number - 1)
        while number == 1:
            zeros = value >> at & 3
            at += 2
            counts += [0] * zeros
            if zeros < 3:
                break
        _must(len(counts) <= max_symbols, "too many symbols")
    used = (at + 7) // 8
    _must(left == 0 and used <= len(data), "table description")
    return _fse_build(accuracy, counts), used


def _huffman_weights(data: bytes) -> tuple[list[int], int]:
    _must(data, "no Huffman table")
    size = data[0]
    if size >= 128:
        count = size - 127
        used = 1 + (count + 1) // 2
        _must(used <= len(data), "Huffman weights")
        return [data[1 + i // 2] >> (0 if i % 2 else 4) & 15 for i in range(count)], used
    stream = data[1 : 1 + size]
    _must(len(stream) == size, "Huffman weights")
    (accuracy, states), used = _fse_read(stream, 6, 256)
    bits = _Backward(stream[used:])
    one, two = bits.read(accuracy), bits.read(accuracy)
    _must(bits.left >= 0, "Huffman weights")
    weights: list[int] = []
    while True:
        symbol, count, base = states[one]
        weights.append(symbol)
        _must(len(weights) < 255, "too many Huffman weights")
        one = base + bits.read(count)
        if bits.left < 0:
            weights.append(states[two][0])
            return weights, 1 + size
        one, two = two, one


def _huffman_read(data: bytes) -> tuple[HuffmanTable, int]:
    weights, used = _huffman_weights(data)
    total = sum(1 << weight >> 1 for weight in weights)
    longest = total.bit_length()
    rest = (1 << longest) - total
    _must(total and longest <= 11 and rest & (rest - 1) == 0, "Huffman weights do not add up")
    weights.append(rest.bit_length())
    table: list[tuple[int, int]] = []
    for weight in range(1, longest + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                table += [(symbol, longest + 1 - weight)] * (1 << weight >> 1)
    return (longest, table), used


def _huffman_stream(data: bytes, count: int, table: HuffmanTable) -> bytes:
    bits, (longest, codes) = _Backward(data), table
    out = bytearray()
    for _ in range(count):
        symbol, used = codes[bits.peek(longest)]
        out.append(symbol)
        bits.left -= used
        _must(bits.left >= 0, "Huffman stream is too short")
    _must(bits.left == 0, "Huffman stream is too long")
    return bytes(out)


class _Frame:
    """What blocks of one frame hand to each other."""

    def __init__(self, limit: int, window: int) -> None:
        self.out = bytearray()
        self.limit, self.window = limit, window
        self.huffman: HuffmanTable | None = None
        self.tables: list[FseTable | None] = [None, None, None]
        self.offsets = [1, 4, 8]

    def _literals(self, data: bytes) -> tuple[bytes, int]:
        _must(data, "no literals")
        kind, form = data[0] & 3, data[0] >> 2 & 3
        if kind < 2:
            head, shift = ((1, 3), (2, 4), (1, 3), (3, 4))[form]
            size = int.from_bytes(data[:head], "little") >> shift
            _must(size <= BLOCK_MAX, "too many literals")
            used = head + (size if kind == 0 else 1)
            _must(used <= len(data), "literals")
            return (data[head:used] if kind == 0 else data[head : head + 1] * size), used
        head, width = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        number = int.from_bytes(data[:head], "little") >> 4
        size, stored = number & ((1 << width) - 1), number >> width
        end = head + stored
        _must(size <= BLOCK_MAX and end <= len(data), "literals")
        body = data[head:end]
        if kind == 2:
            self.huffman, used = _huffman_read(body)
            body = body[used:]
        _must(self.huffman, "literals without a table")
        assert self.huffman is not None
        if form == 0:
            return _huffman_stream(body, size, self.huffman), end
        _must(len(body) >= 6, "jump table")
        jumps = [int.from_bytes(body[i : i + 2], "little") for i in (0, 2, 4)]
        at, each, out = 6, (size + 3) // 4, b""
        _must(6 + sum(jumps) < len(body) and 3 * each <= size, "jump table")
        for jump, count in zip([*jumps, len(body)], [each, each, each, size - 3 * each], strict=True):
            out += _huffman_stream(body[at : at + jump], count, self.huffman)
            at += jump
        return out, end

    def _sequence_tables(self, data: bytes, modes: int) -> int:
        _must(modes & 3 == 0, "reserved bits")
        defaults = ((6, _LL_DEFAULT, 9, 36), (5, _OF_DEFAULT, 8, 32), (6, _ML_DEFAULT, 9, 53))
        used = 0
        for which, (accuracy, counts, limit, symbols) in enumerate(defaults):
            mode = modes >> (6 - 2 * which) & 3
            if mode == 0:
                self.tables[which] = _fse_build(accuracy, counts)
            elif mode == 1:
                _must(used < len(data) and data[used] < symbols, "single symbol")
                self.tables[which] = 0, [(data[used], 0, 0)]
                used += 1
            elif mode == 2:
                self.tables[which], more = _fse_read(data[used:], limit, symbols)
                used += more
            _must(self.tables[which], "no table to repeat")
        return used

    def _offset(self, value: int, literals: int) -> int:
        old = self.offsets
        if value > 3:
            self.offsets = [value - 3, old[0], old[1]]
        else:
            index = value - 1 + (literals == 0)
            offset = old[index] if index < 3 else old[0] - 1
            if index:
                self.offsets = [offset, old[0], old[1] if index > 1 else old[2]]
        return self.offsets[0]

    def block(self, data: bytes) -> None:
        """One compressed block."""
        start = len(self.out)
        literals, at = self._literals(data)
        _must(at < len(data), "no sequences")
        count = data[at]
        head = 1 if count < 128 else 2 if count < 255 else 3
        _must(at + head <= len(data), "number of sequences")
        if head == 2:
            count = (count - 128) << 8 | data[at + 1]
        elif head == 3:
            count = data[at + 1] + (data[at + 2] << 8) + 0x7F00
        at += head
        if count:
            _must(at < len(data), "modes")
            at += 1 + self._sequence_tables(data[at + 1 :], data[at])
            literals = self._sequences(_Backward(data[at:]), count, literals)
        else:
            _must(at == len(data), "bytes behind no sequences")
        self.out += literals
        _must(len(self.out) <= self.limit and len(self.out) - start <= BLOCK_MAX, "more bytes than said")

    def _sequences(self, bits: _Backward, count: int, literals: bytes) -> bytes:
        """Execute the sequences; the literals that they leave."""
        tables = [table for table in self.tables if table is not None]
        states = [bits.read(accuracy) for accuracy, _ in tables]
        at = 0
        for index in range(count):
            rows = [table[state] for (_, table), state in zip(tables, states, strict=True)]
            ll, of, ml = (row[0] for row in rows)
            value = (1 << of) + bits.read(of)
            match = _ML_BASE[ml] + bits.read(_ML_EXTRA[ml])
            length = _LL_BASE[ll] + bits.read(_LL_EXTRA[ll])
            offset = self._offset(value, length)
            self.out += literals[at : at + length]
            at += length
            _must(at <= len(literals) and len(self.out) + match <= self.limit, "more bytes than said")
            _must(0 < offset <= min(len(self.out), self.window), "offset of a match")
            for _ in range(match):
                self.out.append(self.out[-offset])
            if index + 1 < count:
                for which in (0, 2, 1):
                    states[which] = rows[which][2] + bits.read(rows[which][1])
        _must(bits.left == 0, "bits behind the sequences")
        return literals[at:]


def decompress(data: bytes, size: int) -> bytes:
    """The `size` bytes of a stream; no memory is spent on what it claims before that is compared with `size`."""
    _must(len(data) >= 6 and data[:4] == b"\x28\xb5\x2f\xfd", "magic")
    flags, at = data[4], 5
    single = flags >> 5 & 1
    _must(flags & 0b1000 == 0, "reserved bit")
    _must(flags & 0b100, "no content checksum")
    _must(flags & 0b11 == 0, "dictionary")
    width = (single, 2, 4, 8)[flags >> 6]
    _must(width, "no content size")
    window = 0
    if not single:
        base = 1 << (10 + (data[at] >> 3))
        window, at = base + base // 8 * (data[at] & 7), at + 1
    content = int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)
    at += width
    _must(content == size, "content size")
    window = window or content
    _must(window <= max(BLOCK_MAX, content), "window")
    frame = _Frame(size, window)
    last = 0
    while not last:
        _must(at + 3 <= len(data), "block")
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, length, at = header & 1, header >> 1 & 3, header >> 3, at + 3
        _must(kind < 3 and length <= min(BLOCK_MAX, window), "block")
        used = 1 if kind == 1 else length
        _must(at + used <= len(data), "block")
        if kind == 2:
            frame.block(data[at : at + used])
        else:
            _must(len(frame.out) + length <= size, "more bytes than said")
            frame.out += data[at : at + used] * (length if kind == 1 else 1)
        at += used
    _must(len(frame.out) == size and at + 4 == len(data), "end of the frame")
    if xxh64(bytes(frame.out)) & 0xFFFFFFFF != int.from_bytes(data[at:], "little"):
        raise damaged("zstd: content checksum", checksum=True)
    return bytes(frame.out)
