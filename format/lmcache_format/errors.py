"""Everything that can be wrong with bytes of this format, one class a kind.

::

    FormatError                  the bytes (or values) at `where` are not what SPEC.md asks for
    ├── IdentityError            an identity that is incomplete, not canonical, or not its own name's hash
    ├── KeyInputError            token ids, salts or extras that cannot be hashed without ambiguity
    ├── GeometryError            a part, head range or shape that the identity does not allow
    ├── BadName                  a path that this format did not write
    ├── ShardError               a shard whose header, offsets or length lie
    ├── SegmentError             a manifest segment whose table, sections or records lie
    ├── SuperblockError          a superblock that cannot be trusted
    ├── AcceptanceError          a record of what an engine takes that is none
    ├── EncodingError            stored bytes that the named encoding cannot have written
    ├── ChecksumMismatch         bytes that are not those that were written
    └── UnsupportedVersion       sound bytes of a newer format, feature or encoding: not damage
"""

from __future__ import annotations

MAX_SHOWN = 400


class FormatError(ValueError):
    """Bytes or values that break SPEC.md.

    `where` names the object (a path, a field), `expected` and `found` what the rule and the bytes say.
    """

    def __init__(self, message: str, *, where: str = "", expected: object = None, found: object = None) -> None:
        self.message = message
        self.where = where
        self.expected = expected
        self.found = found
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{_shown(self.where)}: {self.message}" if self.where else self.message
        if self.expected is not None:
            text += f"; expected {_shown(self.expected)}"
        if self.found is not None:
            text += f"; found {_shown(self.found)}"
        return text

    def at(self, where: str) -> FormatError:
        """The same error, told with the place where it happened."""
        return type(self)(self.message, where=where, expected=self.expected, found=self.found)


def _shown(value: object) -> str:
    """Text of `value`, which may come from a damaged file: short, and without control characters."""
    text = str(value)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}… ({len(text)} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class IdentityError(FormatError):
    """An identity that is incomplete, not canonical, or does not hash to its own name."""


class KeyInputError(FormatError):
    """Token ids, salts or extras that cannot be hashed without ambiguity."""


class GeometryError(FormatError):
    """A part, head range or shape that the identity does not allow."""


class BadName(FormatError):
    """A path that this format did not write."""


class ShardError(FormatError):
    """A shard whose header, offsets or length lie."""


class SegmentError(FormatError):
    """A manifest segment whose table, sections or records lie."""


class SuperblockError(FormatError):
    """A superblock that cannot be trusted."""


class AcceptanceError(FormatError):
    """A record of which engine takes whose KV that cannot be read as one."""


class EncodingError(FormatError):
    """Stored bytes that the named encoding cannot have written."""


class ChecksumMismatch(FormatError):
    """Bytes that are not those that were written."""


class UnsupportedVersion(FormatError):
    """Sound bytes of a newer format, feature or encoding: not damage, and never deleted as such."""
