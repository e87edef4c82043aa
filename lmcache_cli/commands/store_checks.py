"""The store and the place it lies in: what `doctor` reads there, and what it tries out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lmcache_cli.commands.checkup import Check, Status
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.quantities import show_size

if TYPE_CHECKING:
    from lmcache_cli.backends import Backend
    from lmcache_cli.store import Store
    from lmcache_cli.store.objects import Located, Place

LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_INODES = 10_000
MOST_SKEW_MS = 2_000


def superblock_checks(store: Store) -> Iterator[Check]:
    """What the store says of itself, and what this release may do with it."""
    from lmcache_cli.store import StoreTooNew
    from lmcache_format.superblock import Operation

    block = store.superblock
    yield Check("store", "superblock", Status.OK, f"generation {block.generation}, format {block.version}")
    for operation in Operation:
        try:
            store.check(operation)
        except StoreTooNew as newer:
            yield Check("store", f"may {operation}", Status.WARNING, str(newer), newer.next_step)


def namespace_checks(store: Store) -> Iterator[Check]:
    """Identities and indexes. Raises `BackendError`."""
    from lmcache_cli.store.index import Index
    from lmcache_cli.store.objects import IDENTITY_ADVICE, find_identity

    fingerprints = store.fingerprints()
    num_sound = 0
    for fingerprint in fingerprints:
        check = f"namespace {fingerprint}"
        found = find_identity(store, fingerprint)
        if found.is_newer:
            yield Check("store", check, Status.WARNING, found.problem, "use a newer release of lmcache-toolkit")
        elif found.identity is None:
            yield Check("store", check, Status.PROBLEM, found.problem, IDENTITY_ADVICE, ExitCode.DAMAGE)
        index = Index(store.backend, fingerprint)
        damaged = [problem for problem in index.problems if not problem.is_newer]
        for problem in damaged:
            reason = f"{problem.path}: {problem.reason}"
            yield Check("store", check, Status.PROBLEM, reason, "run 'lmcache repair'", ExitCode.DAMAGE)
        num_sound += found.identity is not None and not damaged
    yield Check("store", "namespaces", Status.OK, f"{num_sound} of {len(fingerprints)} as they should be")


def leftover_checks(backend: Backend) -> Iterator[Check]:
    """Files outside the namespaces: superblocks of all generations, staging, quarantine, foreign ones.

    Raises `BackendError`."""
    from lmcache_cli.store.objects import Place, outside_namespaces

    counts: Counter[Place] = Counter()
    sizes: Counter[Place] = Counter()
    for located in outside_namespaces(backend):
        counts[located.place] += 1
        sizes[located.place] += located.size_bytes
        if located.place in (Place.DAMAGED, Place.NEWER):
            yield _superblock_check(located)

    def counted(place: Place) -> str:
        return f"{counts[place]} files, {show_size(sizes[place])}"

    if counts[Place.STALE_STAGING]:
        found = f"{counted(Place.STALE_STAGING)}, left behind by writers that ended"
        yield Check("store", "staging", Status.WARNING, found, "run 'lmcache repair --yes' to remove them")
    else:
        busy = f"{counted(Place.STAGING)} of writers at work" if counts[Place.STAGING] else ""
        yield Check("store", "staging", Status.OK, busy or "nothing left behind")
    if counts[Place.QUARANTINED]:
        yield Check(
            "store",
            "quarantine",
            Status.NOTE,
            counted(Place.QUARANTINED),
            "damaged files end there; delete them when you have looked at them",
        )
    if counts[Place.FOREIGN]:
        advice = "run 'lmcache verify --quick' to see them; they are left alone"
        yield Check("store", "foreign files", Status.NOTE, counted(Place.FOREIGN), advice)


def place_checks(backend: Backend) -> Iterator[Check]:
    """The file system below a local store, and the store's clock. Raises `BackendError`."""
    from lmcache_cli.backends.local import LocalBackend
    from lmcache_cli.backends.local.place import place_of

    if isinstance(backend, LocalBackend):
        place = place_of(backend)
        name = place.file_system or "unknown"
        if place.is_volatile:
            yield Check("place", "file system", Status.WARNING, f"{name}: in memory", "a restart empties this store")
        elif place.is_network:
            advice = "measure it: a cache pays only where reading beats computing"
            yield Check("place", "file system", Status.NOTE, f"{name}: over the network", advice)
        else:
            yield Check("place", "file system", Status.OK, name)
        is_short = place.free_bytes < LEAST_FREE_BYTES
        free = f"{show_size(place.free_bytes)} of {show_size(place.size_bytes)}"
        yield Check("place", "free space", _warned(is_short), free, "free some space" if is_short else "")
        if place.free_inodes is not None:
            is_short = place.free_inodes < LEAST_FREE_INODES
            advice = "every shard is a file; free some" if is_short else ""
            yield Check("place", "free inodes", _warned(is_short), f"{place.free_inodes:,}", advice)


def clock_check(backend: Backend) -> Check:
    """The store's clock against that of this machine; reading it may write. Raises `BackendError`."""
    before = time.time_ns() // 1_000_000
    there = backend.now_ms()
    after = time.time_ns() // 1_000_000
    skew_ms = there - min(max(there, before), after)
    is_off = abs(skew_ms) > MOST_SKEW_MS
    advice = "ages are told by the store's clock; set both machines' clocks" if is_off else ""
    return Check("place", "clock", _warned(is_off), f"{skew_ms:+d} ms against this machine", advice)


def probe_checks(backend: Backend) -> Iterator[Check]:
    """Try out what the back-end promises, with objects that are removed again."""
    from lmcache_cli.store.probing import Outcome, probe_backend

    for probe in probe_backend(backend):
        match probe.outcome:
            case Outcome.WORKS:
                yield Check("back-end", probe.name, Status.OK, probe.found)
            case Outcome.LACKING:
                yield Check("back-end", probe.name, Status.NOTE, probe.found)
            case Outcome.BROKEN:
                advice = "do not write to this place from more than one process"
                yield Check("back-end", probe.name, Status.PROBLEM, probe.found, advice, ExitCode.UNSUPPORTED)
            case Outcome.FAILED:
                advice = "check permissions and that the place can be reached"
                yield Check("back-end", probe.name, Status.PROBLEM, probe.found, advice, ExitCode.DAMAGE)


def _superblock_check(located: Located) -> Check:
    from lmcache_cli.store.objects import Place

    if located.place is Place.NEWER:
        return Check("store", located.path, Status.WARNING, located.reason, "use a newer release of lmcache-toolkit")
    advice = "restore that file from a copy of the store; shards are intact"
    return Check("store", located.path, Status.PROBLEM, located.reason, advice, ExitCode.DAMAGE)


def _warned(is_bad: bool) -> Status:
    return Status.WARNING if is_bad else Status.OK
