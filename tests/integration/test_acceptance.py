"""Whose KV an engine loads, and how far apart two engines may be."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.integration.acceptance import AcceptedNamespaces, compare_kv, judged, signature
from lmcache_cli.store import ChunkBuffer, Store, WriterOptions
from lmcache_cli.store.acceptances import write_acceptance
from lmcache_cli.store.chain import StoreChain
from lmcache_format.acceptance import Acceptance
from lmcache_format.geometry import whole_part
from lmcache_format.identity import Identity
from tests.store.pattern import document, put_document, refs, tiny_identity

IDENTITY = tiny_identity(name="accepted")
T = IDENTITY.chunk_tokens
HF = {"engine": "transformers", "version": "5.19.0", "piece_tokens": 1024}
VLLM = {"engine": "vllm", "vllm": "0.31.0", "tensor_parallel": 2}
CONSUMER = {"engine": "vllm", "version": "0.32.0", "device": "cpu"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(str(tmp_path / "kv")) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accepted(store: Store, clock: Clock) -> Iterator[AcceptedNamespaces]:
    with store.namespace(IDENTITY, create=True) as namespace:
        yield AcceptedNamespaces(store, lambda adapter: namespace, CONSUMER, clock=clock)


def put(store: Store, tokens: list[int], producer: Mapping[str, object] | None) -> None:
    with store.namespace(IDENTITY, create=True, writer=WriterOptions(producer=producer)) as namespace:
        put_document(namespace, tokens)


def record(store: Store, passed: bool = True, consumer: Mapping[str, str] = CONSUMER) -> None:
    write_acceptance(
        store.backend, Acceptance(IDENTITY.fingerprint, signature(HF), consumer, passed, 0.02, 0.999, 512, 1)
    )


def hit(accepted: AcceptedNamespaces, tokens: list[int]) -> int:
    return accepted.of(None).match(tokens).num_tokens


def test_an_engine_takes_its_own_of_any_version_and_no_others(store: Store, accepted: AcceptedNamespaces) -> None:
    for seed, producer in enumerate((VLLM, HF, {"engine": "runtime"}, None)):
        put(store, document(2 * T, seed), producer)
    assert [hit(accepted, document(2 * T, seed)) for seed in range(4)] == [2 * T, 0, 0, 0]
    assert accepted.counts["lookups_unaccepted"] == 3


def test_a_shard_that_another_process_has_replaced_is_found_at_once(
    store: Store, accepted: AcceptedNamespaces, tmp_path: Path
) -> None:
    tokens = document(3 * T)
    put(store, tokens, VLLM)
    accepted.of(None)._namespace.refresh()
    key = refs(IDENTITY, tokens)[1].key.hex()
    next((tmp_path / "kv").rglob(f"{key}.*")).unlink()
    with store.namespace(IDENTITY, writer=WriterOptions(producer=VLLM)) as other:
        other.load(other.match(tokens))  # meets the gap
        put_document(other, tokens)
    assert hit(accepted, tokens) == 3 * T


def test_a_probe_that_passed_lets_them_in_and_is_noticed_while_serving(
    store: Store, accepted: AcceptedNamespaces, clock: Clock
) -> None:
    put(store, document(2 * T), HF)
    assert hit(accepted, document(2 * T)) == 0
    record(store)
    assert hit(accepted, document(2 * T)) == 0  # looked for just now
    clock.now = 11.0
    assert hit(accepted, document(2 * T)) == 2 * T


@pytest.mark.parametrize(
    ("passed", "consumer"), [(False, CONSUMER), (True, {**CONSUMER, "version": "0.33.0"}), (True, {"engine": "other"})]
)
def test_a_probe_that_failed_or_was_of_another_engine_lets_nobody_in(
    store: Store,
    accepted: AcceptedNamespaces,
    passed: bool,
    consumer: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(store, document(2 * T), HF)
    record(store, passed, consumer)
    with caplog.at_level(logging.WARNING, "lmcache"):
        assert [hit(accepted, document(2 * T)) for _ in range(3)] == [0, 0, 0]
    (line,) = [record.getMessage() for record in caplog.records]  # once
    assert "transformers (version 5.19.0)" in line
    assert ("relative L2 0.0200" in line) == (not passed)


def test_a_match_ends_before_the_first_chunk_of_another(store: Store, accepted: AcceptedNamespaces) -> None:
    tokens = document(4 * T)
    put(store, tokens[: 2 * T], VLLM)
    put(store, tokens, HF)
    assert hit(accepted, tokens) == 2 * T
    record(store)
    accepted.clock.now = 11.0  # type: ignore[attr-defined]
    assert hit(accepted, tokens) == 4 * T


def test_a_chunk_that_was_written_anew_is_asked_again(
    store: Store, accepted: AcceptedNamespaces, tmp_path: Path
) -> None:
    put(store, document(T), VLLM)
    assert hit(accepted, document(T)) == T
    (path,) = (tmp_path / "kv").glob("ns/*/c/*/*/*")
    path.unlink()
    namespace = accepted.of(None)._namespace
    namespace.load(namespace.match(document(T)))  # finds it gone
    with Store.open(str(tmp_path / "kv")) as other, other.namespace(IDENTITY, create=True) as fresh:
        fresh.load(fresh.match(document(T)))
    put(store, document(T), HF)
    assert hit(accepted, document(T)) == 0


@pytest.mark.parametrize("is_accepted", [False, True])
@pytest.mark.parametrize("layers", [None, (0, 1)])
def test_an_archive_gives_nothing_of_others_in_the_place_of_what_was_lost(
    store: Store, clock: Clock, tmp_path: Path, is_accepted: bool, layers: tuple[int, int] | None
) -> None:
    """A match counted on a chunk of the nearest store, which is gone when it is read; the archive has another's."""
    tokens = document(3 * T)
    with Store.create(str(tmp_path / "far")) as far:
        put(far, tokens, HF)
    put(store, tokens, VLLM)
    if is_accepted:
        record(store)
    need = None if layers is None else replace(whole_part(IDENTITY), layer_start=layers[0], layer_stop=layers[1])
    with StoreChain.open([store.url, str(tmp_path / "far")]) as chain:
        with chain.namespace(IDENTITY, need=need) as namespace:
            ours = AcceptedNamespaces(chain, lambda adapter: namespace, CONSUMER, clock=clock).of(None)
            match = ours.match(tokens)
            assert match.num_tokens == 3 * T
            key = refs(IDENTITY, tokens)[1].key.hex()
            next((tmp_path / "kv").rglob(f"{key}.*")).unlink()
            _, result = ours.namespace.load(match)
            assert namespace.wait_promoted(10)
            assert result.num_chunks == (3 if is_accepted else 1)
            assert len(list((tmp_path / "kv").rglob(f"{key}.*"))) == is_accepted


def buffers(identity: Identity, values: np.ndarray) -> list[ChunkBuffer]:
    """Two chunks and a tail that hold the same values in every layer and side, as bf16."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    chunks = []
    for start in range(0, values.shape[1], identity.chunk_tokens):
        piece = bits[:, start : start + identity.chunk_tokens]
        chunk = ChunkBuffer(identity, whole_part(identity), piece.shape[1])
        chunk.fill(dict.fromkeys(chunk.tensors, piece))
        chunks.append(chunk)
    return chunks


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(IDENTITY.kv_heads, 2 * T + 3, IDENTITY.head_dim_k))


def test_rounding_is_accepted(values: np.ndarray) -> None:
    noisy = values * (1 + 0.01 * np.random.default_rng(1).normal(size=values.shape))
    found = compare_kv(buffers(IDENTITY, noisy), buffers(IDENTITY, values))
    assert len(found) == 2 * IDENTITY.layers
    assert all(one.is_acceptable for one in found)
    assert all(0.005 < one.relative_l2 < 0.015 for one in found)


def swapped_halves(values: np.ndarray) -> np.ndarray:
    """Another rotary order."""
    half = values.shape[-1] // 2
    return np.concatenate([values[..., half:], values[..., :half]], axis=-1)


def one_token_wrong(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed[:, 7] = -changed[:, 7]
    return changed


@pytest.mark.parametrize(
    "change", [swapped_halves, one_token_wrong, lambda v: v * 1.05, lambda v: np.roll(v, 1, axis=0), np.zeros_like]
)
def test_anything_else_is_refused(values: np.ndarray, change) -> None:
    found = compare_kv(buffers(IDENTITY, change(values)), buffers(IDENTITY, values))
    worst, relative_l2, cosine = judged(found)
    assert not worst.is_acceptable
    assert relative_l2 == max(one.relative_l2 for one in found)
    assert cosine == min(one.cosine for one in found)


def test_what_is_no_number_is_refused(values: np.ndarray) -> None:
    broken = values.copy()
    broken[0, 0, 0] = np.nan
    worst, _, _ = judged(compare_kv(buffers(IDENTITY, broken), buffers(IDENTITY, values)))
    assert not worst.is_acceptable
    assert math.isnan(worst.relative_l2)


def test_a_producer_is_known_by_what_decides_its_values() -> None:
    assert signature(HF) == {"engine": "transformers", "version": "5.19.0"}
