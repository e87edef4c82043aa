"""Sizes, durations and subsets as options: `typer.Option(parser=size_bytes, metavar="SIZE")`."""

from collections.abc import Callable
from typing import TypeVar

import typer

from lmcache_cli.errors import QuantityError
from lmcache_cli.quantities import Subset, parse_duration_s, parse_size_bytes, parse_subset

T = TypeVar("T")


def size_bytes(text: str) -> int:
    """`500GB` or `500GiB`. Raises typer.BadParameter, which names the option."""
    return _as_option(parse_size_bytes, text)


def duration_s(text: str) -> int:
    """`30d`, `12h`, `90m`. Raises typer.BadParameter, which names the option."""
    return _as_option(parse_duration_s, text)


def subset(text: str) -> Subset:
    """`1/7` or `auto/30`. Raises typer.BadParameter, which names the option."""
    return _as_option(parse_subset, text)


def _as_option(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except QuantityError as error:
        advice = f"; {error.next_step}" if error.next_step else ""
        raise typer.BadParameter(f"{error.problem}{advice}") from error
