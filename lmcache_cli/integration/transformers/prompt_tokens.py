"""Token ids of prompts, as a server would compute them.

Plain text gets the special tokens of the tokenizer (a leading BOS where it has one); a chat is rendered by the model's
template with `add_generation_prompt=True` and then encoded without adding any, since the template wrote them.

Importing transformers takes seconds. The tokenizer it builds is therefore remembered in its serialised form, under the
digest of the tokenizer's files and transformers' version, and used directly the next time: the ids are the same,
because it is the same tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lmcache_cli.integration.errors import ModelError, UnsupportedModel
from lmcache_cli.integration.producer import TokenIds
from lmcache_cli.integration.transformers.weights_digest import canonical, recall, remember

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_PATTERNS = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
TEMPLATE_PATTERNS = ("chat_template*", "additional_chat_templates/*")

Message = Mapping[str, Any]
"""One message of a chat, such as `{"role": "user", "content": "…"}`."""


class PromptTokens(Protocol):
    """Text and chats to token ids, and back."""

    def of_text(self, text: str) -> TokenIds:
        """Token ids of plain text, special tokens included."""
        ...

    def of_chat(self, messages: Sequence[Message]) -> TokenIds:
        """Token ids of a chat that awaits the assistant's answer. Raises `ModelError` where the template refuses it."""
        ...

    def text_of(self, tokens: Sequence[int] | TokenIds) -> str:
        """Text of token ids, without special tokens."""
        ...


def load_prompt_tokens(directory: Path, cache_dir: Path | None = None) -> PromptTokens:
    """The tokenizer of a model directory; remembered in `cache_dir`, None for nowhere. Raises `ModelError`."""
    name = _files_digest(directory)
    memory = None if cache_dir is None else cache_dir / "tokenizers" / f"{name}.json"
    if memory is not None and (known := _recall(memory, name)) is not None:
        return known
    made = _build(directory)
    if memory is not None:
        remember(memory, {"name": name, **made.to_dict()})
    return made


class SerialisedTokenizer:
    """A tokenizer as transformers set it up, with its chat template; needs transformers to render chats alone."""

    def __init__(self, backend: Tokenizer, template: str | None, special_tokens: Mapping[str, Any]) -> None:
        self._backend = backend
        self._template = template
        self._special_tokens = dict(special_tokens)

    def of_text(self, text: str) -> TokenIds:
        return self._encode(text, add_special_tokens=True)

    def of_chat(self, messages: Sequence[Message]) -> TokenIds:
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text a chat becomes, up to where the assistant's answer begins. Raises `ModelError`."""
        if self._template is None:
            raise ModelError("this model has no chat template; give plain text, or a model made for chats")
        if not messages:
            raise ModelError("a chat needs at least one message")
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            result: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._template,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as problem:
            raise ModelError(f"the model's chat template refuses this chat: {problem}") from None
        # Returns the rendered chats and where generated parts lie in them.
        return str(result[0][0])

    def text_of(self, tokens: Sequence[int] | TokenIds) -> str:
        return str(self._backend.decode([int(token) for token in tokens], skip_special_tokens=True))

    def to_dict(self) -> dict[str, Any]:
        """JSON form, read back by `from_dict`."""
        return {
            "tokenizer": self._backend.to_str(),
            "template": self._template,
            "special_tokens": self._special_tokens,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> SerialisedTokenizer:
        """Raises ValueError or KeyError for what `to_dict` did not write."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(entry["tokenizer"]), entry["template"], entry["special_tokens"])

    def _encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        return np.asarray(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.uint32)


def _build(directory: Path) -> SerialisedTokenizer:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as problem:
        raise ModelError(f"no usable tokenizer in {directory}: {problem}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(
            f"{directory} has a tokenizer written in Python ({type(tokenizer).__name__}); give token ids instead"
        )
    # A copy, because calls set truncation and padding on the original: none, for whole prompts.
    backend = Tokenizer.from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    template = tokenizer.get_chat_template() if tokenizer.chat_template is not None else None
    return SerialisedTokenizer(backend, template, tokenizer.special_tokens_map)


def _files_digest(directory: Path) -> str:
    """Of every file that can change a tokenizer or template, and of the library that builds it."""
    patterns = (*TOKENIZER_PATTERNS, *TEMPLATE_PATTERNS, "config.json")
    paths = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    entries = [
        [path.relative_to(directory).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths
    ]
    versions = [version("transformers"), version("tokenizers")]
    return hashlib.sha256(canonical([entries, versions])).hexdigest()[:32]


def _recall(memory: Path, name: str) -> SerialisedTokenizer | None:
    entry = recall(memory)
    if entry.get("name") != name:
        return None
    try:
        return SerialisedTokenizer.from_dict(entry)
    except (ValueError, KeyError, TypeError):
        return None
