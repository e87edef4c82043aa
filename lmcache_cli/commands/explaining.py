"""The answer to why a prompt would miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.command import Session
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import fields_of

if TYPE_CHECKING:
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.store import Store
    from lmcache_cli.store.chain import Answer
    from lmcache_cli.store.explain import Explanation
    from lmcache_format import Identity

ANSWER_COLUMNS = ("store", "start", "stop", "num_tokens")
DIFFERENCE_COLUMNS = ("namespace", "model", "hit_tokens", "field", "wanted", "stored")


def explain_miss(session: Session, asked: AskedPrompt, choice: ModelChoice, archives: Sequence[str]) -> ExitCode:
    """Prints how much of the prompt would hit under the model, and what differs where it does not; with `archives`
    behind the store, which of them would answer."""
    from lmcache_cli.store import Store
    from lmcache_cli.store.explain import explain_prompt

    choice.required()
    with Store.open(session.settings.required_store()) as store:
        identity, document = choice.read(asked)
        explanation = explain_prompt(store, identity, document.tokens, document.salt)
        if archives:
            answers = _answers(session, store, archives, identity, document)
    shown = fields_of(explanation)
    if not session.output.json_lines:
        del shown["sentences"], shown["elsewhere"]  # they follow as the summary and as a table
    session.output.record("explanation", shown)
    if explanation.elsewhere and not session.output.json_lines:
        session.output.table("difference", _differences(explanation), columns=DIFFERENCE_COLUMNS)
    chain = {}
    if archives:
        session.output.table("answer", map(_described_answer, answers), columns=ANSWER_COLUMNS)
        chain = {"chain_hit_tokens": answers[-1].stop if answers else 0}
    with_archives = "; with the archives {chain_hit_tokens} tokens hit" if archives else ""
    session.output.summary(
        "{explanation}" + with_archives,
        **chain,
        explanation="; ".join(explanation.sentences),
        num_tokens=explanation.num_tokens,
        hit_tokens=explanation.hit_tokens,
        cause=explanation.cause,
    )
    return ExitCode.OK


def _answers(
    session: Session, store: Store, archives: Sequence[str], identity: Identity, document: WarmDocument
) -> list[Answer]:
    """Changes nothing, and asks each archive within its deadline."""
    from lmcache_cli.store.chain import StoreChain

    chain = StoreChain(store, archives)
    try:
        with chain.namespace(identity, allow_unverified=True, may_write=False) as namespace:
            for far in namespace.behind:
                if far.answering() is None:
                    session.output.warning(f"{far.url} does not answer; what it has is not counted")
            return namespace.answers(namespace.match(document.tokens, salt=document.salt))
    finally:
        for far_store in chain.behind:
            far_store.close()


def _described_answer(answer: Answer) -> dict[str, object]:
    tokens = {"start": answer.start, "stop": answer.stop, "num_tokens": answer.stop - answer.start}
    return {"store": answer.url, **tokens}


def _differences(explanation: Explanation) -> Iterator[dict[str, object]]:
    for other in explanation.elsewhere:
        for difference in other.differences:
            yield {
                "namespace": other.namespace,
                "model": other.model,
                "hit_tokens": other.hit_tokens,
                "field": difference.field,
                "wanted": difference.wanted,
                "stored": difference.stored,
            }
