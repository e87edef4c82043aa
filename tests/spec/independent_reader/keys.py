"""Keys of chunks (SPEC §5)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

Extras = Callable[[int, int], bytes]
"""The extras of the chunk of tokens `begin` … `end`−1 of a sequence, as they enter its key."""

MULTIMODAL = 1


def no_extras(begin: int, end: int) -> bytes:
    """Extras of text alone."""
    return b""


def extras(pairs: Sequence[tuple[int, bytes]]) -> bytes:
    """(tag, payload) pairs as they enter a key."""
    return b"".join(struct.pack("<HI", tag, len(payload)) + payload for tag, payload in sorted(pairs))


def multimodal(items: Sequence[tuple[int, int, str]]) -> Extras:
    """Extras of a sequence with items (first token, tokens, content hash)."""

    def of_chunk(begin: int, end: int) -> bytes:
        return extras(
            [
                (MULTIMODAL, struct.pack("<qI", start - begin, tokens) + content.encode("utf-8"))
                for start, tokens, content in items
                if start < end and start + tokens > begin
            ]
        )

    return of_chunk


def root(fingerprint: str, salt: str | bytes | None = None) -> bytes:
    """The parent of first chunks, for one namespace and tenant."""
    if isinstance(salt, str):
        salt = salt.encode("utf-8")
    digest = hashlib.sha256(b"lmcache-salt-1" + salt).digest() if salt else bytes(32)
    return hashlib.sha256(b"lmcache-format-1" + bytes.fromhex(fingerprint) + digest).digest()


def chunk_key(parent: bytes, tokens: Sequence[int], chunk_extras: bytes = b"") -> bytes:
    """The key of a chunk of these tokens after `parent`."""
    numbers = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    return hashlib.sha256(parent + numbers + chunk_extras).digest()


def chain(start: bytes, tokens: Sequence[int], chunk_tokens: int, of_chunk: Extras = no_extras) -> list[bytes]:
    """Keys of all chunks of a sequence, its tail included."""
    keys = []
    for begin in range(0, len(tokens), chunk_tokens):
        piece = tokens[begin : begin + chunk_tokens]
        start = chunk_key(start, piece, of_chunk(begin, begin + len(piece)))
        keys.append(start)
    return keys
