"""A vLLM engine in a process of its own, which computes documents and saves them through the connector.

The process is `prefilling`; this side starts it, tells it what to compute and hears what it did. It ends when this side
goes away, whatever the reason: its standard input is then at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from lmcache_cli.integration.asked_warming import Asked
from lmcache_cli.integration.errors import EngineFailed
from lmcache_cli.integration.warming import WarmDocument

COMMAND = (sys.executable, "-m", "lmcache_cli.integration.vllm.prefilling")
CLOSE_S = 90.0
_TERMINATE_S = 15.0
_ERROR = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Engine|Model)): \S")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine. `longest` is the longest document there will be, `at_once` how many are computed
    together, `token_bytes` what KV of a token takes: on a CPU the cache is made as large as these need, unless
    VLLM_CPU_KVCACHE_SPACE says otherwise. `engine` are vLLM's own arguments, which go before all others; `options` are
    the connector's."""

    directory: str
    dtype: str
    longest: int
    at_once: int
    token_bytes: int
    options: Mapping[str, Any]
    piece_tokens: int | None = None
    revision: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a started engine says of itself: the namespace it saves to, how it is called as a producer of KV and as one
    who loads it, and the longest document it takes."""

    fingerprint: str
    producer: Mapping[str, Any]
    consumer: Mapping[str, str]
    max_tokens: int


class EngineProcess:
    """See the module. An `Asker`; use `with`, or `close`."""

    saves_tails = True

    def __init__(self, spec: EngineSpec, documents: Sequence[WarmDocument]) -> None:
        """Starts the engine and waits until it is ready. Raises `EngineFailed` with what it said last."""
        self._documents = documents
        self._at_once = spec.at_once
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        try:
            self._send(asdict(spec))
            self.ready = Ready(**self._hear()["ready"])
        except BaseException:
            self.close()
            raise

    @property
    def max_tokens(self) -> int | None:
        """See `Asker`."""
        return self.ready.max_tokens

    def ask(self, numbers: Sequence[int]) -> Iterator[Asked]:
        """See `Asker`; raises `EngineFailed`."""
        waiting = list(reversed(numbers))
        num_asked = 0
        while waiting or num_asked:
            while waiting and num_asked < 2 * self._at_once:
                number = waiting.pop()
                document = self._documents[number]
                self._send({"number": number, "tokens": document.tokens.tolist(), "salt": document.salt})
                num_asked += 1
            told = self._hear()
            num_asked -= 1
            yield Asked(told["number"], told["num_tokens"], told["num_cached"], problem=told["problem"])

    def close(self) -> None:
        """Let the engine write what is pending, and end it; one that does not end is ended."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._end()
            self._stdout.close()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._stdin.flush()
        except OSError:
            raise self._failure() from None

    def _hear(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            raise self._failure()
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            said = line[:200].decode("utf-8", "replace").strip()
            raise EngineFailed(f"vLLM's process said what is no answer: {said!r}; does a plugin write to it?") from None

    def _failure(self) -> EngineFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERMINATE_S)
        self._log.seek(0)
        said = self._log.read().decode("utf-8", "replace")
        return EngineFailed(f"vLLM ended with exit status {self._process.returncode}: {reason_in(said)}")

    def _end(self) -> None:
        """Whatever is left of the process, and of those that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)


def reason_in(log: str) -> str:
    """The first error in an engine's log, of which later ones are consequences; else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [(line, found) for line in lines if (found := _ERROR.search(line)) and "initialization failed" not in line]
    for line, found in [one for one in errors if "ERROR" in one[0]] or errors[-1:]:
        return line[found.start() :]
    return lines[-1] if lines else "it said nothing"


def connector_options(store: str, chunk_tokens: int, *, cache_dir: Path | None, **other: Any) -> dict[str, Any]:
    """The connector's options for an engine whose work is to save."""
    return {
        "store": store,
        "chunk_size": chunk_tokens,
        "partial_chunks": True,
        "max_pending_saves": 64,
        **({} if cache_dir is None else {"digest_cache": str(cache_dir)}),
        **other,
    }
