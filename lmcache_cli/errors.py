"""Errors that belong to the command line itself. Each says what is wrong and what to do next.

CommandError                 `exit_code` 1
├── Refused                  2: the request is wrong, or dangerous without a further word
│   ├── QuantityError        a size, duration or subset that cannot be read
│   └── SettingsError        a setting in a file or the environment that cannot be read
├── DamageFound              3: the one thing that was asked about is damaged
├── TooNew                   12: the one thing that was asked about is of a newer format
├── OutputFailed             standard output cannot be written (a full disk)
└── OutputClosed             141: the reader of standard output went away; nothing is printed about it
"""

from typing import ClassVar

from lmcache_cli.exit_codes import ExitCode


class CommandError(Exception):
    """Ends a command with a message, the next step and an exit code.

    `problem` says what was expected, what was found and where; `next_step` is an imperative, or empty.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.ERROR

    def __init__(self, problem: str, next_step: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.next_step = next_step


class Refused(CommandError):
    exit_code = ExitCode.REFUSED


class QuantityError(Refused):
    pass


class SettingsError(Refused):
    pass


class DamageFound(CommandError):
    exit_code = ExitCode.DAMAGE


class TooNew(CommandError):
    exit_code = ExitCode.TOO_NEW


class OutputFailed(CommandError):
    pass


class OutputClosed(CommandError):
    exit_code = ExitCode.OUTPUT_CLOSED
