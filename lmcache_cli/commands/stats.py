"""`lmcache stats`: one store in numbers."""

from __future__ import annotations

from lmcache_cli.commands.command import Session, command
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import utc_time


@command(
    examples=("lmcache stats --store /srv/kv", "lmcache stats --store /srv/kv --json"),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def stats(session: Session) -> ExitCode:
    """Show what a store holds, in numbers: chunks, tokens, bytes by encoding, and how they were used."""
    from lmcache_cli.commands.overview import NamespaceStatus, namespace_overviews, total_usage
    from lmcache_cli.rendering import fields_of
    from lmcache_cli.store import Store

    with Store.open(session.settings.required_store()) as store:
        overviews = list(namespace_overviews(store))
        statuses = [overview.status for overview in overviews]
        num_damaged = statuses.count(NamespaceStatus.DAMAGED)
        session.output.record(
            "stats",
            {
                "url": store.url,
                "store_id": store.superblock.store_id,
                "format_version": store.superblock.version,
                "created": utc_time(store.superblock.created_ms),
                "num_namespaces": len(overviews),
                "num_damaged": num_damaged,
                "num_too_new": statuses.count(NamespaceStatus.TOO_NEW),
                **fields_of(total_usage(overviews)),
            },
        )
    for overview in overviews:
        if overview.problem is not None:
            session.output.warning(overview.problem)
    session.output.summary(
        "{num_namespaces} namespaces, {num_damaged} damaged", num_namespaces=len(overviews), num_damaged=num_damaged
    )
    return ExitCode.DAMAGE if num_damaged else ExitCode.OK
