"""Options of `lmcache warm` beside the model and the prompts, and what of them goes together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_cli.commands.command import Session, literal, utf8_text
from lmcache_cli.commands.model_options import check_pieces
from lmcache_cli.commands.quantity_options import duration_s
from lmcache_cli.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.store import Namespace, Store, WriterOptions

AT_ONCE = 4
PIECE_TOKENS = 1024


class EngineName(StrEnum):
    """Who computes."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class ProbeEngine(StrEnum):
    """Who is to load what is computed."""

    VLLM = "vllm"


class DurabilityName(StrEnum):
    """What a write waits for."""

    NONE = "none"
    DATA = "data"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """A running server that computes."""

    server_url: Annotated[
        str | None,
        typer.Option(
            "--server",
            parser=literal,
            metavar="URL",
            help="Have an OpenAI-compatible server compute, whose connector saves; http://127.0.0.1:8000/v1.",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        typer.Option("--served-name", parser=utf8_text, help="The model's name at the server.  [else: the only one]"),
    ] = None
    api_key_env: Annotated[
        str,
        typer.Option("--api-key-env", metavar="VARIABLE", help="Variable that holds the server's key, if it is set."),
    ] = "OPENAI_API_KEY"
    timeout_given_s: Annotated[
        int | None,
        typer.Option(
            "--timeout",
            parser=duration_s,
            metavar="DURATION",
            help="How long a prompt may take at a server, all tries.  [else: 10m]",
            show_default=False,
        ),
    ] = None

    @property
    def timeout_s(self) -> int:
        """How long a prompt may take at a server, all tries together."""
        return self.timeout_given_s or 600


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Who computes, and how much at a time."""

    engine_name: Annotated[
        EngineName | None,
        typer.Option("--engine", help="What computes.  [else: transformers, or the server's]", show_default=False),
    ] = None
    probe_engine: Annotated[
        ProbeEngine | None,
        typer.Option(
            "--probe-engine",
            help="First compare 512 tokens with what this engine computes: if they agree, it loads what is warmed.",
        ),
    ] = None
    engine_options: Annotated[
        str | None,
        typer.Option(
            "--engine-options",
            parser=utf8_text,
            metavar="JSON",
            help='vLLM\'s own, as of `LLM`: {"max_model_len": 8192}.',
        ),
    ] = None
    piece_tokens: Annotated[
        int | None,
        typer.Option(
            "--piece-tokens",
            min=1,
            help="Tokens computed in one pass; with transformers whole chunks.  [else: 1024, or vLLM's own choice]",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            min=1,
            help=f"Documents computed together.  [else: 1; {AT_ONCE} with vLLM and servers]",
            show_default=False,
        ),
    ] = None

    @property
    def engine(self) -> EngineName:
        """Who computes, where no server does."""
        return self.engine_name or EngineName.TRANSFORMERS

    @property
    def at_once(self) -> int:
        """Documents that vLLM or a server computes together."""
        return self.batch_size or AT_ONCE

    def check(self, server: ServerChoice, chunk_tokens: int, *, dry_run: bool) -> None:
        """Raises Refused for what does not go together."""
        is_ours = server.server_url is None and self.engine is EngineName.TRANSFORMERS
        if is_ours:
            check_pieces(self.piece_tokens or PIECE_TOKENS, chunk_tokens)
        if server.server_url is not None and self.engine_name is EngineName.TRANSFORMERS:
            raise Refused("a server computes, or transformers does", "leave out --server or --engine transformers")
        if server.server_url is not None and (self.piece_tokens or self.engine_options):
            raise Refused("--piece-tokens and --engine-options are the server's own", "set them where it is started")
        if self.probe_engine is not None and not is_ours:
            raise Refused("vLLM loads what it has computed itself, without a probe", "leave out --probe-engine")
        if self.probe_engine is not None and dry_run:
            raise Refused("a probe is no dry run: it is recorded", "leave out --dry-run or --probe-engine")
        if self.engine_options is not None and is_ours and self.probe_engine is None:
            raise Refused("--engine-options are vLLM's", "add --engine vllm, or leave them out")
        self.vllm_options()

    def vllm_options(self) -> dict[str, Any]:
        """What was given for vLLM itself. Raises Refused for what is no JSON object, or is not to be chosen."""
        try:
            value = json.loads(self.engine_options or "{}")
        except (ValueError, RecursionError) as problem:
            raise Refused(f"--engine-options is no JSON: {problem}") from None
        if not isinstance(value, dict):
            raise Refused(f"--engine-options is {type(value).__name__}; expected a JSON object")
        for key in ("model", "kv_transfer_config"):
            if key in value:
                raise Refused(f"--engine-options sets {key!r}, which this command does")
        return value


@dataclass(frozen=True, slots=True)
class WriteChoice:
    """How chunks are written."""

    codec: Annotated[str, typer.Option("--codec", help="How to store: raw, or a lossless encoding such as bfx.")] = (
        "raw"
    )
    durability: Annotated[
        DurabilityName, typer.Option("--durability", help="Whether a chunk that is done survives a power cut.")
    ] = DurabilityName.FULL
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Write the token ids into the files as well; off for privacy.")
    ] = False

    def check(self, choice: EngineChoice, server: ServerChoice) -> None:
        """Raises Refused for an unknown or lossy codec, and for what the one who writes does not do."""
        from lmcache_format.encodings import encoding_names, get_encoding
        from lmcache_format.errors import UnsupportedVersion

        try:
            encoding = get_encoding(self.codec)
        except UnsupportedVersion:
            lossless = ", ".join(name for name in encoding_names() if get_encoding(name).lossless)
            raise Refused(f"unknown codec {self.codec!r}", f"use one of {lossless}") from None
        if not encoding.lossless:
            raise Refused(f"codec {self.codec} loses precision", "warm with a lossless one, such as raw or bfx")
        if self.keep_tokens and (server.server_url is not None or choice.engine is EngineName.VLLM):
            raise Refused("the connector writes no token ids into files", "leave out --keep-tokens")
        if server.server_url is not None and (self.codec != "raw" or self.durability is not DurabilityName.FULL):
            raise Refused(
                "--codec and --durability are the server's own",
                'set "encoding" and "durability" in its kv_connector_extra_config',
            )

    def options(self) -> WriterOptions:
        """As the store wants them."""
        from lmcache_cli.backends import Durability
        from lmcache_cli.store import WriterOptions

        return WriterOptions(Durability(self.durability.value), encoding=self.codec, keep_tokens=self.keep_tokens)


@dataclass(frozen=True, slots=True)
class WarmJob:
    """What is to be warmed, and where to."""

    session: Session
    store: Store
    namespace: Namespace
    model: IdentifiedModel
    documents: Sequence[WarmDocument]
    choice: EngineChoice
    write: WriteChoice
    allow_unverified: bool
    revision: str | None
