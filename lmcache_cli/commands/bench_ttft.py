"""`lmcache bench ttft`: what the store saves on your model, your prompts and this machine."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, utf8_text
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
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_cli.integration.transformers.answering import Answer, AnswerRequest
    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_cli.integration.warming import WarmDocument

COLUMNS = (
    "prompt", "num_tokens", "hit_tokens", "cold_ttft_ms", "warm_ttft_ms", "speedup", "bytes_read",
    "identical_to_control", "cold_agreement",
)  # fmt: skip


@command(
    examples=(
        "lmcache bench ttft --store /srv/kv --model ./SmolLM2 --documents handbook.txt",
        'lmcache bench ttft --store /srv/kv --model ./SmolLM2 --documents handbook.txt --question "Who may sign?"',
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def bench_ttft(
    session: Session,
    model: Model,
    documents: Documents = None,
    more_documents: MoreDocuments = None,
    prompts: Prompts = None,
    question: Annotated[
        str, typer.Option("--question", parser=utf8_text, help="Text that follows every document or prompt.")
    ] = "\n\nIn one sentence, what is this text about?\n",
    num_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Length of the answers that are compared.")] = 64,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Fresh processes for each figure; the median counts.")
    ] = 1,
    chat_template: ChatTemplate = False,
    salt: Salt = None,
    name: Name = None,
    revision: Revision = None,
    dtype: KvDtype = None,
    chunk_tokens: ChunkTokens = 256,
    piece_tokens: PieceTokens = 1024,
    allow_unverified: AllowUnverified = False,
) -> ExitCode:
    """Time to first token, cold against warm, each in a fresh process, and whether the answers are the same.

    The control keeps the same beginning in memory and computes the same rest: the warm answer must be identical to
    it. The cold answer comes from one pass over the whole prompt: rounding may give it another word somewhere, and
    others from there on; cold_agreement counts the places where both have the same.
    """
    from lmcache_cli.store import Store

    url = session.settings.required_store()
    check_pieces(piece_tokens, chunk_tokens)
    identified = identify_model(
        model, name=name, revision=revision, dtype=dtype, chunk_tokens=chunk_tokens, allow_unverified=allow_unverified
    )
    found = read_all_prompts(documents, more_documents, prompts, salt)
    Store.open(url).close()
    asked = _with_question(identified, tokenize(identified, found, as_chat=chat_template), question)
    rows = []
    with session.output.progress("bench", total=len(asked) * (2 * repeat + 1), unit="answers") as meter:
        for prompt in asked:
            request = _request(identified, url, prompt, num_tokens, piece_tokens)
            rows.append(_compare(request, prompt.name, repeat, meter.advance))
    session.output.table("ttft", rows, columns=COLUMNS)
    missed = [row for row in rows if not row["hit_tokens"]]
    for row in missed:
        session.output.warning(f"{row['prompt']}: nothing of it is in the store; warm it first")
    different = [row for row in rows if not row["identical_to_control"]]
    session.output.summary(
        "{num_prompts} prompts: {num_identical} answered as their controls, {num_missed} not in the store;"
        " median speed-up {median_speedup}",
        num_prompts=len(rows),
        num_identical=len(rows) - len(different),
        num_missed=len(missed),
        median_speedup=round(median(float(str(row["speedup"])) for row in rows), 2),
    )
    return ExitCode.DAMAGE if missed or different else ExitCode.OK


def _with_question(model: IdentifiedModel, documents: Sequence[WarmDocument], question: str) -> Sequence[WarmDocument]:
    """Every prompt followed by the question, joined as token ids: the document's own ids stay what they are."""
    if not question:
        return documents
    import numpy as np

    from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens
    from lmcache_cli.integration.warming import WarmDocument
    from lmcache_cli.settings import user_cache_dir

    suffix = load_prompt_tokens(model.directory, user_cache_dir()).of_text(question)
    return [WarmDocument(one.name, np.concatenate([one.tokens, suffix]), one.salt) for one in documents]


def _request(
    model: IdentifiedModel, url: str, prompt: WarmDocument, num_tokens: int, piece_tokens: int
) -> AnswerRequest:
    from lmcache_cli.integration.transformers.answering import AnswerRequest, Way

    return AnswerRequest(
        way=Way.COLD,
        directory=str(model.directory),
        identity_json=model.identity.canonical_json().decode("utf-8"),
        tokens=[int(token) for token in prompt.tokens],
        max_tokens=num_tokens,
        piece_tokens=piece_tokens,
        store=url,
        salt=prompt.salt,
    )


def _compare(request: AnswerRequest, name: str, repeat: int, advance: Callable[[int], None]) -> dict[str, object]:
    from dataclasses import replace

    from lmcache_cli.integration.transformers.answering import Way, answer_in_fresh_process

    def answers(one: AnswerRequest, times: int) -> list[Answer]:
        found = []
        for _ in range(times):
            found.append(answer_in_fresh_process(one))
            advance(1)
        return found

    cold = answers(request, repeat)
    warm = answers(replace(request, way=Way.WARM), repeat)
    hit_tokens = warm[0].hit_tokens
    control = answers(replace(request, way=Way.CONTROL, prefix_tokens=hit_tokens), 1)[0]
    cold_ms, warm_ms = _median_ms(cold), _median_ms(warm)
    agreement = sum(one == other for one, other in zip(cold[0].answer, warm[0].answer, strict=True))
    return {
        "prompt": name,
        "num_tokens": len(request.tokens),
        "hit_tokens": hit_tokens,
        "saved_tokens": hit_tokens,
        "cold_ttft_ms": round(cold_ms, 1),
        "warm_ttft_ms": round(warm_ms, 1),
        "speedup": round(cold_ms / warm_ms, 2),
        "bytes_read": warm[0].bytes_read,
        "identical_to_control": all(one.answer == control.answer for one in warm),
        "cold_agreement": f"{agreement}/{len(control.answer)}",
        "answer_tokens": warm[0].answer,
    }


def _median_ms(answers: Sequence[Answer]) -> float:
    return 1000 * median(one.ttft_s for one in answers)
