"""A prompt that a command is about, and the model it is for, as given on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import literal, utf8_text
from lmcache_cli.commands.model_options import (
    AllowUnverified,
    ChatTemplate,
    ChunkTokens,
    KvDtype,
    Name,
    PerhapsModel,
    Revision,
    Salt,
    identify_model,
    tokenize,
)
from lmcache_cli.errors import Refused

if TYPE_CHECKING:
    from lmcache_cli.integration.prompts import Prompt
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_format import Identity


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """The options that name a prompt: at most one of the first three is given."""

    text: Annotated[str | None, typer.Option("--prompt", parser=utf8_text, help="A prompt: this text.")] = None
    text_file: Annotated[
        str | None, typer.Option("--prompt-file", parser=literal, metavar="FILE", help="A prompt: a file of text.")
    ] = None
    tokens_file: Annotated[
        str | None,
        typer.Option("--tokens", parser=literal, metavar="FILE.json", help="A prompt: a JSON list of token ids."),
    ] = None
    as_chat: ChatTemplate = False
    salt: Salt = None

    @property
    def is_given(self) -> bool:
        """True where there is a prompt to look up. Raises Refused where there is more than one."""
        given = [one for one in (self.text, self.text_file, self.tokens_file) if one is not None]
        if len(given) > 1:
            raise Refused("--prompt, --prompt-file and --tokens exclude each other", "leave all but one of them out")
        return bool(given)

    def read(self) -> Prompt:
        """The prompt itself. Raises `PromptError`."""
        from lmcache_cli.integration.prompts import Prompt, read_documents, read_tokens

        if self.tokens_file is not None:
            return read_tokens(self.tokens_file, self.salt)
        if self.text_file is not None:
            return next(read_documents([self.text_file], self.salt))
        return Prompt("--prompt", text=self.text, salt=self.salt)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The options that name the model of a prompt."""

    model: PerhapsModel = None
    name: Name = None
    revision: Revision = None
    dtype: KvDtype = None
    chunk_tokens: ChunkTokens = 256
    allow_unverified: AllowUnverified = False

    def required(self) -> str:
        """The model as named. Raises Refused where none is."""
        if self.model is None:
            raise Refused("a prompt is looked up for a model, and none is named", "pass --model DIR")
        return self.model

    def refuse_without(self, asked: AskedPrompt) -> None:
        """Raises Refused where a model is named and no prompt for it."""
        if self.model is not None and not asked.is_given:
            raise Refused("--model without a prompt", "add --prompt, --prompt-file or --tokens")

    def read(self, asked: AskedPrompt) -> tuple[Identity, WarmDocument]:
        """The identity and the token ids of a prompt. Raises Refused where no model is named or the prompt is
        empty, and `PromptError`."""
        model = self.required()
        prompt = asked.read()
        identified = identify_model(
            model,
            name=self.name,
            revision=self.revision,
            dtype=self.dtype,
            chunk_tokens=self.chunk_tokens,
            allow_unverified=self.allow_unverified,
            with_latents=True,
        )
        (document,) = tokenize(identified, [prompt], as_chat=asked.as_chat)
        if not len(document.tokens):
            raise Refused(f"{prompt.name}: the prompt is empty", "name one with a token at least")
        return identified.identity, document
