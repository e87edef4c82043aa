"""`lmcache warm`: compute the KV of documents and keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command
from lmcache_cli.commands.model_options import (
    AllowUnverified,
    ChatTemplate,
    ChunkTokens,
    Documents,
    KvDtype,
    MoreDocuments,
    Name,
    PerhapsModel,
    Prompts,
    Revision,
    Salt,
    identify_model,
    read_all_prompts,
    tokenize,
)
from lmcache_cli.commands.quantity_options import duration_s
from lmcache_cli.commands.warm_options import (
    PIECE_TOKENS,
    EngineChoice,
    EngineName,
    ServerChoice,
    WarmJob,
    WriteChoice,
)
from lmcache_cli.commands.warm_reports import show_plan, show_result
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lmcache_cli.integration.producer import Producer
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.store import Namespace
    from lmcache_format import Identity


@command(
    examples=(
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt faq.txt",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --prompts prompts.jsonl --chat-template",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --pin --ttl 7d",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --dry-run",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --probe-engine vllm",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --documents handbook.txt --engine vllm",
        "lmcache warm --store /srv/kv --model ./SmolLM2 --prompts prompts.jsonl --server http://127.0.0.1:8000/v1",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.INTERRUPTED),
)
def warm(
    session: Session,
    model: PerhapsModel = None,
    documents: Documents = None,
    more_documents: MoreDocuments = None,
    prompts: Prompts = None,
    *,
    choice: EngineChoice,
    server: ServerChoice,
    chat_template: ChatTemplate = False,
    salt: Salt = None,
    name: Name = None,
    revision: Revision = None,
    dtype: KvDtype = None,
    chunk_tokens: ChunkTokens = 256,
    write: WriteChoice,
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
    loses nothing: run the same command again. With --engine vllm, or a server that runs the connector, it is vLLM that
    computes and saves; what transformers computes vLLM loads once --probe-engine has found both alike.
    """
    choice.check(server, chunk_tokens, dry_run=dry_run)
    write.check(choice, server)
    if ttl is not None and not pin:
        raise Refused("--ttl without --pin", "add --pin, or leave it out")
    if model is None:
        if server.server_url is None:
            raise Refused("no model is named", "pass --model DIR, or --server URL to have a server compute")
        from lmcache_cli.commands.warm_server import ask_unseen

        if pin or dry_run or not resume:
            raise Refused("without --model nobody can tell what of a prompt is present", "pass --model DIR")
        asked = read_all_prompts(documents, more_documents, prompts, salt)
        return ask_unseen(session, server, choice, asked, as_chat=chat_template)
    url = session.settings.required_store()
    found = read_all_prompts(documents, more_documents, prompts, salt)

    from lmcache_cli.store import Store

    with Store.open(url) as store:
        identified = identify_model(
            model,
            name=name,
            revision=revision,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            allow_unverified=allow_unverified,
            with_latents=server.server_url is not None or choice.engine is EngineName.VLLM,
        )
        todo = tokenize(identified, found, as_chat=chat_template)
        with store.namespace(
            identified.identity,
            create=not dry_run,
            missing_ok=dry_run,
            allow_unverified=allow_unverified,
            writer=write.options(),
        ) as namespace:
            if not resume and not dry_run:
                _refuse_unfinished(namespace, todo)
            job = WarmJob(session, store, namespace, identified, todo, choice, write, allow_unverified, revision)
            if server.server_url is not None:
                from lmcache_cli.commands.warm_server import ask_server

                ending = ask_server(job, server, found, as_chat=chat_template, dry_run=dry_run)
            elif choice.engine is EngineName.VLLM:
                from lmcache_cli.commands.warm_vllm import warm_with_vllm

                ending = warm_with_vllm(job, dry_run=dry_run)
            else:
                ending = _warm_with_transformers(job, dry_run=dry_run)
            if pin and not dry_run:
                _pin(namespace, todo, None if ttl is None else store.backend.now_ms() + ttl * 1000)
            return ending


def _pin(namespace: Namespace, documents: Sequence[WarmDocument], expires_ms: int | None) -> None:
    """Pin what is present of every document, which is all of it unless it failed."""
    for document in documents:
        chunks = namespace.match(document.tokens, salt=document.salt).chunks()
        if chunks:
            namespace.pin(chunks[-1].key, expires_ms)
    namespace.flush()


def _refuse_unfinished(namespace: Namespace, documents: Sequence[WarmDocument]) -> None:
    for document in documents:
        present = namespace.match(document.tokens, salt=document.salt).num_tokens
        if 0 < present < len(document.tokens):
            raise Refused(
                f"{document.name}: {present} of {len(document.tokens)} tokens are present from an earlier run",
                "leave out --no-resume to go on with it",
            )


def _load_engine(engine: EngineName, directory: Path, identity: Identity, piece_tokens: int) -> Producer:
    assert engine is EngineName.TRANSFORMERS
    from lmcache_cli.integration.transformers.engine import TransformersEngine

    return TransformersEngine.load(directory, identity, piece_tokens=piece_tokens)


def _warm_with_transformers(job: WarmJob, *, dry_run: bool) -> ExitCode:
    from lmcache_cli.integration.warming import measure_tokens_per_s, warm

    loaded: list[Producer] = []

    def load() -> Producer:
        if not loaded:
            identity = job.model.identity
            job.session.output.note(f"loading {identity.model}")
            pieces = job.choice.piece_tokens or PIECE_TOKENS
            loaded.append(_load_engine(EngineName.TRANSFORMERS, job.model.directory, identity, pieces))
        return loaded[0]

    if dry_run:
        return show_plan(job, lambda tokens: measure_tokens_per_s(load(), tokens))
    if job.choice.probe_engine is not None:
        from lmcache_cli.commands.warm_vllm import probe_with_vllm

        probe_with_vllm(job, load)
    total = sum(len(document.tokens) for document in job.documents)
    with job.session.output.progress("warm", total=total, unit="tokens") as meter:
        report = warm(
            job.namespace,
            load,
            job.documents,
            batch_size=job.choice.batch_size or 1,
            keep_tokens=job.write.keep_tokens,
            progress=meter.advance,
        )
    return show_result(job, report)
