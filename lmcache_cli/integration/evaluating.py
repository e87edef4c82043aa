"""What a lossy encoding does to a model's answers. Knows no engine and no torch.

The KV of a prefix is computed as for the store, encoded and decoded as the store does it, and a continuation that is
known is scored on top of it. The control is the same prefix kept in memory: how far the probabilities of the next
token move (KL divergence), how often the likeliest token stays the same, and what becomes of the perplexity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmcache_cli.integration.errors import PromptError
from lmcache_cli.integration.producer import Document, KnownChunk, Producer, TokenIds
from lmcache_format.encodings import Encoding
from lmcache_format.geometry import part_tensors, whole_part
from lmcache_format.identity import Identity

LogProbabilities = npt.NDArray[np.float32]
LEAST_TOKENS = 16
"""Shorter prompts leave nothing to measure between the exact first tokens and the continuation."""


class Judge(Protocol):
    """A model that says what it expects, given KV that somebody else computed."""

    def unaided(self, prefix: TokenIds, continuation: TokenIds) -> LogProbabilities | None:
        """The same on KV that the judge computes itself, in its own type; None where that is the reader's."""
        ...

    def scores(self, prefix: Sequence[KnownChunk], continuation: TokenIds) -> LogProbabilities:
        """Log probabilities `[T - 1, vocabulary]` of what follows each of `continuation` `[T]` but the last."""
        ...


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens to read, and those that follow them, to score."""

    name: str
    prefix: TokenIds
    continuation: TokenIds


@dataclass(slots=True)
class Scores:
    """One value a passage: KL divergence in nats, share of equal likeliest tokens, loss in nats a token."""

    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def kl(self) -> float:
        """Mean KL divergence from the control, nats."""
        return statistics.mean(self.divergence)

    @property
    def kl_error(self) -> float | None:
        """Its standard error over passages; None where there is one only."""
        count = len(self.divergence)
        return statistics.stdev(self.divergence) / math.sqrt(count) if count > 1 else None

    @property
    def top1(self) -> float:
        """Share of tokens whose likeliest successor stays the same."""
        return statistics.mean(self.agreement)

    @property
    def ratio(self) -> float | None:
        """Times smaller; None where nothing was stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    def perplexity_change(self, control: Scores) -> float:
        """Relative change of perplexity, from that of the control."""
        return math.exp(statistics.mean(self.loss) - statistics.mean(control.loss)) - 1


CONTROL = "raw"
JUDGE = "judge"
"""The judge's own prefill: what computing in the reader's type costs by itself."""


def passage_of(name: str, tokens: TokenIds, continuation_tokens: int, max_tokens: int | None = None) -> Passage:
    """Split a prompt: the last `continuation_tokens`, at most half of it, are scored. Raises `PromptError`."""
    if len(tokens) < LEAST_TOKENS:
        raise PromptError(f"{name}: {len(tokens)} tokens are too few to judge by; at least {LEAST_TOKENS} are needed")
    if max_tokens is not None and len(tokens) > max_tokens:
        raise PromptError(f"{name}: {len(tokens)} tokens, but the model attends to {max_tokens}; cut the prompt")
    begin = len(tokens) - min(continuation_tokens, len(tokens) // 2)
    return Passage(name, tokens[:begin], tokens[begin:])


def evaluate(
    reader: Producer,
    judge: Judge,
    encodings: Sequence[Encoding],
    passages: Iterable[Passage],
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Scores]:
    """Scores by name of the encoding; `CONTROL` for the prefix in memory, `JUDGE` where the judge computes its own.

    Every passage is read once; `advance` is told its tokens when it is done. Blocks while the models compute. Memory:
    one passage's KV three times, and log probabilities of its continuation twice.
    """
    found: dict[str, Scores] = {CONTROL: Scores()}
    for passage in passages:
        chunks = _prefilled(reader, passage.prefix)
        base = judge.scores(chunks, passage.continuation)
        _add(found[CONTROL], base, base, passage.continuation)
        unaided = judge.unaided(passage.prefix, passage.continuation)
        if unaided is not None:
            _add(found.setdefault(JUDGE, Scores()), base, unaided, passage.continuation)
        for encoding in encodings:
            scores = found.setdefault(encoding.name, Scores())
            decoded = _through(reader.identity, encoding, chunks, scores)
            _add(scores, base, judge.scores(decoded, passage.continuation), passage.continuation)
        advance(len(passage.prefix) + len(passage.continuation))
    return found


def _prefilled(reader: Producer, prefix: TokenIds) -> list[KnownChunk]:
    produced = reader.prefill([Document(prefix)], lambda size: np.empty(size, np.uint8))
    return [KnownChunk(chunk.num_tokens, chunk.data) for chunk in produced]


def _through(identity: Identity, encoding: Encoding, chunks: Sequence[KnownChunk], scores: Scores) -> list[KnownChunk]:
    """The chunks encoded and decoded, each as a shard of its own."""
    decoded = []
    start = 0
    for chunk in chunks:
        specs = part_tensors(identity, whole_part(identity), chunk.num_tokens)
        stored = encoding.encode_many(chunk.data, specs, start_pos=start)
        out = np.empty_like(chunk.data)
        encoding.decode_many(stored, specs, out)
        scores.raw_bytes += chunk.data.nbytes
        scores.stored_bytes += sum(one.size for one in stored)
        decoded.append(KnownChunk(chunk.num_tokens, out))
        start += chunk.num_tokens
    return decoded


def _add(scores: Scores, base: LogProbabilities, found: LogProbabilities, continuation: TokenIds) -> None:
    divergence = (np.exp(base) * (base - found)).sum(axis=1, dtype=np.float64)
    following = continuation[1:].astype(np.int64)[:, None]
    scores.divergence.append(float(divergence.mean()))
    scores.agreement.append(float((base.argmax(axis=1) == found.argmax(axis=1)).mean()))
    scores.loss.append(float(-np.take_along_axis(found, following, axis=1).mean(dtype=np.float64)))
