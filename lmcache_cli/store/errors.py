"""What can stop an operation on a store. A miss is no error; damage of single shards is reported, not raised.

::

    StoreError
    ├── NoStore           there is no store at the URL
    ├── StoreExists       there is one already, where a new one was to be made
    ├── StoreTooNew       the store needs a newer release for what was asked
    ├── StoreDamaged      the superblock or an identity cannot be trusted
    ├── NoSuchNamespace   the store has no namespace of that fingerprint
    ├── Refused           the operation would break a rule of the format; nothing was done
    └── IncompleteListing the back-end listed less than the manifest knows; nothing may be concluded
"""

from __future__ import annotations


class StoreError(Exception):
    """Root; `next_step` tells what to do about it."""

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class NoStore(StoreError):
    """There is no store at the URL."""


class StoreExists(StoreError):
    """There is a store at the URL already."""


class StoreTooNew(StoreError):
    """The store needs a newer release for what was asked."""


class StoreDamaged(StoreError):
    """The superblock or an identity cannot be trusted."""


class NoSuchNamespace(StoreError):
    """The store has no namespace of that fingerprint."""


class Refused(StoreError):
    """The operation would break a rule of the format; nothing was done."""


class IncompleteListing(StoreError):
    """The back-end listed less than the manifest knows; nothing may be concluded from it."""
