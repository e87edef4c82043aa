"""Runs the command line as people, pipes and cron do: in a process of its own, and looks at the bytes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from lmcache_cli.store import Namespace

FAKE_PROGRAM = Path(__file__).with_name("fake_program.py")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a process ended: its exit code (negative when a signal killed it) and what it printed."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.stdout.splitlines()


class Runner(Protocol):
    def __call__(self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None) -> Ran: ...


@dataclass(frozen=True, slots=True)
class Program:
    """A command line in its own folder, with nothing of ours in its environment."""

    command: Sequence[str]
    folder: Path

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        config_home = str(self.folder / "config-home")
        return {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "XDG_CONFIG_HOME": config_home, **(extra or {})}

    def start(
        self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None, **streams: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.command, *arguments],
            cwd=self.folder,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    def __call__(self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None) -> Ran:
        """Without any terminal, as in a pipe or under cron."""
        process = self.start(*arguments, env=env)
        stdout, stderr = process.communicate(timeout=60)
        return Ran(process.returncode, stdout, stderr)

    def on_terminal(self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None) -> Ran:
        """With stdout and stderr on one terminal; everything comes back as `stdout`."""
        ours, theirs = pty.openpty()
        process = self.start(*arguments, env={"TERM": "xterm", **(env or {})}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        printed = b""
        try:
            while block := os.read(ours, 65536):
                printed += block
        except OSError:  # the terminal is gone when the last process that held it is
            pass
        os.close(ours)
        return Ran(process.wait(timeout=60), printed, b"")


@pytest.fixture
def lmcache(tmp_path: Path) -> Program:
    """The real command line."""
    return Program([sys.executable, "-m", "lmcache_cli"], tmp_path)


@dataclass(frozen=True, slots=True)
class Inside:
    """The real command line inside the test's own process: for large tables, where a process each takes too long."""

    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[bytes]
    folder: Path

    def __call__(self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None) -> Ran:
        from lmcache_cli.app import main

        with self.monkeypatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("XDG_CONFIG_HOME", str(self.folder / "config-home"))
            patch.delenv("LMCACHE_STORE", raising=False)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            self.capture.readouterr()
            code = main([os.fsdecode(argument) for argument in arguments])
        stdout, stderr = self.capture.readouterr()
        return Ran(code, stdout, stderr)


@pytest.fixture
def inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Inside]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Inside(monkeypatch, capfdbinary, tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def fake(tmp_path: Path) -> Program:
    """The real command line with one command more, `fake`, that prints, waits and fails as told."""
    return Program([sys.executable, str(FAKE_PROGRAM), "fake"], tmp_path)


@pytest.fixture
def faked(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The same inside the test's own process."""
    from lmcache_cli.commands import root
    from tests.cli import fake_program

    monkeypatch.setitem(sys.modules, "lmcache_cli.commands.fake", fake_program.as_module())
    monkeypatch.setattr(root, "COMMANDS", (*root.COMMANDS, "fake"))
    return partial(inside, "fake")


@pytest.fixture
def made_store(tmp_path: Path) -> Path:
    """A store of one namespace, 4 tokens a chunk: a document of 3 chunks and a tail, another that shares its first."""
    from lmcache_cli.store import Store
    from lmcache_format import AttentionKind, Dtype, Identity, LayerGroup

    identity = Identity(
        model="org/tiny [v1]",
        weights=f"sha256:{'0' * 64}",
        dtype=Dtype.F16,
        layers=2,
        kv_heads=2,
        head_dim_k=8,
        head_dim_v=8,
        groups=(LayerGroup(AttentionKind.FULL, 0, 2),),
        chunk_tokens=4,
    )
    folder = tmp_path / "a store"
    with Store.create(str(folder)) as store, store.namespace(identity, create=True) as namespace:
        store_document(namespace, list(range(100, 114)), "first")
        store_document(namespace, [*range(100, 104), *range(200, 204)], "second")
    return folder


def store_document(namespace: Namespace, tokens: list[int], name: str) -> None:
    """Write a document of made-up KV, 4 tokens a chunk."""
    from lmcache_format import next_key

    parent = namespace.root()
    for depth, start in enumerate(range(0, len(tokens), 4)):
        words = tokens[start : start + 4]
        key = next_key(parent, words)
        chunk = namespace.buffer(len(words))
        chunk.memory[:] = bytes(number % 251 for number in range(chunk.size_bytes))
        namespace.put(chunk, key=key, parent=parent, depth=depth, tokens=words)
        parent = key
    namespace.label(name, parent, len(tokens), depth)
