"""`lmcache verify`: check that a store holds what was written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.quantity_options import subset
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.quantities import Subset

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.verify import VerifyOptions, VerifyReport

FINDING_COLUMNS = ("kind", "path", "reason")
MOST_WARNINGS = 20
SUMMARY = (
    "{num_checked} of {num_listed} shards checked ({checked_bytes}): {num_good} good, {num_damaged} damaged, "
    "{num_missing} missing, {num_unchecked} unchecked, {num_unsure} unsure, {num_unindexed} not in the index, "
    "{num_newer} of a newer format, {num_awaiting_sweep} awaiting a sweep, {num_foreign} foreign files"
)


@command(
    examples=(
        "lmcache verify --store /srv/kv",
        "lmcache verify --store /srv/kv --quick",
        "lmcache verify --store /srv/kv --read-data auto/30 -q --json",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def verify(
    session: Session,
    namespace: Annotated[
        str | None,
        typer.Argument(parser=literal, help="Check this namespace only: its fingerprint or the start of it."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Read no shard: compare the listing with the index.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Read the headers of shards only.")] = False,
    read_data: Annotated[
        Subset | None,
        typer.Option(
            "--read-data",
            parser=subset,
            metavar="SHARE",
            help="Read one share of the shards in full: 1/7, or auto/30 for another thirtieth every day.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Shards read at once.")] = 2,
) -> ExitCode:
    """Check that a store holds what was written to it. Changes nothing.

    Every byte of every shard is read and compared with its checksum, unless an option asks for less; the listing and
    the index are compared in any case. Files of a newer format and foreign files are told, and are no damage.
    """
    from lmcache_cli.commands.ls import find_namespace
    from lmcache_cli.store import Store
    from lmcache_cli.store.survey import Level, Share
    from lmcache_cli.store.verify import VerifyOptions

    if quick + headers + (read_data is not None) > 1:
        raise Refused("--quick, --headers and --read-data exclude each other", "pass one of them")
    level = Level.QUICK if quick else Level.HEADERS if headers else Level.FULL
    share = None if read_data is None else Share(read_data.index, read_data.count)
    with Store.open(session.settings.required_store()) as store:
        chosen = None if namespace is None else find_namespace(store, namespace)
        report = _check(session, store, VerifyOptions(level, share, chosen, threads))
    session.output.summary(SUMMARY, level=report.level, share=report.share, **report.counts())
    if report.is_sound:
        return ExitCode.OK
    session.output.note("next: 'lmcache repair --read-data' shows what it would mend")
    return ExitCode.DAMAGE


def _check(session: Session, store: Store, options: VerifyOptions) -> VerifyReport:
    """Prints findings as they are made; with --json or --quiet the first problems go to stderr as well."""
    from lmcache_cli.store.survey import Level
    from lmcache_cli.store.verify import Verification

    output = session.output
    verification = Verification(store, options)
    in_bytes = options.level is Level.FULL and options.share is None
    total = verification.expected_bytes if in_bytes else None if options.share else verification.expected_shards
    with output.progress("verify", total=total, unit="bytes" if in_bytes else "shards") as meter:
        findings = verification.findings(
            lambda num_shards, num_bytes: meter.advance(num_bytes if in_bytes else num_shards)
        )
        output.table("finding", findings, columns=FINDING_COLUMNS)
    report = verification.report
    problems = [finding for finding in report.findings if finding.is_problem]
    if output.quiet or output.json_lines:
        for finding in problems[:MOST_WARNINGS]:
            output.warning(f"{finding.path}: {finding.kind}: {finding.reason}")
    return report
