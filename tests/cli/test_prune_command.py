"""`prune`, `rm`, `pin`, `unpin`: plan first, ask or refuse, one summary, exit codes; on a store of two documents."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.marks import slow_after

FIRST = list(range(100, 114))
SECOND = [*range(100, 104), *range(200, 204)]


def shards(store: Path) -> list[Path]:
    return sorted((store / "ns").rglob("*.safetensors"))


def summary(ran) -> dict:
    return json.loads(ran.lines[-1])


def age(store: Path, days: int) -> None:
    """Write the index anew as if everything had been written and used that many days ago."""
    from dataclasses import replace

    from lmcache_cli.backends import Durability
    from lmcache_cli.store import Store
    from lmcache_cli.store.index import Index
    from lmcache_cli.store.manifest import segment_of_state

    with Store.open(str(store)) as opened:
        (fingerprint,) = opened.fingerprints()
        index = Index(opened.backend, fingerprint)
        touches, adds = index.state.touches.copy(), index.state.adds.copy()
        touches["day"] -= days
        adds["created_ms"] -= days * 86_400_000
        state = replace(index.state, touches=touches, adds=adds)
        for segment in store.rglob("*.lmi"):
            segment.unlink()
        now_ms = opened.backend.now_ms()
        index.manifest.write(segment_of_state(fingerprint, state, "w", now_ms, ()), Durability.NONE)
    for path in shards(store):
        when = time.time() - days * 86_400
        os.utime(path, (when, when))


def namespace(store: Path) -> str:
    (found,) = (path.name for path in (store / "ns").iterdir())
    return found


def key(store: Path, depth: int, tokens: list[int] = FIRST) -> str:
    from lmcache_format import Fingerprint, next_key, root_key

    parent = root_key(Fingerprint(namespace(store)))
    for start in range(0, 4 * depth + 1, 4):
        parent = next_key(parent, tokens[start : start + 4])
    return parent.hex()


# ---- prune ----------------------------------------------------------------------------------------------------------


def test_a_bare_prune_is_refused_and_names_the_rules(inside, made_store):
    ran = inside("prune", "--store", made_store, "--yes")
    assert ran.code == 2
    for rule in ("older-than", "unused-for", "max-size", "max-count", "stale-models", "superseded", "sweep-only"):
        assert f"--{rule}".encode() in ran.stderr
    assert len(shards(made_store)) == 5


@pytest.mark.parametrize("scope", [("--namespace", ""), ("--filter", "model=*"), ("--salt", "s")])
def test_a_scope_alone_is_refused_and_names_rm(inside, made_store, scope):
    if scope == ("--namespace", ""):
        scope = ("--namespace", namespace(made_store)[:6])
    ran = inside("prune", "--store", made_store, "--yes", *scope)
    assert (ran.code, b"lmcache rm" in ran.stderr, len(shards(made_store))) == (2, True, 5)


def test_a_dry_run_shows_the_plan_and_changes_nothing(inside, made_store):
    ran = inside("prune", "--store", made_store, "--max-count", "2", "--dry-run", "--json")
    group, told = map(json.loads, ran.lines)
    size = sum(path.stat().st_size for path in shards(made_store))
    assert (ran.code, group["schema"], group["rule"], group["num_chunks"]) == (0, "lmcache.prune_plan/1", "limit", 3)
    assert (told["num_chunks"], told["kept_chunks"], told["size_bytes"] + told["kept_bytes"]) == (3, 2, size)
    assert len(shards(made_store)) == 5
    assert inside("verify", "--store", made_store).code == 0


def test_without_yes_and_a_terminal_a_plan_is_refused(inside, made_store):
    ran = inside("prune", "--store", made_store, "--max-count", "2", "--json")
    assert (ran.code, b"pass --yes" in ran.stderr, summary(ran)["num_shards"]) == (2, True, 3)
    assert inside("ls", "--store", made_store, "--json").lines[-1].count(b'"num_chunks": 5') == 1


def lose_the_index(store: Path, minutes_ago: int = 60) -> None:
    """As after a writer that died before it flushed, some time ago."""
    for segment in store.rglob("*.lmi"):
        segment.unlink()
    for path in shards(store):
        os.utime(path, (time.time() - 60 * minutes_ago,) * 2)


def test_shards_that_no_index_lists_are_told_where_space_is_limited(inside, made_store):
    lose_the_index(made_store)
    size = sum(path.stat().st_size for path in shards(made_store))
    for limit, code in (("1GB", 0), ("1KB", 3)):
        ran = inside("prune", "--store", made_store, "--max-size", limit, "--yes", "-q", "--json")
        assert ran.code == code
        assert (summary(ran)["num_unlisted"], summary(ran)["unlisted_bytes"]) == (5, size)
        assert b"no index lists 5 shards" in ran.stderr
        assert b"lmcache repair" in ran.stderr
    assert inside("repair", "--store", made_store, "--yes").code == 0
    ran = inside("prune", "--store", made_store, "--max-size", "1KB", "--yes", "-q", "--json")
    assert (ran.code, summary(ran)["num_unlisted"], summary(ran)["num_marked"]) == (0, 0, 5)


def test_neither_young_shards_nor_marked_ones_count_as_unlisted(inside, made_store):
    assert inside("prune", "--store", made_store, "--max-count", "2", "--yes").code == 0
    for path in shards(made_store):
        os.utime(path, (time.time() - 3600,) * 2)
    ran = inside("prune", "--store", made_store, "--max-size", "1GB", "-q", "--json")
    assert (ran.code, summary(ran)["num_unlisted"], summary(ran)["num_waiting"]) == (0, 0, 3)
    lose_the_index(made_store, minutes_ago=1)
    ran = inside("prune", "--store", made_store, "--max-size", "1GB", "-q", "--json")
    assert (ran.code, summary(ran)["num_unlisted"]) == (0, 0)


def test_without_a_limit_of_space_nothing_is_listed_for_it(inside, made_store):
    lose_the_index(made_store)
    ran = inside("prune", "--store", made_store, "--max-count", "9", "-q", "--json")
    assert (ran.code, summary(ran)["num_unlisted"]) == (0, None)


def test_nothing_to_prune_is_exit_0_without_yes(inside, made_store):
    ran = inside("prune", "--store", made_store, "--older-than", "30d", "-q", "--json")
    assert (ran.code, len(ran.lines)) == (0, 1)
    assert {name: summary(ran)[name] for name in ("num_shards", "num_marked", "num_swept", "kept_chunks")} == {
        "num_shards": 0,
        "num_marked": 0,
        "num_swept": 0,
        "kept_chunks": 5,
    }


@pytest.mark.parametrize(
    ("answer", "code", "num_left"),
    [(b"y\n", 0, 0), (b"\n", 2, 5), *(pytest.param(no, 2, 5, marks=pytest.mark.slow) for no in (b"n\n", b"\x04"))],
)
def test_on_a_terminal_it_asks(lmcache, made_store, answer, code, num_left):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*lmcache.command, "prune", "--store", made_store, "--max-count", "0", "--wait", "--grace", "0s"],
        cwd=lmcache.folder,
        env=lmcache.environment({"TERM": "xterm"}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = b""
    answered = False
    try:
        while block := os.read(ours, 65536):
            printed += block
            if not answered and b"[y/N]" in printed:
                os.write(ours, answer)
                answered = True
    except OSError:
        pass
    os.close(ours)
    assert (process.wait(timeout=60), len(shards(made_store))) == (code, num_left), printed
    assert b"5 shards" in printed


def test_marks_are_swept_by_a_later_run(inside, made_store):
    first = inside("prune", "--store", made_store, "--max-count", "1", "--yes", "-q", "--json")
    assert (first.code, summary(first)["num_marked"], summary(first)["num_waiting"]) == (0, 4, 4)
    assert len(shards(made_store)) == 5
    early = inside("prune", "--store", made_store, "--sweep-only", "-q", "--json")
    assert (early.code, summary(early)["num_swept"], summary(early)["num_due"]) == (0, 0, 0)
    time.sleep(1.1)
    late = inside("prune", "--store", made_store, "--older-than", "30d", "--grace", "1s", "-q", "--json")
    assert (late.code, summary(late)["num_swept"], summary(late)["num_waiting"]) == (0, 4, 0)
    assert [path.name[:64] for path in shards(made_store)] == [key(made_store, 0)]
    assert inside("verify", "--store", made_store).code == 0


def test_wait_deletes_in_one_run(inside, made_store):
    ran = inside("prune", "--store", made_store, "--max-count", "0", "--yes", "--wait", "--grace", "1s", "-q", "--json")
    told = summary(ran)
    assert (ran.code, told["num_marked"], told["num_swept"], told["num_waiting"]) == (0, 5, 5, 0)
    assert told["swept_bytes"] == told["marked_bytes"] == told["size_bytes"] > 0
    assert shards(made_store) == []


def test_ages(inside, made_store):
    age(made_store, 40)
    for flags, num in (
        (("--older-than", "41d"), 0),
        (("--older-than", "39d"), 5),
        (("--unused-for", "41d"), 0),
        (("--unused-for", "38d"), 5),
        (("--older-than", "39d", "--unused-for", "41d"), 0),
        (("--older-than", "39d", "--filter", "model=other/*"), 0),
        (("--older-than", "39d", "--filter", "model=org/*"), 5),
        (("--older-than", "39d", "--filter", "namespace=zz*"), 0),
        (("--older-than", "39d", "--salt", "tenant"), 0),
    ):
        ran = inside("prune", "--store", made_store, "--dry-run", "-q", "--json", *flags)
        assert (flags, summary(ran)["num_shards"]) == (flags, num)
    ran = inside("prune", "--store", made_store, "--older-than", "39d", "--yes", "-q", "--json")
    assert (ran.code, summary(ran)["num_marked"], summary(ran)["num_spared"]) == (0, 5, 0)


def test_what_one_run_takes_can_be_bounded(inside, made_store):
    size = max(path.stat().st_size for path in shards(made_store))
    ran = inside(
        "prune", "--store", made_store, "--max-count", "0", "--max-delete", f"{2 * size}B", "--yes", "-q", "--json"
    )
    told = summary(ran)
    assert (ran.code, told["num_marked"], told["num_left_out"], told["marked_bytes"] <= 2 * size) == (0, 2, 3, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--older-than", "30"), b"bare number"),
        (("--max-size", "500"), b"unit"),
        (("--max-count", "-1"), b"--max-count"),
        (("--filter", "encoding=raw", "--max-count", "1"), b"--superseded"),
        (("--sweep-only", "--max-count", "1"), b"--sweep-only"),
        (("--max-count", "1", "--namespace", "zz"), b"no namespace"),
    ],
)
def test_wrong_usage(inside, made_store, arguments, said):
    ran = inside("prune", "--store", made_store, "--yes", *arguments)
    assert (ran.code, said in ran.stderr) == (2, True), ran.stderr
    assert len(shards(made_store)) == 5


def test_a_limit_that_pins_forbid_is_exit_3(inside, made_store):
    assert inside("pin", "--store", made_store, key(made_store, 2)[:12]).code == 0
    ran = inside("prune", "--store", made_store, "--max-count", "1", "--yes", "-q", "--json")
    assert (ran.code, summary(ran)["excess_chunks"], summary(ran)["num_marked"]) == (3, 2, 2)
    assert b"pinned" in ran.stderr


def test_a_namespace_that_cannot_be_read_is_left_alone_and_exit_3(inside, made_store):
    segment = next(made_store.rglob("*.lmi"))
    segment.write_bytes(segment.read_bytes()[:-1])
    ran = inside("prune", "--store", made_store, "--max-count", "0", "--yes", "-q", "--json")
    assert (ran.code, summary(ran)["num_unreadable"], len(shards(made_store))) == (3, 1, 5)
    assert b"repair" in ran.stderr


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_wait_leaves_the_marks_to_the_next_run(lmcache, made_store, number):
    process = lmcache.start(
        "prune", "--store", made_store, "--max-count", "0", "--yes", "--wait", "--grace", "1h", "--json"
    )
    assert process.stderr is not None
    said = b""
    while b"waiting" not in said:
        said = process.stderr.readline()
        assert said, "it ended"
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in stderr) == (128 + number, False)
    told = json.loads(stdout.splitlines()[-1])
    assert (told["num_marked"], told["num_swept"], told["exit_code"]) == (5, 0, 128 + number)
    assert len(shards(made_store)) == 5
    again = lmcache("prune", "--store", made_store, "--sweep-only", "--grace", "0s", "-q", "--json")
    assert (again.code, summary(again)["num_swept"], shards(made_store)) == (0, 5, [])


# ---- rm -------------------------------------------------------------------------------------------------------------


def removed(inside, store, *arguments):
    ran = inside("rm", "--store", store, "--yes", "--wait", "--grace", "0s", "-q", "--json", *arguments)
    assert ran.code == 0, ran.stderr
    return summary(ran)["num_swept"]


def test_rm_of_a_namespace(inside, made_store):
    assert removed(inside, made_store, namespace(made_store)[:6]) == 5
    assert shards(made_store) == []


def test_rm_of_a_key_takes_what_follows(inside, made_store):
    assert removed(inside, made_store, key(made_store, 1)[:10].upper()) == 3
    assert {path.name[:64] for path in shards(made_store)} == {key(made_store, 0), key(made_store, 1, SECOND)}


def test_rm_of_a_tenant_takes_its_chunks_alone(inside, made_store):
    from lmcache_cli.store import Store
    from lmcache_format import next_key

    with Store.open(str(made_store)) as store:
        identity = store.identity(store.fingerprints()[0])
        with store.namespace(identity, create=True) as opened:
            root = opened.root("tenant")
            chunk = opened.buffer(4)
            opened.put(chunk, key=next_key(root, [1, 2, 3, 4]), parent=root, depth=0)
    assert removed(inside, made_store, "--salt", "nobody") == 0
    assert removed(inside, made_store, "--salt", "tenant") == 1
    assert len(shards(made_store)) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), b"nothing says what is to go"),
        (("abc",), b"at least 8 digits"),
        (("00000000",), b"0 chunks start with"),
        (("xyz",), b"expected the start of a key"),
        (("",), b"expected the start of a key"),
        (("--tokens", "ids.json"), b"--model"),
        (("--model", "."), b"--model without a prompt"),
        (("--tokens", "ids.json", "00000000"), b"beside a prompt"),
        (("--tokens", "a", "--prompt", "b"), b"exclude each other"),
    ],
)
def test_rm_of_what_is_unclear_is_refused(inside, made_store, arguments, said):
    ran = inside("rm", "--store", made_store, "--yes", *arguments)
    assert (ran.code, said in ran.stderr) == (2, True), ran.stderr
    assert len(shards(made_store)) == 5


def test_rm_of_what_is_pinned_says_why_nothing_goes(inside, made_store):
    assert inside("pin", "--store", made_store, "--document", "first").code == 0
    ran = inside("rm", "--store", made_store, "--yes", key(made_store, 1))
    assert ran.code == 0
    assert b"what is pinned stays; see: lmcache unpin --help" in ran.stderr
    assert b"0 of 0 shards marked" in ran.stderr


def test_rm_without_yes_is_refused(inside, made_store):
    assert inside("rm", "--store", made_store, namespace(made_store)).code == 2
    assert inside("rm", "--store", made_store, namespace(made_store), "--dry-run").code == 0
    assert len(shards(made_store)) == 5


# ---- pin and unpin --------------------------------------------------------------------------------------------------


def pins(inside, store) -> list[dict]:
    ran = inside("inspect", "--store", store, namespace(store), "--json")
    return [record for record in map(json.loads, ran.lines) if record["schema"] == "lmcache.pin/1"]


def test_a_pinned_document_is_shown_and_kept(inside, made_store):
    ran = inside("pin", "--store", made_store, "--document", "first", "--json")
    made, told = map(json.loads, ran.lines)
    assert (ran.code, made["num_chunks"], made["end_tokens"], made["expires"], made["labels"]) == (
        0,
        4,
        14,
        None,
        ["first"],
    )
    assert (told["num_pins"], told["num_chunks"]) == (1, 4)
    assert [pin["key"] for pin in pins(inside, made_store)] == [key(made_store, 3)[:32]]
    assert removed(inside, made_store, namespace(made_store)) == 1
    assert len(shards(made_store)) == 4


def test_a_pin_ends_with_its_time(inside, made_store):
    assert inside("pin", "--store", made_store, "--document", "first", "--ttl", "1s").code == 0
    assert len(pins(inside, made_store)) == 1
    time.sleep(1.1)
    assert pins(inside, made_store) == []
    assert removed(inside, made_store, namespace(made_store)) == 5


def test_a_pin_made_again_counts_anew(inside, made_store):
    for flags in ((), ("--ttl", "7d"), ()):
        assert inside("pin", "--store", made_store, key(made_store, 1), *flags).code == 0
        (pin,) = pins(inside, made_store)
        assert (pin["expires"] is None) == (not flags)


@pytest.mark.parametrize("how", ["document", "key"])
def test_unpin(inside, made_store, how):
    inside("pin", "--store", made_store, "--document", "first")
    named = ("--document", "first") if how == "document" else (key(made_store, 3)[:8],)
    ran = inside("unpin", "--store", made_store, *named, "-q", "--json")
    assert (ran.code, summary(ran)["num_pins"], pins(inside, made_store)) == (0, 1, [])
    again = inside("unpin", "--store", made_store, *named, "-q", "--json")
    assert (again.code, summary(again)["num_pins"], b"no such pin" in again.stderr) == (0, 0, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), b"found none"),
        (("--document", "first", "00000000"), b"found several"),
        (("--document", "nobody"), b"no document 'nobody'"),
        (("00000000",), b"0 chunks start with"),
        (("--document", "first", "--ttl", "7"), b"bare number"),
        (("--document", "first", "--ttl", "99999999999999s"), b"longer than a pin can say"),
    ],
)
def test_pin_of_what_is_unclear_is_refused(inside, made_store, arguments, said):
    ran = inside("pin", "--store", made_store, *arguments)
    assert (ran.code, said in ran.stderr) == (2, True), ran.stderr
    assert pins(inside, made_store) == []


# ---- clocks, marks of later releases --------------------------------------------------------------------------------


def test_a_clock_a_day_off_is_refused_with_both_times(inside, made_store, monkeypatch):
    from lmcache_cli.backends.local.backend import LocalBackend

    monkeypatch.setattr(LocalBackend, "now_ms", lambda self: 1_000_000_000_000)
    ran = inside("prune", "--store", made_store, "--max-count", "0", "--yes")
    assert (ran.code, b"2001-09-09T01:46:40Z" in ran.stderr, ran.stderr.count(b"Z")) == (2, True, 2)
    assert len(shards(made_store)) == 5
