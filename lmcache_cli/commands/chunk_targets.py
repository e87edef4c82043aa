"""Chunks as people name them on the command line: by a key, or by a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.asked_prompt import AskedPrompt
from lmcache_cli.commands.command import literal, utf8_text
from lmcache_cli.errors import Refused

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.targets import NamedChunk
    from lmcache_format import Fingerprint

LEAST_KEY_DIGITS = 8

NamespaceStart = Annotated[
    str | None, typer.Option("--namespace", parser=literal, metavar="START", help="Only the namespace that starts so.")
]
DocumentName = Annotated[
    str | None, typer.Option("--document", parser=utf8_text, metavar="NAME", help="The document of that name.")
]


def one_of(target: str | None, document: str | None, asked: AskedPrompt) -> None:
    """Raises Refused unless exactly one thing is named."""
    num_named = (target is not None) + (document is not None) + asked.is_given
    if num_named != 1:
        raise Refused(
            "expected one thing to be named, found " + ("none" if not num_named else "several"),
            "give the start of a key, --document NAME, or a prompt: --prompt, --prompt-file, --tokens",
        )


def chunk_with_key(store: Store, start: str, namespace: Fingerprint | None) -> NamedChunk:
    """The one chunk whose key starts so. Raises Refused."""
    from lmcache_cli.store.targets import chunks_by_key

    key = checked_key(start)
    found = chunks_by_key(store, key, namespace)
    if len(found) != 1:
        raise Refused(
            f"{len(found)} chunks start with {key!r} in {store.url}",
            "write more of the key" if found else "run 'lmcache ls NAMESPACE' to see the keys",
        )
    return found[0]


def checked_key(start: str) -> str:
    """The start of a key in small letters. Raises Refused for what is none, or too short to be meant."""
    key = start.lower()
    if not key or set(key) - set("0123456789abcdef") or len(key) > 64:
        raise Refused(f"expected the start of a key, found {start!r}", "keys are written in hexadecimal digits")
    if len(key) < LEAST_KEY_DIGITS:
        raise Refused(
            f"expected at least {LEAST_KEY_DIGITS} digits of a key, found {start!r}",
            "write more of it; 'lmcache ls' shows namespaces, 'lmcache ls NAMESPACE' keys",
        )
    return key
