"""What to warm or ask, from files: documents (UTF-8 text) and prompts (JSON lines).

A prompt line is an object with one of `prompt` (text), `messages` (a chat) or `tokens` (ids), and perhaps `name` and
`salt`. Everything wrong is told with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmcache_format.errors import KeyInputError
from lmcache_format.keys import token_words

from .errors import PromptError
from .producer import TokenIds

_FIELDS = frozenset({"prompt", "messages", "tokens", "name", "salt"})


class Tokenizer(Protocol):
    """Text and chats to token ids, as a server would."""

    def of_text(self, text: str) -> TokenIds:
        """Ids of plain text, special tokens included."""
        ...

    def of_chat(self, messages: list[Mapping[str, Any]]) -> TokenIds:
        """Ids of a chat that awaits the assistant's answer."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was read: exactly one of `text`, `messages` and `tokens` is given."""

    name: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: TokenIds | None = None
    salt: str | None = None

    def token_ids(self, tokenizer: Tokenizer, *, as_chat: bool = False) -> TokenIds:
        """Ids under a tokenizer; with `as_chat` plain text becomes a chat of one message by the user."""
        if self.tokens is not None:
            return self.tokens
        if self.messages is not None:
            return tokenizer.of_chat(list(self.messages))
        assert self.text is not None
        return tokenizer.of_chat([{"role": "user", "content": self.text}]) if as_chat else tokenizer.of_text(self.text)


def read_documents(paths: Iterable[str], salt: str | None = None) -> Iterator[Prompt]:
    """One prompt a file, called like the file. Raises `PromptError`."""
    for path in paths:
        yield Prompt(name=path, text=_read_text(path), salt=salt)


def read_prompts(path: str, salt: str | None = None) -> Iterator[Prompt]:
    """One prompt a line of a JSON-lines file; empty lines are passed over. Raises `PromptError`."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):  # others end no line, and may be in text
        if line.strip():
            yield _parse_line(line, f"{path}:{number}", salt)


def read_tokens(path: str, salt: str | None = None) -> Prompt:
    """A prompt from a JSON file: a list of token ids, or an object with one as `tokens`. Raises `PromptError`."""
    value = _parse_json(_read_text(path), path)
    tokens = value.get("tokens") if isinstance(value, dict) else value
    if not isinstance(tokens, list):
        raise PromptError(f"{path}: expected a list of token ids, or an object with one as 'tokens'")
    return Prompt(name=path, tokens=_tokens({"tokens": tokens}, path), salt=salt)


def _parse_json(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise PromptError(f"{where}: not JSON: {problem}") from None
    return value


def _parse_line(line: str, where: str, salt: str | None) -> Prompt:
    value = _parse_json(line, where)
    if not isinstance(value, dict) or len(set(value) & {"prompt", "messages", "tokens"}) != 1:
        raise PromptError(f"{where}: expected an object with one of 'prompt', 'messages' and 'tokens'")
    unknown = sorted(set(value) - _FIELDS)
    if unknown:
        raise PromptError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
    name, own_salt = value.get("name", where), value.get("salt", salt)
    if not isinstance(name, str) or not (own_salt is None or isinstance(own_salt, str)):
        raise PromptError(f"{where}: 'name' and 'salt' are text")
    return Prompt(
        name=name,
        text=_text(value, where),
        messages=_messages(value, where),
        tokens=_tokens(value, where),
        salt=own_salt,
    )


def _text(value: Mapping[str, Any], where: str) -> str | None:
    text = value.get("prompt")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"{where}: 'prompt' is text, found {type(text).__name__}")
    _refuse_half_characters(text, where)
    return text


def _messages(value: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...] | None:
    messages = value.get("messages")
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise PromptError(f"{where}: 'messages' is a list of objects with 'role' and 'content'")
    _refuse_half_characters(messages, where)
    return tuple(messages)


def _tokens(value: Mapping[str, Any], where: str) -> TokenIds | None:
    tokens = value.get("tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list):
        raise PromptError(f"{where}: 'tokens' is a list of ids, found {type(tokens).__name__}")
    try:
        if not all(isinstance(token, int) for token in tokens):
            other = next(token for token in tokens if not isinstance(token, int))
            raise PromptError(f"{where}: token ids are whole numbers, found {json.dumps(other)[:40]}")
        return token_words(tokens)
    except KeyInputError as problem:
        raise PromptError(f"{where}: {problem}") from None


def _refuse_half_characters(value: object, where: str) -> None:
    """JSON can write half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as problem:
        half = ord(problem.object[problem.start])
        raise PromptError(f"{where}: \\u{half:04x} is half of a surrogate pair and no character") from None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as problem:
        raise PromptError(f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise PromptError(
            f"{path}: not UTF-8 text; byte {problem.start} is {problem.object[problem.start]:#04x}"
        ) from None
