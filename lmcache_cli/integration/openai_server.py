"""A server that speaks OpenAI's interface and saves what it computes: asked for one token of each document.

Documents go as token ids to `/completions`, or as text where nobody has tokenised them; chats go to
`/chat/completions`, whose template is the server's. What can pass by itself (no connection, 429, 5xx) is tried again
until a deadline; everything else is an error at once. The key is sent as a header and is part of no message, not even
where the server repeats it.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from .asked_warming import Asked
from .errors import ServerRefused, ServerUnavailable
from .producer import TokenIds
from .prompts import Prompt

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
CONTACT_S = 10.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 15.0
_ATTEMPT_S = 600.0
_MOST_ANSWER_BYTES = 64 << 20
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server; `max_tokens` is the longest sequence it takes, None where it does not tell."""

    name: str
    max_tokens: int | None


class Answer(Exception):
    """The server answered with an error. `retry_after_s` is when it wants to be asked again."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s


class OpenAIServer:
    """One server. `url` is its base, with or without `/v1`. Raises `ServerRefused` for what is no such URL.

    `timeout_s` bounds every request, all tries together.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._target = _parse(url)
        self.url = f"{self._target.scheme}://{self._target.netloc}{self._target.path}"
        self._api_key = _sendable(api_key)
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._sleep: Callable[[float], object] = sleep or self._stopped.wait
        self._live: set[socket.socket] = set()

    def models(self) -> list[ServedModel]:
        """What the server serves. Raises `ServerRefused`, `ServerUnavailable`."""
        deadline = time.monotonic() + min(CONTACT_S, self._timeout_s)
        try:
            value = self._request("GET", "/models", None, deadline)
        except Answer as answer:
            raise self._explained(answer) from None
        listed = value.get("data")
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise ServerRefused(f"{self.url}/models lists no models: {self._shown(json.dumps(value))}")
        return [ServedModel(str(one["id"]), _length(one.get("max_model_len"))) for one in listed]

    def choose(self, name: str | None) -> ServedModel:
        """The model called `name`, or the only one. Raises `ServerRefused`, `ServerUnavailable`."""
        found = self.models()
        names = ", ".join(model.name for model in found) or "none"
        if name is None and len(found) == 1:
            return found[0]
        for model in found:
            if model.name == name:
                return model
        wanted = "several models; name one with --served-name" if name is None else f"no model {name!r}"
        raise ServerRefused(f"{self.url} serves {wanted}; it serves: {self._shown(names)}")

    def compute(self, model: str, prompt: Prompt, tokens: TokenIds | None) -> Asked:
        """Have one prompt computed; `tokens` are its ids where they are known. What is wrong with this prompt alone is
        told in the result. Raises `ServerRefused`, `ServerUnavailable`."""
        path, body = _question(model, prompt, tokens)
        try:
            value = self._request("POST", path, body, time.monotonic() + self._timeout_s)
        except Answer as answer:
            if answer.status in (400, 413, 422) or answer.status in TRANSIENT:
                return Asked(0, problem=str(answer))
            raise self._explained(answer) from None
        if not isinstance(value.get("choices"), list):
            return Asked(0, problem=f"the server answers without having computed: {self._shown(json.dumps(value))}")
        return _understood(value)

    def stop(self) -> None:
        """Let go of requests under way; nothing is tried again."""
        self._stopped.set()
        for live in list(self._live):
            _cut(live)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> dict[str, Any]:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._try(method, path, body, deadline)
            except Answer as answer:
                wait_s = pause_s if answer.retry_after_s is None else answer.retry_after_s
                if answer.status not in TRANSIENT or time.monotonic() + wait_s > deadline or self._stopped.is_set():
                    raise
            except (OSError, http.client.HTTPException) as problem:
                if isinstance(problem, ssl.SSLError | UnicodeError):
                    raise ServerRefused(f"{self.url}: {self._reason(problem)}; is it http or https?") from None
                wait_s = pause_s
                if time.monotonic() + wait_s > deadline or self._stopped.is_set():
                    reason = self._reason(problem)
                    raise ServerUnavailable(
                        f"{self.url} does not answer: {reason}; is the server running, and the URL right?"
                    ) from None
            self._sleep(wait_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> dict[str, Any]:
        timeout_s = max(0.1, min(_ATTEMPT_S, deadline - time.monotonic()))
        connection = self._connect(timeout_s)
        connection.connect()
        live = connection.sock  # the connection lets go of it while an answer without a length is read
        is_late = threading.Event()

        def give_up() -> None:  # however slowly bytes drip in
            is_late.set()
            _cut(live)

        late = threading.Timer(timeout_s, give_up)
        late.daemon = True
        late.start()
        self._live.add(live)
        try:
            headers = {"Accept": "application/json", "Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            content = None if body is None else json.dumps(body).encode("utf-8")
            connection.request(method, self._target.path + path, content, headers)
            response = connection.getresponse()
            data = response.read(_MOST_ANSWER_BYTES)
            is_cut = not data if response.length is None else response.length > 0
            if is_late.is_set() or (is_cut and len(data) < _MOST_ANSWER_BYTES):
                raise http.client.IncompleteRead(data, response.length)
            if response.status != 200:
                raise Answer(response.status, self._message(data), _retry_after(response.getheader("Retry-After")))
            return self._parsed(path, data)
        finally:
            late.cancel()
            self._live.discard(live)
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        host, port = self._target.hostname or "", self._target.port
        if self._target.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout_s)
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def _parsed(self, path: str, data: bytes) -> dict[str, Any]:
        value = _json(data)
        if not isinstance(value, dict):
            raise ServerRefused(
                f"{self.url}{path} does not answer as an OpenAI-compatible server does: {self._shown(data)}; "
                "expected a base URL such as http://127.0.0.1:8000/v1"
            )
        return value

    def _message(self, data: bytes) -> str:
        """What an error says, in whatever form the server puts it."""
        value = _json(data)
        for field in ("error", "detail", "message"):
            inner = value.get(field) if isinstance(value, dict) else None
            if isinstance(inner, dict):
                inner = inner.get("message")
            if isinstance(inner, str):
                return self._shown(inner)
        return self._shown(data)

    def _reason(self, problem: BaseException) -> str:
        return self._shown(getattr(problem, "strerror", None) or str(problem) or type(problem).__name__)

    def _shown(self, data: bytes | str) -> str:
        """The beginning of what the server said, on one line, without the key."""
        text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
        if self._api_key:
            for form in (self._api_key, json.dumps(self._api_key)[1:-1]):
                text = text.replace(form, "***")
        text = " ".join(text.split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

    def _explained(self, answer: Answer) -> ServerRefused | ServerUnavailable:
        """An error that concerns every request."""
        if answer.status in TRANSIENT:
            return ServerUnavailable(f"{self.url}: {answer}")
        if answer.status in (401, 403):
            key = "the key that was sent" if self._api_key else "no key was sent; name its variable with --api-key-env"
            return ServerRefused(f"{self.url} does not let us in ({answer}): {key}")
        if 300 <= answer.status < 400:
            return ServerRefused(f"{self.url} sends us elsewhere ({answer}); give the URL it leads to")
        return ServerRefused(
            f"{self.url}: {answer}; expected an OpenAI-compatible server, at a URL such as http://127.0.0.1:8000/v1"
        )


class ServerAsker:
    """An `Asker` over prompts that a server computes, `at_once` of them at a time. `tokens` are their ids where known.

    `stop` ends what is under way.
    """

    def __init__(
        self,
        server: OpenAIServer,
        model: ServedModel,
        prompts: Sequence[Prompt],
        tokens: Sequence[TokenIds | None],
        *,
        at_once: int,
        saves_tails: bool = False,
    ) -> None:
        self._server = server
        self._model = model
        self._prompts = prompts
        self._tokens = tokens
        self._at_once = at_once
        self.saves_tails = saves_tails

    @property
    def max_tokens(self) -> int | None:
        """See `Asker`: a prompt leaves room for one token."""
        return None if self._model.max_tokens is None else self._model.max_tokens - 1

    def ask(self, numbers: Sequence[int]) -> Iterator[Asked]:
        """See `Asker`; the first error that concerns the server ends it."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            waiting.put(number)
        done: queue.SimpleQueue[Asked | Exception] = queue.SimpleQueue()
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    asked = self._server.compute(self._model.name, self._prompts[number], self._tokens[number])
                except Exception as problem:  # noqa: BLE001  carried over to the thread that waits for the result
                    done.put(problem)
                    return
                done.put(Asked(number, asked.num_tokens, asked.num_cached, asked.tokens, asked.problem))

        for _ in range(min(self._at_once, len(numbers))):  # ended with the process, whatever the server does
            threading.Thread(target=work, name="lmcache-ask", daemon=True).start()
        try:
            for _ in numbers:
                result = done.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            is_over.set()

    def close(self) -> None:
        """Let go of what is under way."""
        self._server.stop()


def _parse(url: str) -> Any:
    try:
        target = urlsplit(url if "://" in url else f"http://{url}")
        is_url = target.scheme in ("http", "https") and bool(target.hostname) and (target.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ServerRefused("the server's URL is none; expected one such as http://127.0.0.1:8000/v1")
    if target.username is not None or target.password is not None:
        raise ServerRefused("the server's URL holds credentials; put the key into a variable of the environment")
    path = target.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    return target._replace(path=path if path.endswith("/v1") else f"{path}/v1", query="", fragment="")


def _question(model: str, prompt: Prompt, tokens: TokenIds | None) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    if prompt.salt:
        body["cache_salt"] = prompt.salt
    if prompt.messages is not None:
        return "/chat/completions", {**body, "messages": [dict(message) for message in prompt.messages]}
    return "/completions", {**body, "prompt": prompt.text if tokens is None else tokens.tolist()}


def _understood(value: Mapping[str, Any]) -> Asked:
    """What an answer tells of the prompt; servers differ in how much."""
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    ids = value.get("prompt_token_ids") or first.get("prompt_token_ids")
    tokens = None
    if isinstance(ids, list) and all(isinstance(one, int) and 0 <= one < 1 << 32 for one in ids):
        tokens = np.asarray(ids, dtype=np.uint32)
    num_tokens = usage.get("prompt_tokens")
    if not isinstance(num_tokens, int):
        num_tokens = 0 if tokens is None else len(tokens)
    return Asked(0, num_tokens, cached if isinstance(cached, int) else None, tokens)


def _sendable(key: str | None) -> str | None:
    """The key without white space around it. Raises `ServerRefused`, without telling it, for what no header holds."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ServerRefused("the key holds characters that cannot be sent; look at the variable that holds it")
    return key or None


def _cut(live: socket.socket) -> None:
    """End what waits for the other side."""
    with contextlib.suppress(OSError):
        live.shutdown(socket.SHUT_RDWR)


def _json(data: bytes) -> object:
    """None for what is no JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number of them or a date."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
