"""C52: documents, stores and files with odd names, from every locale: printed literally, kept exactly, found again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from tests.cases.every_command import CALLS, Scene, copy_scene
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY
from tests.cli.conftest import Inside, Program
from tests.cli.test_names import LOCALES, NAMES, PRINTED
from tests.marks import slow_after

ENGINE = Path(__file__).with_name("pattern_engine.py")
FILES = list(NAMES.values())


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """The command line with the pattern engine, in a folder with a document of each name."""
    for number, name in enumerate(FILES):
        path = tmp_path / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)  # one of the names has a slash in it
        path.write_text(f"This is document number {number}.")
    Store.create(str(tmp_path / "kv")).close()
    return Program([sys.executable, str(ENGINE), "0"], tmp_path)


def warm(*more: str | bytes) -> list[str | bytes]:
    return ["warm", "--model", ".", "--chunk-tokens", str(CHUNK_TOKENS), "--store", "kv", *more]


def names_of(stdout: bytes) -> list[bytes]:
    records = [json.loads(line) for line in stdout.splitlines()]
    return [
        record["name"].encode("utf-8", "surrogateescape")
        for record in records
        if record["schema"] == "lmcache.document/1"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["ASCII", "UTF-8"])
def test_a_document_of_any_name_is_warmed_once_and_shown_exactly(program: Program, writer: str):
    documents = [word for name in FILES for word in ("--document", b"./" + name)]
    first = program(*warm(*documents, "--json"), env=LOCALES[writer])
    assert first.code == 0, first.stderr
    assert json.loads(first.lines[-1])["num_complete"] == len(FILES)
    for reader, env in LOCALES.items():
        ran = program("inspect", "--store", "kv", ENGINE_IDENTITY.fingerprint, "--json", env=env)
        assert (ran.code, ran.stdout.isascii()) == (0, True), reader
        assert sorted(names_of(ran.stdout)) == sorted(b"./" + name for name in FILES)
    again = program(*warm(*documents, "--json"), env=LOCALES["ASCII" if writer == "UTF-8" else "UTF-8"])
    assert json.loads(again.lines[-1])["tokens_computed"] == 0
    shown = program("inspect", "--store", "kv", ENGINE_IDENTITY.fingerprint)
    names = [line.split(b"\t")[0] for line in shown.lines if line.count(b"\t") == 4]
    assert sorted(names[1:]) == sorted(f"./{text}".encode() for text in PRINTED.values())


@pytest.mark.parametrize("env", slow_after(1, LOCALES.values()), ids=LOCALES)
def test_an_error_quotes_any_name(program: Program, env: dict[str, str]):
    for name in (b"absent [/red]\x1b[31m", b"caf\xe9 gone\n", "文 gone".encode()):
        ran = program(*warm("--document", name), env=env)
        assert ran.code == 2
        assert b"No such file or directory" in ran.stderr
        assert b"Traceback" not in ran.stderr
        assert b"\x1b" not in ran.stderr
        assert ran.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", [name for name in CALLS if name != "config show"])
@pytest.mark.parametrize("odd", slow_after(1, [b"caf\xe9\n", b"[/red] a b", "naïve 文 🧊".encode()]))
def test_every_command_works_on_a_store_of_any_name(
    patterned: Inside, first_scene: Scene, tmp_path: Path, odd: bytes, name: str
):
    scene = copy_scene(first_scene, tmp_path, tmp_path / os.fsdecode(odd))
    (scene.store / os.fsdecode(b"foreign " + odd.replace(b"/", b""))).write_bytes(b"not ours")
    for flags in ((), ("--json",)):
        ran = patterned(*scene.call(name), *flags)
        assert ran.code == 0, ran.stderr
        assert b"Traceback" not in ran.stderr
        for line in ran.lines if flags else ():
            json.loads(line)


@pytest.mark.parametrize("env", slow_after(1, LOCALES.values()), ids=LOCALES)
def test_foreign_files_of_odd_names_are_told_literally(lmcache: Program, scene: Scene, env: dict[str, str]):
    names = [name for name in FILES if b"/" not in name]
    for name in names:
        (scene.store / os.fsdecode(name)).touch()
    ran = lmcache("verify", "--store", scene.store, "--json", env=env)
    assert ran.code == 0, ran.stderr
    found = [json.loads(line) for line in ran.lines[:-1]]
    assert sorted(one["path"].encode("utf-8", "surrogateescape") for one in found) == sorted(names)
    assert {one["kind"] for one in found} == {"foreign"}


@pytest.mark.slow
@pytest.mark.parametrize("env", LOCALES.values(), ids=LOCALES)
def test_a_salt_is_the_same_from_every_locale(program: Program, env: dict[str, str]):
    assert program(*warm("--document", "a b", "--salt", "schlüssel".encode()), env=LOCALES["UTF-8"]).code == 0
    again = program(*warm("--document", "a b", "--salt", "schlüssel".encode(), "--json"), env=env)
    assert json.loads(again.lines[-1])["tokens_computed"] == 0
    other = program(*warm("--document", "a b", "--salt", b"schl\xfcssel"), env=env)
    assert other.code == 2
    assert rb"expected text in UTF-8, found schl\xfcssel" in other.stderr
