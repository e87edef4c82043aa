"""CRC32C as services write it."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error


def crc32c_of(text: str | None) -> int | None:
    """From base64 of four big-endian bytes; None for anything else, as checksums of multipart uploads are."""
    try:
        digest = b64decode(text or "", validate=True)
    except (Error, ValueError):
        return None
    return int.from_bytes(digest, "big") if len(digest) == 4 else None
