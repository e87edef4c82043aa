"""`lmcache doctor`: is everything as it should be: the installation, the settings, the store and its place?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.checkup import Check, Status, exit_code_of
from lmcache_cli.commands.command import Session, command
from lmcache_cli.commands.environment_checks import environment_checks, settings_checks
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.failures import explain

if TYPE_CHECKING:
    from lmcache_cli.backends import Backend
    from lmcache_cli.store import Store

COLUMNS = ("area", "check", "status", "found", "next_step")


@command(
    examples=("lmcache doctor", "lmcache doctor --store /srv/kv", "lmcache doctor --store /srv/kv --no-probe --json"),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.UNSUPPORTED),
)
def doctor(
    session: Session,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="Try out what the store's place can do, with objects that are removed again."
        ),
    ] = True,
) -> ExitCode:
    """Check the installation, the settings, a store, and what its place can do.

    A note is worth knowing and a warning worth acting upon; only problems change the exit code. The bytes of shards
    are not read: that is 'lmcache verify'.
    """
    checks: list[Check] = []

    def rows() -> Iterator[dict[str, object]]:
        for check in _all_checks(session, probe):
            checks.append(check)
            yield check.row()

    output = session.output
    output.table("check", rows(), columns=COLUMNS)
    counts = Counter(check.status for check in checks)
    if output.quiet or output.json_lines:
        for check in checks:
            if check.status is Status.PROBLEM:
                output.warning(f"{check.area}: {check.check}: {check.found}")
    output.summary(
        "{num_checks} checks: {num_problems} problems, {num_warnings} warnings, {num_notes} notes",
        num_checks=len(checks),
        num_problems=counts[Status.PROBLEM],
        num_warnings=counts[Status.WARNING],
        num_notes=counts[Status.NOTE],
    )
    return exit_code_of(checks)


def _all_checks(session: Session, probe: bool) -> Iterator[Check]:
    yield from environment_checks()
    yield from settings_checks(session.settings)
    url = session.settings.store
    if url is None:
        yield Check("store", "store", Status.NOTE, "none is named", "pass --store URL to check one")
    else:
        yield from _guarded("store", _checks_at(url, probe))


def _checks_at(url: str, probe: bool) -> Iterator[Check]:
    """Of the store at a URL and of its place. Where there is no store nothing is written either."""
    from lmcache_cli.backends import open_backend
    from lmcache_cli.commands.store_checks import leftover_checks, namespace_checks, place_checks, superblock_checks
    from lmcache_cli.store import NoStore, Store, StoreError

    with closing(open_backend(url)) as backend:
        store = None
        try:
            store = Store.open(backend)
        except NoStore:
            raise
        except StoreError as problem:
            yield _problem("store", "superblock", problem)
        if store is not None:
            yield from superblock_checks(store)
            yield from _guarded("store", namespace_checks(store))
        yield from _guarded("store", leftover_checks(backend))
        yield from _guarded("place", place_checks(backend))
        if probe and store is not None and _may_write(store):
            yield from _guarded("place", _probes(backend))


def _probes(backend: Backend) -> Iterator[Check]:
    from lmcache_cli.commands.store_checks import clock_check, probe_checks

    checks = list(probe_checks(backend))
    if checks[0].status is Status.OK:
        yield clock_check(backend)
    yield from checks


def _may_write(store: Store) -> bool:
    from lmcache_cli.store import StoreTooNew
    from lmcache_format.superblock import Operation

    try:
        store.check(Operation.WRITE)
    except StoreTooNew:
        return False
    return True


def _guarded(area: str, checks: Iterator[Check]) -> Iterator[Check]:
    """The checks, and where one of them cannot go on, that as a problem."""
    from lmcache_cli.backends import BackendError
    from lmcache_cli.store import StoreError
    from lmcache_format import FormatError

    try:
        yield from checks
    except (BackendError, StoreError, FormatError, OSError) as problem:
        yield _problem(area, area, problem)


def _problem(area: str, check: str, problem: Exception) -> Check:
    failure = explain(problem)
    next_step = "" if "lmcache doctor" in failure.next_step else failure.next_step  # that is where we are
    return Check(area, check, Status.PROBLEM, failure.problem, next_step, failure.exit_code)
