"""C53: pickled and otherwise hostile content in every place: no command runs any of it, and none falls over it."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases.every_command import CALLS, DOCUMENT, Scene

PROGRAM = Path(__file__).with_name("audited_commands.py")
READING = [name for name in CALLS if name not in ("init", "config show", "bench ttft", "inspect file")]


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        import os

        return os.mkdir, (str(self.path),)


@pytest.fixture
def poison(scene: Scene) -> bytes:
    return pickle.dumps(Marker(scene.folder / "marker"))


def as_shard(scene: Scene, poison: bytes) -> None:
    scene.shards[1].write_bytes(poison)


def as_segment(scene: Scene, poison: bytes) -> None:
    next(scene.store.rglob("*.lmi")).write_bytes(poison)


def as_more_segments(scene: Scene, poison: bytes) -> None:
    first = next(scene.store.rglob("*.lmi"))
    first.with_name(f"{'0' * 26}-other.lmi").write_bytes(poison)


def as_identity(scene: Scene, poison: bytes) -> None:
    (scene.namespace / "ns.json").write_bytes(poison)


def as_superblock(scene: Scene, poison: bytes) -> None:
    (scene.store / "store.000001.json").write_bytes(poison)


def beside(scene: Scene, poison: bytes) -> None:
    for name in ("index.pkl", "old.pt", "cache.pickle", "ns/metadata.pkl", "tmp/x", "quarantine/y"):
        path = scene.store / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(poison)


def header_of_100_mb(scene: Scene, poison: bytes) -> None:
    path = scene.shards[1]
    path.write_bytes((100_000_000).to_bytes(8, "little") + b'{"a":"')
    with path.open("r+b") as file:
        file.truncate(200_000_000)


def nested(scene: Scene, poison: bytes) -> None:
    (scene.namespace / "ns.json").write_bytes(b"[" * 1_000_000 + b"]" * 1_000_000)
    path = scene.shards[1]
    text = b'{"__metadata__":' + b"[" * 60_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def nested_superblock(scene: Scene, poison: bytes) -> None:
    (scene.store / "store.000001.json").write_bytes(b'{"a":' * 1_000_000)


PLACES = (
    as_shard, as_segment, as_more_segments, as_identity, as_superblock, beside, header_of_100_mb, nested,
    nested_superblock,
)  # fmt: skip


def run(scenes: list[Scene]) -> list[dict[str, object]]:
    """All reading commands, and an engine's read, on each scene."""
    request = {
        "calls": [list(scene.call(name)) for scene in scenes for name in READING],
        "reads": [str(scene.store) for scene in scenes],
        "tokens": DOCUMENT,
    }
    ran = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps(request).encode(),
        cwd=scenes[0].folder,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    control, *answers = json.loads(ran.stdout)
    assert any("pickle.find_class" in event for event in control["events"]), "the hook sees nothing"
    return answers


@pytest.mark.slow
def test_nothing_of_it_runs_wherever_it_lies(scene: Scene, poison: bytes):
    scenes = [scene]
    for place in PLACES:
        store = scene.folder / place.__name__
        shutil.copytree(scene.store, store)
        scenes.append(Scene(scene.folder, store))
        place(scenes[-1], poison)
    answers = run(scenes)
    num_calls = len(READING)
    sound = answers[:num_calls]
    assert [answer["code"] for answer in sound] == [0] * num_calls
    for number, other in enumerate(scenes[1:], start=1):
        for name, clean, answer in zip(READING, sound, answers[number * num_calls :], strict=False):
            where = (other.store.name, name, answer)
            assert answer["code"] in (0, 2, 3), where  # 2: a chunk that is asked for and is no shard
            assert "Traceback" not in str(answer["said"]), where
            assert "unexpected" not in str(answer["said"]), where
            assert set(answer["events"]) <= set(clean["events"]), where
    reads = answers[len(scenes) * num_calls :]
    assert reads[0]["hit_tokens"] == len(DOCUMENT)
    for read in reads:
        assert read["events"] == []
        assert read["hit_tokens"] in (0, 4, len(DOCUMENT))
    assert not (scene.folder / "marker").exists()
    pickle.loads(poison)  # the marker works
    assert (scene.folder / "marker").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "poison"),
        ("inspect", "--model", ".", "--tokens", "poison", "--store", "kv"),
        ("inspect", "--model", ".", "--prompt-file", "poison", "--store", "kv"),
        ("warm", "--model", ".", "--chunk-tokens", "4", "--prompts", "poison", "--store", "kv"),
        ("warm", "--model", ".", "--chunk-tokens", "4", "--documents", "poison", "--store", "kv"),
    ],
)
def test_it_is_refused_as_an_input(patterned, scene: Scene, poison: bytes, arguments: tuple[str, ...]):
    (scene.folder / "poison").write_bytes(poison)
    ran = patterned(*arguments)
    assert ran.code == 2, ran.stderr
    assert b"poison" in ran.stderr
    assert not (scene.folder / "marker").exists()


def test_yaml_tags_in_settings_are_refused(lmcache, tmp_path: Path):
    (tmp_path / "lmcache.toml").write_text(f"store: !!python/object/apply:os.mkdir ['{tmp_path}/marker']\n")
    ran = lmcache("config", "show")
    assert ran.code == 2
    assert b"expected TOML" in ran.stderr
    assert not (tmp_path / "marker").exists()


def test_a_prompt_nested_a_million_deep_is_refused(patterned, scene: Scene):
    (scene.folder / "deep.jsonl").write_text('{"tokens":' + "[" * 1_000_000)
    ran = patterned("warm", "--model", ".", "--chunk-tokens", "4", "--prompts", "deep.jsonl", "--store", scene.store)
    assert ran.code == 2
    assert b"deep.jsonl:1: not JSON" in ran.stderr
