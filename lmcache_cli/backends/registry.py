"""From a URL to a back-end. A new scheme is one line here and one module with `open_url(url) -> Backend`."""

from __future__ import annotations

import re
from importlib import import_module
from typing import cast

from lmcache_cli.backends.errors import Unsupported
from lmcache_cli.backends.protocol import Backend

SCHEMES: dict[str, str] = {
    "file": "lmcache_cli.backends.local",
    "memory": "lmcache_cli.backends.memory",
}
"""Scheme → module, imported only when the scheme is used."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def open_backend(url: str) -> Backend:
    """The back-end for a path, `file://…`, `memory://name` or another known scheme; touches nothing yet.

    Raises Unsupported for a scheme without a back-end.
    """
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else "file"
    module = SCHEMES.get(scheme)
    if module is None:
        known = ", ".join(f"{known}://" for known in sorted(SCHEMES))
        raise Unsupported(f"no back-end for {scheme}:// URLs; known are plain paths and {known}")
    return cast(Backend, import_module(module).open_url(url))
