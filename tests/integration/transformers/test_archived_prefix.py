"""From end to end with the real model: warmed here, moved to a bucket, deleted here, and answered with the same tokens:
from the bucket, through a chain of both, and, the second time, from here again."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.integration.transformers.model_identity import identify
from lmcache_cli.integration.transformers.prompt_tokens import load_prompt_tokens
from lmcache_cli.integration.warming import WarmDocument, warm
from lmcache_cli.store import Namespace, Store
from lmcache_cli.store.chain import ChainedNamespace, StoreChain
from lmcache_cli.store.events import Event
from lmcache_format.names import chunks_directory

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
NUM_TOKENS, NUM_QUESTION, ANSWER_TOKENS = 600, 30, 12


class Warmed:
    """A store that `warm` has filled, the engine, a prompt that begins with the document, and the control's answer."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        from lmcache_cli.integration.transformers.engine import TransformersEngine

        self.identity = identify(model_dir, cache_dir=folder / "digests").identity
        self.engine = TransformersEngine.load(model_dir, self.identity, piece_tokens=256)
        tokens = load_prompt_tokens(model_dir).of_text((ROOT / "LICENSE").read_text())
        self.prompt = tokens[: NUM_TOKENS + NUM_QUESTION]
        self.folder = folder / "warm"
        with Store.create(str(self.folder)) as store, store.namespace(self.identity, create=True) as namespace:
            document = WarmDocument("LICENSE", tokens[:NUM_TOKENS], None)
            assert warm(namespace, lambda: self.engine, [document]).chunks_stored == 3
        memory = self.engine.new_cache(len(self.prompt) + ANSWER_TOKENS)
        self.engine.extend(memory, self.prompt[:NUM_TOKENS])
        self.expected = self._greedy(memory, self.prompt[NUM_TOKENS:])

    def answer(self, namespace: Namespace) -> tuple[int, list[int]]:
        """How much of the prompt is found, and the answer that follows."""
        from lmcache_cli.integration.transformers.stored_prefix import load_prefix

        cache = load_prefix(namespace, self.prompt, salt=None, spare_tokens=ANSWER_TOKENS)
        return cache.num_tokens, self._greedy(cache.past_key_values, cache.suffix)

    def _greedy(self, cache: Any, suffix: Any) -> list[int]:
        return list(self.engine.greedy(cache, suffix, max_tokens=ANSWER_TOKENS, stop_at_eos=False))


@pytest.fixture(scope="module")
def warmed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    return Warmed(model_dir, tmp_path_factory.mktemp("warmed"))


@pytest.fixture
def lmcache(capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Any]:
    """The command line, in this process; returns the summary of what went well."""
    from lmcache_cli.app import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run(*arguments: str | Path) -> dict[str, Any]:
        capfdbinary.readouterr()
        assert main([*map(str, arguments), "-q", "--json"]) == 0
        summary: dict[str, Any] = json.loads(capfdbinary.readouterr()[0].splitlines()[-1])
        return summary

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def digests(namespace: Namespace, prompt: Any) -> list[bytes]:
    """The bytes of every chunk that a reader gets."""
    buffers, result = namespace.load(namespace.match(prompt))
    assert result.num_tokens == NUM_TOKENS
    return [bytes(buffer.memory) for buffer in buffers]


@pytest.mark.parametrize("cloud", ["s3", "gcs"])
def test_what_was_moved_to_a_bucket_answers_with_the_same_tokens(
    warmed: Warmed, lmcache: Any, tmp_path: Path, request: pytest.FixtureRequest, cloud: str
) -> None:
    url = request.getfixturevalue(f"{cloud}_url")
    near = tmp_path / "kv"
    shutil.copytree(warmed.folder, near)
    with Store.open(str(near)) as store, store.namespace(warmed.identity) as namespace:
        assert warmed.answer(namespace) == (NUM_TOKENS, warmed.expected)
        content = digests(namespace, warmed.prompt)

    lmcache("init", "--store", url)
    moved = lmcache("migrate", near, url, "--delete-source")
    assert (moved["num_copied"], moved["num_deleted"]) == (3, 3)
    with Store.open(str(near)) as store:
        assert not list(store.backend.list(chunks_directory(warmed.identity.fingerprint)))
        with store.namespace(warmed.identity) as namespace:
            assert namespace.match(warmed.prompt).num_tokens == 0

    with Store.open(url) as store, store.namespace(warmed.identity) as namespace:
        assert digests(namespace, warmed.prompt) == content
        assert warmed.answer(namespace) == (NUM_TOKENS, warmed.expected)

    with StoreChain.open([str(near), url]) as chain:
        with chain.namespace(warmed.identity) as both:
            assert isinstance(both, ChainedNamespace)
            assert [answer.url for answer in both.answers(both.match(warmed.prompt))] == [both.behind[0].url]
            assert warmed.answer(both) == (NUM_TOKENS, warmed.expected)
            assert both.wait_promoted(30)
            assert (chain.events[Event.FAR_READ], chain.events[Event.PROMOTED]) == (3, 3)
            assert warmed.answer(both) == (NUM_TOKENS, warmed.expected)
            assert digests(both, warmed.prompt) == content
            assert chain.events[Event.FAR_READ] == 3  # nothing came from the bucket a second time
    with Store.open(str(near)) as store, store.namespace(warmed.identity) as namespace:
        assert digests(namespace, warmed.prompt) == content
        assert warmed.answer(namespace) == (NUM_TOKENS, warmed.expected)
