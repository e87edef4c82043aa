"""What is uploaded: the caller's buffers one after the other, never joined."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence

from crc32c import crc32c

_PIECE_BYTES = 256 * 1024
"""Handed to the socket at a time: small enough that what the transport keeps back stays small."""


class Body:
    """Parts of a put as one stream, read as often as need be: as a file by botocore, asynchronously by aiohttp."""

    def __init__(self, parts: Sequence[memoryview | bytes]) -> None:
        views = [memoryview(part) for part in parts]
        self.parts = [view.cast("B") for view in views if view.nbytes]
        self.size_bytes = sum(part.nbytes for part in self.parts)
        self._position = 0
        checksum = 0
        for part in self.parts:
            checksum = crc32c(part, checksum)
        self.crc32c = checksum

    @property
    def crc32c_base64(self) -> str:
        """The checksum as both services write it."""
        return b64encode(self.crc32c.to_bytes(4, "big")).decode()

    def pieces(self) -> Iterator[memoryview]:
        for part in self.parts:
            for start in range(0, part.nbytes, _PIECE_BYTES):
                yield part[start : start + _PIECE_BYTES]

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for piece in self.pieces():
            yield piece

    def __len__(self) -> int:
        return self.size_bytes

    def __bool__(self) -> bool:
        return True  # an empty object is an object

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.size_bytes)[whence]
        return self._position

    def read(self, size: int = -1) -> memoryview | bytes:
        """At most `size` bytes, fewer at the end of a part; empty at the end."""
        at = self._position
        for part in self.parts:
            if at < part.nbytes:
                piece = part[at:] if size < 0 else part[at : at + size]
                self._position += piece.nbytes
                return piece
            at -= part.nbytes
        return b""
