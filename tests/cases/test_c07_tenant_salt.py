"""C07: a tenant's salt that the store ignores. One prompt, with salt 'a', with 'b', without one, and with 'a' again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_cli.backends import open_backend
from lmcache_cli.integration.vllm.caching import Caching
from lmcache_cli.integration.vllm.identity import RequestReader
from lmcache_cli.integration.vllm.options import ConnectorOptions
from lmcache_cli.store import Store
from tests.integration.vllm.fakes import FakeEngine, FakeRequest
from tests.store.pattern import document

PROMPT = document(35, 7)
A, B = "tenant-a/very.secret", "tenant-b/very.secret"
Build = Callable[..., FakeEngine]


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("read_as", ["caching", "request"])
def test_only_who_stored_it_finds_it(engine_of: Build, load_async: bool, read_as: str):
    """Through lookup, allocation, load, save and finish; the last one must hit, or the others would say nothing."""
    describe = None if read_as == "caching" else RequestReader(ConnectorOptions(store="unused"))
    engine = engine_of(prefix_caching=False, load_async=load_async, describe=describe)
    promised = [engine.run(f"r{n}", PROMPT, cache_salt=salt).promised for n, salt in enumerate([A, B, None, A])]
    assert promised == [[], [], [], [32]]
    assert engine.run("none again", PROMPT).promised == [32]
    assert engine.run("b again", PROMPT, cache_salt=B).promised == [32]
    assert engine.poisoned_forwards == 0
    engine.assert_at_rest()


@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "objects"])
def test_a_salt_is_written_down_nowhere(
    engine_of: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_directory: bool
):
    url = str(tmp_path / "kv2") if is_directory else "memory://c07"
    Store.create(url).close()
    caplog.set_level(logging.DEBUG)
    engine = engine_of(store=url, prefix_caching=False, partial_chunks=True)
    for number, salt in enumerate([A, B, A]):
        engine.run(f"r{number}", PROMPT, cache_salt=salt)
    engine.close()
    backend = open_backend(url)
    names = [info.name for info in backend.list()]
    assert len([name for name in names if name.endswith(".safetensors")]) == 10
    assert len([name for name in names if name.endswith(".lmi")]) >= 1  # the index is among what is read below
    for name in names:
        assert "tenant" not in name
        assert b"very.secret" not in backend.read(name)
    assert "secret" not in caplog.text
    assert "tenant" not in caplog.text


def test_who_forgets_the_salt_is_told_so():
    with pytest.raises(TypeError, match="salt"):
        Caching(adapter=None, items=())  # type: ignore[call-arg]


def test_where_a_salt_is_required_a_request_without_one_is_left_alone(engine_of: Build, store_dir: Path):
    engine = engine_of(describe=RequestReader(ConnectorOptions(store="unused", require_salt=True)))
    assert engine.run("a", PROMPT).promised == []
    assert engine.scheduler.counts["uncached_no_salt"] == 1
    assert list(store_dir.rglob("*.safetensors")) == []
    reader = RequestReader(ConnectorOptions(store="unused"))
    assert reader(FakeRequest("x", PROMPT, cache_salt="")) == reader(FakeRequest("x", PROMPT))
