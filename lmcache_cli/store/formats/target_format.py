"""What migration has to know of a format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmcache_cli.store.copying import WholeShard


@dataclass(frozen=True, slots=True)
class TargetFormat:
    """`version` is the one that the superblock of a store of this format says.

    `convert` takes a shard of any format that this release reads, every byte verified, and gives it as one of this
    format: the very same object where it is one already. It raises `FormatError` for one that cannot be.
    """

    version: int
    convert: Callable[[WholeShard], WholeShard]
