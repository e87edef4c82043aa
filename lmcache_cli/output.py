"""The one place that prints: data on stdout, talk on stderr, in the form that the reader can use.

On a terminal a table, in a pipe the same rows separated by tabs with full keys, with `--json` one JSON object a line,
each with its schema, and one `lmcache.summary/1` object at the end. Nothing here depends on the width of a terminal
unless stdout is one. This is the only module that imports rich, and it does so only for a terminal.
"""

import errno
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

from lmcache_cli.errors import OutputClosed, OutputFailed
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.interruption import Interruption
from lmcache_cli.progress import PLAIN_INTERVAL_S, Meter, ProgressStyle
from lmcache_cli.rendering import JsonValue, cell, field, fields_of, heading, json_text, printable

if TYPE_CHECKING:
    from rich.console import Console

_FLUSH_CHARACTERS = 64 * 1024
_FLUSH_INTERVAL_S = 1.0
_ROWS_A_TABLE = 1000
_BAR_INTERVAL_S = 0.1
_LEAST_CELL_COLUMNS = 12


def prepare_streams() -> None:
    """Makes the standard streams safe to print on: no name can raise, and a closed one swallows what is printed.

    A closed descriptor is opened on the null device, or the next file opened would be taken for standard output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, that is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 — open as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 — open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def release_stdout() -> ExitCode:
    """Writes out what stdout still holds; afterwards the interpreter has nothing left to complain about at exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OUTPUT_CLOSED if error.errno == errno.EPIPE else ExitCode.ERROR
    return ExitCode.OK


class Output:
    """What one command prints. Rows are mappings or dataclasses; keys carry the unit (`size_bytes`, `ttft_ms`)."""

    def __init__(
        self,
        command: str = "",
        *,
        json_lines: bool = False,
        quiet: bool = False,
        progress_style: ProgressStyle = ProgressStyle.AUTO,
        interruption: Interruption | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command = command
        self.json_lines = json_lines
        self.quiet = quiet
        self.progress_style = progress_style
        self._interruption = interruption or Interruption()
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._clock = clock
        self._lock = threading.RLock()  # workers count and warn while the command prints
        self._pending: list[str] = []
        self._pending_characters = 0
        self._flushed_s = clock()
        self._summary: dict[str, JsonValue] = {}
        self._summary_text = ""
        self._bar: _Bar | None = None

    # ------------------------------------------------------------------ data, on stdout

    def table(
        self,
        kind: str,
        rows: Iterable[object],
        *,
        columns: Sequence[str],
        terminal_columns: Sequence[str] | None = None,
    ) -> int:
        """Prints rows as they come and returns how many there were.

        Pipes get `columns`, a terminal `terminal_columns` where they differ; JSON holds every key of the row, under the
        schema `lmcache.<kind>/1`.
        """
        if self._stdout.isatty() and not self.json_lines and not self.quiet:
            return self._print_table(rows, terminal_columns or columns)
        if not self.json_lines and not self.quiet:
            self._print_line("\t".join(columns))
        num_rows = 0
        for row in rows:
            self._print_row(kind, row, columns)
            num_rows += 1
        return num_rows

    def record(self, kind: str, record: object) -> None:
        """Prints one thing with named properties, a property a line."""
        if self.json_lines:
            self._print_json(kind, record)
        elif not self.quiet:
            self._print_record(fields_of(record))

    # ------------------------------------------------------------------ talk, on stderr

    def summary(self, text: str, **counts: object) -> None:
        """What the command did, in one sentence whose numbers are the counts: `"{num_chunks} chunks checked"`.

        Printed when the command ends: the sentence on stderr, the counts as the last JSON object on stdout.
        """
        self._summary = fields_of(counts)
        self._summary_text = text.format_map({key: cell(key, value) for key, value in self._summary.items()})

    def note(self, text: str) -> None:
        """Something worth knowing; `--quiet` leaves it out."""
        if not self.quiet:
            self._talk(printable(text))

    def warning(self, text: str) -> None:
        """Something the reader should act upon; printed even with `--quiet`."""
        self._talk(printable(f"warning: {text}"))

    def failure(self, problem: str, next_step: str = "") -> None:
        """Why the command failed, and what to do next."""
        self._talk(printable(f"{self.command}: {problem}" if self.command else problem))
        if next_step:
            self._talk(printable(f"  next: {next_step}"))

    def traceback(self, text: str) -> None:
        """A traceback for developers, line by line."""
        for line in text.splitlines():
            self._talk(printable(line))

    @contextmanager
    def progress(self, label: str, *, total: int | None, unit: str) -> Iterator[Meter]:
        """Counts towards `total` (None when unknown) and shows how it goes, a bar only on a terminal."""
        style = self._progress_style()
        if style is not ProgressStyle.BAR:
            interval_s = PLAIN_INTERVAL_S if style is ProgressStyle.PLAIN else float("inf")
            yield Meter(label, total, unit, clock=self._clock, show=self._talk_of, interval_s=interval_s)
            return
        bar = _Bar(self._stderr)
        meter = Meter(label, total, unit, clock=self._clock, show=bar.show, interval_s=_BAR_INTERVAL_S)
        bar.begin(meter)
        self._bar = bar
        try:
            yield meter
        finally:
            self._bar = None
            bar.end()

    def finish(self, exit_code: ExitCode, problem: str | None = None) -> None:
        """Ends the command's output: the summary, then everything that is still held back."""
        if self.json_lines:
            ending: dict[str, JsonValue] = {"command": self.command, "exit_code": int(exit_code)}
            if problem is not None:
                ending["error"] = problem
            self._print_line(_json_record("summary", {**ending, **self._summary}))
        self._flush()
        if self._summary_text and not self.json_lines and not self.quiet:
            self._talk(printable(self._summary_text))

    # ------------------------------------------------------------------ how it is done

    def _print_json(self, kind: str, row: object) -> None:
        if not self.quiet:
            self._print_line(_json_record(kind, fields_of(row)))

    def _print_row(self, kind: str, row: object, columns: Sequence[str]) -> None:
        if self.json_lines:
            self._print_json(kind, row)
        elif not self.quiet:
            fields = fields_of(row)
            self._print_line("\t".join(field(fields[key]) for key in columns))

    def _print_record(self, fields: dict[str, JsonValue]) -> None:
        if not self._stdout.isatty():
            for key, value in fields.items():
                self._print_line(f"{key}\t{field(value)}")
            return
        width = max(map(len, fields), default=0)
        for key, value in fields.items():
            self._print_line(f"{key:<{width}}  {cell(key, value)}")

    def _print_table(self, rows: Iterable[object], columns: Sequence[str]) -> int:
        remaining = iter(rows)
        num_rows = 0
        while block := [fields_of(row) for row in itertools.islice(remaining, _ROWS_A_TABLE)]:
            self._print_line(_terminal_table(self._stdout, block, columns))
            num_rows += len(block)
        return num_rows

    def _print_line(self, line: str) -> None:
        with self._lock:
            self._pending.append(line + "\n")
            self._pending_characters += len(line) + 1
        if self._pending_characters >= _FLUSH_CHARACTERS or self._clock() - self._flushed_s >= _FLUSH_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        """Writes whole lines: an interruption waits until they are out."""
        with self._lock, self._interruption.held():
            text = "".join(self._pending)
            self._pending.clear()
            self._pending_characters = 0
            self._flushed_s = self._clock()
            if text:
                self._write(text)

    def _write(self, text: str) -> None:
        try:
            with self._bar.hidden() if self._bar else nullcontext():
                self._stdout.write(text)
                self._stdout.flush()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed("the reader of the output went away") from error
            raise OutputFailed(f"cannot write to standard output: {error.strerror}") from error

    def _talk(self, line: str) -> None:
        with self._lock:
            if self._pending:
                self._flush()
            try:
                with self._bar.hidden() if self._bar else nullcontext():
                    self._stderr.write(line + "\n")
                    self._stderr.flush()
            except OSError:
                pass  # nobody listens; what the command does must not depend on it

    def _talk_of(self, meter: Meter) -> None:
        self._talk(printable(f"{meter.label}: {meter.counts()}"))

    def _progress_style(self) -> ProgressStyle:
        if self.quiet or self.progress_style is ProgressStyle.NONE:
            return ProgressStyle.NONE
        if self.progress_style is ProgressStyle.PLAIN or not self._stderr.isatty():
            return ProgressStyle.PLAIN
        return ProgressStyle.PLAIN if _terminal(self._stderr).is_dumb_terminal else ProgressStyle.BAR


class _Bar:
    """A bar on a terminal that steps aside while something else is printed."""

    def __init__(self, stream: TextIO) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            console=_terminal(stream),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def begin(self, meter: Meter) -> None:
        self._task = self._progress.add_task(printable(meter.label), total=meter.total, counts=meter.counts())
        self._progress.start()

    def show(self, meter: Meter) -> None:
        self._progress.update(self._task, completed=meter.done, counts=meter.counts())

    def end(self) -> None:
        self._progress.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()


def _terminal_table(stream: TextIO, rows: Sequence[dict[str, JsonValue]], columns: Sequence[str]) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for key in columns:
        numeric = all(isinstance(row[key], int | float) for row in rows)
        table.add_column(Text(heading(key)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(key, row[key])) for key in columns))
    console = _terminal(stream, least_columns=_LEAST_CELL_COLUMNS * len(columns))
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def _terminal(stream: TextIO, *, least_columns: int = 40) -> "Console":
    from rich.console import Console

    width = max(get_terminal_size().columns, least_columns)
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def _json_record(kind: str, fields: dict[str, JsonValue]) -> str:
    return json_text({"schema": f"lmcache.{kind}/1", **fields})
