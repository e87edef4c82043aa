"""Format 1, the first: nothing older has to be converted, and what was read and verified is of it."""

from __future__ import annotations

from lmcache_cli.store.copying import WholeShard

from .target_format import TargetFormat


def _as_it_is(shard: WholeShard) -> WholeShard:
    return shard


FORMAT_1 = TargetFormat(version=1, convert=_as_it_is)
