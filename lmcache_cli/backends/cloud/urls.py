"""URLs of object stores, `s3://bucket/prefix?endpoint_url=…&profile=lab`, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from lmcache_cli.backends.errors import Unsupported

MASK = "***"
_SHORTEST_SECRET = 4  # anything shorter would blank out innocent words of messages


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A parsed URL. `key` and `secret` come from `scheme://key:secret@bucket`."""

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    secret: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, options: frozenset[str]) -> BucketUrl:
        """Raises `Unsupported` for a URL without a bucket, or with an option that is not among `options`."""
        scheme, _, rest = url.partition("://")
        where, _, query = rest.partition("?")
        credentials, at, where = where.rpartition("@") if "@" in where.split("/", 1)[0] else ("", "", where)
        bucket, _, prefix = where.partition("/")
        prefix = prefix.strip("/")
        key, _, secret = credentials.partition(":")
        found = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(found.keys() - options)
        if unknown or not bucket or "//" in prefix:
            shown = f"{scheme}://{f'{MASK}@' if at else ''}{where}"
            if unknown:
                problem = f"unknown option {unknown[0]!r}; known are {', '.join(sorted(options))}"
            else:
                problem = f"expected {scheme}://bucket/prefix"
            raise Unsupported(f"{shown}: {problem}")
        return cls(scheme.lower(), bucket, prefix, found, unquote(key) or None, unquote(secret) or None)

    def shown(self, public: Mapping[str, frozenset[str] | None]) -> str:
        """The URL fit for messages, and for opening the store again where it holds no secret.

        `public` names the options that may be shown: with any value (None), or with certain values only.
        """
        parts = []
        for name, value in self.options.items():
            allowed = public.get(name, frozenset())
            shown = without_password(value) if allowed is None or value in allowed else MASK
            parts.append(f"{name}={quote(shown, safe=':/*@')}")
        credentials = f"{MASK}@" if self.key or self.secret else ""
        where = f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket
        return f"{self.scheme}://{credentials}{where}{'?' if parts else ''}{'&'.join(parts)}"

    def secrets(self, public: Mapping[str, frozenset[str] | None]) -> tuple[str, ...]:
        """What must not appear in a message."""
        hidden = [self.key, self.secret]
        for name, value in self.options.items():
            allowed = public.get(name, frozenset())
            if allowed is None:
                hidden.append(urlsplit(value).password)
            elif value not in allowed:
                hidden.append(value)
        return tuple(value for value in hidden if value and len(value) >= _SHORTEST_SECRET)


def without_password(url: str) -> str:
    """A URL with `user:password@` shown as `***@`; anything else as it is."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not separator or "@" not in host:
        return url
    return f"{scheme}://{MASK}@{host.rpartition('@')[2]}{slash}{path}"


def redacted(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret replaced by `***`, also where it is part of a URL."""
    for secret in secrets:
        text = text.replace(secret, MASK).replace(quote(secret, safe=""), MASK)
    return text


def is_true(value: str) -> bool:
    """What an option's text says, where it is a switch."""
    return value.lower() in ("1", "true", "yes", "on")
