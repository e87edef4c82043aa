"""A Python of its own, for what must be imported in another way than here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, timeout_s: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it at the root of the project, and returns how it ended and what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
