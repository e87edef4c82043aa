"""Threads of loads and saves: where they run, and that saves give way to whatever computes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from lmcache_cli.runtime.saving import BackgroundWriter
from lmcache_cli.runtime.threads import BACKGROUND_NICENESS, parent_cores, settled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")


def of_thread(work: Callable[[], object]) -> tuple[set[int], int]:
    """Cores and niceness of a thread that did this."""
    found: list[tuple[set[int], int]] = []

    def run() -> None:
        work()
        found.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_leaves_the_core_it_was_started_on():
    cores = os.sched_getaffinity(0)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})  # as an engine's main thread is
        assert of_thread(lambda: None)[0] == {min(cores)}
        assert of_thread(settled(cores=cores)) == (cores, niceness)

    of_thread(bound)


def test_a_background_thread_gives_way_and_never_comes_forward():
    cores, niceness = of_thread(settled(is_background=True))
    assert cores == os.sched_getaffinity(0)
    assert niceness == max(BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))

    def nicer() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        settled(is_background=True)()

    assert of_thread(nicer)[1] == 19


def test_what_the_system_forbids_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    before = of_thread(lambda: None)
    assert of_thread(settled(cores={0})) == before


def test_a_writer_gives_way_while_the_engine_does_not():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    writer = BackgroundWriter()
    numbers = {thread.name: thread.native_id for thread in threading.enumerate()}
    writer.wait_idle(1.0)
    threading.Event().wait(0.05)
    number = numbers["lmcache-save"]
    assert number is not None
    assert os.getpriority(os.PRIO_PROCESS, number) == max(BACKGROUND_NICENESS, before)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    writer.close()


def test_the_cores_of_the_parent_are_known():
    assert parent_cores() is not None
