"""`lmcache ls`: the namespaces of a store, or the chunks of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import utc_day, utc_time

if TYPE_CHECKING:
    from lmcache_cli.store import State, Store
    from lmcache_format import Fingerprint

NAMESPACE_COLUMNS = (
    "namespace", "model", "dtype", "num_chunks", "num_tokens", "size_bytes", "last_used", "num_hits", "status",
)  # fmt: skip
CHUNK_COLUMNS = ("key", "depth", "num_tokens", "part", "encoding", "size_bytes", "created", "last_used", "num_hits")


@command(
    examples=("lmcache ls --store /srv/kv", "lmcache ls --store /srv/kv 3f9a --json"),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def ls(
    session: Session,
    namespace: Annotated[
        str | None,
        typer.Argument(parser=literal, help="List the shards of this namespace: its fingerprint or the start of it."),
    ] = None,
) -> ExitCode:
    """List the namespaces of a store, or the shards of one of them.

    A namespace is everything besides the tokens that decides the cached bytes: model, weights, dtype, and so on.
    """
    from lmcache_cli.store import Store

    with Store.open(session.settings.required_store()) as store:
        return list_namespaces(session, store) if namespace is None else _list_chunks(session, store, namespace)


def find_namespace(store: Store, start: str) -> Fingerprint:
    """The one namespace whose fingerprint starts so. Raises Refused if there is none or more than one."""
    found = [fingerprint for fingerprint in store.fingerprints() if start and fingerprint.startswith(start.lower())]
    if len(found) != 1:
        what = f"{len(found)} namespaces start with {start!r}" if found else f"no namespace starts with {start!r}"
        raise Refused(f"{what} in {store.url}", f"run 'lmcache ls --store {store.url}' to see them")
    return found[0]


def list_namespaces(session: Session, store: Store) -> ExitCode:
    """Prints a row for every namespace and a warning for each that cannot be read."""
    from lmcache_cli.commands.overview import namespace_overviews, total_usage

    overviews = namespace_overviews(store)
    session.output.table("namespace", (overview.row() for overview in overviews), columns=NAMESPACE_COLUMNS)
    for overview in overviews:
        if overview.problem is not None:
            session.output.warning(overview.problem)
    num_damaged = sum(overview.is_damaged for overview in overviews)
    usage = total_usage(overviews)
    session.output.summary(
        "{num_namespaces} namespaces, {num_chunks} chunks, {num_tokens} tokens, {size_bytes}; {num_damaged} damaged",
        num_namespaces=len(overviews),
        num_chunks=usage.num_chunks,
        num_tokens=usage.num_tokens,
        size_bytes=usage.size_bytes,
        num_damaged=num_damaged,
    )
    return ExitCode.DAMAGE if num_damaged else ExitCode.OK


def _list_chunks(session: Session, store: Store, start: str) -> ExitCode:
    from lmcache_cli.commands.overview import open_for_reading

    with open_for_reading(store, store.identity(find_namespace(store, start))) as opened:
        state = opened.state()
    num_shards = session.output.table("shard", _shard_rows(state), columns=CHUNK_COLUMNS)
    session.output.summary(
        "{num_shards} shards, {size_bytes}", num_shards=num_shards, size_bytes=int(state.adds["size_bytes"].sum())
    )
    return ExitCode.OK


def _shard_rows(state: State) -> Iterator[dict[str, object]]:
    """A row for every shard, by key; the manifest knows the first half of a key."""
    used = {int(touch["key"]): (int(touch["day"]), int(touch["hits"])) for touch in state.touches}
    for number in range(len(state)):
        entry = state.entry(number)
        day, num_hits = used.get(int(state.keys[number]), (None, 0))
        yield {
            "key": entry.key,
            "depth": entry.depth,
            "num_tokens": entry.num_tokens,
            "part": str(entry.part),
            "encoding": entry.encoding,
            "size_bytes": entry.size_bytes,
            "created": utc_time(entry.created_ms),
            "last_used": None if day is None else utc_day(day),
            "num_hits": num_hits,
        }
