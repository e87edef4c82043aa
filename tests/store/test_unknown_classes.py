"""Shards of an encoding that is known, in a quality class that is not its own: a later release made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.compress import CompressOptions, apply_compress, plan_compress
from lmcache_cli.store.explain import explain_prompt
from lmcache_cli.store.repair import RepairOptions, apply_repair, plan_repair
from lmcache_cli.store.survey import Level
from lmcache_cli.store.sweep import sweep
from lmcache_cli.store.verify import FindingKind, VerifyOptions, verify
from lmcache_format.encodings import get_encoding
from tests.store.altered_shards import replace_in_header
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, put_kv
from tests.store.pattern import document

TOKENS = document(3 * CHUNK_TOKENS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chunks in `uq006`, of which the second says that its class is another; not listed by any segment."""
    root = tmp_path / "store"
    with Store.create(str(root)) as store:
        with store.namespace(KV_IDENTITY, create=True) as namespace:
            put_kv(namespace, TOKENS)
            second = namespace.match(TOKENS).chunks()[1].key.hex()
        options = CompressOptions(encoding=get_encoding("uq006"), allow_lossy=True, remove_source=True)
        apply_compress(store, plan_compress(store, options))
        sweep(store, grace_ms=0)
    for segment in root.rglob("*.lmi"):
        segment.unlink()
    (old,) = root.rglob(f"{second}.*.uq006-near.safetensors")
    replace_in_header(old, b'\\"quality\\":\\"near\\"', b'\\"quality\\":\\"fine\\"')
    old.rename(old.with_name(old.name.replace("-near.", "-fine.")))
    return root


def found_tokens(root: Path) -> int:
    with Store.open(str(root)) as store, store.namespace(KV_IDENTITY, allow_lossy=True) as namespace:
        match = namespace.match(TOKENS)
        _, read = namespace.load(match)
        assert read.fault is None
        assert read.num_tokens == match.num_tokens
        return match.num_tokens


@pytest.mark.parametrize("is_indexed", [False, True])
def test_it_is_absent_and_no_damage(root: Path, is_indexed: bool) -> None:
    (shard,) = root.rglob("*.uq006-fine.safetensors")
    before = shard.read_bytes()
    with Store.open(str(root)) as store:
        if is_indexed:
            apply_repair(store, plan_repair(store, RepairOptions()))
        for level in Level:
            report = verify(store, VerifyOptions(level=level))
            newer = [one.path for one in report.findings if one.kind is FindingKind.NEWER]
            assert newer == [str(shard.relative_to(root))]
            assert report.num_damaged == 0
        assert explain_prompt(store, KV_IDENTITY, TOKENS, allow_lossy=True).hit_tokens == CHUNK_TOKENS
    assert found_tokens(root) == CHUNK_TOKENS
    with Store.open(str(root)) as store:
        apply_repair(store, plan_repair(store, RepairOptions(deep=True)))
    assert shard.read_bytes() == before
    assert not list(root.glob("quarantine/*"))
