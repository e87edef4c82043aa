"""C44, the commands with an engine, and doctor: exit codes in every situation, whatever the flags."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from lmcache_cli.backends import NoSpace, Unavailable
from lmcache_cli.backends.fault import Fail, Fault, FaultBackend, FaultScript
from lmcache_cli.integration.errors import AnswerFailed
from lmcache_cli.store import Store
from tests.cases.every_command import DOCUMENT, Scene
from tests.cases.pattern_engine import CHUNK_TOKENS, PatternEngine
from tests.cli.conftest import Inside, Ran
from tests.marks import slow_after

FLAGS = [(), ("--json",), ("--quiet",), ("--json", "--quiet")]


def sound(scene: Scene) -> None: ...


def empty(scene: Scene) -> None:
    shutil.rmtree(scene.store / "ns")


def one_corrupt(scene: Scene) -> None:
    data = bytearray(scene.shards[1].read_bytes())
    data[-1] ^= 1
    scene.shards[1].write_bytes(data)


def one_unreadable(scene: Scene) -> None:
    path = scene.shards[1]
    path.unlink()
    path.symlink_to("nowhere")


def gone(scene: Scene) -> None:
    shutil.rmtree(scene.store)


def superblock_damaged(scene: Scene) -> None:
    path = scene.store / "store.000001.json"
    path.write_bytes(path.read_bytes()[:-1])


def with_an_empty_prompt(scene: Scene) -> None:
    lines = (scene.folder / "prompts.jsonl").read_text()
    (scene.folder / "prompts.jsonl").write_text(lines + '\n{"name": "nothing", "tokens": []}')


def with_a_new_prompt(scene: Scene) -> None:
    (scene.folder / "prompts.jsonl").write_text('{"name": "new", "tokens": [1, 2, 3, 4, 5]}')


# (state, call, exit code)
TABLE: list[tuple[Callable[[Scene], None], str, int]] = [
    *((sound, call, 0) for call in ("warm", "warm dry run", "bench ttft", "doctor", "inspect prompt")),
    *((empty, call, 0) for call in ("warm", "warm dry run", "doctor", "inspect prompt")),
    (empty, "bench ttft", 3),
    *((one_corrupt, call, 0) for call in ("warm", "warm dry run", "doctor", "inspect prompt")),
    *((one_unreadable, call, 0) for call in ("warm dry run", "doctor", "inspect prompt")),
    *((gone, call, 10) for call in ("warm", "warm dry run", "bench ttft", "doctor", "inspect prompt")),
    *((superblock_damaged, call, 3) for call in ("warm", "warm dry run", "bench ttft", "doctor", "inspect prompt")),
    (with_an_empty_prompt, "warm", 3),
    (with_a_new_prompt, "warm", 0),
    (with_a_new_prompt, "bench ttft", 3),
]


@pytest.mark.parametrize("flags", slow_after(1, FLAGS), ids=lambda flags: "".join(flags) or "plain")
@pytest.mark.parametrize(("state", "call", "code"), TABLE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_exit_code_is_that_of_the_table(
    patterned: Inside, scene: Scene, state: Callable[[Scene], None], call: str, code: int, flags: tuple[str, ...]
):
    state(scene)
    ran = patterned(*scene.call(call), *flags)
    check(ran, code, flags)


def check(ran: Ran, code: int, flags: tuple[str, ...] = ()) -> None:
    assert ran.code == code, ran.stderr
    assert b"Traceback" not in ran.stderr
    assert b"unexpected" not in ran.stderr
    if code:
        assert ran.stderr.strip(), "a failure without a reason"
    if "--json" in flags:
        assert json.loads(ran.lines[-1])["exit_code"] == code
    elif "--quiet" in flags:
        assert ran.stdout == b""


WARM = ("warm", "--store", "kv", "--model", ".", "--chunk-tokens", str(CHUNK_TOKENS))
BENCH = ("bench", "ttft", "--store", "kv", "--model", ".", "--chunk-tokens", str(CHUNK_TOKENS), "--question", "")
INPUTS = [
    ((), b"no documents and no prompts are named"),
    (("--documents", "absent.txt"), b"absent.txt: No such file or directory"),
    (("--documents", "."), b".: Is a directory"),
    (("--documents", "latin-1.txt"), b"latin-1.txt: not UTF-8 text; byte 3 is 0xe9"),
    (("--prompts", "absent.jsonl"), b"absent.jsonl: No such file or directory"),
    (("--prompts", "bad.jsonl"), b"bad.jsonl:2: not JSON"),
    (("--prompts", "unknown.jsonl"), b"unknown.jsonl:1: unknown field 'salty'"),
    (("--prompts", "negative.jsonl"), b"negative.jsonl:1: "),
    (("--prompts", "half.jsonl"), rb"half.jsonl:1: \ud800 is half of a surrogate pair"),
    (("--prompts", "none.jsonl"), b"none.jsonl: no prompt is in the file"),
    (("--prompts", "text.jsonl"), b'text.jsonl:1: token ids are whole numbers, found "x"'),
    (("--prompts", "two.jsonl"), b"two.jsonl:1: expected an object with one of"),
    (("--prompts", "prompts.jsonl", "--no-such-option"), b"No such option"),
    (("--prompts", "prompts.jsonl", "--chunk-tokens", "0"), b"--chunk-tokens"),
]


@pytest.mark.parametrize("command", [WARM, BENCH], ids=["warm", "bench ttft"])
@pytest.mark.parametrize(("arguments", "said"), INPUTS)
def test_wrong_input_is_exit_2(
    patterned: Inside, scene: Scene, command: tuple[str, ...], arguments: tuple[str, ...], said: bytes
):
    for name, content in {
        "latin-1.txt": b"caf\xe9",
        "bad.jsonl": b'{"tokens": [1]}\n{"tokens": [1',
        "unknown.jsonl": b'{"tokens": [1], "salty": "x"}',
        "negative.jsonl": b'{"tokens": [-1]}',
        "half.jsonl": rb'{"prompt": "a\ud800"}',
        "none.jsonl": b"\n\n",
        "text.jsonl": b'{"tokens": [1, "x"]}',
        "two.jsonl": b'{"tokens": [1], "prompt": "x"}',
    }.items():
        (scene.folder / name).write_bytes(content)
    ran = patterned(*command, *arguments)
    check(ran, 2)
    assert said in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--codec", "lzma"), b"unknown codec 'lzma'\n  next: use one of raw, bfx, huf8\n"),
        (("--codec", "int8"), b"codec int8 loses precision"),
        (
            ("--piece-tokens", "7"),
            b"no multiple of --chunk-tokens 4\n  next: pass --piece-tokens 4",
        ),
        (("--engine", "abacus"), b"'abacus'"),
        (("--durability", "forever"), b"'forever'"),
        (("--batch-size", "0"), b"--batch-size"),
    ],
)
def test_wrong_options_of_warm_are_exit_2(patterned: Inside, scene: Scene, arguments: tuple[str, ...], said: bytes):
    ran = patterned(*WARM, "--prompts", "prompts.jsonl", *arguments)
    check(ran, 2)
    assert said in ran.stderr


@pytest.mark.parametrize("command", ["warm", "bench ttft"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no such folder", b"no model directory '/no such folder'"),
        (".", b". holds no config.json"),
        ("broken", b"config.json is not JSON"),
    ],
)
def test_a_model_that_is_none_is_exit_2(inside: Inside, scene: Scene, command: str, model: str, said: bytes):
    (scene.folder / "broken").mkdir()
    (scene.folder / "broken" / "config.json").write_text("{")
    ran = inside(*command.split(), "--store", "kv", "--model", model, "--prompts", "prompts.jsonl")
    check(ran, 2)
    assert said in ran.stderr


@pytest.mark.parametrize("call", ["inspect prompt", "pin prompt", "rm prompt"])
def test_a_prompt_without_tokens_is_exit_2(patterned: Inside, scene: Scene, call: str):
    (scene.folder / "ids.json").write_text("[]")
    ran = patterned(*scene.call(call))
    check(ran, 2)
    assert b"ids.json: the prompt is empty" in ran.stderr


def test_pieces_of_bench_hold_whole_chunks(patterned: Inside, scene: Scene):
    ran = patterned(*scene.call("bench ttft"), "--chunk-tokens", "100")
    check(ran, 2)
    assert b"--piece-tokens 1024 is no multiple of --chunk-tokens 100\n  next: pass --piece-tokens 1000" in ran.stderr


def test_any_character_may_stand_in_a_prompt(patterned: Inside, scene: Scene):
    """Line separators of Unicode end no line of JSON."""
    line = json.dumps({"name": "a\u2028b\x85c", "prompt": "x\u2028y\u2029z\x85"}, ensure_ascii=False)
    (scene.folder / "prompts.jsonl").write_text(f"{line}\r\n", encoding="utf-8", newline="")
    ran = patterned(*scene.call("warm"), "--json")
    check(ran, 0, ("--json",))
    assert json.loads(ran.lines[-1])["num_complete"] == 1


def test_an_unknown_dtype_is_exit_2(inside: Inside, scene: Scene):
    ran = inside("warm", "--store", "kv", "--model", ".", "--dtype", "F4", "--prompts", "prompts.jsonl")
    check(ran, 2)
    assert b"unknown type 'F4'\n  next: use BF16, F16 or F32" in ran.stderr


def test_no_resume_refuses_what_an_earlier_run_left(patterned: Inside, scene: Scene):
    (scene.folder / "longer.jsonl").write_text(json.dumps({"name": "longer", "tokens": [*DOCUMENT, 1, 2, 3]}))
    ran = patterned(*WARM, "--prompts", "longer.jsonl", "--no-resume")
    check(ran, 2)
    assert b"longer: 14 of 17 tokens are present from an earlier run" in ran.stderr
    assert patterned(*WARM, "--prompts", "longer.jsonl").code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NoSpace("disk full"), b"disk full\n  next: free some space"),
        (Unavailable("the share is gone"), b"the share is gone\n  next: check that the store can be reached"),
        (Unavailable("locked", transient=False, next_step="unlock it"), b"locked\n  next: unlock it"),
    ],
)
def test_a_store_that_takes_nothing_is_exit_1(
    patterned: Inside, scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception, said: bytes
):
    with_a_new_prompt(scene)
    opened = Store.open

    def failing(url: str) -> Store:
        store = opened(url)
        store.backend = FaultBackend(store.backend, FaultScript(Fault("put", Fail(error), name="safetensors")))
        return store

    monkeypatch.setattr(Store, "open", failing)
    ran = patterned(*scene.call("warm"), "--json")
    check(ran, 1, ("--json",))
    assert said in ran.stderr


def test_an_engine_that_fails_is_not_taken_for_a_wrong_request(
    patterned: Inside, scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    from lmcache_cli.integration.transformers import answering

    def fail(request: object) -> None:
        raise AnswerFailed("answering cold ended with exit status -9: Killed")

    monkeypatch.setattr(answering, "answer_in_fresh_process", fail)
    ran = patterned(*scene.call("bench ttft"))
    check(ran, 1)
    assert b"exit status -9" in ran.stderr


def test_a_document_beyond_the_model_is_left_out_and_told(
    patterned: Inside, scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PatternEngine, "max_tokens", 16)
    (scene.folder / "prompts.jsonl").write_text(
        json.dumps({"name": "long", "tokens": list(range(17))}) + "\n" + json.dumps({"name": "short", "tokens": [9]})
    )
    ran = patterned(*scene.call("warm"), "--json")
    check(ran, 3, ("--json",))
    assert b"long: 17 tokens are more than the 16 the model can attend to" in ran.stderr
    assert json.loads(ran.lines[-1])["num_complete"] == 1
