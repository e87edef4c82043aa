"""C44: the exit code of every command in every situation, with and without --json and --quiet, in one table."""

import json

import pytest

from lmcache_cli.exit_codes import ExitCode

# (arguments, exit code, what stderr must say). Commands join with a line for each situation.
SITUATIONS = [
    ((), 0, b"1 rows printed"),
    (("--code", "3"), 3, b"1 rows printed"),
    (("--fail", "refused"), 2, b"lmcache fake: cannot use plain\n  next: use another one"),
    (("--fail", "package"), 1, b"transformers is not installed\n  next: pip install 'lmcache-toolkit[hf]'"),
    (("--fail", "os-error"), 1, b"lmcache fake: plain: No such file or directory"),
    (
        ("--fail", "unforeseen"),
        1,
        b"unexpected ZeroDivisionError: nobody thought of plain\n  next: run it again with --debug",
    ),
]


@pytest.mark.parametrize("flags", [(), ("--json",), ("--quiet",), ("--json", "--quiet")])
@pytest.mark.parametrize(("arguments", "code", "said"), SITUATIONS)
def test_exit_code(faked, arguments, code, said, flags):
    ran = faked(*arguments, *flags)
    assert ran.code == code
    assert b"Traceback" not in ran.stderr
    if code in (1, 2) or not flags:
        assert said in ran.stderr
    if "--json" in flags:
        summary = json.loads(ran.lines[-1])
        assert (summary["schema"], summary["exit_code"], summary["num_rows"]) == ("lmcache.summary/1", code, 1)
        assert ("error" in summary) == (code in (1, 2))
    if flags == ("--quiet",):
        assert ran.stdout == b""
    if flags == ("--json", "--quiet"):
        assert len(ran.lines) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--no-such-option",), b"lmcache fake: No such option: --no-such-option\n  next: run 'lmcache fake --help'"),
        (("--rows", "many"), b"lmcache fake: Invalid value for '--rows'"),
        (("--progress", "fast"), b"'fast' is not one of 'auto', 'plain', 'bar', 'none'"),
        (("surplus",), b"surplus"),
    ],
)
def test_wrong_usage_is_exit_2_with_the_next_step(faked, arguments, said):
    ran = faked(*arguments)
    assert ran.code == ExitCode.REFUSED
    assert said.replace(b"lmcache fake:", b"lmcache:") in ran.stderr
    assert ran.stdout == b""


def test_unknown_command_is_exit_2_and_names_the_nearest(inside):
    ran = inside("confg")
    assert ran.code == 2
    assert b"Did you mean 'config'?" in ran.stderr


def test_group_without_a_verb_is_exit_2(inside):
    ran = inside("config")
    assert (ran.code, ran.stdout) == (2, b"")
    assert b"run 'lmcache config --help'" in ran.stderr


@pytest.mark.parametrize(("flags", "env"), [(("--debug",), {}), ((), {"LMCACHE_DEBUG": "1"})])
def test_debug_shows_the_traceback_and_keeps_the_code(faked, flags, env):
    ran = faked("--fail", "unforeseen", *flags, env=env)
    assert ran.code == 1
    assert b"Traceback (most recent call last)" in ran.stderr


def test_every_code_has_a_meaning_and_the_promised_number():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "ERROR": 1, "REFUSED": 2, "DAMAGE": 3, "NO_STORE": 10, "BUSY": 11, "TOO_NEW": 12, "UNSUPPORTED": 13,
        "HANGUP": 129, "INTERRUPTED": 130, "OUTPUT_CLOSED": 141, "TERMINATED": 143,
    }  # fmt: skip
    assert all(code.meaning for code in ExitCode)


def test_every_class_that_has_a_rule_exists():
    """The rules name classes by text; a renamed class would silently become exit code 1."""
    import importlib

    from lmcache_cli import failures

    for qualified_name in failures._RULES:
        module_name, _, class_name = qualified_name.rpartition(".")
        kind = getattr(importlib.import_module(module_name), class_name)
        assert f"{kind.__module__}.{kind.__qualname__}" == qualified_name
