"""The grammar of object names: the same on every back-end, so that no name is a path, a pattern or an escape."""

from __future__ import annotations

import re

from lmcache_cli.backends.errors import BadName

COMPONENT_MAX_BYTES = 255
NAME_MAX_BYTES = 1024  # the limit of S3 keys

_COMPONENT = r"(?!\.{1,2}(?:/|\Z))[a-z0-9._-]{1,255}"
_NAME = re.compile(rf"(?:{_COMPONENT}/)*(?:{_COMPONENT}|CACHEDIR\.TAG)")


def check_name(name: str) -> str:
    """The name itself, or BadName saying what is wrong with it."""
    if len(name) <= NAME_MAX_BYTES and _NAME.fullmatch(name) is not None:
        return name
    raise BadName(f"object name {name[:300]!r}: {_complaint(name)}", name=name)


def check_prefix(prefix: str) -> str:
    """A listing prefix without its trailing "/"; "" is the root."""
    return check_name(prefix.removesuffix("/")) if prefix else ""


def _complaint(name: str) -> str:
    if not name or name.startswith("/") or len(name) > NAME_MAX_BYTES:
        return f"expected a relative name of 1 to {NAME_MAX_BYTES} bytes"
    for component in name.split("/"):
        if component in ("", ".", ".."):
            return f"component {component!r} is not allowed"
        if len(component) > COMPONENT_MAX_BYTES:
            return f"a component has {len(component)} characters, at most {COMPONENT_MAX_BYTES} are allowed"
    return "expected components of [a-z0-9._-]"
