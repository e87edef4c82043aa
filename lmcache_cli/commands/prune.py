"""`lmcache prune`: take out of a store what is old, unused, superseded, or beyond a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.model_options import Salt
from lmcache_cli.commands.pruning import (
    DEFAULT_GRACE,
    Consent,
    DryRun,
    Grace,
    MaxDelete,
    Wait,
    Yes,
    refuse_without_rule,
    run_prune,
)
from lmcache_cli.commands.quantity_options import size_bytes
from lmcache_cli.commands.shard_options import Filters, OlderThan, UnusedFor, selection_of
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.selection import Selection
    from lmcache_format import Fingerprint


@command(
    examples=(
        "lmcache prune --store /srv/kv --unused-for 30d --dry-run",
        "lmcache prune --store /srv/kv --max-size 500GB --yes -q --json",
        "lmcache prune --store /srv/kv --stale-models --superseded --yes",
        "lmcache prune --store /srv/kv --filter 'model=org/*' --older-than 90d --yes --wait",
        "lmcache prune --store /srv/kv --sweep-only",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.INTERRUPTED),
)
def prune(
    session: Session,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    max_size: Annotated[
        int | None,
        typer.Option("--max-size", parser=size_bytes, metavar="SIZE", help="Leave at most so much: 500GB."),
    ] = None,
    max_count: Annotated[int | None, typer.Option("--max-count", min=0, help="Leave at most so many chunks.")] = None,
    stale_models: Annotated[
        bool,
        typer.Option(
            "--stale-models", help="Models of which other weights were stored since, and used on a later day."
        ),
    ] = False,
    superseded: Annotated[
        bool,
        typer.Option(
            "--superseded", help="Raw shards beside lossless ones, and tails not used since a full chunk came."
        ),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", parser=literal, metavar="START", help="Only the namespace that starts so."),
    ] = None,
    filters: Filters = None,
    salt: Salt = None,
    max_delete: MaxDelete = None,
    sweep_only: Annotated[
        bool, typer.Option("--sweep-only", help="Mark nothing; delete what earlier runs marked.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = False,
    grace: Grace = DEFAULT_GRACE,  # type: ignore[assignment]
) -> ExitCode:
    """Take out of a store what is old, unused, superseded, or beyond a limit. The plan is shown; --yes carries it out.

    --older-than and --unused-for together mean both; the other rules add to them. --namespace, --filter and --salt
    narrow all rules down; limits are then on what is left there. What was used longest ago goes first, never a chunk
    without all that come after it, and never what is pinned (lmcache pin).

    What goes is marked: readers miss it at once, its bytes are deleted by a later run, once the grace time is over.
    Every run first deletes what earlier ones marked. Ages are told by the store's own clock.

    With --max-size a run also counts shards that no index lists, as a writer that died leaves them: they take space,
    'lmcache repair' lists them, and where they alone keep a store above its limit, the run ends with 3.
    """
    from lmcache_cli.store import Store
    from lmcache_cli.store.prune import PruneRules
    from lmcache_format.superblock import Operation

    selection = selection_of(filters, older_than, unused_for)
    if selection.encodings:
        raise Refused("a prune takes whole chunks, found a filter on encodings", "see: lmcache prune --superseded")
    consent = Consent(dry_run=dry_run, yes=yes, wait=wait, grace_s=grace)
    with Store.open(session.settings.required_store(), Operation.PRUNE) as store:
        rules = PruneRules(
            older_than_ms=selection.older_than_ms,
            unused_for_ms=selection.unused_for_ms,
            max_bytes=max_size,
            max_chunks=max_count,
            superseded=superseded,
            stale_models=stale_models,
            namespaces=_namespaces(store, namespace, selection),
            models=selection.models,
            salt=salt,
            max_delete_bytes=max_delete,
        )
        if not sweep_only:
            refuse_without_rule(rules.has_rule, has_scope=bool(namespace or filters or salt))
        elif rules.has_rule:
            raise Refused("--sweep-only marks nothing, found rules beside it", "leave one of them out")
        return run_prune(session, store, rules, consent)


def _namespaces(store: Store, start: str | None, selection: Selection) -> tuple[Fingerprint, ...] | None:
    """Those that are named; None for all of them."""
    from lmcache_cli.commands.ls import find_namespace

    if start is None and not selection.namespaces:
        return None
    found = store.fingerprints() if start is None else [find_namespace(store, start)]
    return tuple(fingerprint for fingerprint in found if selection.has_namespace(fingerprint))
