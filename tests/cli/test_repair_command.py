"""`repair`: the plan is shown first, --yes carries it out, and the exit code says how it ended (C44, C45)."""

import json

import pytest


def _records(ran):
    return [json.loads(line) for line in ran.lines]


def _shards(store):
    return sorted((store / "ns").rglob("*.safetensors"))


def _lose_index(store):
    for segment in store.rglob("*.lmi"):
        segment.unlink()


def test_nothing_to_repair_is_exit_0(inside, made_store):
    ran = inside("repair", "--store", made_store)
    assert (ran.code, ran.lines) == (0, [b"action\tpath\tcount\tsize_bytes\treason"])
    assert b"nothing to repair" in ran.stderr


def test_without_yes_the_plan_is_shown_and_refused(inside, made_store):
    _lose_index(made_store)
    ran = inside("repair", "--store", made_store)
    assert ran.code == 2
    assert b"nothing was changed; pass --yes" in ran.stderr
    assert ran.lines[1].split(b"\t")[::2] == [b"adopt", b"5", b"sound, but not in the index"]
    assert list(made_store.rglob("*.lmi")) == []


def test_a_dry_run_shows_the_plan_and_is_exit_0(inside, made_store):
    _lose_index(made_store)
    ran = inside("repair", "--store", made_store, "--dry-run", "--json")
    action, summary = _records(ran)
    assert (ran.code, action["schema"], action["action"], action["count"]) == (0, "lmcache.repair_action/1", "adopt", 5)
    assert action["size_bytes"] == sum(path.stat().st_size for path in _shards(made_store))
    assert (summary["num_changes"], summary["num_done"]) == (5, 0)
    assert list(made_store.rglob("*.lmi")) == []


@pytest.mark.parametrize("flags", [(), ("--deep",)])
def test_yes_carries_it_out(inside, made_store, flags):
    _lose_index(made_store)
    victim = _shards(made_store)[0]
    victim.write_bytes(victim.read_bytes()[:100])
    ran = inside("repair", "--store", made_store, "--yes", "--json", *flags)
    summary = _records(ran)[-1]
    assert ran.code == 0
    assert (summary["num_adopted"], summary["num_quarantined"], summary["num_failures"]) == (4, 1, 0)
    assert len(list((made_store / "quarantine").iterdir())) == 1
    assert inside("verify", "--store", made_store).code == 0
    again = inside("repair", "--store", made_store)
    assert (again.code, b"nothing to repair" in again.stderr) == (0, True)


def test_a_namespace_of_its_own(inside, made_store):
    _lose_index(made_store)
    (fingerprint,) = (path.name for path in (made_store / "ns").iterdir())
    assert inside("repair", "--store", made_store, "--yes", "--namespace", fingerprint[:8]).code == 0
    ran = inside("repair", "--store", made_store, "--namespace", "x")
    assert ran.code == 2
    assert b"no namespace starts with 'x'" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--store", "nowhere"), 10, b"there is no store at"),
        (("--store", "nowhere", "--deep", "--yes"), 10, b"there is no store at"),
        ((), 2, b"no store is named"),
    ],
)
def test_exit_codes_without_a_store(inside, arguments, code, said):
    ran = inside("repair", *arguments)
    assert (ran.code, said in ran.stderr) == (code, True)
