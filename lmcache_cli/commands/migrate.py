"""`lmcache migrate`: copy or move shards from one store to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.quantity_options import size_bytes
from lmcache_cli.commands.shard_options import Filters, MaxDuration, OlderThan, UnusedFor, encoding_of, selection_of
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.migrate import MigratePlan, MigrateResult

COLUMNS = ("namespace", "model", "num_shards", "size_bytes", "num_present")
NOTICE_COLUMNS = ("kind", "path", "reason")
MOST_WARNINGS = 20
SUMMARY = (
    "{num_copied} shards copied ({copied_bytes}), {num_present} were there, {num_conflict} of another write; "
    "{num_deleted} deleted at the source ({deleted_bytes}), {num_kept} pinned; "
    "{num_damaged} damaged, {num_failed} failed, {num_left} left"
)


@command(
    examples=(
        "lmcache migrate /srv/kv s3://bucket/kv --dry-run",
        "lmcache migrate /srv/kv s3://bucket/kv --unused-for 7d --delete-source --codec bfx -q --json",
        "lmcache migrate /srv/kv /mnt/other --filter 'model=org/*' --bandwidth-limit 50MB",
        "lmcache migrate /srv/kv-tp4 /srv/kv-tp2 --reshard tp=2",
        "lmcache migrate /srv/kv /mnt/other --to-format 1",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def migrate(
    session: Session,
    source: Annotated[str, typer.Argument(parser=literal, metavar="SRC", help="The store to copy from.")],
    target: Annotated[str, typer.Argument(parser=literal, metavar="DST", help="The store to copy to.")],
    codec: Annotated[
        str | None,
        typer.Option("--codec", metavar="CODEC", help="Encode on the way: bfx, huf8, raw, …  [else: byte for byte]"),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow a lossy codec. Only readers that allow lossy see what it makes.")
    ] = False,
    filters: Filters = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    delete_source: Annotated[
        bool,
        typer.Option("--delete-source", help="Delete each shard at SRC once its copy was read back and compared."),
    ] = False,
    reshard: Annotated[
        str | None,
        typer.Option("--reshard", metavar="tp=N", help="Cut the parts anew for N tensor-parallel ranks."),
    ] = None,
    to_format: Annotated[
        str | None,
        typer.Option("--to-format", metavar="N", help="Write shards in this format, DST's.  [else: as they are]"),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Shards under way at once.")] = 4,
    bandwidth_limit: Annotated[
        int | None,
        typer.Option("--bandwidth-limit", parser=size_bytes, metavar="SIZE", help="Bytes a second, at most: 50MB."),
    ] = None,
    max_duration: MaxDuration = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be copied, and do nothing.")] = False,
) -> ExitCode:
    """Copy from one store to another what is lacking there, every byte checked.

    Labels, pins and last uses come along. Run again, it goes on where it was. Both must be stores, and apart from each
    other; --store is not used. Damaged shards are not copied; a damaged one at DST goes to its quarantine and is
    replaced. Where another sound write of a chunk stands at DST it stays: the same KV.

    With --delete-source a shard goes only when its copy at DST was read back in full, and only in the version that was
    read. Pinned chunks are copied and stay. When SRC or DST does not answer, nothing is deleted any more, and the
    command ends with 1; what was marked by then is swept by the next 'lmcache prune' of SRC. Shards in a lossy encoding
    are copied as they are.

    A store keeps the format it was made with; --to-format is how shards get into a store of another one. This release
    knows format 1, in which everything is already: it is then checked like the rest, and stays as it is.
    """
    from lmcache_cli.store import Store
    from lmcache_cli.store.formats import resolve_format
    from lmcache_cli.store.migrate import MigrateOptions, plan_migrate
    from lmcache_format.superblock import Operation

    options = MigrateOptions(
        selection=selection_of(filters, older_than, unused_for),
        encoding=encoding_of(codec),
        allow_lossy=lossy,
        delete_source=delete_source,
        ranks=None if reshard is None else _ranks(reshard),
        concurrency=concurrency,
        bytes_per_s=bandwidth_limit or None,
        max_duration_s=max_duration,
        to_format=None if to_format is None else resolve_format(to_format),
    )
    with Store.open(source) as here, Store.open(target, Operation.WRITE) as there:
        plan = plan_migrate(here, there, options)
        session.output.table("migrate_plan", _rows(plan), columns=COLUMNS)
        for path, reason in plan.unreadable:
            session.output.warning(f"{path}: {reason}; left alone")
        if dry_run:
            session.output.summary(
                "{num_shards} shards to copy ({size_bytes}), {num_present} are there",
                num_shards=plan.num_shards,
                size_bytes=plan.size_bytes,
                num_present=plan.num_present,
                num_unreadable=len(plan.unreadable),
            )
            return ExitCode.DAMAGE if plan.unreadable else ExitCode.OK
        return _carry_out(session, here, there, plan)


def _ranks(text: str) -> int:
    """N of `tp=N`. Raises Refused."""
    kind, _, number = text.partition("=")
    if kind != "tp" or not (number.isascii() and number.isdigit() and 1 <= len(number) <= 4) or int(number) < 1:
        raise Refused(f"expected --reshard tp=N, found {text!r}", "write tp=2 for two ranks")
    return int(number)


def _rows(plan: MigratePlan) -> Iterator[dict[str, object]]:
    for one in plan.namespaces:
        yield {
            "namespace": one.fingerprint,
            "model": one.identity.model,
            "num_shards": one.num_shards,
            "size_bytes": one.size_bytes,
            "num_present": one.num_present,
        }


def _carry_out(session: Session, source: Store, target: Store, plan: MigratePlan) -> ExitCode:
    from lmcache_cli.store.migrate import MigrateResult, apply_migrate

    result = MigrateResult()
    try:
        with session.output.progress("migrate", total=plan.size_bytes or None, unit="bytes") as meter:
            apply_migrate(source, target, plan, result, lambda num_shards, num_bytes: meter.advance(num_bytes))
    finally:
        _summarise(session, plan, result)
    return ExitCode.OK if result.is_whole and not plan.unreadable else ExitCode.DAMAGE


def _summarise(session: Session, plan: MigratePlan, result: MigrateResult) -> None:
    output = session.output
    if output.json_lines:
        output.table("migrate_notice", result.notices, columns=NOTICE_COLUMNS)
    for notice in [one for one in result.notices if one.is_problem][:MOST_WARNINGS]:
        output.warning(f"{notice.path}: {notice.kind}: {notice.reason}")
    for notice in [one for one in result.notices if not one.is_problem][:MOST_WARNINGS]:
        output.note(f"{notice.path}: {notice.kind}: {notice.reason}")
    counts = {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "notices"}
    output.summary(SUMMARY, num_unreadable=len(plan.unreadable), **counts)
