"""The field's configuration keys, as one frozen object. Unknown keys, and keys of what is not there yet, are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmcache_cli.store.chain import ChainOptions
from lmcache_format.identity import CHUNK_TOKENS


class ConfigError(ValueError):
    """A key is unknown, of another kind, or of something this version does not have."""


@dataclass(frozen=True, slots=True)
class LMCacheEngineConfig:
    """Where chunks are kept.

    `chunk_size`: tokens a chunk. `local_cpu`: keep recent chunks in memory, at most `max_local_cpu_size` GiB of them.
    `local_disk`, `remote_url`: stores, by path or URL; both are written, and read in this order. Where both are given,
    `remote_url` need not answer: after `remote_timeout_s` a read from it has failed. What it had to be asked for is
    promoted, copied to `local_disk` in the background, if `promote`: not while that lists more than
    `promote_max_store_bytes`, nor while its disk has less than `promote_min_free_bytes` free.
    `save_only_first_rank`: ranks that hold the same latents write them once. `save_decode_cache`: keep generated
    tokens, too.
    """

    chunk_size: int = CHUNK_TOKENS
    local_cpu: bool = True
    max_local_cpu_size: float = 5.0
    local_disk: str | None = None
    remote_url: str | None = None
    remote_timeout_s: float = 5.0
    promote: bool = True
    promote_max_store_bytes: int | None = None
    promote_min_free_bytes: int = 1 << 30
    save_only_first_rank: bool = False
    save_decode_cache: bool = False

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> LMCacheEngineConfig:
        """From plain values. Raises `ConfigError` that names the key and what is expected."""
        kinds = {field.name: _KINDS[field.name] for field in fields(cls)}
        for key, value in given.items():
            if key in MISSING:
                raise ConfigError(f"{key!r} is not supported by this version: {MISSING[key]}")
            if key not in kinds:
                close = difflib.get_close_matches(str(key), kinds, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(kinds)}"
                raise ConfigError(f"unknown key {key!r}; {hint}")
            if not isinstance(value, kinds[key]) or (isinstance(value, bool) and bool not in kinds[key]):
                names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds[key])
                raise ConfigError(f"{key!r} is {value!r}; expected {names}")
        config = cls(**given)
        if config.chunk_size < 1 or config.max_local_cpu_size < 0:
            raise ConfigError(f"sizes are positive; found {config.chunk_size} and {config.max_local_cpu_size}")
        if config.remote_timeout_s <= 0:
            raise ConfigError(f"'remote_timeout_s' is more than zero; found {config.remote_timeout_s}")
        if config.promote_min_free_bytes < 0 or (config.promote_max_store_bytes or 0) < 0:
            raise ConfigError("'promote_max_store_bytes' and 'promote_min_free_bytes' are not negative")
        return config

    @property
    def stores(self) -> tuple[str, ...]:
        """URLs of the stores, nearest first."""
        return tuple(url.removeprefix("file://") for url in (self.local_disk, self.remote_url) if url)

    @property
    def chain_options(self) -> ChainOptions:
        """How `remote_url` is asked behind `local_disk`."""
        return ChainOptions.of(
            timeout_s=self.remote_timeout_s,
            promote=self.promote,
            promote_max_store_bytes=self.promote_max_store_bytes,
            promote_min_free_bytes=self.promote_min_free_bytes,
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "chunk_size": (int,),
    "local_cpu": (bool,),
    "max_local_cpu_size": (int, float),
    "local_disk": (str, type(None)),
    "remote_url": (str, type(None)),
    "remote_timeout_s": (int, float),
    "promote": (bool,),
    "promote_max_store_bytes": (int, type(None)),
    "promote_min_free_bytes": (int,),
    "save_only_first_rank": (bool,),
    "save_decode_cache": (bool,),
}
MISSING = {
    "max_local_disk_size": "a store is kept to a size by 'lmcache prune'",
    "remote_serde": "chunks are stored raw; see the encodings of the store",
    "enable_blending": "KV is reused for equal prefixes only",
    "enable_p2p": "engines share a store, not each other's memory",
    "enable_controller": "there is no central controller",
    "enable_pd": "prefill and decode share a store, nothing is pushed",
    "gds_path": "reads go through host memory",
}
