"""What every `scripts/bench_*` shares: timing a piece of work, and rows that say whether a bar holds.

A bench is a generator of `Row`s; `finish(rows)` prints them and returns the exit code:

    from _bench import Sample, bench_arguments, finish, in_project_venv, measure, row
    in_project_venv()                       # before any import that is not in the standard library

    def rows():
        sample = measure(lambda: copy(a, b))                       # seconds
        yield row("store", "page cache 32 MiB", sample.rate(gigabytes), "GB/s", limit=best, at_least=0.80)

    sys.exit(finish(rows(), as_json=bench_arguments(__doc__).json))

Standard library only, so that it can be imported before the environment exists.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
EXIT_BAR_MISSED = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Median with 20th and 80th percentile of one quantity."""

    median: float
    p20: float
    p80: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        ordered = sorted(values)
        if not ordered:
            raise ValueError("no values were measured; expected at least 1; raise the repeat count")
        return cls(_quantile(ordered, 0.5), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))

    def rate(self, amount: float) -> Sample:
        """`amount` per measured unit: a sample of seconds and an amount of GB give GB/s (p20 stays the slow end)."""
        return Sample(amount / self.median, amount / self.p80, amount / self.p20, self.count)

    def scaled(self, factor: float) -> Sample:
        """The same sample in another unit, e.g. seconds to microseconds with 1e6."""
        return Sample(self.median * factor, self.p20 * factor, self.p80 * factor, self.count)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is value / limit, `bar` the condition in words, `holds` None where no bar is set."""

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    bar: str | None = None
    holds: bool | None = None
    p20: float | None = None
    p80: float | None = None
    note: str = ""

    def as_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)})


def measure(
    work: Callable[[], object],
    *,
    repeat: int = 15,
    warmup: int = 2,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Seconds of `work()`; `before()` runs untimed ahead of every call; `clock=time.thread_time` counts CPU seconds."""
    seconds = []
    for index in range(warmup + repeat):
        if before is not None:
            before()
        start = clock()
        work()
        elapsed = clock() - start
        if index >= warmup:
            seconds.append(elapsed)
    return Sample.of(seconds)


def row(
    bench: str,
    case: str,
    value: Sample | float,
    unit: str,
    *,
    limit: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """A row whose bar, if any, is set on value / limit where a limit is given, else on the value itself."""
    median = value.median if isinstance(value, Sample) else float(value)
    ratio = median / limit if limit else None
    subject, judged = ("ratio", ratio) if ratio is not None else ("value", median)
    bars = [f"{subject} >= {at_least:g}"] if at_least is not None else []
    bars += [f"{subject} <= {at_most:g}"] if at_most is not None else []
    holds = (at_least is None or judged >= at_least) and (at_most is None or judged <= at_most) if bars else None
    return Row(
        bench=bench,
        case=case,
        value=median,
        unit=unit,
        limit=limit,
        ratio=ratio,
        bar=" and ".join(bars) or None,
        holds=holds,
        p20=value.p20 if isinstance(value, Sample) else None,
        p80=value.p80 if isinstance(value, Sample) else None,
        note=note,
    )


def finish(rows: Iterable[Row], *, as_json: bool) -> int:
    """Print rows (JSON lines as they come, or one table at the end) and return 0, or 3 where a bar does not hold."""
    seen = []
    for each in rows:
        seen.append(each)
        if as_json:
            print(each.as_json(), flush=True)
    if not as_json:
        print(table(seen))
    missed = [each for each in seen if each.holds is False]
    for each in missed:
        print(
            f"bar missed: {each.bench} / {each.case}: {_figure(each.value)} {each.unit}, wanted {each.bar}",
            file=sys.stderr,
        )
    return EXIT_BAR_MISSED if missed else 0


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text."""
    head = ("bench", "case", "value", "unit", "p20", "p80", "limit", "ratio", "bar", "holds", "note")
    lines = [head] + [
        (
            each.bench,
            each.case,
            _figure(each.value),
            each.unit,
            _figure(each.p20),
            _figure(each.p80),
            _figure(each.limit),
            _figure(each.ratio),
            each.bar or "",
            {True: "yes", False: "NO", None: ""}[each.holds],
            each.note,
        )
        for each in rows
    ]
    right = {2, 4, 5, 6, 7}
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bench_arguments(
    description: str | None, extend: Callable[[argparse.ArgumentParser], object] | None = None
) -> argparse.Namespace:
    """The command line every bench has: `--json`; `extend(parser)` adds a bench's own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one row a line as JSON instead of a table")
    if extend is not None:
        extend(parser)
    return parser.parse_args()


def in_project_venv() -> None:
    """Go on in the project's `.venv`, made by `scripts/setup` where it is missing."""
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        return
    if not python.exists():
        subprocess.run([str(ROOT / "scripts" / "setup")], check=True, stdout=sys.stderr)
    os.execv(python, [str(python), *sys.argv])


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
