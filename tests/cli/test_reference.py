"""docs/cli.md is what the commands say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_fresh():
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "_docs_cli.py", "--check"], capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
