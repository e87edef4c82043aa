"""C52: names are data. Brackets are no markup, control characters do no harm, every locale prints every name."""

import json
import os

import pytest

from tests.marks import slow_after

NAMES = {
    "brackets": b"doc [2007]",
    "closing tag": b"[/red]",
    "opening tag": b"[bold]",
    "space": b"a b",
    "accents": "naïve 文.txt".encode(),
    "not UTF-8": b"caf\xe9.txt",
    "newline and tab": b"two\nlines\tand a tab",
    "escape sequence": b"\x1b[31mred\x1b[0m\rover",
    "emoji": "🧊.txt".encode(),
    "emoji name": b":smiley:",
    "direction override": "evil\u202etxt.exe".encode(),
    "format braces": b"{num_rows} {0} %s",
}
LOCALES = {
    "UTF-8": {"LC_ALL": "C.UTF-8"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII streams": {"PYTHONIOENCODING": "ascii"},
    "strict ASCII streams": {"PYTHONIOENCODING": "ascii:strict"},
}


PRINTED = {
    "brackets": "doc [2007]",
    "closing tag": "[/red]",
    "opening tag": "[bold]",
    "space": "a b",
    "accents": "naïve 文.txt",
    "not UTF-8": r"caf\xe9.txt",
    "newline and tab": r"two\nlines\tand a tab",
    "escape sequence": r"\x1b[31mred\x1b[0m\rover",
    "emoji": "🧊.txt",
    "emoji name": ":smiley:",
    "direction override": r"evil\u202etxt.exe",
    "format braces": "{num_rows} {0} %s",
}
EVERY_NAME = [argument for name in NAMES.values() for argument in (b"--name", name)]


@pytest.mark.parametrize("locale", slow_after(1, LOCALES))
@pytest.mark.parametrize("flags", slow_after(1, [(), ("--json",), ("--fail", "refused")]))
def test_every_name_prints_on_one_line_from_every_locale(fake, locale, flags):
    ran = fake(*EVERY_NAME, *flags, env=LOCALES[locale])
    assert ran.code == (2 if "refused" in flags else 0), ran.stderr
    printed = ran.stdout + ran.stderr
    assert not any(byte < 0x20 and byte not in b"\n\t" for byte in printed)
    assert b"Traceback" not in printed
    assert len(ran.lines) == len(NAMES) + 1
    if not flags:
        assert {line.count(b"\t") for line in ran.lines} == {2}


@pytest.mark.parametrize("locale", slow_after(1, LOCALES))
def test_json_holds_the_exact_name_in_ascii(fake, locale):
    ran = fake(*EVERY_NAME, "--json", env=LOCALES[locale])
    assert ran.stdout.isascii()
    found = [json.loads(line)["name"].encode("utf-8", "surrogateescape") for line in ran.lines[:-1]]
    assert found == list(NAMES.values())


def test_names_are_printed_literally(faked):
    lines = faked(*EVERY_NAME).lines[1:]
    assert [line.split(b"\t")[0].decode() for line in lines] == list(PRINTED.values())


@pytest.mark.parametrize("flags", [(), ("--fail", "refused")])
def test_names_are_printed_literally_on_a_terminal(fake, flags):
    printed = fake.on_terminal(*EVERY_NAME, *flags, env={"NO_COLOR": "1", "COLUMNS": "400"}).stdout.decode()
    for text in PRINTED.values():
        assert printed.count(text) >= (3 if flags else 2), text  # the row, the note, the error


def test_an_ascii_locale_gets_backslashes(fake):
    ran = fake("--name", NAMES["accents"], env=LOCALES["ASCII"])
    assert ran.lines[1].split(b"\t")[0] == rb"na\xefve \u6587.txt"


@pytest.mark.parametrize("locale", slow_after(1, LOCALES))
@pytest.mark.parametrize("name", ["accents", "not UTF-8", "newline and tab"])
def test_a_file_with_an_odd_name_is_found_from_every_locale(fake, locale, name):
    with open(os.fsencode(fake.folder) + b"/" + NAMES[name], "wb"):
        pass
    assert fake("--name", NAMES[name], "--fail", "os-error", env=LOCALES[locale]).code == 0
