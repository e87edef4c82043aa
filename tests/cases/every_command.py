"""A store, prompts, and a harmless call of every command on them, for cases that no command may get wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_cli.store import Store
from tests.cases.pattern_engine import CHUNK_TOKENS, ENGINE_IDENTITY
from tests.store.pattern import document, put_document, refs

DOCUMENT = document(3 * CHUNK_TOKENS + 2)
SECOND = [*DOCUMENT[: 2 * CHUNK_TOKENS], *document(2 * CHUNK_TOKENS, seed=1)]
_ENGINE = ("--model", ".", "--chunk-tokens", str(CHUNK_TOKENS), "--prompts", "prompts.jsonl")

CALLS: dict[str, tuple[str, ...]] = {
    "init": ("init", "--if-missing"),
    "ls": ("ls",),
    "ls namespace": ("ls", "{namespace}"),
    "stats": ("stats",),
    "inspect": ("inspect",),
    "inspect namespace": ("inspect", "{namespace}"),
    "inspect chunk": ("inspect", "{key}"),
    "inspect file": ("inspect", "{shard}"),
    "inspect prompt": ("inspect", "--model", ".", "--tokens", "ids.json"),
    "verify": ("verify",),
    "verify quick": ("verify", "--quick"),
    "repair": ("repair", "--dry-run"),
    "repair deep": ("repair", "--deep", "--dry-run"),
    "compress dry run": ("compress", "--dry-run"),
    "compress": ("compress",),
    "migrate": ("migrate", "{store}", "other", "--dry-run"),
    "prune": ("prune", "--max-count", "4", "--dry-run"),
    "prune nothing": ("prune", "--older-than", "30d"),
    "sweep": ("prune", "--sweep-only"),
    "rm": ("rm", "{key}", "--dry-run"),
    "rm prompt": ("rm", "--model", ".", "--tokens", "ids.json", "--dry-run"),
    "pin": ("pin", "{key}"),
    "pin prompt": ("pin", "--model", ".", "--tokens", "ids.json"),
    "unpin": ("unpin", "--document", "nobody"),
    "doctor": ("doctor",),
    "warm dry run": ("warm", *_ENGINE, "--dry-run"),
    "warm": ("warm", *_ENGINE),
    "bench ttft": ("bench", "ttft", *_ENGINE, "--question", "", "--tokens", "4"),
    "config show": ("config", "show"),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """The folder that commands run in, and the store."""

    folder: Path
    store: Path

    @property
    def shards(self) -> list[Path]:
        """Files of the first document, in order, then those of the second one that are its own."""
        keys = [ref.key for tokens in (DOCUMENT, SECOND) for ref in refs(ENGINE_IDENTITY, tokens)]
        return [next(self.store.rglob(f"{key.hex()}.*.safetensors")) for key in dict.fromkeys(keys)]

    @property
    def namespace(self) -> Path:
        """The folder of the only namespace."""
        return self.store / "ns" / ENGINE_IDENTITY.fingerprint

    def call(self, name: str) -> Sequence[str]:
        """The words of a call of `CALLS`, with the store."""
        values = {
            "namespace": ENGINE_IDENTITY.fingerprint,
            "key": refs(ENGINE_IDENTITY, DOCUMENT)[0].key.hex(),
            "shard": "copy.safetensors",
            "store": str(self.store),
        }
        return [*(word.format(**values) for word in CALLS[name]), "--store", str(self.store)]


def copy_scene(scene: Scene, folder: Path, store: Path) -> Scene:
    """The same somewhere else, its store at a path of its own."""
    for path in scene.folder.iterdir():
        if path.is_file():
            shutil.copy2(path, folder)
    shutil.copytree(scene.folder / "other", folder / "other")
    shutil.copytree(scene.store, store)
    return Scene(folder, store)


def make_scene(folder: Path, store: Path) -> Scene:
    """Two documents that share two chunks, warmed, and files that name them."""
    with Store.create(str(store)) as made, made.namespace(ENGINE_IDENTITY, create=True) as namespace:
        for name, tokens in (("first", DOCUMENT), ("second [2007]", SECOND)):
            put_document(namespace, tokens)
            last = refs(ENGINE_IDENTITY, tokens)[-1]
            namespace.label(name, last.key, len(tokens), last.depth)
        namespace.pin(last.key)
    Store.create(str(folder / "other")).close()
    scene = Scene(folder, store)
    lines = [{"name": "first", "tokens": DOCUMENT}, {"name": "second [2007]", "tokens": SECOND}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "ids.json").write_text(json.dumps(DOCUMENT))
    (folder / "copy.safetensors").write_bytes(scene.shards[0].read_bytes())
    return scene
