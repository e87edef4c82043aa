"""`inspect --prompt …`: how much of a prompt hits, where it stops, and what differs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
from lmcache_cli.store import Store
from tests.cli.conftest import store_document

FIRST = list(range(100, 114))


@pytest.fixture
def asked(inside, made_store, monkeypatch):
    """Asks about token ids under the identity of the made store, some fields of it changed."""

    def ask(tokens, *flags, **changes):
        with Store.open(str(made_store)) as store:
            identity = replace(store.identity(store.fingerprints()[0]), **changes)
        monkeypatch.setattr(
            "lmcache_cli.commands.asked_prompt.identify_model",
            lambda model, **_: IdentifiedModel(Path(model), identity),
        )
        (inside.folder / "ids.json").write_text(json.dumps(tokens))
        ran = inside("inspect", "--store", made_store, "--tokens", "ids.json", "--model", ".", "--json", *flags)
        assert ran.code == 0, ran.stderr
        explanation, summary = [json.loads(line) for line in ran.lines]
        assert explanation["schema"] == "lmcache.explanation/1"
        assert (summary["hit_tokens"], summary["cause"]) == (explanation["hit_tokens"], explanation["cause"])
        return explanation

    return ask


def test_a_stored_document_hits_whole(asked):
    found = asked(FIRST)
    assert (found["hit_tokens"], found["num_tokens"], found["cause"], found["chunk"]) == (
        14,
        14,
        "all of it hits",
        None,
    )


def test_other_tokens(asked):
    found = asked([*FIRST[:5], 9, *FIRST[6:]])
    assert (found["hit_tokens"], found["chunk"], found["chunk_start"], found["chunk_stop"]) == (4, 1, 4, 8)
    assert (found["cause"], found["num_siblings"]) == ("other tokens follow the same beginning", 2)


def test_a_salt(asked):
    found = asked(FIRST, "--salt", "tenant")
    assert (found["hit_tokens"], found["cause"], found["unsalted_tokens"]) == (0, "stored under another salt", 14)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", f"sha256:{'1' * 64}"),
        ("adapter", f"sha256:{'2' * 64}"),
        ("dtype", "BF16"),
        ("chunk_tokens", 2),
    ],
)
def test_another_identity(asked, field, value):
    from lmcache_format import Dtype

    found = asked(FIRST, **{field: Dtype(value) if field == "dtype" else value})
    assert (found["hit_tokens"], found["cause"]) == (0, "stored under another identity")
    (other,) = found["elsewhere"]
    assert other["hit_tokens"] == 14
    (difference,) = other["differences"]
    assert (difference["field"], difference["wanted"]) == (field, value)
    assert any(f"differs in {field}" in sentence for sentence in found["sentences"])


def test_archives_behind_the_store_are_asked_and_nothing_changes(inside, made_store, asked, tmp_path):
    asked(FIRST)  # leaves the identity in place
    near = tmp_path / "near"
    with Store.open(str(made_store)) as full, Store.create(str(near)) as store:
        with store.namespace(full.identity(full.fingerprints()[0]), create=True) as namespace:
            store_document(namespace, FIRST[:4], "the first chunk")
    before = files(made_store), files(near)
    ran = inside("inspect", "--store", near, "--archive", made_store, "--tokens", "ids.json", "--model", ".", "--json")
    assert ran.code == 0, ran.stderr
    explanation, *answers, summary = map(json.loads, ran.lines)
    assert (explanation["hit_tokens"], summary["hit_tokens"], summary["chain_hit_tokens"]) == (4, 4, 14)
    with Store.open(str(made_store)) as full, Store.open(str(near)) as store:
        expected = [(store.url, 0, 4), (full.url, 4, 14)]
    assert [(answer["store"], answer["start"], answer["stop"]) for answer in answers] == expected
    assert (files(made_store), files(near)) == before
    ran = inside("inspect", "--store", near, "--archive", made_store, "--tokens", "ids.json", "--model", ".")
    assert b"with the archives 14 tokens hit" in ran.stderr


def test_an_archive_that_does_not_answer_or_is_none_is_told(inside, made_store, asked, tmp_path):
    asked(FIRST)
    ran = inside(
        "inspect", "--store", made_store, "--archive", tmp_path / "nothing", "--tokens", "ids.json", "--model", "."
    )
    assert ran.code == 10
    assert b"there is no store at file://" in ran.stderr


def files(root):
    return sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*"))


def test_people_get_the_reason_and_a_table_of_differences(inside, made_store, asked):
    asked(FIRST, weights=f"sha256:{'1' * 64}")  # leaves the changed identity in place
    ran = inside("inspect", "--store", made_store, "--tokens", "ids.json", "--model", ".")
    assert ran.code == 0
    assert b"hit_tokens\t0" in ran.lines
    assert b"\tweights\t" in ran.lines[-1]
    assert b"0 of 14 tokens hit; the first chunk that does not is number 0" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "x"), b"none is named\n  next: pass --model DIR"),
        (("--model", "."), b"--model without a prompt"),
        (("--archive", "x"), b"--archive without a prompt"),
        (("--prompt", "x", "--tokens", "y", "--model", "."), b"exclude each other"),
        (("abc", "--prompt", "x", "--model", "."), b"beside it"),
        (("--prompt-file", "absent.txt", "--model", "."), b"absent.txt: No such file or directory"),
        (("--tokens", "absent.json", "--model", "."), b"absent.json: No such file or directory"),
        (("--tokens", "bad.json", "--model", "."), b"bad.json: not JSON"),
        (("--tokens", "text.json", "--model", "."), b"text.json: expected a list of token ids"),
        (("--tokens", "negative.json", "--model", "."), b"negative.json: "),
        (("--prompt-file", "latin-1.txt", "--model", "."), b"latin-1.txt: not UTF-8 text"),
        (("--prompt", "x", "--model", "/nowhere at all"), b"no model directory '/nowhere at all'"),
    ],
)
def test_wrong_usage_is_exit_2(inside, made_store, arguments, said):
    (inside.folder / "bad.json").write_text("[1, 2")
    (inside.folder / "text.json").write_text('"some text"')
    (inside.folder / "negative.json").write_text("[1, -2]")
    (inside.folder / "latin-1.txt").write_bytes(b"caf\xe9")
    ran = inside("inspect", "--store", made_store, *arguments)
    assert ran.code == 2, ran.stderr
    assert said in ran.stderr
    assert b"Traceback" not in ran.stderr
