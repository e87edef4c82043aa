"""The command line with one command more, `fake`, which does what its options say and nothing else."""

import logging
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lmcache_cli.app import main
from lmcache_cli.commands import root
from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.interruption import Stopped


def _raise(kind: str, name: str) -> None:
    match kind:
        case "refused":
            raise Refused(f"cannot use {name}", "use another one")
        case "os-error":
            Path(name).read_bytes()
        case "package":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        case "unforeseen":
            raise ZeroDivisionError(f"nobody thought of {name}")


@command(examples=("lmcache fake",), exit_codes=(ExitCode.DAMAGE,))
def fake(
    session: Session,
    names: Annotated[list[str], typer.Option("--name", parser=literal)] = ["plain"],  # noqa: B006
    rows: Annotated[int, typer.Option("--rows")] = 1,
    sleep_s: Annotated[float, typer.Option("--sleep")] = 0.0,
    fail: Annotated[str, typer.Option("--fail")] = "",
    code: Annotated[int, typer.Option("--code")] = 0,
    steps: Annotated[int, typer.Option("--steps")] = 0,
    tidy_s: Annotated[float, typer.Option("--tidy")] = 0.0,
) -> ExitCode:
    """Print a table, then wait, then fail."""
    staging = Path("staging")
    staging.touch()
    try:
        columns = ("name", "size_bytes", "key")
        table = ({"name": name, "size_bytes": 3 * 2**20, "key": f"{i:064x}"} for name in names for i in range(rows))
        printed = session.output.table("fake", table, columns=columns)
        session.output.summary("{num_rows} rows printed", num_rows=printed)
        for name in names:
            session.output.note(f"a note about {name}")
        with session.output.progress("faking", total=steps, unit="steps") as meter:
            for _ in range(steps):
                time.sleep(0.02)
                meter.advance()
        if code:
            logging.getLogger("lmcache.store").warning("segment \x1b damaged")
        if sleep_s:
            session.output.warning("sleeping")
            time.sleep(sleep_s)
        _raise(fail, " ".join(names))
        return ExitCode(code)
    except Stopped:
        time.sleep(tidy_s)
        raise
    finally:
        staging.unlink()


def as_module() -> ModuleType:
    """The module that a command of this name would have."""
    module = ModuleType("lmcache_cli.commands.fake")
    module.fake = fake  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    sys.modules["lmcache_cli.commands.fake"] = as_module()
    root.COMMANDS = (*root.COMMANDS, "fake")
    sys.exit(main())
