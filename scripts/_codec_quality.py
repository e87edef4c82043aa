"""What a lossy encoding does to a model's answers; see `scripts/bench_codecs --quality`.

The measuring is that of `lmcache compress --evaluate`: a prefix of 1,024 or 2,048 tokens is read in bf16, its KV
encoded and decoded, and the next 256 real tokens are scored by the float32 model on top of it. The bar for *near* is
what computing the KV in bf16 instead of float32 does by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from _bench import Row, Sample, row
from _real_kv import CHUNK_TOKENS, documents, model_directory, quiet_transformers

from lmcache_cli.integration.evaluating import CONTROL, JUDGE, Passage, Scores, evaluate
from lmcache_cli.integration.transformers.engine import TransformersEngine
from lmcache_cli.integration.transformers.judging import TransformersJudge
from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_format.dtypes import Dtype
from lmcache_format.encodings import Lossy, encoding_names, get_encoding

BENCH = "codec quality"
PREFIXES = (1024, 2048)
CONTINUATION = 256
PIECE_TOKENS = 2048
REFERENCE = "float32 prefill"
KL_BARS = {"uq006": 1.5e-4, "uq025": 3.5e-3}
RATIO_BARS = {"uq006": 2.5, "uq025": 3.8}


def quality_rows(per_kind: int) -> Iterator[Row]:
    """Three rows and a size for each lossy encoding, over `2 * per_kind` documents."""
    torch.set_num_threads(2)
    quiet_transformers()
    identity = identify(model_directory(), dtype=Dtype.BF16, chunk_tokens=CHUNK_TOKENS).identity
    reader = TransformersEngine.load(model_directory(), identity, piece_tokens=PIECE_TOKENS)
    judge = TransformersJudge.load(model_directory(), reader, Dtype.F32, piece_tokens=PIECE_TOKENS)
    # int8huf decodes to the same bits as int8.
    encodings = [get_encoding(name) for name in encoding_names() if name != "int8huf"]
    scores = evaluate(reader, judge, [one for one in encodings if isinstance(one, Lossy)], passages(per_kind))
    control = scores.pop(CONTROL)
    for name, found in scores.items():
        yield from rows_of(REFERENCE if name == JUDGE else name, found, control)


def passages(per_kind: int) -> Iterator[Passage]:
    """Documents cut to a prefix of one length or the other, and what follows."""
    for index, document in enumerate(documents(per_kind, max(PREFIXES) + CONTINUATION)):
        print(f"document {index + 1} of {2 * per_kind}: {document.kind} {document.name}", file=sys.stderr)
        tokens, prefix = np.array(document.tokens, np.uint32), PREFIXES[index % 2]
        yield Passage(document.name, tokens[:prefix], tokens[prefix : prefix + CONTINUATION])


def rows_of(name: str, scores: Scores, control: Scores) -> Iterator[Row]:
    values, error = scores.divergence, scores.kl_error or 0.0
    note = f"± {error:.2g} over {len(values)} documents, worst {max(values):.2g}"
    sample = Sample.of(values)
    # The bar is on the mean; p20 and p80 are over documents.
    of_mean = Sample(scores.kl, sample.p20, sample.p80, sample.count)
    yield row(BENCH, f"{name} KL", of_mean, "nats", at_most=KL_BARS.get(name), note=note)
    yield row(BENCH, f"{name} top-1", 100 * scores.top1, "% equal")
    yield row(BENCH, f"{name} perplexity", 100 * scores.perplexity_change(control), "% change")
    if scores.ratio is not None:
        yield row(BENCH, f"{name} size", scores.ratio, "x smaller", at_least=RATIO_BARS.get(name))
