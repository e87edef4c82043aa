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
    """Show in numbers what a store holds and how it was used.

    Chunks, tokens, bytes by encoding and part. Counted from the indexes: no shard is looked at, a million of them take
    seconds. size is that of the files, raw that of the KV they hold; chunks_by_last_use counts chunks by the days since
    they were read or written last.
    """
    from lmcache_cli.commands.overview import NamespaceStatus, namespace_overviews, shown_usage, total_usage
    from lmcache_cli.store import Store

    with Store.open(session.settings.required_store()) as store:
        overviews = namespace_overviews(store)
        usage = total_usage(overviews)
        num_damaged = sum(overview.is_damaged for overview in overviews)
        session.output.record(
            "stats",
            {
                "url": store.url,
                "store_id": store.superblock.store_id,
                "format_version": store.superblock.version,
                "created": utc_time(store.superblock.created_ms),
                "num_namespaces": len(overviews),
                "num_damaged": num_damaged,
                "num_too_new": sum(overview.status is NamespaceStatus.TOO_NEW for overview in overviews),
                "num_segments": sum(overview.stats.num_segments for overview in overviews),
                **shown_usage(usage),
            },
        )
    for overview in overviews:
        if overview.problem is not None:
            session.output.warning(overview.problem)
    session.output.summary(
        "{num_namespaces} namespaces, {num_chunks} chunks, {num_incomplete_chunks} of them incomplete; "
        "{num_damaged} damaged",
        num_namespaces=len(overviews),
        num_chunks=usage.num_chunks,
        num_incomplete_chunks=usage.num_incomplete_chunks,
        num_damaged=num_damaged,
    )
    return ExitCode.DAMAGE if num_damaged else ExitCode.OK
