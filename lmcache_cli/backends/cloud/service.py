"""What `CloudBackend` asks of an object store: single requests, each of which answers or raises an error of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_cli.backends.cloud.body import Body


@dataclass(frozen=True, slots=True)
class Remote:
    """An object as the service describes it. `digest` is a hash of its bytes, if the service tells one."""

    size_bytes: int
    version: str
    modified_ms: int
    crc32c: int | None = None
    digest: str = ""

    def is_copy_of(self, other: Remote) -> bool:
        """Whether both hold the same bytes, as far as checksums tell; without any, they count as different."""
        if self.size_bytes != other.size_bytes:
            return False
        if self.crc32c is not None and other.crc32c is not None:
            return self.crc32c == other.crc32c
        return bool(self.digest) and self.digest == other.digest


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditions the service keeps: create only where nothing is, delete only a certain version."""

    create: bool
    delete: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A piece of a listing; `next_token` leads to the next one."""

    objects: Sequence[tuple[str, Remote]]
    prefixes: Sequence[str]
    next_token: str | None


class Fetched(Protocol):
    """The body of an answer, of which nothing was read yet."""

    @property
    def total_bytes(self) -> int:
        """Of the whole object, not of the range."""
        ...

    @property
    def version(self) -> str: ...

    async def read(self, size: int) -> bytes:
        """Some bytes, at most `size`; none at the end. Raises Unavailable where the body ends before its time."""
        ...

    def close(self) -> None:
        """Leave the rest."""
        ...


class CloudService(Protocol):
    """One bucket and prefix. Names are relative to the prefix; all methods raise `Unavailable` besides what they say.

    Times are whole seconds, as HTTP dates are, so that all sources agree.
    """

    @property
    def url(self) -> str: ...

    @property
    def no_version(self) -> str:
        """A well-formed version that no object has."""
        ...

    @property
    def lists_crc32c(self) -> bool: ...

    async def documented_conditions(self) -> Conditions | None:
        """Those of a service that is known to keep its word; None where they must be measured."""
        ...

    async def head(self, name: str) -> Remote | None: ...

    async def fetch(self, name: str, start: int, stop: int | None, version: str | None) -> Fetched:
        """Bytes `start` to `stop`, or to the end. Raises NotFound, VersionChanged; ShortRead if nothing is there."""
        ...

    async def put(self, name: str, body: Body, *, create: bool) -> Remote:
        """Raises AlreadyExists with `create`, NoSpace, Unsupported where the condition is refused as such."""
        ...

    async def delete(self, name: str, version: str | None) -> bool:
        """False: surely gone before. Raises VersionChanged, Unsupported where the condition is refused as such."""
        ...

    async def copy(self, name: str, to: str, source: Remote, *, create: bool) -> Remote:
        """Copy that version within the store. Raises NotFound, VersionChanged, AlreadyExists."""
        ...

    async def list_page(self, prefix: str, *, deep: bool, token: str | None) -> Page:
        """Names below the prefix, which is "" or ends with "/"; `deep=False`: the next level, and prefixes."""
        ...

    async def now_ms(self) -> int: ...

    async def close(self) -> None: ...
