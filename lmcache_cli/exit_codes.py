"""Exit codes of every command, documented once: the command line reference is generated from this table."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says; `meaning` is the text of the reference."""

    OK = 0
    ERROR = 1
    REFUSED = 2
    DAMAGE = 3
    NO_STORE = 10
    BUSY = 11
    TOO_NEW = 12
    UNSUPPORTED = 13
    HANGUP = 129
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


ALWAYS_POSSIBLE = (ExitCode.OK, ExitCode.ERROR, ExitCode.REFUSED)

_MEANINGS = {
    ExitCode.OK: "done, nothing left over",
    ExitCode.ERROR: "failed",
    ExitCode.REFUSED: "wrong usage, or refused before anything was changed",
    ExitCode.DAMAGE: "finished, but found damage or left work undone",
    ExitCode.NO_STORE: "there is no store at that place",
    ExitCode.BUSY: "somebody else is doing this right now",
    ExitCode.TOO_NEW: "written by a newer version of the format",
    ExitCode.UNSUPPORTED: "the back-end lacks a capability that this needs",
    ExitCode.HANGUP: "stopped by SIGHUP",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.OUTPUT_CLOSED: "the reader of the output went away",
    ExitCode.TERMINATED: "stopped by SIGTERM",
}
