"""Chained prefix keys (SPEC §5): change one token, and every later key changes.

``key_i = SHA256(key_{i-1} ‖ u32le num_tokens ‖ num_tokens × u32le token ‖ extras)``
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from .errors import KeyInputError
from .identity import Fingerprint

ChunkKey = NewType("ChunkKey", bytes)
KEY_BYTES = 32
TAG_MULTIMODAL = 1

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
_ROOT_DOMAIN = b"lmcache-format-1"
_SALT_DOMAIN = b"lmcache-salt-1"
_NO_SALT = bytes(32)
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """Something besides tokens that changes the KV of one chunk: a tag (u16) and bytes of its own."""

    tag: int
    payload: bytes

    def encode(self) -> bytes:
        """`u16le tag ‖ u32le length ‖ payload`."""
        if not 0 <= self.tag <= 0xFFFF or len(self.payload) > 0xFFFF_FFFF:
            raise KeyInputError(
                "extra is out of range", expected="tag of 16 bits, payload of 32-bit length", found=self.tag
            )
        return struct.pack("<HI", self.tag, len(self.payload)) + self.payload


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or other item of a prompt: its placeholder covers `num_tokens` tokens from `start` on.

    `identifier` is the content hash of the item: its placeholder tokens are the same for every item.
    """

    start: int
    num_tokens: int
    identifier: str


def chunk_extras(items: Sequence[MultimodalItem], chunk_start: int, num_tokens: int) -> tuple[Extra, ...]:
    """The extras of the chunk that holds `num_tokens` tokens from `chunk_start` on: one for each item it touches.

    Payload: `i64le` start of the item counted from the chunk's first token (negative where it began earlier),
    `u32le` its tokens, then the identifier in UTF-8.
    """
    stop = chunk_start + num_tokens
    return tuple(
        Extra(
            TAG_MULTIMODAL,
            _item_payload(item, chunk_start),
        )
        for item in items
        if item.start < stop and item.start + item.num_tokens > chunk_start
    )


def _item_payload(item: MultimodalItem, chunk_start: int) -> bytes:
    try:
        where = struct.pack("<qI", item.start - chunk_start, item.num_tokens)
        return where + item.identifier.encode("utf-8")
    except (struct.error, UnicodeEncodeError) as problem:
        raise KeyInputError("multimodal item cannot be hashed", found=problem) from None


def encode_extras(extras: Sequence[Extra]) -> bytes:
    """Extras in their one order: by tag, then payload."""
    return b"".join(extra.encode() for extra in sorted(extras))


def salt_digest(salt: str | bytes | None) -> bytes:
    """What stands for a tenant's salt in keys: 32 zero bytes for none or the empty one, else a digest."""
    if not salt:
        return _NO_SALT
    raw = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
    return hashlib.sha256(_SALT_DOMAIN + raw).digest()


def root_key(fingerprint: Fingerprint, salt: str | bytes | None = None) -> ChunkKey:
    """`key_{-1}`: the parent of every first chunk under this identity and salt."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise KeyInputError("fingerprint has another form", expected="32 hex digits", found=fingerprint)
    return ChunkKey(hashlib.sha256(_ROOT_DOMAIN + bytes.fromhex(fingerprint) + salt_digest(salt)).digest())


def next_key(parent: ChunkKey, tokens: Tokens, extras: Sequence[Extra] = ()) -> ChunkKey:
    """Key of the chunk (full or tail) that holds `tokens` after `parent`."""
    words = token_words(tokens)
    if len(words) == 0:
        raise KeyInputError("a chunk holds at least one token")
    return _link(parent, len(words), words.data.cast("B"), encode_extras(extras))


def chunk_keys(
    root: ChunkKey,
    tokens: Tokens,
    chunk_tokens: int,
    extras: Sequence[Sequence[Extra]] | None = None,
) -> KeyList:
    """Keys of all full chunks of `tokens`; the remainder has no key here (it is a tail: `next_key`).

    `extras`, where given, holds one sequence a chunk. Raises `KeyInputError` for ids outside 0 … 2^32-1.
    """
    words = token_words(tokens)
    _check_parent(root)
    if chunk_tokens < 1:
        raise KeyInputError("a chunk holds at least one token", found=chunk_tokens)
    count = len(words) // chunk_tokens
    if extras is not None and len(extras) < count:
        raise KeyInputError("extras are given for some chunks only", expected=count, found=len(extras))
    data = words.data.cast("B")
    step = 4 * chunk_tokens
    head = struct.pack("<I", chunk_tokens)
    sha256 = hashlib.sha256
    parent: bytes = root
    keys = []
    for index in range(count):
        digest = sha256(parent + head)
        digest.update(data[index * step : (index + 1) * step])
        if extras is not None and extras[index]:
            digest.update(encode_extras(extras[index]))
        parent = digest.digest()
        keys.append(parent)
    return KeyList(b"".join(keys))


@dataclass(frozen=True, slots=True)
class KeyList:
    """Keys back to back in one byte string, so that a whole prompt is looked up in one batch."""

    blob: bytes

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    def __getitem__(self, index: int) -> ChunkKey:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(index)
        start = (index % count) * KEY_BYTES
        return ChunkKey(self.blob[start : start + KEY_BYTES])

    def __iter__(self) -> Iterator[ChunkKey]:
        return (self[index] for index in range(len(self)))

    def first(self, count: int) -> KeyList:
        """The first `count` keys."""
        return KeyList(self.blob[: count * KEY_BYTES])

    def after(self, count: int) -> KeyList:
        """All but the first `count` keys."""
        return KeyList(self.blob[count * KEY_BYTES :])


def token_words(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Token ids as contiguous little-endian u32. Raises `KeyInputError` for anything that is no such id."""
    array = tokens if isinstance(tokens, np.ndarray) else _from_sequence(tokens)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise KeyInputError("token ids form one row of integers", found=f"{array.dtype} of {array.ndim} dimensions")
    if array.size and (
        (array.dtype.kind == "i" and int(array.min()) < 0)
        or (array.dtype.itemsize > 4 and int(array.max()) > 0xFFFF_FFFF)
    ):
        raise KeyInputError(
            "token id is out of range", expected="0 to 4294967295", found=f"{array.min()} … {array.max()}"
        )
    return np.ascontiguousarray(array, dtype="<u4")


def _from_sequence(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    if any(type(token) is bool for token in tokens):
        raise KeyInputError("token ids are integers", found="a boolean")
    try:
        array = np.asarray(tokens)
        return array if array.size else array.astype(np.int64)
    except (ValueError, OverflowError) as problem:
        raise KeyInputError("token ids form one row of integers", found=problem) from None


def _check_parent(parent: bytes) -> None:
    if len(parent) != KEY_BYTES:
        raise KeyInputError("parent key has another length", expected=KEY_BYTES, found=len(parent))


def _link(parent: bytes, count: int, words: memoryview, extras: bytes) -> ChunkKey:
    _check_parent(parent)
    digest = hashlib.sha256(parent + struct.pack("<I", count))
    digest.update(words)
    digest.update(extras)
    return ChunkKey(digest.digest())
