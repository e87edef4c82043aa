"""Options of the commands that work through shards: which ones, for how long, and with which codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.quantity_options import duration_s
from lmcache_cli.errors import Refused

if TYPE_CHECKING:
    from lmcache_cli.store.selection import Selection
    from lmcache_format.encodings import Encoding

_KINDS = ("model", "namespace", "encoding")

Filters = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="KIND=GLOB",
        help="Only what matches: model=org/*, namespace=3f9a*, encoding=raw. May be given several times.",
    ),
]
OlderThan = Annotated[
    int | None,
    typer.Option("--older-than", parser=duration_s, metavar="DURATION", help="Only chunks written that long ago: 30d."),
]
UnusedFor = Annotated[
    int | None,
    typer.Option("--unused-for", parser=duration_s, metavar="DURATION", help="Only chunks not used for so long: 7d."),
]
MaxDuration = Annotated[
    int | None,
    typer.Option(
        "--max-duration", parser=duration_s, metavar="DURATION", help="Begin nothing new after so long; exit code 3."
    ),
]


def selection_of(filters: Sequence[str] | None, older_than: int | None, unused_for: int | None) -> Selection:
    """What the options choose. Raises Refused for a filter that is none."""
    from lmcache_cli.store.selection import Selection

    patterns: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for text in filters or ():
        kind, equals, pattern = text.partition("=")
        if kind not in patterns or not equals or not pattern:
            raise Refused(f"expected a filter such as model=org/*, found {text!r}", f"kinds are {', '.join(_KINDS)}")
        patterns[kind].append(pattern.lower() if kind == "namespace" else pattern)
    return Selection(
        models=tuple(patterns["model"]),
        namespaces=tuple(patterns["namespace"]),
        encodings=tuple(patterns["encoding"]),
        older_than_ms=None if older_than is None else older_than * 1000,
        unused_for_ms=None if unused_for is None else unused_for * 1000,
    )


def encoding_of(codec: str | None) -> Encoding | None:
    """The encoding a person named. Raises Refused for one this release does not know."""
    from lmcache_format.encodings import encoding_names, resolve_encoding
    from lmcache_format.errors import UnsupportedVersion

    if codec is None:
        return None
    try:
        return resolve_encoding(codec)
    except UnsupportedVersion:
        known = ", ".join(encoding_names())
        raise Refused(f"there is no codec {codec!r}", f"choose one of {known}, or uq:0.25 and the like") from None
