"""What cases drive: the command line as people, pipes and cron run it, and the fake engine of the connector."""

from pathlib import Path

import pytest

from tests.cases.every_command import Scene, copy_scene, make_scene
from tests.cases.pattern_engine import install
from tests.cli.conftest import Inside, fake, inside, lmcache, made_store
from tests.integration.vllm.conftest import engine_of, identity, store_dir
from tests.store.conftest import root, store

__all__ = ["engine_of", "fake", "identity", "inside", "lmcache", "made_store", "root", "store", "store_dir"]


@pytest.fixture(scope="session")
def first_scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A store and prompts, of which every test gets a copy: writing them waits for the disk many times."""
    folder = tmp_path_factory.mktemp("scene")
    return make_scene(folder, folder / "kv")


@pytest.fixture
def scene(first_scene: Scene, tmp_path: Path) -> Scene:
    """A store and prompts."""
    return copy_scene(first_scene, tmp_path, tmp_path / "kv")


@pytest.fixture
def patterned(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """The command line inside this process, with the pattern engine in the place of models."""
    install(monkeypatch.setattr, 0.0)
    return inside
