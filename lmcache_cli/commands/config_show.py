"""`lmcache config show`: every setting, its value, and where it comes from."""

from collections.abc import Iterator

from lmcache_cli.commands.command import Session, command
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.settings import Settings, misspelt_variables


@command(
    examples=("lmcache config show", "LMCACHE_STORE=/srv/kv lmcache config show --json"),
)
def config_show(session: Session) -> ExitCode:
    """Show every setting and where it comes from.

    A flag wins over the environment, the environment over the project file (lmcache.toml, or [tool.lmcache] in
    pyproject.toml, in this folder or above it), and that over the user file ($XDG_CONFIG_HOME/lmcache/config.toml).
    """
    for name, nearest in misspelt_variables().items():
        session.output.warning(f"{name} in the environment is no setting; did you mean {nearest}?")
    num_settings = session.output.table("setting", _rows(session.settings), columns=("key", "value", "origin"))
    session.output.summary("{num_settings} settings", num_settings=num_settings)
    return ExitCode.OK


def _rows(settings: Settings) -> Iterator[dict[str, object]]:
    for key, value in settings.shown().items():
        origin = settings.origins[key]
        yield {
            "key": key,
            "value": value,
            "origin": str(origin),
            "source": origin.source,
            "where": origin.where,
            "line": origin.line,
        }
