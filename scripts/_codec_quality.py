"""What a lossy encoding does to a model's answers; see `scripts/bench_codecs --quality`.

A prefix of 1,024 or 2,048 tokens is read in bf16, its KV encoded and decoded, and the next 256 real tokens are scored
by the float32 model on top of it: mean KL divergence from the answers on the unencoded KV, agreement on the likeliest
token, change of perplexity. The bar for *near* is what computing the KV in bf16 instead of float32 does by itself.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _bench import Row, Sample, row
from _real_kv import CHUNK_TOKENS, chunks_of, documents, load_model, prefill

from lmcache_format.encodings import Lossy, encoding_names, get_encoding

BENCH = "codec quality"
PREFIXES = (1024, 2048)
CONTINUATION = 256
REFERENCE = "float32 prefill"
KL_BARS = {"uq006": 1.5e-4, "uq025": 3.5e-3}
RATIO_BARS = {"uq006": 2.5, "uq025": 3.8}


@dataclass(slots=True)
class Scores:
    """One value a document."""

    divergence: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    raw_bytes: int = 0
    stored_bytes: int = 0


@torch.no_grad()
def quality_rows(per_kind: int) -> Iterator[Row]:
    """Three rows and a size for each lossy encoding, over `2 * per_kind` documents."""
    torch.set_num_threads(2)
    reader, judge = load_model(torch.bfloat16), load_model(torch.float32)
    # int8huf decodes to the same bits as int8.
    names = [name for name in encoding_names() if isinstance(get_encoding(name), Lossy) and name != "int8huf"]
    scores = {name: Scores() for name in (REFERENCE, *names)}
    base_loss = []
    for index, document in enumerate(documents(per_kind, max(PREFIXES) + CONTINUATION)):
        print(f"document {index + 1} of {2 * per_kind}: {document.kind} {document.name}", file=sys.stderr)
        prefix = PREFIXES[index % 2]
        continuation = torch.tensor(document.tokens[prefix : prefix + CONTINUATION])
        kv = prefill(reader, document.tokens[:prefix])
        base = answers(judge, kv.float(), continuation)
        base_loss.append(loss(base, continuation))
        add(
            scores[REFERENCE],
            base,
            answers(judge, prefill(judge, document.tokens[:prefix]), continuation),
            continuation,
        )
        for name in names:
            decoded = through(name, kv, scores[name])
            add(scores[name], base, answers(judge, decoded.float(), continuation), continuation)
    for name, found in scores.items():
        yield from rows_of(name, found, statistics.mean(base_loss))


def through(name: str, kv: torch.Tensor, scores: Scores) -> torch.Tensor:
    """`kv` after encoding and decoding, chunk by chunk."""
    encoding = get_encoding(name)
    decoded = []
    for chunk in chunks_of("", kv):
        stored = encoding.encode_many(chunk.data, chunk.specs, start_pos=chunk.start_pos)
        out = np.empty_like(chunk.data)
        encoding.decode_many(stored, chunk.specs, out)
        scores.raw_bytes += chunk.data.nbytes
        scores.stored_bytes += sum(one.size for one in stored)
        shape = (len(chunk.specs), *chunk.specs[0].shape)
        decoded.append(torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).reshape(shape))
    assert kv.shape[2] % CHUNK_TOKENS == 0
    return torch.cat(decoded, dim=2)


def answers(judge: Any, kv: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
    """Log probabilities `[tokens - 1, vocabulary]` of what follows each token of `continuation`."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(len(kv) // 2):
        cache.update(kv[2 * layer][None], kv[2 * layer + 1][None], layer)
    logits = judge(continuation[None], past_key_values=cache, use_cache=True).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


def loss(log_probabilities: torch.Tensor, continuation: torch.Tensor) -> float:
    return float(-log_probabilities.gather(1, continuation[1:, None]).mean())


def add(scores: Scores, base: torch.Tensor, found: torch.Tensor, continuation: torch.Tensor) -> None:
    scores.divergence.append(float((base.exp() * (base - found)).sum(dim=1).double().mean()))
    scores.agreement.append(float((base.argmax(dim=1) == found.argmax(dim=1)).double().mean()))
    scores.loss.append(loss(found, continuation))


def rows_of(name: str, scores: Scores, base_loss: float) -> Iterator[Row]:
    values = scores.divergence
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    mean, sample = statistics.mean(values), Sample.of(values)
    note = f"± {error:.2g} over {len(values)} documents, worst {max(values):.2g}"
    # The bar is on the mean; p20 and p80 are over documents.
    of_mean = Sample(mean, sample.p20, sample.p80, sample.count)
    yield row(BENCH, f"{name} KL", of_mean, "nats", at_most=KL_BARS.get(name), note=note)
    yield row(BENCH, f"{name} top-1", 100 * statistics.mean(scores.agreement), "% equal")
    change = 100 * (math.exp(statistics.mean(scores.loss) - base_loss) - 1)
    yield row(BENCH, f"{name} perplexity", change, "% change")
    if scores.stored_bytes:
        ratio = scores.raw_bytes / scores.stored_bytes
        yield row(BENCH, f"{name} size", ratio, "x smaller", at_least=RATIO_BARS.get(name))
