"""Run alone: list a place and print how many objects were seen, and the most memory the process ever used, in bytes."""

from __future__ import annotations

import resource
import sys
import time

from lmcache_cli.backends import open_backend


def main() -> None:
    backend = open_backend(sys.argv[1])
    started = time.monotonic()
    seen = sum(1 for _ in backend.list())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(f"{seen} {peak_bytes} {time.monotonic() - started:.1f}\n")
    backend.close()


if __name__ == "__main__":
    main()
