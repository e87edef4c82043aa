"""Problems are counted every time and told once, and a flood of them does not flood the log."""

from __future__ import annotations

import logging
import threading

import pytest

from lmcache_cli.store import events as events_module
from lmcache_cli.store.events import Event, Events


def test_a_problem_is_told_once_for_each_place_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    for _ in range(5):
        for where in ("a", "b"):
            events.problem(Event.READ_DAMAGED, where, "checksum")
    events.problem(Event.READ_MISSING, "a", "gone")
    assert events[Event.READ_DAMAGED] == 10
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert events.snapshot() == {"read_damaged": 10, "read_missing": 1}


def test_a_flood_of_problems_ends_in_the_counters(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MOST_TOLD", 20)
    events = Events()
    for number in range(200):
        events.problem(Event.READ_DAMAGED, str(number), "checksum")
        events.problem(Event.READ_DAMAGED, "199", "checksum")
    assert len(caplog.records) == 20
    assert events[Event.READ_DAMAGED] == 400


def test_no_count_is_lost_between_threads() -> None:
    events = Events()
    threads = [threading.Thread(target=lambda: [events.count(Event.HIT, 2) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[Event.HIT] == 8000
