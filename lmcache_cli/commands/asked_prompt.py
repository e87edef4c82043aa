"""A prompt that was asked about, and the answer to why it would miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_cli.commands.command import Session
from lmcache_cli.commands.model_options import tokenize
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import fields_of

if TYPE_CHECKING:
    from lmcache_cli.integration.prompts import Prompt
    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_cli.store.explain import Explanation

DIFFERENCE_COLUMNS = ("namespace", "model", "hit_tokens", "field", "wanted", "stored")


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt as given on the command line: at most one of the first three is."""

    text: str | None
    text_file: str | None
    tokens_file: str | None
    as_chat: bool
    salt: str | None

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


def explain_miss(
    session: Session, asked: AskedPrompt, model: str | None, identify: Callable[[str], IdentifiedModel]
) -> ExitCode:
    """Prints how much of the prompt would hit under the model, and what differs where it does not."""
    from lmcache_cli.store import Store
    from lmcache_cli.store.explain import explain_prompt

    if model is None:
        raise Refused("a prompt is looked up for a model, and none is named", "pass --model DIR")
    url = session.settings.required_store()
    prompt = asked.read()
    with Store.open(url) as store:
        identified = identify(model)
        (document,) = tokenize(identified, [prompt], as_chat=asked.as_chat)
        explanation = explain_prompt(store, identified.identity, document.tokens, document.salt)
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
