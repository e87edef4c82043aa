"""Signals that end a command: the first one stops it in order, the third one at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lmcache_cli.exit_codes import ExitCode

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Raised in the main thread by the first ending signal, so that every `finally` runs.

    Not a KeyboardInterrupt, which libraries turn into something else, and not an Exception, which they swallow.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode(128 + self.number)

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Interruption:
    """Turns SIGINT, SIGTERM and SIGHUP into one `Stopped`.

    A second signal is answered with a line on stderr, because tidying up is short and worth waiting for; a third one
    ends the process where it stands. Signals that were ignored when the process began (`nohup`) stay ignored.
    """

    def __init__(self) -> None:
        self._num_signals = 0
        self._num_holders = 0
        self._waiting: int | None = None
        self._over = False

    def install(self) -> None:
        """Starts listening. Main thread only."""
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays `Stopped` to the end of the block, for writes that must not be cut in two."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
        self._raise_if_waiting()

    def finish(self) -> None:
        """The outcome is decided: from here on signals no longer change it. Raises a `Stopped` that waits."""
        self._raise_if_waiting()
        self._over = True

    def _raise_if_waiting(self) -> None:
        if self._waiting is not None and not self._num_holders:
            number, self._waiting = self._waiting, None
            raise Stopped(number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 2:
            os._exit(128 + number)
        if self._over:
            return
        if self._num_signals == 2:
            _write_to_stderr(b"still tidying up; once more stops at once\n")
        elif self._num_holders:
            self._waiting = number
        else:
            raise Stopped(number)


def _write_to_stderr(line: bytes) -> None:
    try:
        os.write(2, line)  # not through sys.stderr: a handler may run in the middle of another write
    except OSError:
        pass
