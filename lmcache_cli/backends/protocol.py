"""The one interface between the store and any place that keeps bytes.

An object is immutable: it appears whole, under one name, and never changes. Names are relative, "/"-separated, with
components of `[a-z0-9._-]` (`CACHEDIR.TAG` excepted). Every method blocks and may be called from several threads.
Errors are those of `errors.py`; a method that lists none raises `BadName` and `Unavailable` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

STAGING_PREFIX = "tmp"
"""Names below it are the back-end's own staging files: listed like all others, never objects."""


class Durability(Enum):
    """What a put waits for. Atomicity does not depend on it: readers see the whole object or none."""

    NONE = "none"
    """Nothing: a power cut may lose the object, or leave bytes that fail their checksum."""
    DATA = "data"
    """The bytes are on the device before the name appears; the name may be lost by a power cut until `sync_names`."""
    FULL = "full"
    """Bytes and name are on the device when put returns."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a back-end can promise, so that callers choose their way without trying."""

    conditional_create: bool
    """put(if_absent=True) has one winner among racing writers."""
    conditional_delete: bool
    """delete(version=…) never removes another version, even in a race."""
    cheap_stat: bool
    """stat costs microseconds rather than a round trip."""
    rename: bool
    """move is one atomic operation; otherwise copy, verify, delete."""
    ranged_read: bool
    """read_into fetches only the bytes asked for."""
    direct_io: bool
    """4096-aligned buffers spare a copy."""
    object_crc32c: bool
    """stat and list report the CRC32C of objects without reading them."""
    durable: bool
    """Durability.DATA and FULL are kept; objects outlive the process."""
    shared: bool
    """Other processes see the same objects."""
    confirmed_put: bool = False
    """put returns what the service says of the object once it is there, compared with what was sent."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object; or a sub-prefix in a flat listing: its name ends with "/", its size is 0, its version empty."""

    name: str
    size_bytes: int
    version: str
    modified_ms: int
    crc32c: int | None = None

    @property
    def is_prefix(self) -> bool:
        return self.name.endswith("/")


@runtime_checkable
class ReadHandle(Protocol):
    """One object pinned: whatever happens to its name, reads come from the bytes that were there at open, or fail.

    Use as a context manager. `read_into` may be called from several threads; `close` only when none of them reads.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of the object."""
        ...

    @property
    def version(self) -> str: ...

    @property
    def block_bytes(self) -> int:
        """Best size of one `read_into` for a reader that checks bytes as they come.

        At most 1 MiB where they are in memory already (a block then stays in the CPU's cache), several MiB where every
        call waits for a device.
        """
        ...

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all `buffers`, in order, with the bytes from `offset` on.

        The buffers are the caller's: writable, contiguous, format "B". Raises ShortRead if the object ends before they
        are full, Unavailable; then their content is unspecified.
        """
        ...

    def close(self) -> None:
        """Unpin; more than once is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """Named immutable objects somewhere: about ten operations, the same promises everywhere."""

    @property
    def url(self) -> str:
        """Where the objects lie, fit for messages: credentials are shown as `***`."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a small object, or of exactly the range. Raises NotFound, ShortRead, Unavailable."""
        ...

    def open_read(self, name: str) -> ReadHandle:
        """Pin the object for reading. Raises NotFound, Unavailable."""
        ...

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        """Publish the concatenated parts as one object, whole or not at all.

        The parts are read until the call returns or raises and not after; they must not change meanwhile. A `HeadLast`
        are two parts, the first of which is made from the second, and may be written after it. With
        `if_absent` an object that is there stays (AlreadyExists), otherwise it is replaced atomically. Raises
        AlreadyExists, NoSpace, Unavailable (then the object may have been published all the same, but never in part).
        """
        ...

    def stat(self, name: str) -> ObjectInfo | None:
        """The object's description; None means surely absent. Raises Unavailable where that is unknown."""
        ...

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Everything below the prefix (whole components; "" is the root), foreign files included, in no order.

        Complete or raises Unavailable, possibly after some items: conclude nothing before it ended. Objects that come
        or go meanwhile may or may not be seen. `recursive=False` yields the next level only, deeper ones as
        sub-prefixes.
        """
        ...

    def delete(self, name: str, *, version: str | None) -> bool:
        """True: deleted; False: it was gone already. With a version, no other one is deleted: raises VersionChanged."""
        ...

    def move(self, name: str, to: str) -> None:
        """Give the object another name, for quarantine; never replaces. Raises NotFound, AlreadyExists, Unavailable."""
        ...

    def now_ms(self) -> int:
        """Milliseconds since 1970 on the store's own clock, the one that sets `modified_ms`. Raises Unavailable."""
        ...

    def sync_names(self) -> None:
        """Make durable the names of all earlier puts with Durability.DATA: FULL for many at once, at less cost."""
        ...

    def collect_staging(self, *, older_than_ms: int) -> int:
        """Remove what dead writers left half-written that long ago; returns how many. Never touches objects."""
        ...

    def close(self) -> None:
        """Give back descriptors and connections; open handles stay valid."""
        ...
