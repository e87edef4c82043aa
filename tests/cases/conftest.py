"""What cases drive: the command line as people, pipes and cron run it, and the fake engine of the connector."""

from pathlib import Path

import pytest

from tests.cases.every_command import Scene, make_scene
from tests.cases.pattern_engine import install
from tests.cli.conftest import Inside, fake, inside, lmcache, made_store
from tests.integration.vllm.conftest import engine_of, identity, store_dir

__all__ = ["engine_of", "fake", "identity", "inside", "lmcache", "made_store", "store_dir"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A store and prompts."""
    return make_scene(tmp_path, tmp_path / "kv")


@pytest.fixture
def patterned(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """The command line inside this process, with the pattern engine in the place of models."""
    install(monkeypatch.setattr, 0.0)
    return inside
