"""The tree of commands. A command's module is imported when the command is used or its help line is shown."""

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Annotated, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from lmcache_cli import __version__
from lmcache_cli.commands.command import Command

HELP_COLUMNS = 100

# In the order of a first use; "group verb" is `verb` in the module `group_verb`.
COMMANDS = (
    "init",
    "ls",
    "stats",
    "inspect",
    "verify",
    "repair",
    "compress",
    "migrate",
    "prune",
    "rm",
    "pin",
    "unpin",
    "doctor",
    "warm",
    "bench ttft",
    "config show",
)

GROUPS = {
    "bench": "Measurements on your own model and prompts.",
    "config": "Settings, and where each of them comes from.",
}


def build_root(*, on_terminal: bool = False) -> TyperGroup:
    """The whole command line; off a terminal its help has a fixed width."""
    root = _group(_root, "lmcache")
    root.context_settings = {
        "help_option_names": ["-h", "--help"],
        "terminal_width": None if on_terminal else HELP_COLUMNS,
    }
    root.commands = _Loaded({name.split()[0]: _loader(name.split()[0]) for name in COMMANDS})
    return root


def load_command(name: str) -> Command:
    """The command with this name, `verb` or `group verb`."""
    module_name = name.replace(" ", "_").replace("-", "_")
    found = getattr(importlib.import_module(f"lmcache_cli.commands.{module_name}"), module_name)
    assert isinstance(found, Command)
    return found


T = TypeVar("T")


class _Loaded(MutableMapping[str, T]):
    """Names to commands, each made at its first use; the names alone cost nothing."""

    def __init__(self, loaders: Mapping[str, Callable[[], T]]) -> None:
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> T:
        return self._loaders[name]()

    def __setitem__(self, name: str, built: T) -> None:
        self._loaders[name] = lambda: built

    def __delitem__(self, name: str) -> None:
        del self._loaders[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __contains__(self, name: object) -> bool:
        return name in self._loaders


def _loader(name: str) -> Callable[[], TyperCommand | TyperGroup]:
    if name in GROUPS:
        return lambda: _subgroup(name)
    return lambda: load_command(name).build(name)


def _subgroup(name: str) -> TyperGroup:
    def callback() -> None: ...

    callback.__doc__ = GROUPS[name]
    group = _group(callback, name)
    verbs = [full.split()[1] for full in COMMANDS if full.split()[0] == name]
    group.commands = _Loaded({verb: _verb_loader(f"{name} {verb}", verb) for verb in verbs})
    return group


def _verb_loader(full: str, verb: str) -> Callable[[], TyperCommand | TyperGroup]:
    return lambda: load_command(full).build(verb)


def _group(callback: Callable[..., None], name: str) -> TyperGroup:
    app = typer.Typer(name=name, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(callback)
    return typer.main.get_group(app)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lmcache {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Persistent KV caches of language models: keep them as files, look at them, check them, answer from them."""
