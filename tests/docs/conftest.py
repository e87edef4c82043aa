"""The real command line inside the test's own process: a new one for each command takes too long on a busy machine."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended, and the records it printed; the last one is its summary."""

    code: int
    records: list[dict[str, Any]]

    @property
    def summary(self) -> dict[str, Any]:
        return self.records[-1]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`lmcache(…)` runs a command with `--json`."""

    capture: pytest.CaptureFixture[bytes]

    def __call__(self, *arguments: str | Path) -> Ran:
        from lmcache_cli.app import main

        self.capture.readouterr()
        code = main([*map(str, arguments), "--json"])
        stdout, _ = self.capture.readouterr()
        return Ran(code, [json.loads(line) for line in stdout.splitlines()])


@pytest.fixture
def lmcache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[CommandLine]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))
    monkeypatch.delenv("LMCACHE_STORE", raising=False)
    yield CommandLine(capfdbinary)
    for number, handler in handlers.items():
        signal.signal(number, handler)
