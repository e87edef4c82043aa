"""The formats that shards can be migrated to: a module for each, with one entry here.

What a format is, says `format/SPEC.md`. Here is only how a whole, verified shard becomes one of it. A release that
brings a new format adds its module and its entry.
"""

from __future__ import annotations

from lmcache_cli.store.errors import Refused

from .format_1 import FORMAT_1
from .target_format import TargetFormat

__all__ = ["FORMATS", "TargetFormat", "resolve_format"]

FORMATS: dict[int, TargetFormat] = {one.version: one for one in (FORMAT_1,)}


def resolve_format(text: str) -> TargetFormat:
    """The format of that number. Raises `Refused`, which names those there are."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
    found = None if number is None else FORMATS.get(number)
    if found is None:
        known = ", ".join(map(str, sorted(FORMATS)))
        raise Refused(
            f"expected --to-format to be a format that this release can write ({known}), found {text!r}",
            next_step=f"write --to-format {max(FORMATS)}, or use a newer release of lmcache-toolkit",
        )
    return found
