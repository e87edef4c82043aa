"""`lmcache warm --server`: a running server computes, its connector saves, and the store is asked what arrived."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from lmcache_cli.commands.warm_reports import show_plan, show_result
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.settings import secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_cli.commands.command import Session
    from lmcache_cli.commands.warm_options import EngineChoice, ServerChoice, WarmJob
    from lmcache_cli.integration.openai_server import OpenAIServer, ServerAsker
    from lmcache_cli.integration.producer import TokenIds
    from lmcache_cli.integration.prompts import Prompt


def ask_server(
    job: WarmJob, choice: ServerChoice, prompts: Sequence[Prompt], *, as_chat: bool, dry_run: bool
) -> ExitCode:
    """Have a server compute what is missing in the store, and wait until it is there."""
    from lmcache_cli.integration.asked_warming import warm_through

    if dry_run:
        return show_plan(job, None)
    chats = [_as_chat(prompt) if as_chat else prompt for prompt in prompts]
    guesses = [number for number, prompt in enumerate(chats) if prompt.messages is not None]
    tokens = [document.tokens for document in job.documents]
    asker = _asker(choice, job.choice, chats, tokens)
    total = sum(map(len, tokens))
    with closing(asker), job.session.output.progress("warm", total=total, unit="tokens") as meter:
        report = warm_through(
            job.namespace, lambda: asker, job.documents, saves_tails=False, guesses=guesses, progress=meter.advance
        )
    return show_result(job, report)


def ask_unseen(
    session: Session, choice: ServerChoice, engine: EngineChoice, prompts: Sequence[Prompt], *, as_chat: bool
) -> ExitCode:
    """Have a server compute prompts that nobody here can tokenise; a store, where one is named, is counted alone."""
    from lmcache_cli.integration.asked_warming import count_shards, wait_for_shards
    from lmcache_cli.store import Store

    store = None if session.settings.store is None else Store.open(session.settings.store)
    before = 0 if store is None else count_shards(store)
    started, num_tokens, num_failed = time.perf_counter(), 0, 0
    chats = [_as_chat(prompt) if as_chat else prompt for prompt in prompts]
    asker = _asker(choice, engine, chats, [prompt.tokens for prompt in chats])
    with closing(asker), session.output.progress("warm", total=len(prompts), unit="prompts") as meter:
        for asked in asker.ask(range(len(prompts))):
            num_tokens += asked.num_tokens
            if asked.problem:
                num_failed += 1
                session.output.warning(f"{prompts[asked.number].name}: {asked.problem}")
            meter.advance(1)
    text = "{num_computed} of {num_documents} prompts computed, {num_tokens} tokens, in {elapsed_s}"
    counts: dict[str, int] = {}
    if store is not None:
        session.output.note("waiting until the store grows no more")
        with store:
            counts = {"shards_before": before, "shards_after": wait_for_shards(store, before)}
        text += "; the store had {shards_before} shards and has {shards_after}"
    session.output.summary(
        text,
        num_documents=len(prompts),
        num_computed=len(prompts) - num_failed,
        num_failed=num_failed,
        num_tokens=num_tokens,
        elapsed_s=time.perf_counter() - started,
        **counts,
    )
    return ExitCode.DAMAGE if num_failed else ExitCode.OK


def _asker(
    choice: ServerChoice, engine: EngineChoice, prompts: Sequence[Prompt], tokens: Sequence[TokenIds | None]
) -> ServerAsker:
    """Raises `ServerRefused`, `ServerUnavailable`."""
    from lmcache_cli.integration.openai_server import ServerAsker

    server = _server(choice)
    return ServerAsker(server, server.choose(choice.served_name), prompts, tokens, at_once=engine.at_once)


def _server(choice: ServerChoice) -> OpenAIServer:
    from lmcache_cli.integration.openai_server import OpenAIServer

    assert choice.server_url is not None
    return OpenAIServer(choice.server_url, api_key=secret(choice.api_key_env), timeout_s=choice.timeout_s)


def _as_chat(prompt: Prompt) -> Prompt:
    """Plain text as one message of a user."""
    from lmcache_cli.integration.prompts import Prompt

    if prompt.text is None:
        return prompt
    return Prompt(prompt.name, messages=({"role": "user", "content": prompt.text},), salt=prompt.salt)
