"""The answer to why a prompt would miss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.command import Session
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import fields_of

if TYPE_CHECKING:
    from lmcache_cli.store.explain import Explanation

DIFFERENCE_COLUMNS = ("namespace", "model", "hit_tokens", "field", "wanted", "stored")


def explain_miss(session: Session, asked: AskedPrompt, choice: ModelChoice) -> ExitCode:
    """Prints how much of the prompt would hit under the model, and what differs where it does not."""
    from lmcache_cli.store import Store
    from lmcache_cli.store.explain import explain_prompt

    choice.required()
    with Store.open(session.settings.required_store()) as store:
        identity, document = choice.read(asked)
        explanation = explain_prompt(store, identity, document.tokens, document.salt)
    shown = fields_of(explanation)
    if not session.output.json_lines:
        del shown["sentences"], shown["elsewhere"]  # they follow as the summary and as a table
    session.output.record("explanation", shown)
    if explanation.elsewhere and not session.output.json_lines:
        session.output.table("difference", _differences(explanation), columns=DIFFERENCE_COLUMNS)
    session.output.summary(
        "{explanation}",
        explanation="; ".join(explanation.sentences),
        num_tokens=explanation.num_tokens,
        hit_tokens=explanation.hit_tokens,
        cause=explanation.cause,
    )
    return ExitCode.OK


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
