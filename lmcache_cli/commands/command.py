"""What every command has: the options in common, examples and exit codes in its help, one way to end."""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer
from typer.core import TyperCommand

from lmcache_cli.exit_codes import ALWAYS_POSSIBLE, ExitCode
from lmcache_cli.failures import report
from lmcache_cli.interruption import Interruption
from lmcache_cli.output import Output
from lmcache_cli.progress import ProgressStyle
from lmcache_cli.rendering import as_utf8, printable
from lmcache_cli.settings import Settings, debug_requested, load_settings

_Group = TypeVar("_Group")


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with: its settings and its output."""

    settings: Settings
    output: Output


@dataclass(frozen=True, slots=True)
class Command:
    """A function with the text of its help; `build` makes it a part of the command line."""

    function: Callable[..., ExitCode]
    examples: Sequence[str]
    exit_codes: Sequence[ExitCode]
    hidden: bool = False

    def build(self, name: str) -> TyperCommand:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, epilog=self._epilog(), hidden=self.hidden)(self._entry())
        built = typer.main.get_command(app)
        assert isinstance(built, TyperCommand)
        return built

    def _epilog(self) -> str:
        examples = "\n".join(f"  {example}" for example in self.examples)
        codes = "\n".join(f"  {code:<3} {code.meaning}" for code in self.exit_codes)
        return f"\b\nExamples:\n{examples}\n\n\b\nExit codes:\n{codes}"

    def _entry(self) -> Callable[..., ExitCode]:
        """The function as Typer sees it: its own parameters, then the common ones, instead of `session`.

        A parameter whose type is a dataclass stands for the fields of it: a group of options that commands share.
        """
        own = [
            one for name, one in inspect.signature(self.function, eval_str=True).parameters.items() if name != "session"
        ]
        groups = {one.name: one.annotation for one in own if _is_group(one.annotation)}

        def entry(context: typer.Context, **arguments: object) -> ExitCode:
            common = _grouped(CommonOptions, arguments)
            given: dict[str, object] = {name: _grouped(group, arguments) for name, group in groups.items()}
            return _run(self.function, arguments | given, common, context)

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        shown = [option for one in own for option in (_options(groups[one.name]) if one.name in groups else [one])]
        parameters = [context, *map(_keyword_only, [*shown, *_options(CommonOptions)])]
        entry.__signature__ = inspect.Signature(parameters, return_annotation=ExitCode)  # type: ignore[attr-defined]
        entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        entry.__doc__ = self.function.__doc__
        return entry


def command(
    *, examples: Sequence[str], exit_codes: Sequence[ExitCode] = (), hidden: bool = False
) -> Callable[[Callable[..., ExitCode]], Command]:
    """Makes a function a command. It takes a Session first and returns how it ended.

    `examples` are command lines that work as printed; `exit_codes` those that this command adds to 0, 1 and 2.
    """

    def decorate(function: Callable[..., ExitCode]) -> Command:
        return Command(function, examples, sorted({*ALWAYS_POSSIBLE, *exit_codes}), hidden)

    return decorate


def literal(text: str) -> str:
    """Reads a name exactly as given, bytes that are no text included: `typer.Option(parser=literal)`."""
    return text


def utf8_text(text: str) -> str:
    """Reads text, which means the same from every locale: `typer.Option(parser=utf8_text)`."""
    read = as_utf8(text)
    try:
        read.encode("utf-8")
    except UnicodeEncodeError:
        raise typer.BadParameter(f"expected text in UTF-8, found {printable(text)}") from None
    return read


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every command understands."""

    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            parser=literal,
            metavar="URL",
            help="Directory or URL of the store.  [else: LMCACHE_STORE, lmcache.toml]",
            show_default=False,
        ),
    ] = None
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object a line, each with its schema; a summary comes last.")
    ] = False
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing but warnings, errors and, with --json, the summary."),
    ] = False
    progress: Annotated[
        ProgressStyle | None,
        typer.Option("--progress", help="How to show progress.  [else: a bar on a terminal]", show_default=False),
    ] = None
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False


def _keyword_only(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _options(group: type) -> list[inspect.Parameter]:
    return list(inspect.signature(group, eval_str=True).parameters.values())


def _grouped(group: type[_Group], arguments: dict[str, object]) -> _Group:
    """Takes the options of a group out of the arguments."""
    return group(**{option.name: arguments.pop(option.name) for option in _options(group)})


def _run(
    function: Callable[..., ExitCode], arguments: dict[str, object], common: CommonOptions, context: typer.Context
) -> ExitCode:
    interruption = context.obj if isinstance(context.obj, Interruption) else Interruption()
    output = Output(context.command_path, json_lines=common.json_lines, quiet=common.quiet, interruption=interruption)
    log = _LogToOutput(output)
    try:
        logging.getLogger("lmcache").addHandler(log)
        settings = load_settings(_flags(common))
        output.progress_style = settings.progress
        exit_code = function(Session(settings, output), **arguments)
        output.finish(exit_code)
    except BaseException as error:  # noqa: BLE001 — the boundary, where an error becomes a message
        debug = common.debug or debug_requested(())
        return report(error, output, debug=debug)
    finally:
        logging.getLogger("lmcache").removeHandler(log)
    return exit_code


class _LogToOutput(logging.Handler):
    """What the packages below log as a warning is a warning of the command."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.warning(record.getMessage())


def _flags(common: CommonOptions) -> dict[str, str | bool | None]:
    """The options that are settings as well; None where the flag was not given."""
    progress = None if common.progress is None else common.progress.value
    return {"store": common.store, "progress": progress, "debug": common.debug or None}
