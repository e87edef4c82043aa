"""`lmcache compress`: store shards in a codec that takes less space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command
from lmcache_cli.commands.evaluation import EvaluationOptions, refuse_stray, run_evaluation
from lmcache_cli.commands.quantity_options import size_bytes
from lmcache_cli.commands.shard_options import Filters, MaxDuration, OlderThan, UnusedFor, encoding_of, selection_of
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.compress import CompressPlan, CompressResult

COLUMNS = ("namespace", "model", "encoding", "num_shards", "size_bytes", "expected_bytes", "ratio", "reason")
PROBLEM_COLUMNS = ("kind", "path", "reason")
MOST_WARNINGS = 20
SUMMARY = (
    "{num_encoded} shards encoded ({source_bytes} became {encoded_bytes}), {num_present} were already, "
    "{num_no_gain} would not shrink; {num_removed} old shards marked ({removed_bytes}), "
    "{num_damaged} damaged, {num_failed} failed, {num_left} left"
)


@command(
    examples=(
        "lmcache compress --store /srv/kv --dry-run",
        "lmcache compress --store /srv/kv --unused-for 1d --max-duration 2h -q --json",
        "lmcache compress --store /srv/kv --codec raw --filter 'model=org/*'",
        "lmcache compress --store /srv/kv --codec uq --lossy --unused-for 30d",
        "lmcache compress --evaluate --model ./SmolLM2 --documents handbook.txt faq.txt",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def compress(
    session: Session,
    evaluation: EvaluationOptions,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="CODEC",
            help="bfx, huf8, raw; lossy: uq, uq:0.12, uq:fp8-grade, int8, fp8, …  [else: lossless, and told why]",
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow a lossy codec. Only readers that allow lossy see what it makes.")
    ] = False,
    remove_source: Annotated[
        bool | None,
        typer.Option(
            "--remove-source/--keep-source",
            help="Whether old shards go once new ones are verified.  [else: yes where lossless, no where lossy]",
            show_default=False,
        ),
    ] = None,
    filters: Filters = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    read_rate: Annotated[
        int | None,
        typer.Option(
            "--read-rate",
            parser=size_bytes,
            metavar="SIZE",
            help="Bytes a second that readers get from this place: choose the codec that serves them fastest.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Shards encoded at once.")] = 2,
    max_duration: MaxDuration = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, with the ratio of a sample, and do nothing.")
    ] = False,
) -> ExitCode:
    """Store shards in a codec that takes less space, or back as they were with --codec raw.

    Every new shard is read back and decoded before the old one is marked for removal; the next 'lmcache prune' sweeps
    what was marked. Stopped at any time, the same command goes on where it was. Shards in a lossy encoding are never
    encoded again.

    A lossy codec must be named, and allowed with --lossy. Its shards lie beside the exact ones, which stay unless
    --remove-source is given: then readers that do not allow lossy encodings have to compute those chunks again.

    With --evaluate nothing is read from a store or written to one. The model reads each prompt but its last tokens, the
    KV goes through each codec, or the one of --codec, and the last tokens are scored on top of it: KL divergence from
    the same KV kept in memory, how many likeliest tokens stay the same, and the change of perplexity.
    """
    if evaluation.evaluate:
        return run_evaluation(session, evaluation, encoding_of(codec))
    refuse_stray(evaluation)
    from lmcache_cli.store import Store
    from lmcache_cli.store.compress import CompressOptions, plan_compress

    options = CompressOptions(
        encoding=encoding_of(codec),
        selection=selection_of(filters, older_than, unused_for),
        allow_lossy=lossy,
        remove_source=remove_source,
        link_bytes_per_s=read_rate,
        threads=threads,
        max_duration_s=max_duration,
    )
    with Store.open(session.settings.required_store()) as store:
        plan = plan_compress(store, options)
        session.output.table("compress_plan", _rows(plan), columns=COLUMNS)
        for path, reason in plan.unreadable:
            session.output.warning(f"{path}: {reason}; left alone")
        _explain(session, plan)
        if dry_run:
            session.output.summary(
                "{num_shards} shards to encode ({size_bytes}, about {expected_bytes} then)",
                num_shards=plan.num_shards,
                size_bytes=plan.size_bytes,
                expected_bytes=sum(one.expected_bytes or 0 for one in plan.namespaces),
                num_unreadable=len(plan.unreadable),
            )
            return ExitCode.DAMAGE if plan.unreadable else ExitCode.OK
        return _carry_out(session, store, plan)


def _rows(plan: CompressPlan) -> Iterator[dict[str, object]]:
    for one in plan.namespaces:
        yield {
            "namespace": one.fingerprint,
            "model": one.identity.model,
            "encoding": one.label,
            "num_shards": one.num_shards,
            "size_bytes": one.size_bytes,
            "expected_bytes": one.expected_bytes,
            "ratio": None if one.ratio is None else round(one.ratio, 3),
            "num_present": one.num_present,
            "num_lossy": one.num_lossy,
            "removes_source": plan.removes_source(one.encoding),
            "reason": one.reason,
        }


def _explain(session: Session, plan: CompressPlan) -> None:
    """What people should know about lossy encodings before they rely on them."""
    lossy = [one for one in plan.namespaces if not one.encoding.lossless and one.num_shards]
    if lossy and plan.removes_source(lossy[0].encoding):
        session.output.warning("the exact shards go: readers that do not allow lossy encodings will miss these chunks")
    elif lossy:
        session.output.note("the exact shards stay; --remove-source frees their space")
    if any(one.num_lossy for one in plan.namespaces):
        count = sum(one.num_lossy for one in plan.namespaces)
        session.output.note(f"{count} shards are in another lossy encoding and stay as they are")


def _carry_out(session: Session, store: Store, plan: CompressPlan) -> ExitCode:
    from lmcache_cli.store.compress import CompressResult, apply_compress

    result = CompressResult()
    try:
        with session.output.progress("compress", total=plan.size_bytes, unit="bytes") as meter:
            apply_compress(store, plan, result, lambda num_shards, num_bytes: meter.advance(num_bytes))
    finally:
        _summarise(session, plan, result)
    return ExitCode.OK if result.is_whole and not plan.unreadable else ExitCode.DAMAGE


def _summarise(session: Session, plan: CompressPlan, result: CompressResult) -> None:
    output = session.output
    if output.json_lines:
        rows = ({"kind": one.fate, "path": one.path, "reason": one.reason} for one in result.problems)
        output.table("compress_problem", rows, columns=PROBLEM_COLUMNS)
    for one in result.problems[:MOST_WARNINGS]:
        output.warning(f"{one.path}: {one.fate}: {one.reason}")
    counts = {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "problems"}
    output.summary(SUMMARY, num_unreadable=len(plan.unreadable), **counts)
