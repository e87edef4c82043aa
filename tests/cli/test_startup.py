"""`lmcache --help` is quick and imports nothing heavy."""

import os
import statistics
import subprocess
import sys

import pytest

HEAVY = ("numpy", "torch", "fsspec", "s3fs", "gcsfs", "transformers", "rich", "pydantic")

LIST_MODULES = """
import sys
from lmcache_cli.app import main
code = main({arguments!r})
print(code, *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments):
    program = LIST_MODULES.format(arguments=arguments, heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "0"
    assert "lmcache" in ran.stdout


def test_help_takes_at_most_a_quarter_of_a_second(lmcache):
    """By processor time, which is what a lone process on an idle machine waits for: other tests may run beside."""
    assert lmcache("--help").code == 0
    taken_s = []
    for _ in range(5):
        process = lmcache.start("--help", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
        taken_s.append(used.ru_utime + used.ru_stime)
    assert statistics.median(taken_s) <= 0.25, taken_s


def test_help_says_of_every_command_what_it_does_in_a_whole_sentence(lmcache):
    lines = lmcache("--help").stdout.decode().partition("Commands:\n")[2].splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_version_is_that_of_the_package(lmcache):
    import lmcache_cli

    assert lmcache("--version").stdout == f"lmcache {lmcache_cli.__version__}\n".encode()


def test_help_in_a_pipe_does_not_depend_on_the_width(lmcache):
    narrow, wide = (lmcache("config", "show", "--help", env={"COLUMNS": columns}) for columns in ("40", "400"))
    assert narrow.stdout == wide.stdout
    assert b"Exit codes:" in narrow.stdout
    assert b"Examples:" in narrow.stdout


def test_every_command_says_how_to_use_it():
    from lmcache_cli.commands.root import COMMANDS, load_command

    for name in COMMANDS:
        command = load_command(name)
        assert command.function.__doc__, name
        assert command.examples, name
        assert all(f"lmcache {name}" in example for example in command.examples), name
        assert {0, 1, 2} <= set(command.exit_codes), name
