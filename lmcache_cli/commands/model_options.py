"""Options of every command that works with a model and prompts, and what they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import literal, utf8_text
from lmcache_cli.errors import Refused
from lmcache_cli.rendering import as_utf8
from lmcache_cli.settings import user_cache_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_cli.integration.prompts import Prompt
    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_cli.integration.transformers.prompt_tokens import PromptTokens
    from lmcache_cli.integration.warming import WarmDocument

_MODEL = typer.Option(
    "--model", parser=literal, metavar="DIR|ID", help="Model directory, or hub name of one on this machine."
)
Model = Annotated[str, _MODEL]
PerhapsModel = Annotated[str | None, _MODEL]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", parser=utf8_text, help="Readable name of the model.  [else: the one its configuration records]"
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", parser=literal, help="Snapshot of a hub name, best a full commit.")
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", parser=literal, metavar="BF16|F16|F32", help="Compute and cache in this type.  [else: as saved]"
    ),
]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", min=1, max=65_536, help="Tokens of a chunk.")]
AllowUnverified = Annotated[
    bool, typer.Option("--allow-unverified", help="Accept weights that are known by name only.")
]
Documents = Annotated[
    list[str] | None,
    typer.Option("--documents", "--document", parser=literal, metavar="FILE", help="UTF-8 text; more may follow it."),
]
MoreDocuments = Annotated[list[str] | None, typer.Argument(parser=literal, metavar="[FILE]...", help="More documents.")]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        parser=literal,
        metavar="FILE.jsonl",
        help="A JSON object a line: prompt, messages or tokens; perhaps name and salt.",
    ),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="Render plain text as one message of a user, as a server would.")
]
Salt = Annotated[
    str | None, typer.Option("--salt", parser=utf8_text, help="Tenant's salt; only its digest is ever stored.")
]
PieceTokens = Annotated[int, typer.Option("--piece-tokens", min=1, help="Tokens computed in one pass; whole chunks.")]


def identify_model(
    model: str,
    *,
    name: str | None,
    revision: str | None,
    dtype: str | None,
    chunk_tokens: int,
    allow_unverified: bool,
    with_latents: bool = False,
) -> IdentifiedModel:
    """The model on this machine and its identity. `with_latents`: vLLM is to compute, or nothing. Raises Refused for an
    unknown dtype, and what `identify` raises."""
    from lmcache_cli.integration.transformers.model_identity import identify
    from lmcache_format.dtypes import Dtype

    try:
        wanted = None if dtype is None else Dtype(dtype.upper())
    except ValueError:
        raise Refused(f"unknown type {dtype!r}", "use BF16, F16 or F32") from None
    return identify(
        model,
        name=name,
        revision=revision,
        dtype=wanted,
        chunk_tokens=chunk_tokens,
        allow_unverified=allow_unverified,
        with_latents=with_latents,
        cache_dir=user_cache_dir(),
    )


def check_pieces(piece_tokens: int, chunk_tokens: int) -> None:
    """Raises Refused unless a piece holds whole chunks."""
    if piece_tokens % chunk_tokens:
        raise Refused(
            f"--piece-tokens {piece_tokens} is no multiple of --chunk-tokens {chunk_tokens}",
            f"pass --piece-tokens {max(piece_tokens // chunk_tokens, 1) * chunk_tokens}",
        )


def read_all_prompts(
    documents: Sequence[str] | None, more: Sequence[str] | None, prompts: str | None, salt: str | None
) -> list[Prompt]:
    """Documents, then the lines of a prompt file. Raises Refused where nothing is named."""
    from lmcache_cli.integration.prompts import read_documents, read_prompts

    found = list(read_documents([*(documents or ()), *(more or ())], salt))
    if prompts is not None:
        found += read_prompts(prompts, salt)
    if not found and prompts is not None:
        raise Refused(f"{prompts}: no prompt is in the file", "write a JSON object a line")
    if not found:
        raise Refused("no documents and no prompts are named", "pass --documents FILE or --prompts FILE.jsonl")
    return [replace(prompt, name=as_utf8(prompt.name)) for prompt in found]  # a file has one name from every locale


def tokenize(model: IdentifiedModel, prompts: Sequence[Prompt], *, as_chat: bool) -> list[WarmDocument]:
    """Token ids of every prompt under the model's own tokenizer."""
    from lmcache_cli.integration.warming import WarmDocument

    tokenizer = None
    documents = []
    for prompt in prompts:
        if prompt.tokens is not None:
            tokens = prompt.tokens
        else:
            tokenizer = tokenizer or _load_tokenizer(model)
            tokens = prompt.token_ids(tokenizer, as_chat=as_chat)
        documents.append(WarmDocument(prompt.name, tokens, prompt.salt))
    return documents


def _load_tokenizer(model: IdentifiedModel) -> PromptTokens:
    from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens

    return load_prompt_tokens(model.directory, user_cache_dir())
