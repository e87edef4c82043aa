"""A server on loopback that speaks enough of OpenAI's interface, and saves pattern KV as a connector would.

A token of a text is one of its bytes. `failures` are statuses to answer with before the first good answer to each body.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """What the server is told to do, and what it was asked."""

    save: Callable[[list[int], str | None], None] = lambda tokens, salt: None
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "tiny", "max_model_len": 1000}])
    key: str | None = None
    failures: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    respond: Callable[[str], tuple[int, bytes] | None] = lambda path: None
    tells_tokens: bool = True
    delay: threading.Event | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _at_once: int = 0
    _tries: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any] | None, authorization: str | None) -> tuple[int, bytes]:
        special = self.respond(path)
        if special is not None:
            return special
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, json.dumps({"error": {"message": "Unauthorized"}}).encode()
        if path == "/v1/models":
            return 200, json.dumps({"object": "list", "data": self.models}).encode()
        if body is None or path not in ("/v1/completions", "/v1/chat/completions"):
            return 404, b'{"detail": "Not Found"}'
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.asked.append((path, body))
            attempt = self._tries[json.dumps(body)]
            self._tries[json.dumps(body)] += 1
        try:
            if self.delay is not None:
                self.delay.wait(10)
            if attempt < len(self.failures):
                return self.failures[attempt], json.dumps({"error": {"message": "not now"}}).encode()
            tokens = tokens_of(path, body)
            if len(tokens) >= 1000:
                return 400, json.dumps({"error": {"message": "maximum context length is 1000"}}).encode()
            self.save(tokens, body.get("cache_salt"))
        finally:
            with self._lock:
                self._at_once -= 1
        choice: dict[str, Any] = {"index": 0, "text": "a"}
        value: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(tokens)}}
        if self.tells_tokens and body.get("return_token_ids"):
            (choice if path == "/v1/completions" else value)["prompt_token_ids"] = tokens
        return 200, json.dumps(value).encode()


def tokens_of(path: str, body: dict[str, Any]) -> list[int]:
    """The template of the server's chats has a beginning of its own."""
    if path == "/v1/chat/completions":
        return [7, *"".join(f"{one['role']}: {one['content']}\n" for one in body["messages"]).encode()]
    prompt = body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Serve on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any] | None) -> None:
            status, data = server.answer(self.path, body, self.headers.get("Authorization"))
            try:
                self.send_response(status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the other side has gone

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
