"""`init`, `ls`, `stats`, `inspect` on real stores: what they show, and their exit codes in every situation."""

import json
import shutil

import pytest


def _records(ran):
    return [json.loads(line) for line in ran.lines]


def test_init_makes_a_store_once(inside):
    first = inside("init", "--store", "kv", "--json")
    assert first.code == 0
    record, summary = _records(first)
    assert (record["schema"], record["format_version"], summary["created"]) == ("lmcache.store/1", 1, True)
    assert (inside.folder / "kv" / "store.000001.json").exists()
    again = inside("init", "--store", "kv")
    assert again.code == 2
    assert b"is a store already" in again.stderr
    kept = inside("init", "--store", "kv", "--if-missing", "--json")
    assert kept.code == 0
    assert [r.get("store_id") for r in _records(kept)] == [record["store_id"], None]
    assert _records(kept)[-1]["created"] is False


def test_init_leaves_other_files_alone(inside):
    (inside.folder / "kv").mkdir()
    (inside.folder / "kv" / "notes.txt").write_text("mine")
    assert inside("init", "--store", "kv").code == 0
    assert (inside.folder / "kv" / "notes.txt").read_text() == "mine"


def test_ls_shows_namespaces(inside, made_store):
    namespace, summary = _records(inside("ls", "--store", made_store, "--json"))
    assert namespace["schema"] == "lmcache.namespace/1"
    assert namespace["model"] == "org/tiny [v1]"
    assert (namespace["num_chunks"], namespace["num_tokens"], namespace["status"]) == (5, 18, "ok")
    assert (
        summary["size_bytes"]
        == namespace["size_bytes"]
        == sum(path.stat().st_size for path in made_store.rglob("*.safetensors"))
    )
    assert (made_store / "ns" / namespace["namespace"]).is_dir()
    assert b"org/tiny [v1]" in inside("ls", env={"LMCACHE_STORE": str(made_store)}).lines[1]


def test_ls_shows_the_shards_of_a_namespace(inside, made_store):
    fingerprint = _records(inside("ls", "--store", made_store, "--json"))[0]["namespace"]
    ran = inside("ls", "--store", made_store, fingerprint[:6].upper(), "--json")
    *shards, summary = _records(ran)
    assert sorted((shard["depth"], shard["num_tokens"]) for shard in shards) == [(0, 4), (1, 4), (1, 4), (2, 4), (3, 2)]
    assert {shard["part"] for shard in shards} == {"l0-2h0-2"}
    on_disk = {path.name.split(".")[0][:32] for path in made_store.rglob("*.safetensors")}
    assert {shard["key"] for shard in shards} == on_disk
    assert summary["num_shards"] == 5


def test_stats_add_up(inside, made_store):
    record, summary = _records(inside("stats", "--store", made_store, "--json"))
    assert record["num_namespaces"] == summary["num_namespaces"] == 1
    assert record["bytes_by_encoding"] == {"raw": record["size_bytes"]}
    assert record["num_chunks"] == 5


def _namespace_of(store):
    (folder,) = (store / "ns").iterdir()
    return folder.name


def _shard_at(store, depth):
    """The path of a shard, told from the others by what its header says in plain text."""
    wanted = f'"lmcache.depth":"{depth}"'.encode()
    return next(path for path in sorted(store.rglob("*.safetensors")) if wanted in path.read_bytes())


def _of_kind(records, kind):
    return [record for record in records if record["schema"] == f"lmcache.{kind}/1"]


def test_inspect_shows_the_tree_of_prefixes(inside, made_store):
    records = _records(inside("inspect", "--store", made_store, _namespace_of(made_store), "--json"))
    (identity,), runs, summary = _of_kind(records, "identity"), _of_kind(records, "prefix"), records[-1]
    assert (identity["model"], identity["verified"]) == ("org/tiny [v1]", True)
    assert summary["num_runs"] == 3
    root, *branches = runs
    assert (root["level"], root["num_chunks"], root["num_tokens"], root["end_tokens"]) == (0, 1, 4, 4)
    branches.sort(key=lambda run: run["num_chunks"])
    assert [(run["level"], run["num_chunks"], run["end_tokens"]) for run in branches] == [(1, 1, 8), (1, 3, 14)]
    assert [run["labels"] for run in branches] == [["second"], ["first"]]
    assert not any(run["detached"] for run in runs)


def test_inspect_shows_which_documents_are_complete(inside, made_store):
    """C48."""
    namespace = _namespace_of(made_store)
    whole = inside("inspect", "--store", made_store, namespace, "--json")
    assert [(document["name"], document["status"]) for document in _of_kind(_records(whole), "document")] == [
        ("first", "complete"),
        ("second", "complete"),
    ]
    assert _records(whole)[-1]["documents"] == "complete (2/2)"
    _shard_at(made_store, depth=3).unlink()
    assert inside("repair", "--store", made_store, "--yes").code == 0
    broken = inside("inspect", "--store", made_store, namespace)
    assert b"first\tincomplete (?/14 tokens)\t14\t-\t" in broken.stdout
    assert b"documents: incomplete (1/2)" in broken.stderr


def test_inspect_shows_no_more_than_the_limit_and_says_so(inside, made_store):
    namespace = _namespace_of(made_store)
    ran = inside("inspect", "--store", made_store, namespace, "--limit", "1", "--json")
    assert [len(_of_kind(_records(ran), kind)) for kind in ("document", "prefix")] == [1, 1]
    assert (_records(ran)[-1]["num_runs"], _records(ran)[-1]["num_left_out"]) == (3, 3)
    assert b"3 more runs and documents are left out; pass --limit 0" in ran.stderr
    unlimited = inside("inspect", "--store", made_store, namespace, "--limit", "0", "--json")
    assert _records(unlimited)[-1]["num_left_out"] == 0


def test_inspect_marks_what_no_prompt_can_reach(inside, made_store):
    from lmcache_cli.commands.overview import open_for_reading
    from lmcache_cli.store import Store
    from lmcache_format.segment import RemoveReason

    with (
        Store.open(str(made_store)) as store,
        open_for_reading(store, store.identity(store.fingerprints()[0])) as opened,
    ):
        state = opened.state()
        (first,) = (entry for entry in map(state.entry, range(len(state))) if entry.depth == 0)
        opened.remove(first, RemoveReason.MISSING)
    records = _records(inside("inspect", "--store", made_store, _namespace_of(made_store), "--json"))
    assert [run["detached"] for run in _of_kind(records, "prefix")] == [True, True]


def test_inspect_shows_what_a_shard_says_of_itself(inside, made_store):
    path = _shard_at(made_store, depth=3)
    key = path.name.split(".")[0]
    by_key, summary = _records(inside("inspect", "--store", made_store, key[:12], "--json"))
    assert (by_key["key"], by_key["depth"], by_key["num_tokens"], by_key["tail"]) == (key, 3, 2, True)
    assert summary["num_shards"] == 1
    by_file, _ = _records(inside("inspect", path, "--json"))
    assert {**by_file, "path": ""} == {**by_key, "path": ""}


def test_inspect_of_a_file_compares_every_checksum(inside, made_store):
    copy = inside.folder / "copy [1] \udce9.bin"
    data = bytearray(_shard_at(made_store, depth=1).read_bytes())
    copy.write_bytes(data)
    assert inside("inspect", copy).code == 0
    data[-1] ^= 1
    copy.write_bytes(data)
    damaged = inside("inspect", copy, "--json")
    assert damaged.code == 3
    assert rb"copy [1] \xe9.bin: " in damaged.stderr
    assert _records(damaged)[-1]["exit_code"] == 3
    data[200] ^= 1
    copy.write_bytes(data)
    assert inside("inspect", copy).code == 3
    copy.write_bytes(data[:100])
    assert inside("inspect", copy).code == 3


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95.", b"PK\x03\x04" + bytes(100), b"\xff" * 100, b"{" * 100_000])
def test_inspect_of_a_foreign_file_is_refused(inside, content):
    """C53."""
    (inside.folder / "x.pt").write_bytes(content)
    ran = inside("inspect", "x.pt")
    assert ran.code == 2
    assert b"x.pt: expected a shard file" in ran.stderr


def test_inspect_of_a_damaged_shard_in_a_store_is_exit_3(inside, made_store):
    path = _shard_at(made_store, depth=0)
    path.write_bytes(path.read_bytes().replace(b'"lmcache.depth":"0"', b'"lmcache.depth":"7"'))
    ran = inside("inspect", "--store", made_store, path.name[:10])
    assert ran.code == 3
    assert path.name.encode() in ran.stderr


def _damage_identity(store):
    (path,) = store.glob("ns/*/ns.json")
    path.write_bytes(path.read_bytes().replace(b"tiny", b"TINY"))


def _remove_identity(store):
    (path,) = store.glob("ns/*/ns.json")
    path.unlink()


def _damage_superblock(store):
    path = store / "store.000001.json"
    path.write_bytes(path.read_bytes().replace(b"store", b"stOre"))


def _newer_superblock(store):
    from lmcache_cli.store import Store
    from lmcache_format.superblock import Superblock

    with Store.open(str(store)) as opened:
        block = opened.superblock
    newer = Superblock(block.store_id, block.created_ms, generation=2, incompat=("from-the-future",))
    (store / "store.000002.json").write_bytes(newer.to_json())


def _put_pickles_about(store):
    (store / "ns" / "index.pkl").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")
    (store / "old.pt").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")


SITUATIONS = {
    "sound": (lambda store: None, 0, b""),
    "no store": (shutil.rmtree, 10, b"there is no store at"),
    "empty folder": (lambda store: (shutil.rmtree(store), store.mkdir()), 10, b"to make one there: lmcache init"),
    "a file instead": (lambda store: (shutil.rmtree(store), store.touch()), 1, b""),
    "damaged identity": (_damage_identity, 3, b"does not hash to its name"),
    "identity gone": (_remove_identity, 3, b"ns.json is missing"),
    "damaged superblock": (_damage_superblock, 3, b"store.000001.json"),
    "newer superblock": (_newer_superblock, 12, b"from-the-future"),
    "foreign files": (_put_pickles_about, 0, b""),
}


@pytest.mark.parametrize("flags", [(), ("--json", "--quiet")])
@pytest.mark.parametrize("command", ["ls", "stats", "inspect"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_exit_code(inside, made_store, situation, command, flags):
    """C44, C53, C55."""
    change, code, said = SITUATIONS[situation]
    change(made_store)
    ran = inside(command, "--store", made_store, *flags)
    assert ran.code == code, ran.stderr
    assert said in ran.stderr
    assert b"Traceback" not in ran.stderr
    assert not (inside.folder / "marker").exists()
    if flags:  # with --quiet the summary alone
        assert [record["exit_code"] for record in _records(ran)] == [code]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ls",), 2, b"no store is named\n  next: pass --store URL"),
        (("ls", "--store", "redis://user:secret@host"), 13, b"redis://***@host: no file system"),
        (("ls", "ffffffffff", "--store", "a store"), 2, b"no namespace starts with 'ffffffffff'"),
        (("init",), 2, b"no store is named"),
        (("inspect", "ffffffffff", "--store", "a store"), 2, b"no namespace and no chunk starts with 'ffffffffff'"),
        (("inspect", "not hex", "--store", "a store"), 2, b"expected a file, a fingerprint or a key, found 'not hex'"),
        (("ls", "--store", "s3://"), 13, b"s3://: expected s3://bucket/prefix\n  next: check how the store is written"),
        (
            ("ls", "--store", "a store/store.000001.json"),
            1,
            b"expected a directory, found another kind of file\n  next: look",
        ),
        (("init", "--store", "a store/store.000001.json/x"), 1, b"found a file on the way to it\n  next: look at what"),
        (
            ("inspect", "s3://user:secret@b/kv"),
            2,
            b"s3://***@b/kv: expected a shard file, found a URL\n  next: for a store",
        ),
        (("inspect", "gone.safetensors"), 2, b"gone.safetensors: there is no such file"),
        (("inspect", "./a store"), 2, b"found a directory\n  next: for a store: --store ./a store"),
        (("inspect", "", "--store", "a store"), 2, b"expected a file, a fingerprint or a key, found ''"),
    ],
)
def test_wrong_request(inside, made_store, arguments, code, said):
    ran = inside(*arguments)
    assert ran.code == code
    assert said in ran.stderr
    assert b"secret" not in ran.stderr


LOCALES = [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]


@pytest.mark.parametrize("locale", LOCALES)
def test_a_store_under_an_odd_name_works(lmcache, made_store, locale):
    """C52."""
    odd = made_store.parent / "[red] \u6587\udce9\n"
    made_store.rename(odd)
    assert lmcache("stats", "--store", odd, env=locale).code == 0
