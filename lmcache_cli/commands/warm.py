"""`lmcache warm`: compute the KV of documents and keep it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command
from lmcache_cli.commands.model_options import (
    AllowUnverified,
    ChatTemplate,
    ChunkTokens,
    Documents,
    KvDtype,
    Model,
    MoreDocuments,
    Name,
    PieceTokens,
    Prompts,
    Revision,
    Salt,
    check_pieces,
    identify_model,
    read_all_prompts,
    tokenize,
)
from lmcache_cli.commands.quantity_options import duration_s
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lmcache_cli.integration.producer import Producer
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.store import Namespace
    from lmcache_format import Identity

PLAN_COLUMNS = ("name", "num_tokens", "present_tokens", "shared_tokens", "tokens_to_compute", "bytes_to_write")


class EngineName(StrEnum):
    """Who computes."""

    TRANSFORMERS = "transformers"


class DurabilityName(StrEnum):
    """What a write waits for."""

    NONE = "none"
    DATA = "data"
    FULL = "full"


@command(
    examples=(
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt faq.txt",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --prompts prompts.jsonl --chat-template",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --pin --ttl 7d",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --dry-run",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.INTERRUPTED),
)
def warm(
    session: Session,
    model: Model,
    documents: Documents = None,
    more_documents: MoreDocuments = None,
    prompts: Prompts = None,
    engine: Annotated[EngineName, typer.Option("--engine", help="What computes.")] = EngineName.TRANSFORMERS,
    chat_template: ChatTemplate = False,
    salt: Salt = None,
    name: Name = None,
    revision: Revision = None,
    dtype: KvDtype = None,
    chunk_tokens: ChunkTokens = 256,
    piece_tokens: PieceTokens = 1024,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Documents computed together.")] = 1,
    codec: Annotated[
        str, typer.Option("--codec", help="How to store: raw, or a lossless encoding such as bfx.")
    ] = "raw",
    durability: Annotated[
        DurabilityName, typer.Option("--durability", help="Whether a chunk that is done survives a power cut.")
    ] = DurabilityName.FULL,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Write the token ids into the files as well; off for privacy.")
    ] = False,
    allow_unverified: AllowUnverified = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on where an earlier run stopped; without, refuse if one did."),
    ] = True,
    pin: Annotated[bool, typer.Option("--pin", help="Keep what is warmed from being pruned.")] = False,
    ttl: Annotated[
        int | None,
        typer.Option("--ttl", parser=duration_s, metavar="DURATION", help="Let pins go after so long: 7d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be computed and written, and how long it takes.")
    ] = False,
) -> ExitCode:
    """Compute the KV caches of documents and prompts, and keep them in the store.

    What is present is never computed again, and a beginning that documents share is computed once. An interrupted run
    loses nothing: run the same command again.
    """
    from lmcache_cli.backends import Durability
    from lmcache_cli.store import Store, WriterOptions

    url = session.settings.required_store()
    check_pieces(piece_tokens, chunk_tokens)
    if ttl is not None and not pin:
        raise Refused("--ttl without --pin", "add --pin, or leave it out")
    _check_codec(codec)
    found = read_all_prompts(documents, more_documents, prompts, salt)
    with Store.open(url) as store:
        identified = identify_model(
            model,
            name=name,
            revision=revision,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            allow_unverified=allow_unverified,
        )
        todo = tokenize(identified, found, as_chat=chat_template)
        options = WriterOptions(Durability(durability.value), encoding=codec, keep_tokens=keep_tokens)
        with store.namespace(
            identified.identity,
            create=not dry_run,
            missing_ok=dry_run,
            allow_unverified=allow_unverified,
            writer=options,
        ) as namespace:

            def load() -> Producer:
                session.output.note(f"loading {identified.identity.model}")
                return _load_engine(engine, identified.directory, identified.identity, piece_tokens)

            if dry_run:
                return _dry_run(session, namespace, load, todo)
            if not resume:
                _refuse_unfinished(namespace, todo)
            ending = _warm(session, namespace, load, todo, batch_size=batch_size, keep_tokens=keep_tokens)
            if pin:
                _pin(namespace, todo, None if ttl is None else store.backend.now_ms() + ttl * 1000)
            return ending


def _pin(namespace: Namespace, documents: Sequence[WarmDocument], expires_ms: int | None) -> None:
    """Pin what is present of every document, which is all of it unless it failed."""
    for document in documents:
        chunks = namespace.match(document.tokens, salt=document.salt).chunks()
        if chunks:
            namespace.pin(chunks[-1].key, expires_ms)
    namespace.flush()


def _check_codec(codec: str) -> None:
    from lmcache_format.encodings import encoding_names, get_encoding
    from lmcache_format.errors import UnsupportedVersion

    try:
        encoding = get_encoding(codec)
    except UnsupportedVersion:
        raise Refused(f"unknown codec {codec!r}", f"use one of {', '.join(encoding_names())}") from None
    if not encoding.lossless:
        raise Refused(f"codec {codec} loses precision", "warm with a lossless one, such as raw or bfx")


def _load_engine(engine: EngineName, directory: Path, identity: Identity, piece_tokens: int) -> Producer:
    match engine:
        case EngineName.TRANSFORMERS:
            from lmcache_cli.integration.transformers.engine import TransformersEngine

            return TransformersEngine.load(directory, identity, piece_tokens=piece_tokens)


def _refuse_unfinished(namespace: Namespace, documents: Sequence[WarmDocument]) -> None:
    for document in documents:
        present = namespace.match(document.tokens, salt=document.salt).num_tokens
        if 0 < present < len(document.tokens):
            raise Refused(
                f"{document.name}: {present} of {len(document.tokens)} tokens are present from an earlier run",
                "leave out --no-resume to go on with it",
            )


def _dry_run(
    session: Session, namespace: Namespace, load: Callable[[], Producer], documents: Sequence[WarmDocument]
) -> ExitCode:
    from lmcache_cli.integration.warming import measure_tokens_per_s, plan

    planned = list(plan(namespace, documents))
    session.output.table("warm_plan", planned, columns=PLAN_COLUMNS)
    to_compute = sum(one.tokens_to_compute for one in planned)
    speed = None
    if to_compute:
        longest = max(documents, key=lambda document: len(document.tokens))
        speed = measure_tokens_per_s(load(), longest.tokens)
    session.output.summary(
        "{num_documents} documents: {tokens_to_compute} of {num_tokens} tokens to compute, {bytes_to_write} to write,"
        " about {estimated_s}; nothing was written",
        num_documents=len(planned),
        num_tokens=sum(one.num_tokens for one in planned),
        tokens_to_compute=to_compute,
        bytes_to_write=sum(one.bytes_to_write for one in planned),
        estimated_s=to_compute / speed if speed else 0.0,
        tokens_per_s=speed,
    )
    return ExitCode.OK


def _warm(
    session: Session,
    namespace: Namespace,
    load: Callable[[], Producer],
    documents: Sequence[WarmDocument],
    *,
    batch_size: int,
    keep_tokens: bool,
) -> ExitCode:
    from lmcache_cli.integration.warming import warm as warm_documents

    total = sum(len(document.tokens) for document in documents)
    with session.output.progress("warm", total=total, unit="tokens") as meter:
        report = warm_documents(
            namespace, load, documents, batch_size=batch_size, keep_tokens=keep_tokens, progress=meter.advance
        )
    for name, reason in report.failures:
        session.output.warning(f"{name}: {reason}")
    session.output.summary(
        "{num_complete} of {num_documents} documents are in the store: {tokens_computed} tokens computed,"
        " {tokens_present} were present, {chunks_stored} chunks and {bytes_written} written in {elapsed_s}",
        namespace=namespace.fingerprint,
        num_documents=report.num_documents,
        num_complete=report.num_complete,
        num_failed=len(report.failures),
        num_tokens=report.num_tokens,
        tokens_computed=report.tokens_computed,
        tokens_present=report.tokens_present,
        chunks_stored=report.chunks_stored,
        bytes_written=report.bytes_written,
        elapsed_s=report.seconds,
    )
    return ExitCode.DAMAGE if report.num_complete < report.num_documents else ExitCode.OK
