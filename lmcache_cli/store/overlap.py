"""Are two stores one, or does one lie inside the other? Moving shards between such stores would delete them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from .errors import Refused
from .store import Store

_ALIASES = {"s3a": "s3", "gcs": "gs"}


def refuse_overlap(source: Store, target: Store) -> None:
    """Raise `Refused` where two stores are the same, or nested, under whatever names."""
    here, there = _Place.of(source.url), _Place.of(target.url)
    if here == there:
        raise Refused(f"{source.url} and {target.url} are the same place", next_step="name two stores")
    if here.holds(there) or there.holds(here):
        raise Refused(
            f"one of {source.url} and {target.url} lies inside the other", next_step="use places apart from each other"
        )
    if source.superblock.store_id == target.superblock.store_id:
        raise Refused(
            f"{source.url} and {target.url} are the same store ({source.superblock.store_id}), or copies of each other",
            next_step="make the other one with 'lmcache init' and migrate into it",
        )


@dataclass(frozen=True, slots=True)
class _Place:
    root: str
    path: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> _Place:
        parts = urlsplit(url)
        if parts.scheme == "file":
            real = os.path.realpath(os.fsdecode(unquote_to_bytes(parts.path)))
            return cls("file", Path(real).parts)
        scheme = _ALIASES.get(parts.scheme, parts.scheme)
        path = tuple(part for part in parts.path.split("/") if part)
        return cls(f"{scheme}://{parts.netloc}?{parts.query}", path)

    def holds(self, other: _Place) -> bool:
        return self.root == other.root and other.path[: len(self.path)] == self.path
