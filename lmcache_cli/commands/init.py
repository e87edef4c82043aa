"""`lmcache init`: make a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import utc_time

if TYPE_CHECKING:
    from lmcache_cli.store import Store


@command(
    examples=("lmcache init --store /srv/kv", "lmcache init --store /srv/kv --if-missing"),
    exit_codes=(ExitCode.TOO_NEW, ExitCode.UNSUPPORTED),
)
def init(
    session: Session,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Be content with a store that is there already.")
    ] = False,
) -> ExitCode:
    """Make a store, and say what its place can do.

    Refused where a store is already. Nothing else at that place is touched.
    """
    from lmcache_cli.store import Store, StoreExists

    url = session.settings.required_store()
    created = True
    try:
        store = Store.create(url)
    except StoreExists:
        if not if_missing:
            raise
        store, created = Store.open(url), False
    with store:
        session.output.record("store", described_store(store))
    session.output.summary("made a store" if created else "there is a store already", created=created)
    return ExitCode.OK


def described_store(store: Store) -> dict[str, object]:
    """The properties of a store and of the place it lies in."""
    superblock, capabilities = store.superblock, store.backend.capabilities
    return {
        "url": store.url,
        "store_id": superblock.store_id,
        "format_version": superblock.version,
        "created": utc_time(superblock.created_ms),
        "writer": superblock.writer,
        **{name: getattr(capabilities, name) for name in capabilities.__dataclass_fields__},
    }
