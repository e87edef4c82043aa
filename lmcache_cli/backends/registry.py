"""From a URL to a back-end. A new scheme is one line here and one module with `open_url(url) -> Backend`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from lmcache_cli.backends.errors import Unsupported
from lmcache_cli.backends.protocol import Backend


@dataclass(frozen=True, slots=True)
class Scheme:
    """The module of a scheme, imported only when it is used; the extra that installs what it needs.

    `is_remote`: reached over a network, hence tried again by default.
    """

    module: str
    extra: str = ""
    is_remote: bool = False


_S3 = Scheme("lmcache_cli.backends.cloud.s3", extra="s3", is_remote=True)
_GCS = Scheme("lmcache_cli.backends.cloud.gcs", extra="gcs", is_remote=True)
_OTHER = Scheme("lmcache_cli.backends.other", is_remote=True)

SCHEMES: Mapping[str, Scheme] = {
    "file": Scheme("lmcache_cli.backends.local"),
    "memory": Scheme("lmcache_cli.backends.memory"),
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
}
"""All others are left to fsspec."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_MISTYPED = re.compile(rf"({'|'.join(SCHEMES)}):/?", re.IGNORECASE)


def open_backend(url: str) -> Backend:
    """The back-end for a path, `file://…`, `memory://name`, `s3://…`, `gs://…` or whatever fsspec knows.

    Touches nothing yet. Those over a network are wrapped in `RetryBackend`. Raises Unsupported for a scheme without a
    back-end, one whose packages are not installed, and for a path that looks like a mistyped URL, such as `s3:/bucket`.
    """
    match = _SCHEME.match(url)
    if match is None and (mistyped := _MISTYPED.match(url)) is not None:
        scheme_of_it = mistyped.group(1).lower()
        raise Unsupported(
            f"{url}: expected {scheme_of_it}:// at the beginning of a URL, found {mistyped.group(0)!r}; "
            f"if a directory is meant, write ./{url}"
        )
    name = match.group(1).lower() if match else "file"
    scheme = SCHEMES.get(name, _OTHER)
    try:
        module = import_module(scheme.module)
    except ImportError as error:
        raise Unsupported(
            f"{name}:// URLs need a package that is not installed ({error.name}); "
            f"install lmcache-toolkit[{scheme.extra}]",
            next_step=f"pip install 'lmcache-toolkit[{scheme.extra}]'",
        ) from error
    backend = cast(Backend, module.open_url(url))
    if not scheme.is_remote:
        return backend
    from lmcache_cli.backends.retry import RetryBackend

    return RetryBackend(backend)
