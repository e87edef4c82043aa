"""Marks that the tests of several rooms use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(number: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first `number` are tried always, and the others by the whole gate alone."""
    return [
        value if place < number else pytest.param(value, marks=pytest.mark.slow) for place, value in enumerate(values)
    ]
