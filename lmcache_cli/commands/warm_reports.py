"""What `lmcache warm` says: of what is to be done, and of what was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_cli.commands.warm_options import WarmJob
    from lmcache_cli.integration.producer import TokenIds
    from lmcache_cli.integration.warming import WarmReport

PLAN_COLUMNS = ("name", "num_tokens", "present_tokens", "shared_tokens", "tokens_to_compute", "bytes_to_write")
_PLAN = (
    "{num_documents} documents: {tokens_to_compute} of {num_tokens} tokens to compute, {bytes_to_write} to write,"
    "%s nothing was written"
)
_RESULT = (
    "{num_complete} of {num_documents} documents are in the store: {tokens_computed} tokens computed,"
    " {tokens_present} were present, {chunks_stored} chunks and {bytes_written} written in {elapsed_s}"
)


def show_plan(job: WarmJob, measure: Callable[[TokenIds], float] | None) -> ExitCode:
    """What there is to do. `measure` says how many tokens a second are computed, given some; None: nobody knows."""
    from lmcache_cli.integration.warming import plan

    output = job.session.output
    planned = list(plan(job.namespace, job.documents))
    output.table("warm_plan", planned, columns=PLAN_COLUMNS)
    to_compute = sum(one.tokens_to_compute for one in planned)
    speed = None
    if to_compute and measure is not None:
        longest = max(job.documents, key=lambda document: len(document.tokens))
        speed = measure(longest.tokens)
    estimated_s = to_compute / speed if speed else None if to_compute else 0.0
    output.summary(
        _PLAN % ("" if estimated_s is None else " about {estimated_s};"),
        num_documents=len(planned),
        num_tokens=sum(one.num_tokens for one in planned),
        tokens_to_compute=to_compute,
        bytes_to_write=sum(one.bytes_to_write for one in planned),
        estimated_s=estimated_s,
        tokens_per_s=speed,
    )
    return ExitCode.OK


def show_result(job: WarmJob, report: WarmReport) -> ExitCode:
    """What was done; documents that failed are named."""
    from lmcache_cli.integration.asked_warming import AskedReport

    output = job.session.output
    for name, reason in report.failures:
        output.warning(f"{name}: {reason}")
    counts: dict[str, int] = {}
    text = _RESULT
    if isinstance(report, AskedReport):
        counts = {"shards_before": report.shards_before, "shards_after": report.shards_after}
        text += "; the namespace had {shards_before} shards and has {shards_after}"
    output.summary(
        text,
        namespace=job.namespace.fingerprint,
        num_documents=report.num_documents,
        num_complete=report.num_complete,
        num_failed=len(report.failures),
        num_tokens=report.num_tokens,
        tokens_computed=report.tokens_computed,
        tokens_present=report.tokens_present,
        chunks_stored=report.chunks_stored,
        bytes_written=report.bytes_written,
        elapsed_s=report.seconds,
        **counts,
    )
    return ExitCode.DAMAGE if report.num_complete < report.num_documents else ExitCode.OK
