"""`lmcache warm` where somebody else computes and saves: a vLLM of its own, or a server. Both are fakes that save
pattern KV; what is said, what is stored, and how the command ends are real."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.commands import warm
from lmcache_cli.integration import asked_warming
from lmcache_cli.integration.producer import BufferSource, Document, ProducedChunk
from lmcache_cli.integration.vllm import engine_process
from lmcache_cli.store import Store, WriterOptions
from lmcache_cli.store.acceptances import read_acceptances
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY, PatternEngine, install
from tests.cli.conftest import Inside, Program, Ran, inside
from tests.integration.fake_openai import FakeServer, serving
from tests.integration.vllm.fake_prefilling import make_numbers
from tests.store.pattern import document, hit, put_chunk, put_document, refs

__all__ = ["inside"]
FAKE = Path(__file__).parent / "vllm" / "fake_prefilling.py"
DOCUMENTS = {
    "one": document(3 * CHUNK_TOKENS + 2),
    "two": document(5 * CHUNK_TOKENS, seed=1),
    "three": document(2, seed=2),
}
WARM = ("warm", "--model", ".", "--prompts", "prompts.jsonl", "--chunk-tokens", str(CHUNK_TOKENS), "--store", "kv")
Fake = Callable[[str], None]


@pytest.fixture
def run(inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Inside:
    install(monkeypatch.setattr, 0.0)
    write_prompts(tmp_path, DOCUMENTS)
    Store.create(str(tmp_path / "kv")).close()
    monkeypatch.setattr(asked_warming, "REFRESH_S", 0.1)
    for function in (asked_warming.warm_through, asked_warming.wait_for_shards):
        monkeypatch.setitem(function.__kwdefaults__, "settle_s", 0.4)
    return inside


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Fake:
    def choose(mode: str) -> None:
        monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, str(FAKE), mode))

    choose("good")
    return choose


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with serving(FakeServer(save=Connector(tmp_path / "kv"))) as started:
        yield started


class Connector:
    """Saves whole chunks of what a server computes, in the background; `tails` as well."""

    def __init__(self, root: Path, *, tails: bool = False, late_s: float = 0.0) -> None:
        self._root = root
        self._late_s = late_s
        self.tails = tails

    def __call__(self, tokens: list[int], salt: str | None) -> None:
        threading.Timer(self._late_s, self.write, (tokens, salt)).start()

    def write(self, tokens: list[int], salt: str | None) -> None:
        with (
            Store.open(str(self._root)) as store,
            store.namespace(ENGINE_IDENTITY, create=True, writer=WriterOptions(producer={"engine": "vllm"})) as space,
        ):
            put_document(space, tokens, salt=salt, tail=self.tails)


def write_prompts(folder: Path, prompts: dict[str, Any]) -> None:
    lines = [
        {"name": name, **(value if isinstance(value, dict) else {"tokens": value})} for name, value in prompts.items()
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))


def hits(folder: Path, prompts: dict[str, list[int]] = DOCUMENTS, salt: str | None = None) -> dict[str, int]:
    """What a reader gets, every element compared."""
    with Store.open(str(folder / "kv")) as store, store.namespace(ENGINE_IDENTITY, missing_ok=True) as namespace:
        return {name: hit(namespace, tokens, salt=salt) for name, tokens in prompts.items()}


def summary(ran: Ran) -> dict[str, Any]:
    assert b"Traceback" not in ran.stderr
    return dict(json.loads(ran.lines[-1]))


def shown(run: Inside) -> dict[str, str]:
    """What `inspect` says of each document."""
    ran = run("inspect", "--store", "kv", ENGINE_IDENTITY.fingerprint[:8], "--json")
    records = [json.loads(line) for line in ran.lines]
    return {one["name"]: one["status"] for one in records if one["schema"] == "lmcache.document/1"}


# ---- vLLM in a process of its own


def test_vllm_computes_what_is_missing_and_all_of_it_is_there(run: Inside, engine: Fake, tmp_path: Path) -> None:
    ran = run(*WARM, "--engine", "vllm", "--json")
    told = summary(ran)
    assert (ran.code, told["num_complete"], told["num_failed"]) == (0, 3, 0)
    assert (told["tokens_computed"], told["tokens_present"]) == (sum(map(len, DOCUMENTS.values())), 0)
    assert (told["shards_before"], told["shards_after"], told["chunks_stored"]) == (0, 10, 10)
    assert hits(tmp_path) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
    assert set(shown(run).values()) == {"complete"}


def test_a_second_run_starts_no_engine(run: Inside, engine: Fake) -> None:
    assert run(*WARM, "--engine", "vllm").code == 0
    engine("fails")
    told = summary(run(*WARM, "--engine", "vllm", "--json"))
    assert (told["exit_code"], told["num_complete"], told["tokens_computed"]) == (0, 3, 0)


@pytest.mark.slow
def test_an_engine_with_full_buffers_is_asked_again(run: Inside, engine: Fake, tmp_path: Path) -> None:
    engine("few")
    assert run(*WARM, "--engine", "vllm").code == 0
    assert hits(tmp_path) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}


def test_a_document_that_is_too_long_fails_alone(run: Inside, engine: Fake, tmp_path: Path) -> None:
    prompts = {**DOCUMENTS, "long": document(41, seed=5), "empty": []}
    write_prompts(tmp_path, prompts)
    ran = run(*WARM, "--engine", "vllm", "--json")
    assert ran.code == 3
    assert b"long: 41 tokens are more than the 40 the engine takes; split the document" in ran.stderr
    assert b"empty: the document is empty" in ran.stderr
    assert (summary(ran)["num_complete"], summary(ran)["num_failed"]) == (3, 2)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("fails", b"vLLM ended with exit status 1: ValueError: no room for anything"),
        ("dies", b"vLLM ended with exit status 1: torch.OutOfMemoryError: no memory"),
        ("other", b"vLLM saves to namespace 00000000000000000000000000000000, expected"),
    ],
)
def test_an_engine_that_cannot_be_used_is_an_error_that_says_why(
    run: Inside, engine: Fake, mode: str, text: bytes
) -> None:
    engine(mode)
    ran = run(*WARM, "--engine", "vllm", "--json")
    assert ran.code == 1
    assert text in ran.stderr
    assert summary(ran)["exit_code"] == 1
    assert shown(run)["two"] == f"incomplete (?/{5 * CHUNK_TOKENS} tokens)"


def test_a_dry_run_measures_and_writes_nothing(run: Inside, engine: Fake, tmp_path: Path) -> None:
    ran = run(*WARM, "--engine", "vllm", "--dry-run", "--json")
    told = summary(ran)
    assert (ran.code, told["tokens_to_compute"]) == (0, sum(map(len, DOCUMENTS.values())))
    assert told["tokens_per_s"] > 0
    assert not list((tmp_path / "kv").glob("ns/*"))


def test_pins_and_salts_as_ever(run: Inside, engine: Fake, tmp_path: Path) -> None:
    assert run(*WARM, "--engine", "vllm", "--salt", "tenant", "--pin").code == 0
    assert hits(tmp_path, salt="tenant") == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
    assert set(hits(tmp_path).values()) == {0}
    with Store.open(str(tmp_path / "kv")) as store, store.namespace(ENGINE_IDENTITY) as namespace:
        assert len(namespace.state().pins) == 3


def test_without_resume_a_part_is_refused(run: Inside, engine: Fake, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "kv")) as store, store.namespace(ENGINE_IDENTITY, create=True) as namespace:
        put_chunk(namespace, refs(ENGINE_IDENTITY, DOCUMENTS["two"])[0], DOCUMENTS["two"])
    ran = run(*WARM, "--engine", "vllm", "--no-resume")
    assert ran.code == 2
    assert b"two: 4 of 20 tokens are present" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_stopped_leaves_no_engine_and_can_be_gone_on_with(
    run: Inside, engine: Fake, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    program = Program([sys.executable, str(FAKE.parents[1] / "warm_program.py"), "slow"], tmp_path)
    process = program.start(*WARM, "--engine", "vllm", "--batch-size", "1")
    while not (tmp_path / "engine.pid").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in stderr
    pid = int((tmp_path / "engine.pid").read_text())
    for _ in range(500):  # it goes by itself when its input ends
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    assert run(*WARM, "--engine", "vllm").code == 0
    assert hits(tmp_path) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
    assert set(shown(run).values()) == {"complete"}


# ---- the probe


def accepted(folder: Path) -> list[bool]:
    with Store.open(str(folder / "kv")) as store:
        return [one.passed for one in read_acceptances(store.backend, ENGINE_IDENTITY.fingerprint, store.events)]


class Numbers(PatternEngine):
    """KV that consists of numbers, as what is compared does."""

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        for chunk in super().prefill(documents, buffers):
            make_numbers(chunk.data)
            yield chunk


@pytest.fixture
def numbers(run: Inside, engine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_load_engine", lambda *_: Numbers(ENGINE_IDENTITY, 0.0))
    engine("numbers")


def present(folder: Path) -> list[int]:
    with Store.open(str(folder / "kv")) as store, store.namespace(ENGINE_IDENTITY) as namespace:
        return [namespace.match(tokens).num_tokens for tokens in DOCUMENTS.values()]


@pytest.mark.slow
@pytest.mark.usefixtures("numbers")
def test_a_probe_that_passes_is_recorded_and_warming_goes_on(run: Inside, tmp_path: Path) -> None:
    ran = run(*WARM, "--probe-engine", "vllm", "--json")
    (probe,) = [json.loads(line) for line in ran.lines if b'"lmcache.probe/1"' in line]
    assert (ran.code, probe["passed"], probe["relative_l2"], probe["cosine"]) == (0, True, 0.0, 1.0)
    assert probe["num_tokens"] == 512
    assert probe["producer"] == {"engine": "pattern"}
    assert accepted(tmp_path) == [True]
    assert present(tmp_path) == [len(tokens) for tokens in DOCUMENTS.values()]


@pytest.mark.slow
@pytest.mark.usefixtures("numbers")
def test_a_probe_that_fails_is_recorded_and_nothing_is_warmed(run: Inside, engine: Fake, tmp_path: Path) -> None:
    engine("apart")
    ran = run(*WARM, "--probe-engine", "vllm")
    assert ran.code == 2
    assert b"what pattern computes is not what vLLM computes: layer " in ran.stderr
    assert b"(less than 0.03 is wanted), cosine " in ran.stderr
    assert b"warm with --engine vllm instead" in ran.stderr
    assert accepted(tmp_path) == [False]
    assert present(tmp_path) == [0, 0, 0]


# ---- a server


def ask(run: Inside, server: FakeServer, *more: str, env: dict[str, str] | None = None) -> Ran:
    return run(*WARM, "--server", server.url, "--json", *more, env=env)


def test_a_server_computes_and_its_full_chunks_arrive(run: Inside, server: FakeServer, tmp_path: Path) -> None:
    server.save = Connector(tmp_path / "kv", late_s=0.2)
    ran = ask(run, server)
    told = summary(ran)
    assert ran.code == 3  # two tokens fill no chunk
    assert b"three: its 2 tokens fill no chunk of 4; with partial_chunks the connector saves them" in ran.stderr
    assert (told["num_complete"], told["shards_before"], told["shards_after"]) == (2, 0, 8)
    assert hits(tmp_path) == {"one": 12, "two": 20, "three": 0}
    assert {path for path, _ in server.asked} == {"/v1/completions"}
    assert sorted(len(body["prompt"]) for _, body in server.asked) == [14, 20]
    assert shown(run) == {"one": "complete", "two": "complete"}
    again = summary(ask(run, server))
    assert (again["tokens_computed"], again["tokens_present"], len(server.asked)) == (0, 32, 2)


def test_a_chat_is_stored_under_the_servers_own_tokens(run: Inside, server: FakeServer, tmp_path: Path) -> None:
    write_prompts(tmp_path, {"chat": {"messages": [{"role": "user", "content": "What is in it?"}], "salt": "s"}})
    ran = ask(run, server)
    assert ran.code == 0
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert body["cache_salt"] == "s"
    tokens = [7, *b"user: What is in it?\n"]
    assert hits(tmp_path, {"chat": tokens}, "s") == {"chat": len(tokens) // 4 * 4}
    assert shown(run) == {"chat": "complete"}


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_server_that_tells_of_too_few_tokens_completes_nothing(
    run: Inside, server: FakeServer, tmp_path: Path, tokens: list[int]
) -> None:
    write_prompts(tmp_path, {"chat": {"messages": [{"role": "user", "content": "What is in it?"}]}})
    answer = json.dumps({"choices": [{"prompt_token_ids": tokens}], "usage": {"prompt_tokens": -5}}).encode()
    server.respond = lambda path: (200, answer) if "chat" in path else None
    ran = ask(run, server)
    assert (ran.code, summary(ran)["num_complete"]) == (3, 0)
    assert f"its {len(tokens)} tokens fill no chunk of 4".encode() in ran.stderr


def test_a_process_that_answers_with_anything_else_is_told(run: Inside, engine: Fake) -> None:
    engine("garbled")
    ran = run(*WARM, "--engine", "vllm")
    assert ran.code == 1
    assert b"vLLM's process said what is no answer: 'a plugin says hello'" in ran.stderr


def test_a_server_that_does_not_save_here_is_told(run: Inside, server: FakeServer) -> None:
    server.save = lambda tokens, salt: None
    ran = ask(run, server)
    assert ran.code == 3
    assert b"0 of 20 tokens are in the store after the engine has computed all of them" in ran.stderr
    assert summary(ran)["num_complete"] == 0


def test_trouble_with_one_prompt_leaves_the_others(run: Inside, server: FakeServer, tmp_path: Path) -> None:
    server.models = [{"id": "tiny"}]
    write_prompts(tmp_path, {"two": DOCUMENTS["two"], "long": [1] * 1200})
    ran = ask(run, server)
    assert ran.code == 3
    assert b"long: HTTP 400: maximum context length is 1000" in ran.stderr
    assert (summary(ran)["num_complete"], summary(ran)["num_failed"]) == (1, 1)


def test_the_key_comes_from_the_environment(run: Inside, server: FakeServer) -> None:
    server.key = "sk-secret"
    refused = ask(run, server)
    assert refused.code == 2
    assert b"no key was sent; name its variable with --api-key-env" in refused.stderr
    wrong = ask(run, server, env={"OPENAI_API_KEY": "sk-secret-no"})
    assert wrong.code == 2
    good = ask(run, server, "--api-key-env", "MY_KEY", env={"MY_KEY": "sk-secret"})
    assert summary(good)["num_complete"] == 2
    for ran in (refused, wrong, good):
        assert b"sk-secret" not in ran.stdout + ran.stderr


def test_a_dry_run_asks_for_nothing(run: Inside, server: FakeServer) -> None:
    ran = ask(run, server, "--dry-run")
    assert (ran.code, server.asked) == (0, [])
    assert summary(ran)["estimated_s"] is None


def test_without_a_model_texts_are_sent_and_the_store_is_counted(
    run: Inside, server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("some words and more")
    ran = run("warm", "--documents", "text.txt", "--server", server.url, "--store", "kv", "--json")
    told = summary(ran)
    assert (ran.code, told["num_computed"], told["num_tokens"]) == (0, 1, 19)
    assert (told["shards_before"], told["shards_after"]) == (0, 4)
    assert server.asked[0][1]["prompt"] == "some words and more"
    alone = run("warm", "--documents", "text.txt", "--server", server.url, "--chat-template", "--json")
    assert alone.code == 0
    assert "shards_after" not in summary(alone)
    assert server.asked[1][0] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--server", "URL", "--engine", "transformers"), b"a server computes, or transformers does"),
        (("--server", "URL", "--codec", "bfx"), b"--codec and --durability are the server's own"),
        (("--server", "URL", "--piece-tokens", "8"), b"are the server's own"),
        (("--server", "URL", "--keep-tokens"), b"the connector writes no token ids into files"),
        (("--server", "URL", "--probe-engine", "vllm"), b"leave out --probe-engine"),
        (("--engine", "vllm", "--keep-tokens"), b"the connector writes no token ids into files"),
        (("--engine", "vllm", "--probe-engine", "vllm"), b"leave out --probe-engine"),
        (("--engine", "vllm", "--engine-options", "[]"), b"expected a JSON object"),
        (("--engine", "vllm", "--engine-options", "{"), b"--engine-options is no JSON"),
        (("--engine", "vllm", "--engine-options", '{"model": "x"}'), b"sets 'model', which this command does"),
        (("--engine-options", "{}"), b"--engine-options are vLLM's"),
        (("--probe-engine", "vllm", "--dry-run"), b"a probe is no dry run"),
        (("--server", "nowhere://"), b"the server's URL is none"),
    ],
)
def test_what_does_not_go_together_is_refused(
    run: Inside, server: FakeServer, more: tuple[str, ...], text: bytes
) -> None:
    ran = run(*WARM, *(server.url if word == "URL" else word for word in more))
    assert ran.code == 2
    assert text in ran.stderr


def test_without_a_model_much_cannot_be_done(run: Inside, server: FakeServer) -> None:
    for more in (("--pin",), ("--dry-run",), ("--no-resume",)):
        ran = run("warm", "--prompts", "prompts.jsonl", "--server", server.url, *more)
        assert ran.code == 2
        assert b"without --model nobody can tell what of a prompt is present" in ran.stderr
    assert b"no model is named" in run("warm", "--prompts", "prompts.jsonl", "--store", "kv").stderr
