"""An HTTP proxy on loopback that stands in front of a server and does what networks and services do to requests."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.loopback import serving

_CONDITIONS = frozenset({"if-match", "if-none-match"})
_CONDITION = "ifGenerationMatch"


@dataclass(frozen=True)
class Answer:
    """Say this instead of asking the server."""

    status: int
    body: bytes = b""


@dataclass(frozen=True)
class Reset:
    """Break the connection; `after_asking`: once the server has done what it was asked, so that the answer is lost."""

    after_asking: bool = False


@dataclass(frozen=True)
class Hang:
    """Say nothing for so long, then break the connection."""

    seconds: float = 5.0


@dataclass(frozen=True)
class BreakOff:
    """The server's answer up to so many bytes of its body, then a broken connection."""

    at_bytes: int


@dataclass(frozen=True)
class HalfUpload:
    """Half of the request's body reaches the server, then both connections break."""


@dataclass(frozen=True)
class FlipUpload:
    """One bit of the request's body arrives flipped."""


Effect = Answer | Reset | Hang | BreakOff | HalfUpload | FlipUpload
Rule = Callable[["Request"], Effect | None]


@dataclass(frozen=True)
class Request:
    """What the proxy was asked, and the how manieth of its method it was."""

    method: str
    path: str
    number: int
    has_condition: bool


@dataclass
class FlakyProxy:
    """`rule` decides what happens to a request; None passes it on. Conditions can be kept from the server."""

    upstream: str
    rule: Rule = field(default=lambda request: None)
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""
    hide_conditions: bool = False

    def effect(self, method: str, path: str, *, has_condition: bool) -> Effect | None:
        with self._lock:
            self.counts[method] += 1
            request = Request(method, path, self.counts[method], has_condition)
        return self.rule(request)

    def forget(self) -> None:
        """Pass everything on, and count anew."""
        self.rule = lambda request: None
        self.counts.clear()


@contextmanager
def flaky_proxy(upstream: str) -> Iterator[FlakyProxy]:
    """A proxy in front of the endpoint, for the time of the block."""
    proxy = FlakyProxy(upstream)

    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    with serving(Handler) as proxy.endpoint:
        yield proxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FlakyProxy

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        has_condition = any(name.lower() in _CONDITIONS for name in self.headers) or _CONDITION in self.path
        if self.proxy.hide_conditions:
            self.path = re.sub(rf"{_CONDITION}=\d+&?", "", self.path)
        effect = self.proxy.effect(self.command, self.path, has_condition=has_condition)
        match effect:
            case Answer(status, content):
                self._answer(status, [("Content-Type", "application/xml")], content)
            case Reset(after_asking=False):
                self._break()
            case Hang(seconds):
                time.sleep(seconds)
                self._break()
            case HalfUpload():
                self._ask(body, len(body) // 2)
                self._break()
            case _:
                self._pass_on(body, effect)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - as the base class calls them

    def _pass_on(self, body: bytes, effect: Effect | None) -> None:
        if isinstance(effect, FlipUpload):
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        found = self._ask(body, len(body))
        if found is None or isinstance(effect, Reset):
            self._break()
            return
        status, headers, content = found
        if isinstance(effect, BreakOff):
            self._answer(status, headers, content, cut_at=effect.at_bytes)
            self._break()
        else:
            self._answer(status, headers, content)

    def _ask(self, body: bytes, size: int) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """The server's answer; None where only a part of the body was sent, or there is no answer."""
        where = urlsplit(self.proxy.upstream)
        connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if not (self.proxy.hide_conditions and name.lower() in _CONDITIONS):
                    connection.putheader(name, value)
            connection.endheaders(body[:size])
            if size < len(body):
                return None
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, cut_at: int | None = None) -> None:
        self.send_response_only(status)
        told = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        if status != 204:
            self.send_header("Content-Length", length or str(len(content)))
        if "date" not in told:
            self.send_header("Date", self.date_time_string())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut_at])
            self.wfile.flush()

    def _break(self) -> None:
        """Close without a good-bye."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.rfile.close()

    def finish(self) -> None:
        if not self.rfile.closed:
            super().finish()

    def log_message(self, *_: object) -> None:
        return None
