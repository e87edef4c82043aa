"""The acceptances of a namespace (SPEC §9.1): read, written, and carried over to a copy."""

from __future__ import annotations

from lmcache_cli.backends import AlreadyExists, Backend, BackendError, Durability
from lmcache_format.acceptance import MAX_ACCEPTANCE_BYTES, Acceptance
from lmcache_format.errors import FormatError
from lmcache_format.identity import Fingerprint
from lmcache_format.names import acceptance_directory, acceptance_path, is_acceptance_path

from .events import Event, Events
from .store import read_start


def read_acceptances(backend: Backend, fingerprint: Fingerprint, events: Events) -> list[Acceptance]:
    """All that can be read; those that cannot are counted and count for nothing. Never raises for what it finds."""
    found = []
    try:
        paths = [info.name for info in backend.list(acceptance_directory(fingerprint)) if is_acceptance_path(info.name)]
    except BackendError as problem:
        events.problem(Event.READ_UNAVAILABLE, acceptance_directory(fingerprint), problem)
        return []
    for path in paths:
        try:
            one = Acceptance.from_json(read_start(backend, path, MAX_ACCEPTANCE_BYTES))
        except BackendError as problem:
            events.problem(Event.READ_UNAVAILABLE, path, problem)
            continue
        except FormatError as problem:
            events.problem(Event.READ_DAMAGED, path, problem)
            continue
        if one.fingerprint == fingerprint and acceptance_path(fingerprint, one.name) == path:
            found.append(one)
        else:
            events.problem(Event.READ_FOREIGN, path, "an acceptance that belongs elsewhere")
    return found


def write_acceptance(backend: Backend, acceptance: Acceptance) -> None:
    """Record what a probe found, in the place of an earlier one of the same two engines. Raises `BackendError`."""
    path = acceptance_path(acceptance.fingerprint, acceptance.name)
    backend.put(path, [acceptance.to_json()], durability=Durability.FULL, if_absent=False)


def copy_acceptances(source: Backend, target: Backend, fingerprint: Fingerprint, events: Events) -> None:
    """Bring to a copy of a namespace what it lacks; what it has stays. Raises `BackendError`."""
    for one in read_acceptances(source, fingerprint, events):
        path = acceptance_path(fingerprint, one.name)
        if target.stat(path) is None:
            try:
                target.put(path, [one.to_json()], durability=Durability.FULL)
            except AlreadyExists:
                pass  # by somebody else just now
