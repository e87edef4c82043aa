"""`verify` on real stores: what it finds, what it prints, how it ends."""

import json

import pytest


def _verify(inside, store, *flags):
    ran = inside("verify", "--store", store, "--json", *flags)
    *findings, summary = [json.loads(line) for line in ran.lines]
    assert summary["exit_code"] == ran.code
    return ran, findings, summary


def _shards(store):
    return sorted(store.rglob("*.safetensors"))


def _flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("flags", [(), ("--quick",), ("--headers",), ("--read-data", "1/2"), ("--read-data", "auto/3")])
def test_a_sound_store_is_exit_0(inside, made_store, flags):
    ran, findings, summary = _verify(inside, made_store, *flags)
    assert (ran.code, findings, summary["num_listed"], summary["num_damaged"]) == (0, [], 5, 0)


def test_a_flipped_bit_is_exit_3_and_named_on_both_streams(inside, made_store):
    damaged = _shards(made_store)[1]
    _flip_last_byte(damaged)
    ran, findings, summary = _verify(inside, made_store)
    assert (ran.code, summary["num_damaged"], summary["num_good"]) == (3, 1, 4)
    assert [(found["kind"], found["path"]) for found in findings] == [
        ("damaged", damaged.relative_to(made_store).as_posix())
    ]
    assert damaged.name.encode() in ran.stderr
    quiet = inside("verify", "--store", made_store, "--quiet")
    assert (quiet.code, quiet.stdout) == (3, b"")
    assert damaged.name.encode() in quiet.stderr


def test_a_flipped_bit_of_the_data_is_not_seen_without_reading_it(inside, made_store):
    _flip_last_byte(_shards(made_store)[1])
    assert inside("verify", "--store", made_store, "--quick").code == 0
    assert inside("verify", "--store", made_store, "--headers").code == 0


def test_every_share_together_reads_every_shard(inside, made_store):
    checked = [_verify(inside, made_store, "--read-data", f"{index}/3")[2]["num_checked"] for index in (1, 2, 3)]
    assert sum(checked) == 5


@pytest.mark.parametrize("flags", [(), ("--quick",)])
def test_a_missing_shard_is_exit_3(inside, made_store, flags):
    _shards(made_store)[0].unlink()
    ran, findings, summary = _verify(inside, made_store, *flags)
    assert (ran.code, summary["num_missing"]) == (3, 1)
    assert [found["kind"] for found in findings if found["kind"] != "incomplete"] == ["missing"]


def test_foreign_files_are_told_and_are_no_damage(inside, made_store):
    """C53."""
    (made_store / "index.pkl").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    ran, findings, _ = _verify(inside, made_store)
    assert ran.code == 0
    assert [(found["kind"], found["path"]) for found in findings] == [("foreign", "index.pkl")]
    assert not (inside.folder / "marker").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--quick", "--headers"), b"exclude each other"),
        (("--read-data", "7"), b"expected a share such as 1/7 or auto/30, found '7'"),
        (("--read-data", "8/7"), b"expected a share from 1/7 to 7/7, found '8/7'"),
        (("--threads", "0"), b"--threads"),
        (("ffff",), b"no namespace starts with 'ffff'"),
    ],
)
def test_wrong_usage_is_exit_2(inside, made_store, flags, said):
    ran = inside("verify", "--store", made_store, *flags)
    assert ran.code == 2
    assert said in ran.stderr


def test_a_terminal_gets_the_findings_as_a_table(lmcache, made_store):
    _flip_last_byte(_shards(made_store)[1])
    ran = lmcache.on_terminal("verify", "--store", made_store, env={"NO_COLOR": "1"})
    assert ran.code == 3
    assert b"1 damaged" in ran.stdout
