"""What `prune` and `rm` have in common: show the plan, ask, sweep what earlier runs marked, mark, wait, tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session
from lmcache_cli.commands.quantity_options import duration_s, size_bytes
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.quantities import show_duration, show_size
from lmcache_cli.rendering import utc_day

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.prune import MarkResult, PrunePlan, PruneRules
    from lmcache_cli.store.sweep import SweepResult
    from lmcache_cli.store.unlisted import Unlisted

COLUMNS = ("namespace", "model", "rule", "num_chunks", "num_shards", "size_bytes", "first_used", "last_used")
MOST_WARNINGS = 20
_POLL_S = 1.0
SUMMARY = (
    "{num_marked} of {num_shards} shards marked ({marked_bytes}), {num_swept} deleted ({swept_bytes}), "
    "{num_waiting} wait for a sweep; of those looked at {kept_chunks} chunks stay ({kept_bytes}); "
    "{num_failures} failures"
)
PLANNED = (
    "{num_shards} shards of {num_chunks} chunks to mark ({size_bytes}), {num_due} of {num_waiting} marked shards to "
    "delete; of those looked at {kept_chunks} chunks stay ({kept_bytes})"
)

MaxDelete = Annotated[
    int | None,
    typer.Option("--max-delete", parser=size_bytes, metavar="SIZE", help="Take at most so much in this run."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would go, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do what the plan says without asking.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the grace time, then delete what was just marked.")]
Grace = Annotated[
    int,
    typer.Option(
        "--grace", parser=duration_s, metavar="DURATION", help="How long readers may go on with what is marked."
    ),
]
DEFAULT_GRACE = "15m"


@dataclass(frozen=True, slots=True)
class Consent:
    """How a plan is to be carried out. `grace_s`: time between mark and deletion."""

    dry_run: bool
    yes: bool
    wait: bool
    grace_s: int


def run_prune(session: Session, store: Store, rules: PruneRules, consent: Consent) -> ExitCode:
    """Plan, ask, do. Without consent to a plan with victims nothing is done, and the exit code is 2."""
    from lmcache_cli.store.prune import plan_prune

    plan = plan_prune(store, rules, grace_ms=consent.grace_s * 1000)
    session.output.table("prune_plan", _rows(plan), columns=COLUMNS)
    _warn(session, plan)
    if consent.dry_run:
        session.output.summary(PLANNED, **_counts(plan))
        return _ending(plan, num_failures=0)
    if plan.num_shards and not consent.yes and not _agreed(session, plan):
        session.output.warning("nothing was changed; pass --yes to carry this plan out")
        session.output.summary(PLANNED, **_counts(plan))
        return ExitCode.REFUSED
    return _carry_out(session, store, plan, consent)


def run_sweep(session: Session, store: Store, consent: Consent) -> ExitCode:
    """Delete what earlier runs marked, and nothing else."""
    from lmcache_cli.store.prune import PruneRules

    return run_prune(session, store, PruneRules(), consent)


def _rows(plan: PrunePlan) -> Iterator[dict[str, object]]:
    for group in plan.groups():
        yield {
            "namespace": group.namespace,
            "model": group.model,
            "rule": group.rule,
            "num_chunks": group.num_chunks,
            "num_shards": group.num_shards,
            "size_bytes": group.size_bytes,
            "first_used": utc_day(group.first_used_ms // 86_400_000),
            "last_used": utc_day(group.last_used_ms // 86_400_000),
        }


def _warn(session: Session, plan: PrunePlan) -> None:
    rules = plan.rules
    if plan.num_pinned and (rules.everything or rules.key is not None or rules.prompt is not None):
        session.output.note("what is pinned stays; see: lmcache unpin --help")
    for fingerprint, problem in plan.unreadable:
        session.output.warning(f"{fingerprint}: {problem}; left alone")
    if plan.num_left_out:
        session.output.note(
            f"{plan.num_left_out} shards more ({show_size(plan.left_out_bytes)}) are left for later by --max-delete"
        )
    elif plan.excess_bytes or plan.excess_chunks:
        beyond = show_size(plan.excess_bytes) if plan.excess_bytes else f"{plan.excess_chunks} chunks"
        session.output.warning(f"{beyond} beyond the limit stay, because they are pinned; see: lmcache unpin --help")


def _agreed(session: Session, plan: PrunePlan) -> bool:
    """Asks where there is somebody to ask."""
    if not sys.stdin.isatty():
        return False
    session.output.note(f"{plan.num_shards} shards ({show_size(plan.size_bytes)}) would go")
    return typer.confirm("Carry this plan out?", default=False, err=True)


def _carry_out(session: Session, store: Store, plan: PrunePlan, consent: Consent) -> ExitCode:
    from lmcache_cli.store.prune import MarkResult, mark
    from lmcache_cli.store.sweep import SweepResult, sweep

    swept, marked, unlisted = SweepResult(), MarkResult(), None
    grace_ms = consent.grace_s * 1000
    try:
        if plan.num_due:  # first: on a full disk there must be room for the marks
            with session.output.progress("delete", total=plan.num_due, unit="shards") as meter:
                sweep(store, grace_ms=grace_ms, result=swept, advance=lambda num, size: meter.advance(num))
        if plan.num_shards:
            with session.output.progress("mark", total=plan.num_shards, unit="shards") as meter:
                mark(store, plan, result=marked, advance=lambda num, size: meter.advance(num))
        if consent.wait and (marked.num_marked or plan.num_marked > plan.num_due):
            _wait(session, store, max(marked.marked_ms, _last_mark_ms(store)) + grace_ms)
            with session.output.progress("delete", total=marked.num_marked, unit="shards") as meter:
                sweep(store, grace_ms=grace_ms, result=swept, advance=lambda num, size: meter.advance(num))
        unlisted = _count_unlisted(session, store, plan)
    finally:
        _tell(session, plan, marked, swept, unlisted)
    return _ending(plan, num_failures=len(swept.failures), unlisted=unlisted)


def _count_unlisted(session: Session, store: Store, plan: PrunePlan) -> Unlisted | None:
    """Where the space of whole namespaces is limited: what takes space beside what the indexes list."""
    from lmcache_cli.backends import BackendError
    from lmcache_cli.store.unlisted import count_unlisted

    if plan.rules.max_bytes is None or plan.rules.salt is not None:
        return None
    try:
        found = count_unlisted(store, plan.in_scope)
    except BackendError as problem:
        session.output.warning(f"shards that no index lists could not be counted: {problem}")
        return None
    if found.num_shards:
        session.output.warning(
            f"no index lists {found.num_shards} shards ({show_size(found.size_bytes)}), so no limit counts them; "
            "list them with: lmcache repair"
        )
    return found


def _last_mark_ms(store: Store) -> int:
    """When the latest mark that waits for a sweep was made; 0 where there is none."""
    from lmcache_cli.store.index import Index
    from lmcache_cli.store.sweep import marked

    latest = 0
    for fingerprint in store.fingerprints():
        state = Index(store.backend, fingerprint).state
        waiting = state.removes["marked_ms"][marked(state)]
        latest = max(latest, int(waiting.max(initial=0)))
    return min(latest, store.backend.now_ms())


def _wait(session: Session, store: Store, until_ms: int) -> None:
    """On the store's own clock; an interruption ends it, and leaves the marks to the next run."""
    left_ms = until_ms - store.backend.now_ms()
    if left_ms > 0:
        session.output.note(f"waiting {show_duration(left_ms / 1000)} for the grace time")
    while (left_ms := until_ms - store.backend.now_ms()) > 0:
        time.sleep(min(_POLL_S * 15, left_ms / 1000 + 0.005))


def _tell(session: Session, plan: PrunePlan, marked: MarkResult, swept: SweepResult, unlisted: Unlisted | None) -> None:
    for path, reason in swept.failures[:MOST_WARNINGS]:
        session.output.warning(f"{path}: {reason}")
    if marked.num_spared:
        session.output.note(
            f"{marked.num_spared} shards stay after all: used, written or pinned since the plan was made"
        )
    over = swept.num_swept + swept.num_gone + swept.num_changed
    session.output.summary(
        SUMMARY,
        **{
            **_counts(plan),
            "num_waiting": max(0, plan.num_marked + marked.num_marked - over),
            "num_marked": marked.num_marked,
            "marked_bytes": marked.marked_bytes,
            "num_spared": marked.num_spared,
            "num_swept": swept.num_swept,
            "swept_bytes": swept.swept_bytes,
            "num_gone": swept.num_gone,
            "num_changed": swept.num_changed,
            "num_failures": len(swept.failures),
            "num_unlisted": None if unlisted is None else unlisted.num_shards,
            "unlisted_bytes": None if unlisted is None else unlisted.size_bytes,
        },
    )


def _counts(plan: PrunePlan) -> dict[str, int]:
    return {
        "num_chunks": plan.num_chunks,
        "num_shards": plan.num_shards,
        "size_bytes": plan.size_bytes,
        "kept_bytes": plan.kept_bytes,
        "kept_chunks": plan.kept_chunks,
        "num_pinned": plan.num_pinned,
        "num_left_out": plan.num_left_out,
        "left_out_bytes": plan.left_out_bytes,
        "excess_bytes": plan.excess_bytes,
        "excess_chunks": plan.excess_chunks,
        "num_waiting": plan.num_marked,
        "num_due": plan.num_due,
        "num_unreadable": len(plan.unreadable),
    }


def _ending(plan: PrunePlan, *, num_failures: int, unlisted: Unlisted | None = None) -> ExitCode:
    """A cap that was asked for leaves nothing undone; a limit that pins or unlisted shards keep one from does."""
    beside_bytes = 0 if unlisted is None else unlisted.size_bytes
    is_over = plan.rules.max_bytes is not None and beside_bytes > max(0, plan.rules.max_bytes - plan.kept_bytes)
    missed = (plan.excess_bytes or plan.excess_chunks or is_over) and not plan.num_left_out
    return ExitCode.DAMAGE if num_failures or plan.unreadable or missed else ExitCode.OK


def refuse_without_rule(has_rule: bool, has_scope: bool) -> None:
    """Raises Refused where nothing says what is to go."""
    if has_rule:
        return
    advice = "all of a namespace or a tenant goes with: lmcache rm" if has_scope else "try it with --dry-run first"
    raise Refused(
        "nothing says what is to go",
        "give at least one of --older-than, --unused-for, --max-size, --max-count, --stale-models, --superseded, or "
        f"--sweep-only; {advice}",
    )
