"""The command line, run as people, pipes and cron do, for the cases that end there."""

from pathlib import Path

import pytest

from tests.cases.every_command import Scene, make_scene
from tests.cases.pattern_engine import install
from tests.cli.conftest import Inside, fake, inside, lmcache, made_store

__all__ = ["fake", "inside", "lmcache", "made_store"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A store and prompts."""
    return make_scene(tmp_path, tmp_path / "kv")


@pytest.fixture
def patterned(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """The command line inside this process, with the pattern engine in the place of models."""
    install(monkeypatch.setattr, 0.0)
    return inside
