"""The jobs of docs/archival.md as printed there, on a small store: one line, the right exit code, what it counts."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Ran, inside
from tests.docs.pages import ROOT, Block, blocks
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv, read_kv
from tests.store.pattern import document

__all__ = ["inside"]

PAGE = ROOT / "docs" / "archival.md"
STORE, ARCHIVE = "/srv/kv", "s3://bucket/kv"
OLD, NEW = document(4 * CHUNK_TOKENS), document(3 * CHUNK_TOKENS, seed=1)
JOBS = ("compress", "prune", "migrate", "verify")
FIELDS = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
_CRON = re.compile(r"(?P<when>\S+ \S+ \S+ \S+ \S+) (?P<user>\w+) (?P<command>lmcache .*)")


def printed(info: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.info == info]


def crontab() -> list[re.Match[str]]:
    """The lines of the crontab that run something."""
    (block,) = printed("cron")
    lines = [line for line in block.text.splitlines() if "=" not in line.split()[0]]
    matches = [_CRON.fullmatch(line) for line in lines]
    assert None not in matches
    return [match for match in matches if match is not None]


def units() -> dict[str, configparser.ConfigParser]:
    """The unit files by name."""
    found = {}
    for block in printed("ini"):
        name, text = block.text.split("\n", 1)
        unit = configparser.ConfigParser(delimiters="=", interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(text)
        found[name.removeprefix("# ")] = unit
    return found


def cron_command(job: str) -> str:
    (command,) = [match["command"] for match in crontab() if match["command"].split()[1] == job]
    return command.partition(" | ")[0]


def shell_command(*beginning: str) -> str:
    """The line of a shell block that begins so."""
    lines = [line for block in printed("bash") for line in block.text.splitlines()]
    (command,) = [line for line in lines if line.startswith(" ".join(("lmcache", *beginning)))]
    return command


@dataclass(frozen=True, slots=True)
class Place:
    """A store, an archive, and how commands of the page are run on them."""

    store: Path
    archive: str
    run: Callable[..., Ran]

    def __call__(self, command: str, **instead: str) -> Ran:
        """Run a command of the page with our places for the page's, and other values where given."""
        words = shlex.split(command)[1:]
        places = {STORE: str(self.store), ARCHIVE: self.archive, **instead}
        return self.run(*(places.get(word, word) for word in words))


def summary(ran: Ran) -> dict[str, Any]:
    """The only line on standard output; standard error is empty exactly where all is well."""
    assert len(ran.lines) == 1, ran
    record: dict[str, Any] = json.loads(ran.lines[0])
    assert record["schema"] == "lmcache.summary/1"
    assert record["exit_code"] == ran.code
    assert bool(ran.stderr) == bool(ran.code), ran.stderr  # so that cron sends mail, or none
    return record


def shards(place: Place) -> list[Path]:
    return sorted((place.store / "ns").rglob("*.safetensors"))


def hit(url: str | Path, tokens: list[int]) -> int:
    from lmcache_cli.store import Store

    with Store.open(str(url)) as store, store.namespace(KV_IDENTITY, missing_ok=True) as namespace:
        return read_kv(namespace, tokens)


def make_store(folder: Path) -> None:
    """A document that was written and last used nine days ago, and one of today."""
    from lmcache_cli.store import Store

    Store.create(str(folder)).close()
    then_s = time.time() - 9 * 86_400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: int(then_s * 1000))
        write(folder, "handbook.txt", OLD)
    for path in (folder / "ns").rglob("*"):
        if path.is_file():
            os.utime(path, (then_s, then_s))
    write(folder, "new.txt", NEW)


def write(folder: Path, name: str, tokens: list[int]) -> None:
    from lmcache_cli.store import Store

    with Store.open(str(folder)) as store, store.namespace(KV_IDENTITY, create=True) as opened:
        put_kv(opened, tokens)
        keys = opened.match(tokens).keys
        opened.label(name, keys[-1], len(tokens), len(keys) - 1)


@pytest.fixture
def place(tmp_path, inside) -> Place:
    make_store(tmp_path / "kv")
    made = Place(tmp_path / "kv", str(tmp_path / "archive"), lambda *words: inside(*words, env=environment))
    environment = {"LMCACHE_STORE": str(made.store)}
    assert made(shell_command("init", "--store", ARCHIVE)).code == 0
    return made


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_cron_and_systemd_run_the_same_jobs():
    services = {name: unit for name, unit in units().items() if name.endswith(".service")}
    started = {name: unit["Service"]["ExecStart"].rpartition("/lmcache ")[2] for name, unit in services.items()}
    assert started == {f"lmcache-{job}.service": cron_command(job).removeprefix("lmcache ") for job in JOBS}, (
        "the two differ"
    )
    assert [match["command"].split()[1] for match in crontab()] == list(JOBS)


def test_times_of_the_crontab_are_times():
    for match in crontab():
        for field, (first, last) in zip(match["when"].split(), FIELDS, strict=True):
            assert field == "*" or first <= int(field) <= last


def test_the_log_of_cron_takes_a_whole_line(place):
    sizes = [int(size) for match in crontab() for size in re.findall(r"logger -S (\d+) ", match["command"])]
    assert len(sizes) == len(JOBS)
    assert all(len(place(cron_command(job)).lines[0]) < min(sizes) / 2 for job in JOBS)


def test_units_have_known_parts():
    known = {
        "Unit": {"Description", "RequiresMountsFor", "Wants", "After"},
        "Service": {
            "Type", "User", "Environment", "EnvironmentFile", "ExecStart", "Nice", "IOSchedulingClass",
        },
        "Timer": {"OnCalendar", "RandomizedDelaySec", "Persistent"},
        "Install": {"WantedBy"},
    }  # fmt: skip
    found = units()
    assert sorted(found) == sorted(f"lmcache-{job}.{kind}" for job in JOBS for kind in ("service", "timer"))
    for name, unit in found.items():
        kinds = ["Unit", "Service"] if name.endswith(".service") else ["Timer", "Install"]
        assert unit.sections() == kinds
        assert all(set(unit[section]) <= known[section] for section in unit.sections()), name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_takes_the_units(tmp_path):
    program = tmp_path / "lmcache"
    program.touch(mode=0o755)
    for block in printed("ini"):
        name, text = block.text.split("\n", 1)
        (tmp_path / name.removeprefix("# ")).write_text(text.replace("/opt/lmcache/bin/lmcache", str(program)))
    for name, unit in units().items():
        if name.endswith(".timer"):
            calendar = ["systemd-analyze", "calendar", unit["Timer"]["OnCalendar"]]
            assert subprocess.run(calendar, capture_output=True, check=False).returncode == 0
    files = sorted(tmp_path.glob("lmcache-*"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    said = [line for line in checked.stderr.splitlines() if str(tmp_path) in line or "lmcache-" in line]
    assert said == []


def test_the_counts_that_are_listed_are_there(place):
    listed = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [job for job, _ in listed] == list(JOBS)
    for job, names in listed:
        told = summary(place(cron_command(job)))
        assert [name for name in re.findall(r"`(\w+)`", names) if name not in told] == []


# ---- the jobs -------------------------------------------------------------------------------------------------------


def test_compress_encodes_what_was_not_used_for_a_day(place):
    told = summary(place(cron_command("compress")))
    assert (told["exit_code"], told["num_encoded"], told["num_removed"], told["num_left"]) == (0, 4, 4, 0)
    assert told["encoded_bytes"] < told["source_bytes"]
    assert (hit(place.store, OLD), hit(place.store, NEW)) == (len(OLD), len(NEW))
    again = summary(place(cron_command("compress")))
    assert (again["exit_code"], again["num_encoded"]) == (0, 0)


def test_prune_sweeps_what_compress_marked_and_keeps_to_the_size(place):
    assert place(cron_command("compress")).code == 0
    assert len(shards(place)) == 11
    early = summary(place(cron_command("prune")))
    assert (early["exit_code"], early["num_marked"], early["num_swept"], early["num_waiting"]) == (0, 0, 0, 4)
    later = summary(place(cron_command("prune") + " --grace 0s"))  # as if it were an hour later
    assert (later["exit_code"], later["num_swept"], later["num_waiting"]) == (0, 4, 0)
    assert len(shards(place)) == 7
    size = sum(path.stat().st_size for path in shards(place))
    limited = summary(place(cron_command("prune"), **{"500GB": f"{size - 1}B"}))
    assert (limited["exit_code"], limited["num_marked"], limited["excess_bytes"]) == (0, 1, 0)
    assert limited["kept_bytes"] < size
    assert (hit(place.store, OLD), hit(place.store, NEW)) == (len(OLD) - CHUNK_TOKENS, len(NEW))


def test_migrate_moves_what_was_not_used_for_a_week(place):
    told = summary(place(cron_command("migrate")))
    assert (told["exit_code"], told["num_copied"], told["num_deleted"], told["num_left"]) == (0, 4, 4, 0)
    assert (hit(place.store, OLD), hit(place.store, NEW)) == (0, len(NEW))
    assert (hit(place.archive, OLD), hit(place.archive, NEW)) == (len(OLD), 0)
    again = summary(place(cron_command("migrate")))
    assert (again["exit_code"], again["num_copied"], again["num_deleted"]) == (0, 0, 0)


def test_verify_changes_nothing_and_is_content_with_a_sound_store(place):
    before = {path: path.read_bytes() for path in place.store.rglob("*") if path.is_file()}
    told = summary(place(cron_command("verify")))
    assert (told["exit_code"], told["num_damaged"], told["num_missing"]) == (0, 0, 0)
    assert told["share"].endswith("/30")
    assert {path: path.read_bytes() for path in place.store.rglob("*") if path.is_file()} == before


def test_one_after_the_other_leaves_two_sound_stores(place):
    """What was just compressed is as old as it was: it is archived in its new encoding."""
    told = {job: summary(place(cron_command(job))) for job in JOBS}
    assert {job: one["exit_code"] for job, one in told.items()} == dict.fromkeys(JOBS, 0)
    assert (told["compress"]["num_encoded"], told["migrate"]["num_copied"], told["migrate"]["num_deleted"]) == (4, 4, 4)
    assert place(cron_command("prune") + " --grace 0s").code == 0
    for url in (str(place.store), place.archive):
        assert place.run("verify", "--store", url, "-q", "--json").code == 0
    assert {path.name.split(".")[2] for path in Path(place.archive).rglob("*.safetensors")} == {"bfx"}
    assert len(shards(place)) == 3
    assert (hit(place.archive, OLD), hit(place.store, NEW)) == (len(OLD), len(NEW))


@pytest.mark.slow
def test_the_commands_as_printed_in_processes_of_their_own(tmp_path):
    """With everything that systemd would set: a program, an environment, no terminal."""
    make_store(tmp_path / "kv")
    program = Path(sys.executable).parent / "lmcache"
    environment = {"PATH": "/usr/bin:/bin", "LMCACHE_STORE": str(tmp_path / "kv")}
    for job in JOBS:
        line = units()[f"lmcache-{job}.service"]["Service"]["ExecStart"]
        for theirs, ours in (
            ("/opt/lmcache/bin/lmcache", program),
            (STORE + " ", f"{tmp_path}/kv "),
            (ARCHIVE, tmp_path / "archive"),
        ):
            line = line.replace(theirs, str(ours))
        if job == "migrate":
            (tmp_path / "archive").mkdir()
            made = [program, "init", "--store", tmp_path / "archive", "-q"]
            subprocess.run(made, env=environment, stdin=subprocess.DEVNULL, check=True)
        ran = subprocess.run(
            shlex.split(line), env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, b""), line
        (told,) = map(json.loads, ran.stdout.splitlines())
        assert (told["command"], told["exit_code"]) == (f"lmcache {job}", 0)


# ---- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS)
def test_a_disk_that_is_not_mounted_is_exit_10_and_gets_no_store(place, job):
    shutil.rmtree(place.store)
    place.store.mkdir()
    assert summary(place(cron_command(job)))["exit_code"] == 10
    assert list(place.store.iterdir()) == []


def test_an_archive_that_was_never_made_is_exit_10_and_loses_nothing(place):
    shutil.rmtree(place.archive)
    assert summary(place(cron_command("migrate")))["exit_code"] == 10
    assert not Path(place.archive).exists()
    assert hit(place.store, OLD) == len(OLD)


@pytest.mark.parametrize("job", ["compress", "migrate", "verify"])
def test_a_damaged_shard_is_exit_3_and_stays(place, job):
    damaged = min(shards(place), key=lambda path: path.stat().st_mtime)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    told = summary(place(cron_command(job)))
    assert (told["exit_code"], told["num_damaged"]) == (3, 1)
    assert damaged.exists()


def test_a_size_that_pins_do_not_let_it_reach_is_exit_3(place):
    assert place(shell_command("pin")).code == 0
    told = summary(place(cron_command("prune"), **{"500GB": "1B"}))
    assert (told["exit_code"], told["num_marked"], told["excess_bytes"] > 0) == (3, 3, True)
    assert (hit(place.store, OLD), hit(place.store, NEW)) == (len(OLD), 0)


@pytest.mark.parametrize("job", ["compress", "migrate"])
def test_what_is_left_for_lack_of_time_is_exit_3(place, job):
    ran = place(cron_command(job) + " --max-duration 0s")
    assert (ran.code, json.loads(ran.lines[0])["num_left"]) == (3, 4)
    assert summary(place(cron_command(job)))["exit_code"] == 0


# ---- the archive ----------------------------------------------------------------------------------------------------


def test_pinned_chunks_are_copied_and_stay(place):
    assert place(shell_command("pin")).code == 0
    told = summary(place(cron_command("migrate")))
    assert (told["exit_code"], told["num_copied"], told["num_deleted"], told["num_kept"]) == (0, 4, 0, 4)
    assert hit(place.store, OLD) == hit(place.archive, OLD) == len(OLD)


def test_what_comes_back_goes_again_unless_it_is_pinned_or_used(place):
    back = shell_command("migrate", ARCHIVE)
    assert place(cron_command("migrate")).code == 0
    assert summary(place(back))["num_copied"] == 4
    assert summary(place(cron_command("migrate")))["num_deleted"] == 4
    assert hit(place.store, OLD) == 0
    assert place(back).code == 0
    assert place(shell_command("pin")).code == 0
    assert summary(place(cron_command("migrate")))["num_deleted"] == 0
    assert hit(place.store, OLD) == len(OLD)


def test_which_store_would_answer_is_told(place, monkeypatch, tmp_path):
    from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
    from lmcache_cli.integration.warming import WarmDocument

    assert place(cron_command("migrate")).code == 0
    (tmp_path / "question.txt").write_text("a question")
    module, words = "lmcache_cli.commands.asked_prompt", np.array(OLD, np.uint32)
    monkeypatch.setattr(f"{module}.identify_model", lambda model, **_: IdentifiedModel(Path(model), KV_IDENTITY))
    monkeypatch.setattr(f"{module}.tokenize", lambda *_, **how: [WarmDocument("question", words, None)])
    told = summary(place(shell_command("inspect") + " -q --json"))
    assert (told["hit_tokens"], told["chain_hit_tokens"]) == (0, len(OLD))


@pytest.mark.parametrize(("days_ago", "num_deleted"), [(0, 0), (8, 4)])
def test_what_an_archive_behind_gave_stays_a_week_and_goes_without_being_sent_again(
    place, monkeypatch, days_ago, num_deleted
):
    from lmcache_cli.store.chain import StoreChain

    assert place(cron_command("migrate")).code == 0
    assert hit(place.store, OLD) == 0
    then_ms = int((time.time() - days_ago * 86_400) * 1000)
    with monkeypatch.context() as patch, StoreChain.open([str(place.store), place.archive]) as chain:
        patch.setattr("lmcache_cli.store.wall_clock.now_ms", lambda: then_ms)
        with chain.namespace(KV_IDENTITY) as namespace:
            assert read_kv(namespace, OLD) == len(OLD)
            assert namespace.wait_promoted(10)
    assert hit(place.archive, OLD) == len(OLD)
    told = summary(place(cron_command("migrate")))
    assert (told["exit_code"], told["num_copied"], told["num_deleted"]) == (0, 0, num_deleted)
    assert len(shards(place)) == 3 + 4 - num_deleted


def test_the_archive_is_pruned_checked_and_listed_like_any_store(place):
    assert place(cron_command("migrate")).code == 0
    assert place(shell_command("ls")).code == 0
    prune = shell_command("prune", "--store", ARCHIVE)
    assert summary(place(prune))["num_marked"] == 0
    assert summary(place(prune, **{"365d": "8d"}))["num_marked"] == 4
    told = summary(place(shell_command("verify", "--store", ARCHIVE)))
    assert (told["exit_code"], told["num_awaiting_sweep"]) == (0, 4)


@pytest.mark.slow
def test_the_same_with_a_bucket(tmp_path, inside, s3_url):
    make_store(tmp_path / "kv")
    environment = {"LMCACHE_STORE": str(tmp_path / "kv")}
    place = Place(tmp_path / "kv", s3_url, lambda *words: inside(*words, env=environment))
    assert summary(place(cron_command("migrate")))["exit_code"] == 10
    for command in (shell_command("init", "--store", ARCHIVE), shell_command("doctor")):
        assert place(command).code == 0
    for job in ("migrate", "compress", "prune", "verify"):
        assert summary(place(cron_command(job)))["exit_code"] == 0
    assert (hit(place.store, OLD), hit(s3_url, OLD), hit(place.store, NEW)) == (0, len(OLD), len(NEW))
    told = summary(place(shell_command("verify", "--store", ARCHIVE)))
    assert (told["exit_code"], told["num_good"]) == (0, 4)
    assert summary(place(shell_command("prune", "--store", ARCHIVE)))["num_marked"] == 0
    assert place(shell_command("ls")).code == 0
    assert summary(place(shell_command("migrate", ARCHIVE)))["num_copied"] == 4
    assert hit(place.store, OLD) == len(OLD)
    assert place(shell_command("pin")).code == 0


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_exit_1_and_nothing_is_deleted(tmp_path, inside, s3_bucket):
    make_store(tmp_path / "kv")
    url = s3_bucket.url("kv", endpoint="http://127.0.0.1:9")
    place = Place(tmp_path / "kv", url, lambda *words: inside(*words, env={}))
    before = shards(place)
    told = summary(place(cron_command("migrate")))
    assert (told["exit_code"], bool(told["error"])) == (1, True)
    assert shards(place) == before
