"""What can be said in `kv_connector_extra_config`, and what is refused with a sentence that helps."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_cli.backends import Durability
from lmcache_cli.integration.vllm.engine_log import join_engine_log
from lmcache_cli.integration.vllm.identity import UnsupportedEngine, cache_dtype, ranks_of
from lmcache_cli.integration.vllm.options import ConnectorOptions, OptionError
from lmcache_cli.integration.vllm.paging import check_spec, layer_numbers, supported_group
from lmcache_cli.integration.vllm.steps import BlockTables
from lmcache_cli.integration.vllm.versions import UnsupportedVersion, require_version
from lmcache_format.dtypes import Dtype


def test_defaults_and_types():
    options = ConnectorOptions.parse({"store": "/kv", "load_timeout_s": 5, "durability": "data"})
    assert (options.chunk_size, options.load_async, options.save_decode) == (256, None, False)
    assert options.durability_level is Durability.DATA


def test_an_archive_is_one_store_or_several():
    assert ConnectorOptions.parse({"store": "/kv", "archive": "s3://kv"}).archive == ("s3://kv",)
    given = {"store": "/kv", "archive": ["/old", "s3://kv"], "archive_timeout_s": 2, "promote_min_free_bytes": 0}
    options = ConnectorOptions.parse(given)
    assert options.archive == ("/old", "s3://kv")
    chain = options.chain_options
    assert (chain.far.timeout_s, chain.promotion.is_on, chain.promotion.min_free_bytes) == (2, True, 0)
    assert ConnectorOptions.parse({"store": "/kv"}).archive == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, '"store" is missing'),
        ({"store": "/kv", "chunksize": 64}, "did you mean 'chunk_size'"),
        ({"store": "/kv", "frobnicate": 1}, "known are store"),
        ({"store": "/kv", "save": "yes"}, "expected bool"),
        ({"store": "/kv", "chunk_size": True}, "expected int"),
        ({"store": "/kv", "max_pending_saves": 0}, "more than zero"),
        ({"store": "/kv", "durability": "paranoid"}, "expected one of data, full, none"),
        ({"store": 5}, "expected str"),
        ({"store": "/kv", "archive": 5}, "expected str or list"),
        ({"store": "/kv", "archive": ["s3://kv", ""]}, "expected URLs or paths"),
        ({"store": "/kv", "archive_timeout_s": 0}, "more than zero"),
        ({"store": "/kv", "promote_min_free_bytes": -1}, "zero or more"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        ConnectorOptions.parse(given)


@pytest.mark.parametrize("version", ["0.28.1", "0.26.0rc1", "0.9.2", "0.11.2+cpu"])
def test_an_older_vllm_is_refused_by_name(version: str):
    with pytest.raises(UnsupportedVersion, match=rf"needs vLLM 0.29 or newer, found {re.escape(version)}"):
        require_version(version, has_cache_config=True)


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.1.dev3+g1234", "1.0", "0.1.dev1+gabc", "dev"])
def test_newer_ones_and_checkouts_are_known_by_what_they_hand_over(version: str):
    require_version(version, has_cache_config=True)
    with pytest.raises(UnsupportedVersion, match="without kv_cache_config"):
        require_version(version, has_cache_config=False)


def test_what_is_logged_goes_where_vllms_log_goes(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    theirs, ours, root = logging.Logger("vllm", logging.INFO), logging.Logger("lmcache"), logging.Logger("root")
    theirs.addHandler(handler := logging.Handler())
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    known = {"lmcache": ours, "vllm": theirs, None: root}
    monkeypatch.setattr(logging, "getLogger", lambda name=None: known[name])
    for _ in range(2):
        join_engine_log()
    ours.info("once")
    ours.debug("not at this level")
    assert said == ["once"]


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def spec(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, **fields)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (MambaSpec(), "of kind MambaSpec"),
        (spec(kv_quant_mode=2), "quantised"),
        (spec(tokens_per_state=4), "one key and value a token"),
        (spec(state_content_bytes=656), "one key and value a token"),
        (spec(attention_chunk_size=8192), "local to chunks"),
        (spec(non_causal=True), "not causal"),
        (MLAAttentionSpec(kv_quant_mode=1), "quantised"),
        (MLAAttentionSpec(state_content_bytes=656), "one key and value a token"),
        (MLAAttentionSpec(is_index_group_leader=True), "plain ones"),
        (MLAAttentionSpec(model_version="deepseek_v4"), "plain ones"),
    ],
)
def test_pages_that_hold_something_else_are_refused(found: Any, message: str):
    with pytest.raises(UnsupportedEngine, match=message):
        check_spec(found)
    check_spec(spec(kv_quant_mode=0, sliding_window=512))
    check_spec(MLAAttentionSpec(kv_quant_mode=0, model_version=None))


def test_more_than_one_group_is_refused():
    groups = [SimpleNamespace(kv_cache_spec=spec()), SimpleNamespace(kv_cache_spec=MambaSpec())]
    with pytest.raises(UnsupportedEngine, match=r"2 groups of KV layers \(FullAttentionSpec, MambaSpec"):
        supported_group(SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize(
    "names", [["model.layers.0.attn", "model.layers.2.attn"], ["encoder"], ["a.0.b", "c.0.d"], ["layers.1.sub.2.attn"]]
)
def test_layers_that_cannot_be_numbered_are_refused(names: list[str]):
    with pytest.raises(UnsupportedEngine):
        layer_numbers(names)


def test_layers_are_ordered_by_number():
    names = [f"model.layers.{n}.self_attn.attn" for n in (10, 9, 11)]
    assert list(layer_numbers(names)) == [9, 10, 11]


def engine(dtype: str = "torch.bfloat16", cache: str = "auto", **parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, **parallel}
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype=cache),
        parallel_config=SimpleNamespace(**sizes),
    )


def test_the_type_is_the_one_the_pages_have():
    assert cache_dtype(engine()) is Dtype.BF16
    assert cache_dtype(engine(cache="float16")) is Dtype.F16
    with pytest.raises(UnsupportedEngine, match="kv_cache_dtype is fp8"):
        cache_dtype(engine(cache="fp8"))


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_a_context_cut_over_ranks_is_refused(field: str):
    assert ranks_of(engine()).num_ranks == 2
    with pytest.raises(UnsupportedEngine, match=field):
        ranks_of(engine(**{field: 2}))


def output(new: list[Any], cached: Any, preempted: set[str] | None = None, **counts: int) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts, preempted_req_ids=preempted
    )


def cached(ids: list[str], blocks: list[Any], computed: list[int], resumed: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    return SimpleNamespace(req_ids=ids, new_block_ids=blocks, num_computed_tokens=computed, resumed_req_ids=resumed)


def new(name: str, blocks: list[int], computed: int) -> Any:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_block_tables_follow_either_runner(runner: str):
    """A resumed request is listed among the new ones by one runner, among the cached ones by the other."""
    tables = BlockTables()
    none = cached([], [], [])
    (row,) = tables.rows(output([new("a", [1, 2], 0)], none, a=8))
    assert (row.block_ids, row.num_computed, row.num_scheduled) == ([1, 2], 0, 8)
    (row,) = tables.rows(output([], cached(["a"], [([3],)], [8]), a=4))
    assert row.block_ids == [1, 2, 3]
    (row,) = tables.rows(output([], cached(["a"], [None], [12]), a=1))
    assert row.block_ids == [1, 2, 3]
    assert list(tables.rows(output([], none, preempted={"a"}))) == []
    if runner == "v1":
        rows = tables.rows(output([], cached(["a"], [([7, 8],)], [4], {"a"}), a=4))
    else:
        rows = tables.rows(output([new("a", [7, 8], 4)], none, a=4))
    assert [row.block_ids for row in rows] == [[7, 8]]
    tables.forget("a")
    assert len(tables) == 0


def test_the_halves_import_neither_vllm_nor_torch():
    modules = "scheduling, worker, steps, plan, options, identity"
    code = (
        f"import sys; from lmcache_cli.integration.vllm import {modules}\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
