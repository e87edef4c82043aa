"""`kv_connector_extra_config`: parsed once at the door, unknown keys refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmcache_cli.backends import Durability
from lmcache_cli.store.chain import ChainOptions
from lmcache_format.identity import CHUNK_TOKENS


class OptionError(ValueError):
    """An option of the connector is unknown, missing or of another kind."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """What can be said in `kv_connector_extra_config`. Only `store` has to be.

    - `store`: URL or path of the store; `create_store` makes one where there is none.
    - `archive`: stores that are asked, in this order, for what `store` lacks, and never written. After
      `archive_timeout_s` a read from one has failed; one that keeps failing is left alone for a while. What they give
      is copied to `store` in the background if `promote`, but not while that lists more than `promote_max_store_bytes`
      or its disk has less than `promote_min_free_bytes` free.
    - `load`, `save`: whether requests use the store, whether it grows. `save_decode`: generated tokens, too.
    - `load_async`: requests wait for their load while others run; by default on devices, not on the CPU.
    - `partial_chunks`: save the rest of a prompt that fills no chunk, too.
    - `chunk_size`: tokens a chunk; it is part of the identity, so that another size is another cache.
    - `require_salt`: leave requests without a `cache_salt` uncached.
    - `allow_unverified`: serve under a model's name alone where its weights cannot be identified.
    - `accept_unprobed`: load what other engines computed although no probe has compared them with this one.
    - `allow_lossy`: read chunks that were compressed with loss. `encoding`: how chunks are written.
    - `durability`: none, data or full, see the store. `max_pending_saves`: chunks in memory that wait to be written;
      what comes when all are taken is saved later, or not at all.
    - `load_timeout_s`, `lookup_timeout_s`: after that long, a load has failed, and a lookup found nothing.
    - `hold_saves`: write only once the step is known to have loaded well; always so with several ranks. Beside other
      connectors in a MultiConnector it keeps what they failed to load out of the store.
    - `model_name`, `digest_cache`: a readable name of the model, and a directory that remembers digests of weights (by
      default in vLLM's own cache directory).
    """

    store: str
    create_store: bool = False
    archive: tuple[str, ...] = ()
    archive_timeout_s: float = 5.0
    promote: bool = True
    promote_max_store_bytes: int | None = None
    promote_min_free_bytes: int = 1 << 30
    load: bool = True
    save: bool = True
    save_decode: bool = False
    load_async: bool | None = None
    partial_chunks: bool = False
    chunk_size: int = CHUNK_TOKENS
    require_salt: bool = False
    allow_unverified: bool = False
    accept_unprobed: bool = False
    allow_lossy: bool = False
    encoding: str = "raw"
    durability: str = "none"
    max_pending_saves: int = 32
    load_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    hold_saves: bool = False
    model_name: str | None = None
    digest_cache: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ConnectorOptions:
        """From the engine's configuration. Raises `OptionError` that names the key and what is expected."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise OptionError(f"kv_connector_extra_config: unknown key {key!r}; {hint}")
        if not given.get("store"):
            raise OptionError('kv_connector_extra_config: "store" is missing; give the URL or path of a store')
        for key, value in given.items():
            _check(key, value)
        return cls(**{**given, "archive": _urls(given.get("archive"))})

    @property
    def chain_options(self) -> ChainOptions:
        """How `archive` is asked."""
        return ChainOptions.of(
            timeout_s=self.archive_timeout_s,
            promote=self.promote,
            promote_max_store_bytes=self.promote_max_store_bytes,
            promote_min_free_bytes=self.promote_min_free_bytes,
        )

    @property
    def durability_level(self) -> Durability:
        """`durability` as the store wants it."""
        return Durability[self.durability.upper()]


_KINDS: dict[str, tuple[type, ...]] = {
    "store": (str,),
    "archive": (str, list, tuple, type(None)),
    "archive_timeout_s": (int, float),
    "promote_max_store_bytes": (int, type(None)),
    "promote_min_free_bytes": (int,),
    "encoding": (str,),
    "durability": (str,),
    "model_name": (str, type(None)),
    "digest_cache": (str, type(None)),
    "load_async": (bool, type(None)),
    "chunk_size": (int,),
    "max_pending_saves": (int,),
    "load_timeout_s": (int, float),
    "lookup_timeout_s": (int, float),
}


_MAY_BE_ZERO = ("promote_max_store_bytes", "promote_min_free_bytes")


def _urls(given: Any) -> tuple[str, ...]:
    """One URL, or several. Raises `OptionError`."""
    urls = (given,) if isinstance(given, str) else tuple(given or ())
    for url in urls:
        if not isinstance(url, str) or not url:
            raise OptionError(f"kv_connector_extra_config: 'archive' has {url!r}; expected URLs or paths of stores")
    return urls


def _check(key: str, value: Any) -> None:
    kinds = _KINDS.get(key, (bool,))
    is_right = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    if not is_right:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise OptionError(f"kv_connector_extra_config: {key!r} is {value!r}; expected {names}")
    is_number = bool not in kinds and isinstance(value, int | float)
    if is_number and (value < 0 or (value == 0 and key not in _MAY_BE_ZERO)):
        least = "zero or more" if key in _MAY_BE_ZERO else "more than zero"
        raise OptionError(f"kv_connector_extra_config: {key!r} is {value!r}; expected {least}")
    if key == "durability" and value.upper() not in Durability.__members__:
        known = ", ".join(sorted(name.lower() for name in Durability.__members__))
        raise OptionError(f"kv_connector_extra_config: 'durability' is {value!r}; expected one of {known}")
