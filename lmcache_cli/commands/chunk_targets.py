"""Chunks as people name them on the command line: a key, a document, or a prompt under a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.asked_prompt import AskedPrompt
from lmcache_cli.commands.command import literal, utf8_text
from lmcache_cli.commands.model_options import identify_model, tokenize
from lmcache_cli.errors import Refused

if TYPE_CHECKING:
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.store import Store
    from lmcache_cli.store.targets import NamedChunk
    from lmcache_format import Fingerprint, Identity

LEAST_KEY_DIGITS = 8

Prompt = Annotated[str | None, typer.Option("--prompt", parser=utf8_text, help="The chunks of this text.")]
PromptFile = Annotated[
    str | None, typer.Option("--prompt-file", parser=literal, metavar="FILE", help="The same for a file of text.")
]
TokensFile = Annotated[
    str | None,
    typer.Option("--tokens", parser=literal, metavar="FILE.json", help="The same for a JSON list of token ids."),
]
NamespaceStart = Annotated[
    str | None, typer.Option("--namespace", parser=literal, metavar="START", help="Only the namespace that starts so.")
]
DocumentName = Annotated[
    str | None, typer.Option("--document", parser=utf8_text, metavar="NAME", help="The document of that name.")
]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model a prompt is for, as given."""

    model: str | None
    name: str | None
    revision: str | None
    dtype: str | None
    chunk_tokens: int
    allow_unverified: bool

    def read(self, asked: AskedPrompt) -> tuple[Identity, WarmDocument]:
        """The identity and the token ids of a prompt. Raises Refused where no model is named."""
        if self.model is None:
            raise Refused("a prompt is looked up for a model, and none is named", "pass --model DIR")
        prompt = asked.read()
        identified = identify_model(
            self.model,
            name=self.name,
            revision=self.revision,
            dtype=self.dtype,
            chunk_tokens=self.chunk_tokens,
            allow_unverified=self.allow_unverified,
        )
        (document,) = tokenize(identified, [prompt], as_chat=asked.as_chat)
        return identified.identity, document


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
        raise Refused(f"expected at least {LEAST_KEY_DIGITS} digits of a key, found {start!r}", "write more of it")
    return key
