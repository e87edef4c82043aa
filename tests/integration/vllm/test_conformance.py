"""What a real vLLM does to the connector, and the store to vLLM: told by the scenarios of `scenarios.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .real_engine import CHUNK, ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).resolve().parents[3]
NOISE = 1e-4
"""Relative error of KV computed in pieces of other lengths, in float32; 1e-6 as a rule. Garbage has 1."""


@pytest.fixture(scope="module")
def place(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scenarios have told what came of them: one process, since the first engine of each takes long."""
    place = tmp_path_factory.mktemp("scenarios")
    names = "faults,pressure,services,ranks,latents,archive"
    command = [sys.executable, "-m", "tests.integration.vllm.scenarios", names, str(model_dir), str(place)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return place


def told(place: Path, name: str) -> dict[str, Any]:
    failed = place / f"{name}.failed"
    assert not failed.exists(), failed.read_text()
    return dict(json.loads((place / f"{name}.json").read_text()))


# ---- faults ----------------------------------------------------------------------------------------------------

FAULTS = ("missing", "truncated", "flipped", "slow", "eio")
IN_THE_FILE = {"missing", "truncated", "flipped"}
CASES = pytest.mark.parametrize(
    ("policy", "mode", "fault"),
    [(policy, mode, fault) for policy in ("recompute", "fail") for mode in ("sync", "async") for fault in FAULTS],
)
WHOLE = 6 * CHUNK


@pytest.fixture(scope="module")
def faults(place: Path) -> dict[tuple[str, str, str], Any]:
    found = told(place, "faults")["faults"]
    return {(each["policy"], each["mode"], each["fault"]): each for each in found}


@CASES
def test_a_chunk_that_cannot_be_read_ends_as_the_policy_says(faults: Any, policy: str, mode: str, fault: str):
    case = faults[policy, mode, fault]
    assert case["counts"]["load_failed"] == 1  # otherwise nothing was tried here
    assert case["counts"]["tokens_loaded"] - case["bystander"]["cached"] == CHUNK
    assert (case["bystander"]["finish"], case["bystander"]["tokens"]) == ("length", case["bystander_control"])
    if policy == "recompute":
        assert (case["answer"]["finish"], case["answer"]["tokens"]) == ("length", case["control"])
    else:
        assert case["answer"]["finish"] == "error"


@CASES
def test_nothing_of_it_is_stored(faults: Any, policy: str, mode: str, fault: str):
    """Where it is computed again it is whole again; what the failing step computed on nothing is nowhere."""
    case = faults[policy, mode, fault]
    assert case["error_after"] < NOISE
    if policy == "recompute":
        assert case["tokens_after"] == WHOLE
    else:
        assert case["tokens_after"] == (CHUNK if fault in IN_THE_FILE else 4 * CHUNK)


@CASES
def test_the_next_request_is_answered_right_and_leaves_the_store_whole(faults: Any, policy: str, mode: str, fault: str):
    case = faults[policy, mode, fault]
    assert (case["again"]["finish"], case["again"]["tokens"]) == ("length", case["control"])
    if policy == "recompute":
        assert case["again"]["cached"] == WHOLE
    tokens, error = case["end"]
    assert tokens == WHOLE
    assert error < NOISE


def test_no_store_holds_a_damaged_shard_in_the_end(faults: Any):
    assert [case["damaged"] for case in faults.values() if "damaged" in case] == [0] * 4


# ---- too little room -------------------------------------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@pytest.fixture(scope="module")
def pressure(place: Path) -> dict[str, Any]:
    return told(place, "pressure")


@MODES
def test_preempted_requests_are_loaded_again_and_answer_the_same(pressure: Any, mode: str):
    case = pressure[mode]
    assert case["preempted"] >= 1
    assert case["cold_counts"]["tokens_loaded"] >= 3 * CHUNK
    assert [answer["tokens"] for answer in case["cold"]] == pressure["control"]


@MODES
def test_prompts_in_pieces_begin_with_what_is_stored(pressure: Any, mode: str):
    """Four at once that share a prefix; hits end inside of a piece, and inside of a prompt."""
    case = pressure[mode]
    assert [answer["tokens"] for answer in case["warm"]] == pressure["control_shared"]
    assert all(answer["cached"] >= 3 * CHUNK for answer in case["warm"])
    assert case["warm_counts"]["tokens_loaded"] >= 3 * CHUNK
    assert not case["warm_counts"].get("load_failed")


@MODES
def test_what_is_stored_meanwhile_is_what_one_piece_would_have_stored(pressure: Any, mode: str):
    case = pressure[mode]
    assert [tokens for tokens, _ in case["stored"]] == [192] * 4 + [256, 256, 320]
    assert max(error for _, error in case["stored"]) < NOISE
    assert case["damaged"] == 0


# ---- what else the engine may ask for --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def services(place: Path) -> dict[str, Any]:
    return told(place, "services")


def test_generated_tokens_are_stored_on_demand_alone(services: Any):
    """A prompt of 148 tokens, and 60 that follow: two chunks, or three."""
    said, again = services["decoded"]["said"], services["decoded"]["again"]
    assert again["cached"] == 3 * CHUNK
    assert again["tokens"] == said[-6:]
    assert services["without_decode"] == 2


def test_reset_cache_begins_a_generation(services: Any):
    assert services["generation"] == [0, 2 * CHUNK]  # what was there before; what came since
    assert services["next_engine"] == [2 * CHUNK, 0]  # to others, the other way round


def test_events_tell_of_every_chunk_by_the_stores_keys(services: Any):
    told = {event["keys"][0]: event for event in services["events"]}
    for depth, (key, parent) in enumerate(services["chunks"]):
        tokens = [*services["prompt"], *services["decoded"]["said"]][depth * CHUNK : (depth + 1) * CHUNK]
        assert (told[key]["parent"], told[key]["tokens"]) == (parent if depth else None, tokens)


@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
def test_blocks_of_any_size_are_filled_from_one_store(services: Any, block_size: int):
    found = services["block_sizes"][str(block_size)]
    assert (found["cached"], found["tokens"]) == (2 * CHUNK, services["control"])


def test_a_chunk_that_goes_while_the_engine_runs_is_saved_again(services: Any):
    """The scheduler's half does not promise it, and the worker's does not believe its index."""
    assert services["gone"]["cached"] == [CHUNK, 4 * CHUNK, 4 * CHUNK]
    assert services["gone"]["stored"] == [4 * CHUNK, 0.0]


# ---- ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(place: Path) -> dict[str, Any]:
    return told(place, "ranks")


def test_two_ranks_read_what_one_has_written(ranks: Any):
    loaded, _, anew = ranks["pair"]
    assert (loaded["cached"], anew["cached"]) == ([4 * CHUNK], [0])
    assert loaded["tokens"] == anew["tokens"] == [ranks["control"][0]]


def test_one_rank_reads_what_two_have_written(ranks: Any):
    assert ranks["pair"][1]["cached"] == [0]
    assert [answer["cached"] for answer in ranks["back"]] == [4 * CHUNK, 3 * CHUNK]
    assert [answer["tokens"] for answer in ranks["back"]] == ranks["control"]


def test_both_cuts_lie_side_by_side_in_one_store(ranks: Any):
    assert ranks["parts"] == ["l0-4h0-2", "l0-4h0-4", "l0-4h2-4"]
    assert [tokens for tokens, _ in ranks["stored"]] == [4 * CHUNK, 3 * CHUNK]
    assert max(error for _, error in ranks["stored"]) < NOISE
    assert ranks["damaged"] == 0


# ---- latents ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mla(place: Path) -> dict[str, Any]:
    return told(place, "latents")


def test_latents_that_a_fresh_engine_finds_give_the_same_answers(mla: Any):
    assert [answer["cached"] for answer in mla["alone"]] == [4 * CHUNK] * 2
    assert [answer["tokens"] for answer in mla["alone"]] == mla["control"][:2]


def test_two_ranks_share_latents_with_one(mla: Any):
    """They load what one has written and write what one loads, each chunk once."""
    assert [answer["cached"] for answer in mla["pair"]] == [[4 * CHUNK], [0]]
    assert [answer["tokens"] for answer in mla["pair"]] == [[mla["control"][0]], [mla["control"][2]]]
    assert [answer["cached"] for answer in mla["beside"]] == [4 * CHUNK] * 3
    assert [answer["tokens"] for answer in mla["beside"]] == mla["control"]
    assert mla["parts"] == ["l0-2"] * 8
    assert [tokens for tokens, _ in mla["errors"]] == [4 * CHUNK] * 2
    assert max(error for _, error in mla["errors"]) < NOISE
    assert mla["damaged"] == 0


def test_an_engine_that_mixes_up_rotated_keys_is_refused(mla: Any):
    assert "mixes up the keys of latents" in mla["refused"]
    assert '"-rotary_embedding"' in mla["refused"]


# ---- an archive behind the store -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_archive_answers_and_is_asked_once(place: Path, mode: str):
    """Three chunks each of three prompts lie in the archive alone; what it fails to give is computed, and kept here."""
    found = told(place, "archive")
    case = found[mode]
    for asked, control in zip((case["moved"], case["failing"], case["hanging"]), found["control"], strict=True):
        assert [answer["tokens"] for answer in asked] == [control, control]
        assert {answer["finish"] for answer in asked} == {"length"}
    assert [answer["cached"] for answer in case["moved"]] == [3 * CHUNK, 3 * CHUNK]
    for asked in (case["failing"], case["hanging"]):
        assert [answer["cached"] for answer in asked] == [0, 3 * CHUNK]
    assert {answer["far_read"] for asked in ("moved", "failing", "hanging") for answer in case[asked]} == {3}
    assert case["chunks"] == found["archived"] == [3, 3, 3]
    assert (found["left"], case["damaged"]) == (0, 0)
