"""Which vLLM this connector was made for."""

from __future__ import annotations

OLDEST = (0, 29)


class UnsupportedVersion(RuntimeError):
    """This vLLM is too old."""


def require_version(version: str, *, has_cache_config: bool) -> None:
    """Raise `UnsupportedVersion` for a vLLM whose pages this connector does not know. Builds from a checkout call
    themselves 0.0 or 0.1; they are known by what they hand over: `kv_cache_config`."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    is_development = numbers in ((), (0, 0), (0, 1))
    wanted = ".".join(map(str, OLDEST))
    if not is_development and numbers < OLDEST:
        raise UnsupportedVersion(
            f"this connector needs vLLM {wanted} or newer, found {version}: KV lies otherwise in the pages of older "
            "ones; upgrade vLLM"
        )
    if not has_cache_config:
        raise UnsupportedVersion(
            f"vLLM {version} built the connector without kv_cache_config; expected vLLM {wanted} or newer"
        )
