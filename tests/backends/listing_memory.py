"""Run alone: list a place and print how many objects were seen, and the most memory the process ever used, in bytes."""

from __future__ import annotations

import sys
import time

from lmcache_cli.backends import open_backend
from tests.peak_memory import peak_bytes


def main() -> None:
    backend = open_backend(sys.argv[1])
    started = time.monotonic()
    seen = sum(1 for _ in backend.list())
    sys.stdout.write(f"{seen} {peak_bytes()} {time.monotonic() - started:.1f}\n")
    backend.close()


if __name__ == "__main__":
    main()
