"""C48: signals at any time end a command with its code, in order, without a traceback and without leftovers."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.marks import slow_after

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def _await_warning(process):
    """Returns once the command says that it sleeps."""
    for line in process.stderr:
        if b"sleeping" in line:
            return


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_ends_the_command_in_order(fake, number):
    process = fake.start("--sleep", "30")
    _await_warning(process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == CODES[number]
    assert b"Traceback" not in stderr
    assert f"stopped by {number.name}".encode() in stderr
    assert not (fake.folder / "staging").exists()


def test_json_is_valid_and_says_how_it_ended(fake):
    process = fake.start("--sleep", "30", "--rows", "5", "--json")
    _await_warning(process)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=10)
    records = [json.loads(line) for line in stdout.splitlines()]
    assert len(records) == 6
    assert records[-1]["exit_code"] == 143


def test_a_second_ctrl_c_waits_for_the_tidying_up(fake):
    process = fake.start("--sleep", "30", "--tidy", "1")
    _await_warning(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"still tidying up" in stderr
    assert not (fake.folder / "staging").exists()


@pytest.mark.slow
def test_a_third_ctrl_c_stops_at_once(fake):
    process = fake.start("--sleep", "30", "--tidy", "30")
    _await_warning(process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=10)
    assert process.returncode == 130


@pytest.mark.slow
def test_a_signal_that_was_ignored_stays_ignored(fake):
    import subprocess

    shell = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *fake.command, "--sleep", "1"]
    process = subprocess.Popen(shell, cwd=fake.folder, env=fake.environment(), stdout=-1, stderr=-1)
    _await_warning(process)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=10)
    assert process.returncode == 0


def _await_handlers(process):
    """Returns once the process catches SIGTERM; before that, Python itself is starting and nothing of ours runs."""
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\t([0-9a-f]+)", status)[1], 16)
        if caught & 1 << (signal.SIGTERM - 1):
            return
        time.sleep(0.001)


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGINT, signal.SIGTERM]), ids=lambda number: number.name)
@pytest.mark.parametrize("flags", slow_after(1, [("--json",), ()]))
def test_a_signal_at_any_time_leaves_whole_lines(fake, number, flags):
    for attempt in range(6):
        process = fake.start("--rows", "60000", *flags)
        _await_handlers(process)
        time.sleep(0.04 * attempt)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
        assert process.returncode == CODES[number], stderr
        assert b"Traceback" not in stderr
        assert stdout == b"" or stdout.endswith(b"\n")
        for line in stdout.splitlines() if flags else ():
            json.loads(line)
        assert not (fake.folder / "staging").exists()
