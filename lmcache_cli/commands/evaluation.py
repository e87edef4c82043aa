"""`lmcache compress --evaluate`: what codecs with loss do to the answers of one's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, literal
from lmcache_cli.commands.model_options import (
    AllowUnverified,
    ChatTemplate,
    Documents,
    MoreDocuments,
    PerhapsModel,
    Prompts,
    Revision,
    identify_model,
    read_all_prompts,
    tokenize,
)
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.integration.evaluating import Judge, Scores
    from lmcache_cli.integration.producer import Producer
    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_format.encodings import Encoding

COLUMNS = ("codec", "quality", "ratio", "kl_nats", "kl_error", "kl_worst", "top1_percent", "perplexity_change_percent")
JUDGE_DTYPES = ("F32", "BF16", "F16")
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The options that go with --evaluate."""

    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate", help="Write nothing: measure on a model and prompts what codecs with loss do to its answers."
        ),
    ] = False
    model: PerhapsModel = None
    documents: Documents = None
    more_documents: MoreDocuments = None
    prompts: Prompts = None
    continuation: Annotated[
        int, typer.Option("--continuation", min=2, help="Last tokens of every prompt, at most half, that are scored.")
    ] = 256
    judge_dtype: Annotated[
        str,
        typer.Option(
            "--judge-dtype",
            parser=literal,
            metavar="F32|BF16|F16",
            help="What scores: F32 shows small differences, the type of the model saves its memory twice.",
        ),
    ] = "F32"
    chat_template: ChatTemplate = False
    revision: Revision = None
    allow_unverified: AllowUnverified = False


def refuse_stray(options: EvaluationOptions) -> None:
    """Raise Refused where something was given that only --evaluate uses."""
    given = {
        "--model": options.model,
        "--documents": options.documents or options.more_documents,
        "--prompts": options.prompts,
        "--chat-template": options.chat_template,
        "--revision": options.revision,
    }
    for name, value in given.items():
        if value:
            raise Refused(f"{name} without --evaluate", "add --evaluate, or leave it out")


def run_evaluation(session: Session, options: EvaluationOptions, encoding: Encoding | None) -> ExitCode:
    """Evaluate one encoding, or all with loss, and print a row for each. Touches no store."""
    from lmcache_cli.integration.evaluating import evaluate, passage_of

    if options.model is None:
        raise Refused("--evaluate without a model", "say which with --model DIR")
    if options.judge_dtype.upper() not in JUDGE_DTYPES:
        raise Refused(f"unknown type {options.judge_dtype!r} for --judge-dtype", f"use {', '.join(JUDGE_DTYPES)}")
    found = read_all_prompts(options.documents, options.more_documents, options.prompts, None)
    identified = identify_model(
        options.model,
        name=None,
        revision=options.revision,
        dtype=None,
        chunk_tokens=_CHUNK_TOKENS,
        allow_unverified=options.allow_unverified,
    )
    prompts = tokenize(identified, found, as_chat=options.chat_template)
    session.output.note(f"loading {identified.identity.model}")
    reader, judge = load_models(identified, options.judge_dtype.upper())
    passages = [passage_of(prompt.name, prompt.tokens, options.continuation, reader.max_tokens) for prompt in prompts]
    encodings = [encoding] if encoding is not None else encodings_with_loss()
    total = sum(len(passage.prefix) + len(passage.continuation) for passage in passages)
    with session.output.progress("evaluate", total=total, unit="tokens") as meter:
        scores = evaluate(reader, judge, encodings, passages, meter.advance)
    session.output.table("codec_quality", _rows(scores, encodings, options.judge_dtype.upper()), columns=COLUMNS)
    session.output.summary(
        "{num_codecs} codecs judged on {num_prompts} prompts, {num_tokens} tokens; nothing was written",
        num_codecs=len(encodings),
        num_prompts=len(passages),
        num_tokens=total,
        num_scored=sum(len(passage.continuation) - 1 for passage in passages),
        model=identified.identity.model,
    )
    return ExitCode.OK


def encodings_with_loss() -> list[Encoding]:
    """All, but those that decode to the same bits as another."""
    from lmcache_format.encodings import encoding_names, get_encoding

    return [get_encoding(name) for name in encoding_names() if not get_encoding(name).lossless and name != "int8"]


def load_models(identified: IdentifiedModel, judge_dtype: str) -> tuple[Producer, Judge]:
    """The model as it computes for the store, and the one that scores."""
    from lmcache_cli.integration.transformers.engine import PIECE_TOKENS, TransformersEngine
    from lmcache_cli.integration.transformers.judging import TransformersJudge
    from lmcache_format.dtypes import Dtype

    reader = TransformersEngine.load(identified.directory, identified.identity)
    judge = TransformersJudge.load(identified.directory, reader, Dtype(judge_dtype), piece_tokens=PIECE_TOKENS)
    return reader, judge


def _rows(scores: Mapping[str, Scores], encodings: Sequence[Encoding], judge_dtype: str) -> list[dict[str, object]]:
    from lmcache_cli.integration.evaluating import CONTROL, JUDGE

    control = scores[CONTROL]
    rows = [_row(f"(prefill in {judge_dtype})", None, scores[JUDGE], control)] if JUDGE in scores else []
    return rows + [_row(one.name, one.quality, scores[one.name], control) for one in encodings]


def _row(codec: str, quality: str | None, scores: Scores, control: Scores) -> dict[str, object]:
    error = scores.kl_error
    return {
        "codec": codec,
        "quality": quality,
        "ratio": None if scores.ratio is None else round(scores.ratio, 3),
        "kl_nats": float(f"{scores.kl:.3g}"),
        "kl_error": None if error is None else float(f"{error:.2g}"),
        "kl_worst": float(f"{max(scores.divergence):.3g}"),
        "top1_percent": round(100 * scores.top1, 2),
        "perplexity_change_percent": round(100 * scores.perplexity_change(control), 3),
        "num_prompts": len(scores.divergence),
    }
