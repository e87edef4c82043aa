"""`lmcache repair`: make the index agree with the shards again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.repair import RepairPlan, RepairResult

COLUMNS = ("action", "path", "count", "size_bytes", "reason")


@command(
    examples=(
        "lmcache repair --store /srv/kv --dry-run",
        "lmcache repair --store /srv/kv --yes",
        "lmcache repair --store /srv/kv --deep --yes --json",
        "lmcache repair --store /srv/kv --read-data --yes",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def repair(
    session: Session,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the header of every shard, and write the index anew from them.")
    ] = False,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte of every shard, as verify does, to find flipped bits.")
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", parser=literal, metavar="START", help="Only the namespace that starts so."),
    ] = None,
    accept_missing: Annotated[
        bool,
        typer.Option("--accept-missing", help="Believe it when most of what the index lists is not in the store."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do what the plan says.")] = False,
) -> ExitCode:
    """Make the index of a store agree with its shards again. The plan is shown; --yes carries it out.

    Shards that the index lost are listed again, entries without a shard are dropped, damaged files are moved to the
    folder quarantine. No shard is deleted. Where the listing of the store is not complete, nothing is done.
    """
    from lmcache_cli.commands.ls import find_namespace
    from lmcache_cli.store import Store
    from lmcache_cli.store.repair import RepairOptions, plan_repair

    with Store.open(session.settings.required_store()) as store:
        chosen = None if namespace is None else find_namespace(store, namespace)
        options = RepairOptions(deep, read_data, namespace=chosen, accept_missing=accept_missing)
        with session.output.progress("looking", total=None, unit="shards") as meter:
            plan = plan_repair(store, options, lambda num_shards, num_bytes: meter.advance(num_shards))
        session.output.table("repair_action", _rows(plan), columns=COLUMNS)
        if plan.num_unchecked:
            session.output.warning(f"{plan.num_unchecked} shards could not be read and stay as they are")
        if dry_run or not plan.num_changes:
            return _nothing_done(session, plan)
        if not yes:
            session.output.warning("nothing was changed; pass --yes to carry this plan out")
            _nothing_done(session, plan)
            return ExitCode.REFUSED
        return _carry_out(session, store, plan)


def _rows(plan: RepairPlan) -> Iterator[dict[str, object]]:
    for action in plan.actions:
        yield {
            "action": action.kind,
            "path": action.path,
            "namespace": action.namespace,
            "count": action.count,
            "size_bytes": action.size_bytes,
            "reason": action.reason,
        }


def _nothing_done(session: Session, plan: RepairPlan) -> ExitCode:
    said = "{num_changes} changes to make" if plan.num_changes else "nothing to repair"
    session.output.summary(said, num_changes=plan.num_changes, num_done=0, num_unchecked=plan.num_unchecked)
    return ExitCode.DAMAGE if plan.num_unchecked else ExitCode.OK


def _carry_out(session: Session, store: Store, plan: RepairPlan) -> ExitCode:
    from lmcache_cli.store.repair import apply_repair

    result = apply_repair(store, plan)
    for path, reason in result.failures:
        session.output.warning(f"{path}: {reason}")
    session.output.summary(
        "{num_adopted} shards listed again, {num_dropped} entries dropped, {num_corrected} corrected, "
        "{num_quarantined} files moved to quarantine; {num_failures} failures",
        num_changes=plan.num_changes,
        num_unchecked=plan.num_unchecked,
        num_failures=len(result.failures),
        **_counts(result),
    )
    return ExitCode.DAMAGE if result.failures or plan.num_unchecked else ExitCode.OK


def _counts(result: RepairResult) -> dict[str, int]:
    return {name: getattr(result, name) for name in result.__dataclass_fields__ if name.startswith("num_")}
