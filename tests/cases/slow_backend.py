"""The real command line on stores that take their time for every shard they put: `slow_backend.py SECONDS words…`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lmcache_cli.backends import Durability, ObjectInfo
from lmcache_cli.backends.local import LocalBackend

_put = LocalBackend.put


def install(seconds_a_shard: float) -> None:
    """Slow down every put of a shard in this process."""

    def put(
        self: LocalBackend,
        name: str,
        parts: Sequence[memoryview | bytes],
        *,
        durability: Durability,
        if_absent: bool = True,
    ) -> ObjectInfo:
        if name.endswith(".safetensors"):
            time.sleep(seconds_a_shard)
        return _put(self, name, parts, durability=durability, if_absent=if_absent)

    LocalBackend.put = put  # type: ignore[method-assign]


if __name__ == "__main__":
    from lmcache_cli.app import main

    install(float(sys.argv.pop(1)))
    sys.exit(main())
