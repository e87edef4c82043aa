"""Asking a server over real HTTP: what is sent, what is tried again, and what each answer is taken for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count

import numpy as np
import pytest

from lmcache_cli.integration.errors import ServerRefused, ServerUnavailable
from lmcache_cli.integration.openai_server import OpenAIServer, ServedModel, ServerAsker
from lmcache_cli.integration.prompts import Prompt
from tests.integration.fake_openai import FakeServer, serving

KEY = "sk-secret-0123"
TEXT = Prompt("text", text="hello")
CHAT = Prompt("chat", messages=({"role": "user", "content": "hi"},), salt="tenant")
Started = Callable[..., FakeServer]


@pytest.fixture
def start() -> Iterator[Started]:
    with ExitStack() as stack:
        yield lambda **told: stack.enter_context(serving(FakeServer(**told)))


def client(server: FakeServer, **options: object) -> OpenAIServer:
    return OpenAIServer(server.url, **{"timeout_s": 5.0, "sleep": lambda seconds: None, **options})


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_any_url_of_the_server_will_do(start: Started, ending: str) -> None:
    server = start()
    base = server.url.removesuffix("/v1")
    assert OpenAIServer(base + ending).url == server.url
    assert OpenAIServer(base.removeprefix("http://") + ending).choose(None) == ServedModel("tiny", 1000)


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "http://", "http://[::1", "http://x:99999/v1", "http://x:port/v1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ServerRefused, match="URL is none"):
        OpenAIServer(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ServerRefused) as caught:
        OpenAIServer(f"http://me:{KEY}@127.0.0.1:1/v1")
    assert KEY not in str(caught.value)


def test_ids_go_as_ids_text_as_text_and_chats_as_chats(start: Started) -> None:
    server = start()
    ours = client(server)
    ids = np.array([1, 2, 3], np.uint32)
    assert ours.compute("tiny", TEXT, ids).tokens.tolist() == [1, 2, 3]
    assert ours.compute("tiny", TEXT, None).num_tokens == 5
    assert ours.compute("tiny", CHAT, None).tokens.tolist() == [7, *b"user: hi\n"]
    common = {"model": "tiny", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    assert server.asked == [
        ("/v1/completions", {**common, "prompt": [1, 2, 3]}),
        ("/v1/completions", {**common, "prompt": "hello"}),
        ("/v1/chat/completions", {**common, "messages": list(CHAT.messages), "cache_salt": "tenant"}),
    ]


def test_a_server_that_tells_no_ids_will_do(start: Started) -> None:
    asked = client(start(tells_tokens=False)).compute("tiny", TEXT, None)
    assert (asked.num_tokens, asked.num_cached, asked.tokens, asked.problem) == (5, None, None, "")


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_can_pass_is_tried_again(start: Started, status: int) -> None:
    server = start(failures=[status, status])
    assert client(server).compute("tiny", TEXT, None).problem == ""
    assert len(server.asked) == 3


def test_the_pause_is_as_long_as_the_server_wants(start: Started) -> None:
    pauses: list[float] = []
    server = start(failures=[429, 503], headers={"Retry-After": "2"})
    assert client(server, sleep=pauses.append).compute("tiny", TEXT, None).problem == ""
    assert all(1.6 <= pause <= 2.4 for pause in pauses)
    assert len(pauses) == 2


def test_there_is_a_deadline(start: Started) -> None:
    server = start(failures=[503] * 1000)
    asked = client(server, timeout_s=0.3, sleep=time.sleep).compute("tiny", TEXT, None)
    assert asked.problem == "HTTP 503: not now"
    assert 1 <= len(server.asked) <= 3


def test_a_prompt_that_is_too_long_is_that_prompts_trouble(start: Started) -> None:
    server = start()
    asked = client(server).compute("tiny", TEXT, np.zeros(1000, np.uint32))
    assert asked.problem == "HTTP 400: maximum context length is 1000"
    assert len(server.asked) == 1


def test_a_key_is_sent_and_never_told(start: Started) -> None:
    server = start(key=KEY)
    assert client(server, api_key=KEY).choose(None).name == "tiny"
    with pytest.raises(ServerRefused, match="no key was sent"):
        client(server).models()
    with pytest.raises(ServerRefused) as caught:
        client(server, api_key=f"{KEY}-wrong").models()
    assert "401: Unauthorized" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize(
    ("status", "data"),
    [
        (401, b'{"error": {"message": "bad key KEY"}}'),
        (401, b'{"error": {"message": "' + b"x" * 290 + b' KEY"}}'),
        (400, b"Authorization: Bearer KEY"),
        (418, b"KEY"),
        (302, b"KEY"),
        (200, b"KEY"),
        (200, b'{"data": ["KEY"], "error": "KEY"}'),
        (200, b'{"data": [{"id": "KEY"}]}'),
    ],
)
def test_a_key_that_the_server_repeats_is_not_told(start: Started, path: str, status: int, data: bytes) -> None:
    server = start(respond=lambda asked: (status, data.replace(b"KEY", KEY.encode())) if asked == path else None)
    ours, told = client(server, api_key=f" {KEY}\n"), ""
    try:
        if path == "/v1/models":
            ours.choose("another")
        told = ours.compute("tiny", TEXT, None).problem
    except ServerRefused as refused:
        told = str(refused)
    assert told
    assert KEY[:6] not in told


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-\u20ac", "sk-\x00"])
def test_a_key_that_no_header_holds_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(ServerRefused, match="cannot be sent") as caught:
        OpenAIServer("http://127.0.0.1:1", api_key=key)
    assert "sk-" not in str(caught.value)


@contextmanager
def answering(*answers: bytes, drip: bool = False) -> Iterator[str]:
    """Raw bytes for each connection in turn, the last for all that follow; with `drip` one byte after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_over = threading.Event()

        def answer(connection: socket.socket, data: bytes) -> None:
            with connection, suppress(OSError):
                connection.recv(65_536)
                connection.sendall(data)
                while drip and not is_over.wait(0.02):
                    connection.sendall(b" ")

        def serve() -> None:
            with suppress(OSError):
                for number in count():
                    connection = listening.accept()[0]
                    data = answers[min(number, len(answers) - 1)]
                    threading.Thread(target=answer, args=(connection, data), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            is_over.set()
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n{"])
def test_bytes_that_drip_in_do_not_move_the_deadline(begun: bytes) -> None:
    with answering(begun, drip=True) as url, pytest.raises(ServerUnavailable, match="does not answer"):
        OpenAIServer(url, timeout_s=0.4).compute("tiny", TEXT, None)


def test_an_answer_that_is_cut_short_is_asked_for_again() -> None:
    whole = b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"choices": [{}], "usage": {"prompt_tokens": 5}}  '
    with answering(whole[:60], whole[:20], whole) as url:
        asked = OpenAIServer(url, timeout_s=5.0, sleep=lambda seconds: None).compute("tiny", TEXT, None)
    assert (asked.num_tokens, asked.problem) == (5, "")


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"error": ' * 200_000, b"\xff\x00", b'{"choices": 1e999999}'])
@pytest.mark.parametrize("status", [200, 400, 503])
def test_hostile_json_is_an_error_that_says_so(start: Started, status: int, data: bytes) -> None:
    server = start(respond=lambda path: (status, data), headers={"Retry-After": "Mon, 01 Jan 0001 00:00:00 -0000"})
    ours = client(server, timeout_s=0.2, sleep=time.sleep)
    with suppress(ServerRefused):
        assert ours.compute("tiny", TEXT, None).problem


@pytest.mark.parametrize(
    ("status", "data", "text"),
    [
        (200, b"<html>hello</html>", "does not answer as an OpenAI-compatible server does: <html>hello</html>"),
        (200, b"[]", "does not answer as an OpenAI-compatible server does"),
        (200, b"{}", "lists no models"),
        (
            404,
            b'{"detail": "Not Found"}',
            "HTTP 404: Not Found; expected an OpenAI-compatible server, at a URL",
        ),
        (302, b"", "sends us elsewhere"),
        (418, b"x" * 10_000, "HTTP 418: xxx"),
    ],
)
def test_a_wrong_url_is_told(start: Started, status: int, data: bytes, text: str) -> None:
    server = start(respond=lambda path: (status, data))
    with pytest.raises(ServerRefused) as caught:
        client(server).choose(None)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_port_where_nobody_listens_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ServerUnavailable, match="does not answer: Connection refused; is the server running"):
            OpenAIServer(url, timeout_s=0.2).models()


def test_the_model_is_chosen_by_name_or_is_the_only_one(start: Started) -> None:
    server = start(models=[{"id": "a"}, {"id": "b", "max_model_len": 5}])
    assert client(server).choose("b") == ServedModel("b", 5)
    with pytest.raises(ServerRefused, match="several models; name one with --served-name; it serves: a, b"):
        client(server).choose(None)
    with pytest.raises(ServerRefused, match="no model 'c'; it serves: a, b"):
        client(server).choose("c")


def asker(server: FakeServer, count: int, at_once: int = 3, **options: object) -> ServerAsker:
    prompts = [Prompt(str(number), text="x" * (number + 1)) for number in range(count)]
    return ServerAsker(client(server, **options), ServedModel("tiny", 1000), prompts, [None] * count, at_once=at_once)


def test_no_more_are_asked_at_once_than_may_be(start: Started) -> None:
    server = start(save=lambda tokens, salt: time.sleep(0.01))
    found = sorted(asker(server, 12).ask(range(12)), key=lambda one: one.number)
    assert [one.num_tokens for one in found] == list(range(1, 13))
    assert server.most_at_once <= 3


def test_an_error_that_concerns_the_server_ends_it(start: Started) -> None:
    server = start(respond=lambda path: (404, b"no such model") if "completions" in path else None)
    with pytest.raises(ServerRefused, match="404: no such model"):
        list(asker(server, 50).ask(range(50)))


def test_letting_go_ends_what_is_under_way(start: Started) -> None:
    server = start(delay=threading.Event())
    ours = asker(server, 3, timeout_s=600.0)
    answers = ours.ask(range(3))
    threading.Timer(0.2, ours.close).start()
    with pytest.raises(ServerUnavailable):  # or they would be answered in the end
        list(answers)
    server.delay.set()
