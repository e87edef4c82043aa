"""Whatever happens to the files of a store, repair makes it sound, a second one has nothing to do, and what was good
is read as it was."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.repair import RepairOptions, apply_repair, plan_repair
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import FindingKind, VerifyOptions, verify
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from tests.store.altered_shards import in_format
from tests.store.pattern import document, hit, put_document, tiny_identity

ROUNDS = 12
DOCUMENTS = {"trunk": document(40), "branch": [*document(40)[:20], *document(14, seed=1)]}


def delete(path: Path, rng: np.random.Generator) -> None:
    path.unlink()


def empty(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(b"")


def cut(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes()[: rng.integers(1, path.stat().st_size)])


def extend(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes() + rng.bytes(int(rng.integers(1, 9000))))


def flip_in_header(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    data[rng.integers(0, 4096)] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(data)


def zeros(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def directory(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


def newer(path: Path, rng: np.random.Generator) -> None:
    in_format(path, "9")


Harm = Callable[[Path, np.random.Generator], None]
SEEN_IN_THE_LISTING: tuple[Harm, ...] = (delete, empty, cut, extend, directory, newer)
SEEN_IN_THE_HEADER: tuple[Harm, ...] = (*SEEN_IN_THE_LISTING, flip_in_header, zeros)


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


def made(root: Path, identity: Identity, rng: np.random.Generator) -> None:
    with Store.create(str(root)) as store:
        for tokens in DOCUMENTS.values():
            halves = rng.random() < 0.5
            for part in (Part(0, 1, 0, 2), Part(1, 2, 0, 2)) if halves else (Part(0, 2, 0, 2),):
                with store.namespace(identity, create=True) as namespace:
                    put_document(namespace, tokens, part=part)


def harm(root: Path, rng: np.random.Generator, harms: tuple[Harm, ...]) -> None:
    shards = sorted((root / "ns").rglob("*.safetensors"))
    for path in rng.choice(np.array(shards, object), int(rng.integers(1, 5)), replace=False):
        harms[rng.integers(len(harms))](path, rng)
    for segment in sorted(root.rglob("*.lmi")):
        if rng.random() < 0.3:
            (delete, empty, cut)[rng.integers(3)](segment, rng)


def contents(root: Path) -> Counter[bytes]:
    """What all shards hold, quarantined ones included."""
    return Counter(path.read_bytes() for path in root.rglob("*.safetensors*") if path.is_file())


def hits(root: Path, identity: Identity) -> dict[str, int]:
    with Store.open(str(root)) as store, store.namespace(identity) as namespace:
        return {name: hit(namespace, tokens) for name, tokens in DOCUMENTS.items()}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_repair_after_anything(tmp_path: Path, identity: Identity, seed: int, deep: bool):
    rng = np.random.default_rng(seed)
    root = tmp_path / "kv"
    made(root, identity, rng)
    harm(root, rng, SEEN_IN_THE_HEADER if deep else SEEN_IN_THE_LISTING)
    untouched = Path(shutil.copytree(root, tmp_path / "copy"))
    expected = hits(untouched, identity)
    before = contents(root)
    with Store.open(str(root)) as store:
        result = apply_repair(store, plan_repair(store, RepairOptions(deep=deep, accept_missing=True)))
        assert result.failures == []
        report = verify(store, VerifyOptions(Level.FULL))
        again = plan_repair(store, RepairOptions(deep=deep))
    assert {finding.kind for finding in report.findings} <= {FindingKind.NEWER, FindingKind.INCOMPLETE}
    assert {action.kind.value for action in again.actions} <= {"rewrite"}
    assert not before - contents(root), "something was deleted"
    found = hits(root, identity)
    assert all(found[name] >= expected[name] for name in DOCUMENTS)
    if report.num_newer == 0:  # what a later release wrote stands in the way of the same name
        with Store.open(str(root)) as store, store.namespace(identity, create=True) as namespace:
            for tokens in DOCUMENTS.values():
                put_document(namespace, tokens)
        assert hits(root, identity) == {name: len(tokens) for name, tokens in DOCUMENTS.items()}
        with Store.open(str(root)) as store:
            assert verify(store).is_sound
