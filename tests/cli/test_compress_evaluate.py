"""`lmcache compress --evaluate`: what codecs do to answers is told per codec, and no store is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_cli.commands import evaluation
from lmcache_cli.integration.evaluating import LogProbabilities
from lmcache_cli.integration.producer import BufferSource, Document, KnownChunk, ProducedChunk, TokenIds
from lmcache_cli.integration.transformers.model_identity import IdentifiedModel
from lmcache_format.geometry import part_bytes, whole_part
from lmcache_format.identity import Identity
from tests.cases.pattern_engine import tokenized
from tests.cli.conftest import Inside
from tests.format.encodings.samples import kv_like
from tests.store.pattern import tiny_identity

IDENTITY = tiny_identity(kv_heads=2, head_dim=16, chunk_tokens=32)
ROOT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog " * 4


class FakeReader:
    """KV that depends on the token and its place alone."""

    provenance: Mapping[str, Any] = {}
    max_tokens = 400

    def __init__(self, identity: Identity) -> None:
        self.identity = identity

    def prefill(self, documents: Sequence[Document], buffers: BufferSource) -> Iterator[ProducedChunk]:
        for index, document in enumerate(documents):
            for start in range(0, len(document.tokens), 32):
                num_tokens = min(32, len(document.tokens) - start)
                data = buffers(part_bytes(self.identity, whole_part(self.identity), num_tokens))
                data[:] = kv_like((data.size // 32, 1, 16), start).reshape(-1).view(np.uint8)
                yield ProducedChunk(index, start, num_tokens, data)


class FakeJudge:
    """Scores that lean on the mean of the KV: an error in it moves them."""

    def unaided(self, prefix: TokenIds, continuation: TokenIds) -> LogProbabilities | None:
        return None

    def scores(self, prefix: Sequence[KnownChunk], continuation: TokenIds) -> LogProbabilities:
        bits = np.concatenate([chunk.data.view(np.uint16) for chunk in prefix]).astype(np.uint32) << 16
        values = bits.view(np.float32)[: 256 * 16].reshape(256, -1).mean(axis=1)
        logits = np.tile(values, (len(continuation) - 1, 1))
        shifted: LogProbabilities = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
        return shifted


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = IdentifiedModel(tmp_path, IDENTITY)
    monkeypatch.setattr(evaluation, "identify_model", lambda *_, **__: model)
    monkeypatch.setattr(evaluation, "tokenize", tokenized)
    monkeypatch.setattr(evaluation, "load_models", lambda *_: (FakeReader(IDENTITY), FakeJudge()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCACHE_STORE", raising=False)
    (tmp_path / "fox.txt").write_text(TEXT)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": TEXT[:90], "name": "short"}) + "\n")
    return tmp_path


def test_every_codec_with_loss_is_measured_without_a_store(inside: Inside, scene: Path) -> None:
    before = sorted(scene.rglob("*"))
    ran = inside(
        "compress", "--evaluate", "--model", ".", "--prompts", "asked.jsonl", "--documents", "fox.txt", "--json"
    )
    assert ran.code == 0, ran.stderr
    *rows, end = map(json.loads, ran.lines)
    assert {row["schema"] for row in rows} == {"lmcache.codec_quality/1"}
    assert [row["codec"] for row in rows] == ["int8huf", "uq006", "uq012", "uq025", "uq050", "fp8"]
    assert [row["quality"] for row in rows] == ["near", "near", "fine", "fp8-grade", "int4-grade", "fp8-grade"]
    uq = {row["codec"]: row for row in rows}
    kls = [uq[name]["kl_nats"] for name in ("uq006", "uq012", "uq025", "uq050")]
    assert kls == sorted(kls)
    assert kls[0] > 0
    assert uq["uq006"]["ratio"] < uq["uq050"]["ratio"]
    assert all(row["num_prompts"] == 2 and row["kl_worst"] >= row["kl_nats"] for row in rows)
    assert (end["num_codecs"], end["num_prompts"], end["num_tokens"]) == (6, 2, 90 + len(TEXT))
    assert end["num_scored"] == 44 + len(TEXT) // 2 - 1
    assert sorted(scene.rglob("*")) == before


def test_one_codec_alone_and_a_lossless_one_changes_nothing(inside: Inside, scene: Path) -> None:
    ran = inside("compress", "--evaluate", "--model", ".", "--documents", "fox.txt", "--codec", "bfx", "--json")
    row, _ = map(json.loads, ran.lines)
    found = (row["codec"], row["quality"], row["kl_nats"], row["top1_percent"], row["perplexity_change_percent"])
    assert found == ("bfx", None, 0, 100, 0)
    assert row["kl_error"] is None
    assert row["ratio"] > 1.1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--evaluate",), 2, b"say which with --model DIR"),
        (("--evaluate", "--model", "."), 2, b"pass --documents FILE or --prompts FILE.jsonl"),
        (("--evaluate", "--model", ".", "--documents", "none.txt"), 2, b"none.txt"),
        (("--evaluate", "--model", ".", "--documents", "few.txt"), 2, b"few.txt: 5 tokens are too few"),
        (("--evaluate", "--model", ".", "--documents", "many.txt"), 2, b"the model attends to 400; cut the prompt"),
        (("--evaluate", "--model", ".", "--documents", "fox.txt", "--judge-dtype", "I8"), 2, b"use F32, BF16, F16"),
        (("--evaluate", "--model", ".", "--documents", "fox.txt", "--codec", "zip"), 2, b"there is no codec 'zip'"),
        (("--model", "."), 2, b"--model without --evaluate"),
        (("--documents", "fox.txt"), 2, b"--documents without --evaluate"),
    ],
)
def test_wrong_words_say_what_to_do(
    inside: Inside, scene: Path, words: tuple[str, ...], code: int, said: bytes
) -> None:
    (scene / "few.txt").write_text("hello")
    (scene / "many.txt").write_text("x" * 401)
    ran = inside("compress", *words)
    assert said in ran.stderr
    assert ran.code == code


@pytest.mark.slow
def test_on_a_real_model_near_is_near_and_lossless_is_the_control(
    inside: Inside, model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text((ROOT / "docs" / "architecture.md").read_text()[:2500])
    words = ("--evaluate", "--model", model_dir, "--documents", tmp_path / "text.txt", "--continuation", "64", "--json")

    def row(codec: str) -> dict[str, Any]:
        lines = map(json.loads, inside("compress", *words, "--codec", codec).lines)
        return next(line for line in lines if line.get("codec") not in (None, "(prefill in F32)"))

    near, coarse, exact = row("uq"), row("uq:0.5"), row("bfx")
    assert 0 < near["kl_nats"] < 1e-3 < coarse["kl_nats"] < 0.1
    assert near["top1_percent"] > 95
    assert (exact["kl_nats"], exact["top1_percent"]) == (0, 100)
