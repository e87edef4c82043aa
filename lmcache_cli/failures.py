"""The one place that turns an error into a message, the next step and an exit code."""

import traceback
from dataclasses import dataclass

import typer

from lmcache_cli.errors import CommandError, OutputClosed, OutputFailed
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.interruption import Stopped
from lmcache_cli.output import Output


@dataclass(frozen=True, slots=True)
class Failure:
    """What to say about an error; `foreseen` is False for errors that nobody foresaw."""

    problem: str
    next_step: str
    exit_code: ExitCode
    foreseen: bool = True


def explain(error: BaseException) -> Failure:
    """Says what an error means for the caller of a command. Re-raises what must end the process (SystemExit)."""
    match error:
        case CommandError():
            return Failure(error.problem, error.next_step, error.exit_code)
        case Stopped():
            return Failure(str(error), "run the same command again to go on", error.exit_code)
        case typer.TyperException():
            return _explain_usage(error)
        case typer.Abort():
            return Failure("stopped at a question", "pass --yes to answer it beforehand", ExitCode.REFUSED)
    if (rule := _rule_for(type(error))) is not None:
        next_step = getattr(error, "next_step", "") or rule.next_step
        return Failure(_text(error), next_step, rule.exit_code)
    match error:
        case ModuleNotFoundError(name=str(name)) if extra := _EXTRAS.get(name.partition(".")[0]):
            return Failure(f"{name} is not installed", f"pip install 'lmcache-toolkit[{extra}]'", ExitCode.ERROR)
        case OSError(strerror=str(reason)):
            return Failure(f"{_names(error)}{reason}", "", ExitCode.ERROR)
        case Exception():
            return Failure(
                f"unexpected {type(error).__name__}: {error}",
                "run it again with --debug to see where",
                ExitCode.ERROR,
                foreseen=False,
            )
    raise error


def report(error: BaseException, output: Output, *, debug: bool) -> ExitCode:
    """Ends a command's output with what went wrong and returns the exit code. A reader who left is told nothing."""
    failure = explain(error)
    if failure.exit_code is ExitCode.OUTPUT_CLOSED:
        return failure.exit_code
    try:
        output.finish(failure.exit_code, failure.problem)
    except OutputClosed as closed:
        return closed.exit_code
    except OutputFailed:
        pass  # what went wrong first is the news
    if debug and not isinstance(error, Stopped):
        output.traceback("".join(traceback.format_exception(error)))
    output.failure(failure.problem, failure.next_step)
    return failure.exit_code


@dataclass(frozen=True, slots=True)
class _Rule:
    exit_code: ExitCode
    next_step: str = ""


# By qualified name, so that explaining a misspelt option does not import numpy. The narrowest class decides; a next
# step that the error itself knows goes before the one given here.
_RULES = {
    "lmcache_cli.store.errors.NoStore": _Rule(ExitCode.NO_STORE, "run 'lmcache init' to make one"),
    "lmcache_cli.store.errors.StoreTooNew": _Rule(ExitCode.TOO_NEW, "update lmcache-toolkit"),
    "lmcache_cli.store.errors.StoreDamaged": _Rule(ExitCode.DAMAGE, "run 'lmcache doctor'"),
    "lmcache_cli.store.errors.StoreExists": _Rule(ExitCode.REFUSED),
    "lmcache_cli.store.errors.NoSuchNamespace": _Rule(ExitCode.REFUSED, "run 'lmcache ls' to see the namespaces"),
    "lmcache_cli.store.errors.Refused": _Rule(ExitCode.REFUSED),
    "lmcache_cli.store.errors.IncompleteListing": _Rule(ExitCode.ERROR, "run it again when the store lists everything"),
    "lmcache_cli.store.errors.StoreError": _Rule(ExitCode.ERROR, "run 'lmcache doctor' to check the store"),
    "lmcache_cli.integration.errors.AnswerFailed": _Rule(ExitCode.ERROR),
    "lmcache_cli.integration.errors.EngineFailed": _Rule(ExitCode.ERROR),
    "lmcache_cli.integration.errors.ServerUnavailable": _Rule(ExitCode.ERROR),
    "lmcache_cli.integration.errors.ModelError": _Rule(ExitCode.REFUSED),
    "lmcache_cli.integration.errors.PromptError": _Rule(ExitCode.REFUSED),
    "lmcache_format.errors.KeyInputError": _Rule(ExitCode.REFUSED),
    "lmcache_format.errors.UnsupportedVersion": _Rule(ExitCode.TOO_NEW, "update lmcache-toolkit"),
    "lmcache_format.errors.FormatError": _Rule(ExitCode.DAMAGE, "run 'lmcache verify' to see what is damaged"),
    "lmcache_cli.backends.errors.Unsupported": _Rule(
        ExitCode.UNSUPPORTED, "check how the store is written; 'lmcache doctor' tries out what a place can do"
    ),
    "lmcache_cli.backends.errors.Obstructed": _Rule(ExitCode.ERROR, "look at what stands there, or use another place"),
    "lmcache_cli.backends.errors.NoSpace": _Rule(ExitCode.ERROR, "free some space, then run it again"),
    "lmcache_cli.backends.errors.Unavailable": _Rule(
        ExitCode.ERROR, "check that the store can be reached, then run it again"
    ),
    "lmcache_cli.backends.errors.BackendError": _Rule(ExitCode.ERROR, "run 'lmcache doctor' to check the store"),
}

# Packages that a base installation lacks, and the extra that brings them.
_EXTRAS = {
    "torch": "hf",
    "transformers": "hf",
    "tokenizers": "hf",
    "safetensors": "hf",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "vllm": "vllm",
}


def _rule_for(kind: type[BaseException]) -> _Rule | None:
    for ancestor in kind.__mro__:
        if (rule := _RULES.get(f"{ancestor.__module__}.{ancestor.__qualname__}")) is not None:
            return rule
    return None


def _explain_usage(error: typer.TyperException) -> Failure:
    # UsageError, which carries the context, has no public name in Typer.
    command_path = getattr(getattr(error, "ctx", None), "command_path", None)
    next_step = f"run '{command_path} --help'" if command_path else ""
    exit_code = ExitCode.REFUSED if error.exit_code == ExitCode.REFUSED else ExitCode.ERROR
    problem = error.format_message().replace(": Value error, ", ": ").rstrip(".")
    return Failure(problem, next_step, exit_code)


def _text(error: BaseException) -> str:
    """The message; an error without one is named by its class."""
    return str(error) or type(error).__name__


def _names(error: OSError) -> str:
    return "".join(f"{name}: " for name in (error.filename, error.filename2) if name is not None)
