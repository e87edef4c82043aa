"""The process around a command: signals, streams, and an exit code for whatever happened.

Importing this module is cheap, and the command line itself is imported once the signal handlers stand, so that an early
Ctrl-C ends with exit code 130 as a late one does.
"""

import sys
from collections.abc import Sequence

from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.interruption import Interruption

PROGRAM = "lmcache"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments` are those of the process if not given."""
    interruption = Interruption()
    interruption.install()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        exit_code = _run(words, interruption)
        interruption.finish()
    except BaseException as error:  # noqa: BLE001 — the boundary: everything becomes a message and a code
        exit_code = _report(error, words)
    return _released(exit_code)


def _run(words: list[str], interruption: Interruption) -> ExitCode:
    from lmcache_cli.commands.root import build_root
    from lmcache_cli.output import prepare_streams

    prepare_streams()
    result = build_root(on_terminal=sys.stdout.isatty()).main(
        words or ["--help"], prog_name=PROGRAM, standalone_mode=False, obj=interruption
    )
    return ExitCode(result or 0)


def _report(error: BaseException, words: list[str]) -> ExitCode:
    from lmcache_cli.failures import report
    from lmcache_cli.output import Output
    from lmcache_cli.settings import debug_requested

    return report(error, Output(PROGRAM), debug=debug_requested(words))


def _released(exit_code: ExitCode) -> ExitCode:
    from lmcache_cli.output import release_stdout

    released = release_stdout()
    return exit_code if exit_code is not ExitCode.OK else released
