"""C51: what is printed into pipes, files and cron mails, and what only a terminal gets."""

import json
import os
import subprocess

import pytest

from tests.marks import slow_after

PLAIN_SURROUNDINGS = [
    {},
    {"TERM": "dumb"},
    {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    {"COLUMNS": "0"},
    {"COLUMNS": "40"},
    {"COLUMNS": "400"},
    {"NO_COLOR": "1"},
    {"CI": "1"},
    {"FORCE_COLOR": "1"},
    {"LC_ALL": "C"},
]
LONG_NAME = "/srv/" + "long-name/" * 20 + "end"


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_pipe_gets_the_same_whole_lines_everywhere(faked, flags):
    runs = [faked("--name", LONG_NAME, "--rows", "3", *flags, env=env) for env in PLAIN_SURROUNDINGS]
    assert {run.code for run in runs} == {0}
    assert len({run.stdout for run in runs}) == 1
    for run in runs:
        for byte in (b"\x1b", b"\r", b"\b"):
            assert byte not in run.stdout + run.stderr
        assert sum(LONG_NAME.encode() in line and b"0" * 63 in line for line in run.lines) == 3


def test_a_pipe_gets_fields_separated_by_tabs(faked):
    assert faked("--rows", "1").lines == [b"name\tsize_bytes\tkey", b"plain\t3145728\t" + b"0" * 64]


def test_empty_environment_works(fake):
    ran = subprocess.run(["env", "-i", *fake.command], cwd=fake.folder, capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, fake().stdout)


def test_every_json_line_has_a_schema_and_counts_agree_with_the_text(faked):
    ran = faked("--rows", "7", "--json")
    records = [json.loads(line) for line in ran.lines]
    assert [record["schema"] for record in records] == ["lmcache.fake/1"] * 7 + ["lmcache.summary/1"]
    assert records[-1]["num_rows"] == 7
    assert b"7 rows printed" in faked("--rows", "7").stderr


def test_talk_stays_off_stdout(faked):
    ran = faked()
    assert b"a note about plain" in ran.stderr
    assert b"note" not in ran.stdout


def test_quiet_leaves_out_notes_and_keeps_warnings(faked):
    ran = faked("--quiet", "--sleep", "0.01")
    assert ran.stderr == b"warning: sleeping\n"


def test_a_terminal_gets_a_table_for_people(fake):
    ran = fake.on_terminal(env={"NO_COLOR": "1"})
    assert ran.code == 0
    assert b"3.0 MiB" in ran.stdout


@pytest.mark.parametrize("columns", slow_after(1, ["1", "", "0", "40"]))
def test_a_terminal_of_any_width_gets_the_whole_name(fake, columns):
    ran = fake.on_terminal("--name", "x" * 200, env={"COLUMNS": columns, "NO_COLOR": "1"})
    assert ran.code == 0
    assert ran.stdout.count(b"x") == 400  # the row and the note


def test_json_on_a_terminal_is_json(fake):
    ran = fake.on_terminal("--json", "--quiet")
    assert json.loads(ran.stdout)["schema"] == "lmcache.summary/1"


def test_a_bar_is_drawn_on_a_terminal_only(fake, faked):
    assert b"\x1b" in fake.on_terminal("--steps", "20").stdout
    for style in ("auto", "bar", "plain", "none"):
        ran = faked("--steps", "5", "--progress", style)
        assert (ran.code, b"\x1b" in ran.stderr, b"faking" in ran.stderr) == (0, False, False)


@pytest.mark.parametrize("flags", slow_after(1, [("--quiet",), ("--progress", "plain"), ("--progress", "none")]))
def test_a_terminal_gets_no_bar_if_it_is_not_wanted(fake, flags):
    assert b"faking" not in fake.on_terminal("--steps", "20", *flags).stdout


def test_a_dumb_terminal_gets_no_bar(fake):
    assert b"\x1b" not in fake.on_terminal("--steps", "20", env={"TERM": "dumb"}).stdout


def test_reader_who_leaves_early_ends_the_command_quietly(fake):
    process = fake.start("--rows", "100000")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not (fake.folder / "staging").exists()


def test_full_disk_behind_stdout_is_an_error(fake):
    full = os.open("/dev/full", os.O_WRONLY)
    process = fake.start(stdout=full)
    os.close(full)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"cannot write to standard output: No space left on device" in stderr
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


@pytest.mark.parametrize("closed", slow_after(2, [">&-", "<&- >&- 2>&-", "<&-", "2>&-", ">&- 2>&-"]))
@pytest.mark.parametrize("code", slow_after(1, ["3", "0"]))
def test_closed_streams_do_not_change_the_exit_code(fake, closed, code):
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *fake.command, "--code", code]
    ran = subprocess.run(shell, cwd=fake.folder, env=fake.environment(), capture_output=True, check=False)
    assert ran.returncode == int(code)
    assert b"Traceback" not in ran.stderr


def test_warnings_of_the_packages_below_are_warnings_of_the_command(faked):
    assert rb"warning: segment \x1b damaged" in faked("--code", "3", "--quiet").stderr
