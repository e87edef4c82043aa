"""Records of which engine takes whose KV: they travel as they were written, and anything odd counts for nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_cli.store import Store
from lmcache_cli.store.acceptances import read_acceptances, write_acceptance
from lmcache_cli.store.migrate import apply_migrate, plan_migrate
from lmcache_cli.store.objects import inside_namespace
from lmcache_format.acceptance import Acceptance
from lmcache_format.canonical_json import dump_canonical
from lmcache_format.errors import AcceptanceError, UnsupportedVersion
from lmcache_format.identity import Fingerprint
from tests.store.pattern import document, put_document, tiny_identity

IDENTITY = tiny_identity(name="acceptances")
HF = {"engine": "transformers", "version": "5.19.0"}
VLLM = {"engine": "vllm", "version": "0.32.0", "device": "cpu"}


def acceptance(passed: bool = True, **other: str) -> Acceptance:
    return Acceptance(IDENTITY.fingerprint, {**HF, **other}, VLLM, passed, 0.017, 0.999, 512, 7)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path / "kv"))
    made.namespace(IDENTITY, create=True).close()
    return made


def read(store: Store) -> list[Acceptance]:
    return read_acceptances(store.backend, IDENTITY.fingerprint, store.events)


def test_what_was_written_is_read(store: Store) -> None:
    write_acceptance(store.backend, acceptance())
    assert read(store) == [acceptance()]
    assert list(inside_namespace(store.backend, IDENTITY.fingerprint)) == []


def test_a_later_probe_of_the_two_takes_the_place_of_the_earlier(store: Store) -> None:
    write_acceptance(store.backend, acceptance())
    write_acceptance(store.backend, acceptance(passed=False))
    write_acceptance(store.backend, acceptance(version="5.20.0"))
    assert sorted((one.producer["version"], one.passed) for one in read(store)) == [("5.19.0", False), ("5.20.0", True)]


def test_it_concerns_what_names_all_that_was_probed() -> None:
    assert acceptance().concerns({**HF, "piece_tokens": 1024})
    assert not acceptance().concerns({**HF, "version": "5.20.0"})
    assert not acceptance().concerns({})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, UnsupportedVersion),
        ({"passed": "yes"}, AcceptanceError),
        ({"producer": {"version": "1"}}, AcceptanceError),
        ({"relative_l2": "small"}, AcceptanceError),
        ({"relative_l2": "nan"}, AcceptanceError),
        ({"cosine": "1e-3"}, AcceptanceError),
        ({"created": -1}, AcceptanceError),
        ({"format": "other"}, AcceptanceError),
    ],
)
def test_what_breaks_a_rule_counts_for_nothing(
    store: Store, tmp_path: Path, change: dict[str, object], expected: type
) -> None:
    data = dump_canonical({**json.loads(acceptance().to_json()), **change})
    with pytest.raises(expected):
        Acceptance.from_json(data)
    write_acceptance(store.backend, acceptance())
    (path,) = (tmp_path / "kv").glob("ns/*/a/*.json")
    path.write_bytes(data)
    assert read(store) == []


def test_a_member_of_a_later_release_is_ignored_and_any_other_form_refused() -> None:
    value = {**json.loads(acceptance().to_json()), "seed": 7}
    assert Acceptance.from_json(dump_canonical(value)) == acceptance()
    with pytest.raises(AcceptanceError, match="canonical"):
        Acceptance.from_json(json.dumps(value).encode())


def test_one_that_lies_elsewhere_counts_for_nothing(store: Store, tmp_path: Path) -> None:
    other = Fingerprint("0" * 32)
    data = Acceptance(other, HF, VLLM, True, 0.0, 1.0, 512, 7).to_json()
    write_acceptance(store.backend, acceptance())
    (path,) = (tmp_path / "kv").glob("ns/*/a/*.json")
    path.write_bytes(data)
    assert read(store) == []
    path.rename(path.with_name("note.txt"))
    assert [one.path.rpartition("/")[2] for one in inside_namespace(store.backend, IDENTITY.fingerprint)] == [
        "note.txt"
    ]


def test_a_copy_of_the_store_brings_it_along(store: Store, tmp_path: Path) -> None:
    with store.namespace(IDENTITY, create=True) as namespace:
        put_document(namespace, document(10))
    write_acceptance(store.backend, acceptance())
    with Store.create(str(tmp_path / "copy")) as target:
        apply_migrate(store, target, plan_migrate(store, target))
        assert read(target) == [acceptance()]
