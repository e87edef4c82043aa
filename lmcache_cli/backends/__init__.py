"""Bytes to and from disk, memory and object stores, under one protocol.

Imports nothing of this project but itself; knows names and bytes, not what they mean. `protocol.py` is the interface,
`errors.py` the errors, `registry.py` finds the back-end of a URL, `tests/backends/contract.py` is what each must pass.
"""

from lmcache_cli.backends.errors import (
    AlreadyExists,
    BackendError,
    BadName,
    CircuitOpen,
    NoSpace,
    NotFound,
    Obstructed,
    RootChanged,
    ShortRead,
    Unavailable,
    Unsupported,
    VersionChanged,
)
from lmcache_cli.backends.head_last import HeadLast
from lmcache_cli.backends.protocol import STAGING_PREFIX, Backend, Capabilities, Durability, ObjectInfo, ReadHandle
from lmcache_cli.backends.registry import open_backend

__all__ = [
    "STAGING_PREFIX",
    "AlreadyExists",
    "Backend",
    "BackendError",
    "BadName",
    "Capabilities",
    "CircuitOpen",
    "Durability",
    "HeadLast",
    "NoSpace",
    "NotFound",
    "ObjectInfo",
    "Obstructed",
    "ReadHandle",
    "RootChanged",
    "ShortRead",
    "Unavailable",
    "Unsupported",
    "VersionChanged",
    "open_backend",
]
