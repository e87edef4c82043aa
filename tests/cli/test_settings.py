"""Where settings come from, which source wins, and what is said about a file that cannot be read."""

import json

import pytest


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _shown(ran):
    assert ran.code == 0, ran.stderr
    return {record["key"]: record for record in map(json.loads, ran.lines) if record["schema"] == "lmcache.setting/1"}


def test_the_stronger_source_wins(inside):
    def store(*arguments, env=None):
        record = _shown(inside("config", "show", "--json", *arguments, env=env))["store"]
        return record["value"], record["origin"]

    assert store() == (None, "default")
    user = _write(inside.folder / "config-home" / "lmcache" / "config.toml", 'store = "/user"\n')
    assert store() == ("/user", f"user file {user} line 1")
    project = _write(inside.folder / "lmcache.toml", '# ours\nstore = "/project"\n')
    assert store() == ("/project", f"project file {project} line 2")
    env = {"LMCACHE_STORE": "/env"}
    assert store(env=env) == ("/env", "environment LMCACHE_STORE")
    assert store("--store", "/flag", env=env) == ("/flag", "flag --store")
    assert store(env={"LMCACHE_STORE": ""})[0] == "/project"


def test_a_wrong_value_is_refused_though_a_stronger_source_sets_another(inside):
    _write(inside.folder / "lmcache.toml", "store = 3\n")
    ran = inside("config", "show", env={"LMCACHE_STORE": "/env"})
    assert ran.code == 2
    assert b"lmcache.toml, line 1: expected a directory or URL as store, found 3" in ran.stderr


def test_pyproject_counts_if_it_has_our_table(inside):
    project = _write(
        inside.folder / "pyproject.toml",
        '[project]\nname = "x"\nstore = "no"\n\n[tool.lmcache]\nprogress = "plain"\n',
    )
    record = _shown(inside("config", "show", "--json"))["progress"]
    assert (record["value"], record["where"], record["line"]) == ("plain", str(project), 6)
    project.write_text('[project]\nname = "lmcache-user"\n')
    assert _shown(inside("config", "show", "--json"))["progress"]["source"] == "default"


def test_the_nearest_file_above_is_the_project_file_and_paths_are_relative_to_it(inside):
    _write(inside.folder / "lmcache.toml", 'store = "kv"\n')
    from lmcache_cli.settings import load_settings

    inner = inside.folder / "a" / "b"
    inner.mkdir(parents=True)
    assert load_settings(folder=inner).store == str(inside.folder / "kv")
    _write(inside.folder / "a" / "lmcache.toml", 'store = "s3://bucket/prefix"\n')
    assert load_settings(folder=inner).store == "s3://bucket/prefix"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('\nstroe = "x"\n', "lmcache.toml, line 2: expected a known key, found 'stroe'\n  next: did you mean 'store'?"),
        ("xyz = 1\n", "found 'xyz'\n  next: the keys are: store, progress, debug"),
        ("store = 5\n", "lmcache.toml, line 1: expected a directory or URL as store, found 5"),
        ('"progress" = "fast"\n', "line 1: expected progress to be one of auto, plain, bar, none, found 'fast'"),
        ('debug = "maybe"\n', "line 1: expected true or false, found 'maybe'"),
        ("store = \n", "expected TOML"),
        ("x = " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_next_step(inside, text, said):
    _write(inside.folder / "lmcache.toml", text)
    ran = inside("config", "show")
    assert ran.code == 2
    assert said in ran.stderr.decode()
    assert ran.stdout == b""


@pytest.mark.parametrize("content", [b"\x80\x04\x95.", b"\xff\xfe", b"\0" * 10, b"x" * (2 << 20)])
def test_bytes_that_are_no_settings_are_refused(inside, content):
    """C53: nothing but TOML is read, least of all a pickle."""
    (inside.folder / "lmcache.toml").write_bytes(content)
    ran = inside("config", "show")
    assert ran.code == 2
    assert b"lmcache.toml: expected" in ran.stderr


def test_a_wrong_variable_is_refused_by_name(inside):
    ran = inside("config", "show", env={"LMCACHE_PROGRESS": "fast"})
    assert ran.code == 2
    assert b"LMCACHE_PROGRESS: expected progress to be one of" in ran.stderr


def test_a_misspelt_variable_is_pointed_out(inside):
    ran = inside("config", "show", env={"LMCACHE_STROE": "/x", "LMCACHE_LOCAL_CPU": "true"})
    assert ran.code == 0
    assert (
        ran.stderr.splitlines()[0]
        == b"warning: LMCACHE_STROE in the environment is no setting; did you mean LMCACHE_STORE?"
    )
    assert b"LOCAL_CPU" not in ran.stderr


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/p", "s3://***@bucket/p"),
        ("s3://bucket/p?endpoint=http://x&secret=abc", "s3://bucket/p?endpoint=***&secret=***"),
        ("redis://:pass@word@host:6379/0", "redis://***@host:6379/0"),
        ("/a/user@host", "/a/user@host"),
        ("s3://[bad:secret@x", "s3://***@x"),
    ],
)
def test_credentials_are_never_shown(inside, url, shown):
    ran = inside("config", "show", "--json", "--store", url)
    assert _shown(ran)["store"]["value"] == shown
    assert b"secret" not in ran.stdout.replace(b"secret=***", b"")


def test_a_deleted_current_folder_is_no_reason_to_fail(lmcache):
    import subprocess

    gone = lmcache.folder / "gone"
    gone.mkdir()
    shell = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *lmcache.command, "config", "show"]
    # The package itself is found by its installation or through PYTHONPATH, not through the current folder.
    from pathlib import Path

    env = lmcache.environment({"PYTHONPATH": str(Path(__file__).parents[2])})
    ran = subprocess.run(shell, cwd=gone, env=env, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_settings_cannot_be_changed():
    from dataclasses import FrozenInstanceError

    from lmcache_cli.settings import Settings

    with pytest.raises(FrozenInstanceError):
        Settings().store = "/other"
