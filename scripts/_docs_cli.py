"""The command line reference, made from the commands themselves; `scripts/docs_cli` runs it."""

import contextlib
import io
import sys
from pathlib import Path

from lmcache_cli.app import PROGRAM
from lmcache_cli.commands.root import COMMANDS, GROUPS, build_root
from lmcache_cli.exit_codes import ExitCode

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

PREAMBLE = """\
# Command line reference

<!-- Written by scripts/docs_cli from the commands themselves; change those. -->

Data goes to standard output, everything else to standard error. On a terminal data is a table for people. In a pipe
the same rows are separated by tabs under a line of column names: keys and paths in full, sizes in bytes, `-` where
there is nothing, control characters as backslash escapes. With `--json` every line is one ASCII object whose `schema`
is `lmcache.<kind>/<version>`, and the last line is `lmcache.summary/1` with the command, its exit code, its counts
and, if it failed, the `error`. With `--quiet` only warnings and errors are printed and, with `--json`, the summary:
one line for a log. None of these change the exit code.

Sizes are written `500GB` (powers of 1000) or `500GiB` (powers of 1024), durations `30d`, `12h`, `90m`, `45s`, `2w` or
`1d12h`, shares of a store `1/7` or `auto/30` (another thirtieth every day).

Settings come from a flag, else from the environment (`LMCACHE_STORE`, `LMCACHE_PROGRESS`, `LMCACHE_DEBUG`), else from
the project file (`lmcache.toml`, or `[tool.lmcache]` in `pyproject.toml`, in the current folder or above it), else
from the user file (`$XDG_CONFIG_HOME/lmcache/config.toml`); `lmcache config show` tells which.

A first Ctrl-C (or SIGTERM, SIGHUP) stops a command in order; a third one stops it at once. Run it again to go on.
"""


def reference() -> str:
    """The whole page."""
    codes = "".join(f"| {int(code)} | {code.meaning} |\n" for code in ExitCode)
    parts = [PREAMBLE, f"## Exit codes\n\n| code | meaning |\n|---:|---|\n{codes}", _section(PROGRAM, [])]
    described: set[str] = set()
    for name in COMMANDS:
        group = name.split()[0]
        if group in GROUPS and group not in described:
            parts.append(_section(f"{PROGRAM} {group}", [group]))
            described.add(group)
        parts.append(_section(f"{PROGRAM} {name}", name.split()))
    return "\n".join(parts)


def _section(title: str, words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        build_root().main([*words, "--help"], prog_name=PROGRAM, standalone_mode=False)
    text = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"## {title}\n\n```text\n{text}\n```\n"


def main(arguments: list[str]) -> int:
    wanted = reference()
    if arguments == ["--check"]:
        found = REFERENCE.read_text(encoding="utf-8") if REFERENCE.exists() else ""
        if found != wanted:
            print("docs/cli.md is stale; run scripts/docs_cli", file=sys.stderr)
        return int(found != wanted)
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
