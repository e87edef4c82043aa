"""Token ids are those a server computes, the first time and every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.integration.errors import ModelError
from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens

pytestmark = pytest.mark.usefixtures("transformers")
pytestmark = pytest.mark.slow

TEXTS = [
    "",
    "The capital of France is",
    " leading space\n\n\ttabs",
    "naïve 文 🙂 \x00",
    "<|im_start|>user\nhi<|im_end|>",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Bonjour"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ],
]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def test_remembered_and_built_tokenizers_give_transformers_own_ids(
    model_dir: Path, reference: Any, tmp_path: Path
) -> None:
    built = load_prompt_tokens(model_dir, tmp_path)
    remembered = load_prompt_tokens(model_dir, tmp_path)
    assert list(tmp_path.rglob("*.json"))
    for tokens in (built, remembered, load_prompt_tokens(model_dir)):
        for text in TEXTS:
            assert tokens.of_text(text).tolist() == reference(text).input_ids
        for chat in CHATS:
            expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert tokens.of_chat(chat).tolist() == expected
        assert tokens.text_of(tokens.of_text(TEXTS[1])) == TEXTS[1]


def test_second_time_does_not_import_transformers(model_dir: Path, tmp_path: Path) -> None:
    expected = load_prompt_tokens(model_dir, tmp_path).of_text(TEXTS[1])
    program = (
        "import sys; from pathlib import Path\n"
        "from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens\n"
        "print(load_prompt_tokens(Path(sys.argv[1]), Path(sys.argv[2])).of_text(sys.argv[3]).tolist())\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, model_dir, tmp_path, TEXTS[1]], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected.tolist())


def test_chat_without_messages_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="at least one message"):
        load_prompt_tokens(model_dir).of_chat([])


def test_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        load_prompt_tokens(tmp_path)
