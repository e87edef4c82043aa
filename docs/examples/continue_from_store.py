"""Continue generation from stored KV: the prompt's stored prefix is read, the rest is computed, transformers goes on.

    python docs/examples/continue_from_store.py STORE MODEL DOCUMENT QUESTION

Warm the document first: lmcache warm --store STORE --model MODEL --documents DOCUMENT
"""

import sys
from pathlib import Path

import numpy as np

from lmcache_cli.integration.transformers.engine import TransformersEngine
from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens
from lmcache_cli.integration.transformers.stored_prefix import load_prefix
from lmcache_cli.store import Store

ANSWER_TOKENS = 24


def main(store_url: str, model: str, document: str, question: str) -> None:
    identified = identify(model)
    tokenizer = load_prompt_tokens(identified.directory)
    # Joined as ids, not as text: a text's last token may change with what follows it, and its tail would not be found.
    text = tokenizer.of_text(Path(document).read_text(encoding="utf-8"))
    prompt = np.concatenate([text, tokenizer.of_text(question)])

    engine = TransformersEngine.load(identified.directory, identified.identity)
    with Store.open(store_url) as store, store.namespace(identified.identity, missing_ok=True) as namespace:
        cache = load_prefix(namespace, prompt, salt=None, spare_tokens=ANSWER_TOKENS)
    print(f"{cache.num_tokens} of {len(prompt)} tokens come from the store, {len(cache.suffix)} are computed")

    output = engine.model.generate(
        cache.input_ids,
        past_key_values=cache.past_key_values,
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
    )
    print(tokenizer.text_of(output[0, len(prompt) :].tolist()))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
