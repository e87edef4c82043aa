"""A store on real object stores, from end to end, and through what servers do at bad moments."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmcache_cli.backends import Durability, Unavailable, open_backend
from lmcache_cli.backends.cloud.backend import CloudBackend, Deadlines
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from lmcache_cli.store import Namespace, PutStatus, Store, StoreExists, WriterOptions
from lmcache_cli.store.probing import Outcome, probe_backend
from lmcache_cli.store.survey import Level
from lmcache_cli.store.verify import VerifyOptions, verify
from lmcache_format.identity import Identity
from tests.flaky_proxy import Answer, Reset, flaky_proxy
from tests.servers import Bucket
from tests.store.pattern import document, hit, put_document, real_identity, tiny_identity

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TOKENS = document(42)


@pytest.fixture(params=["s3", "gcs"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return found


@pytest.fixture
def url(bucket: Bucket) -> str:
    return bucket.url(f"store-{os.urandom(6).hex()}")


@pytest.fixture
def identity() -> Identity:
    return tiny_identity()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.create(url) as made:
        yield made


def reopened(url: str, identity: Identity, tokens: list[int]) -> int:
    """Tokens that another process would find, every element compared."""
    with Store.open(url) as store, store.namespace(identity, missing_ok=True) as namespace:
        return hit(namespace, tokens)


def test_what_was_put_is_matched_read_and_verified(store: Store, url: str, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        assert set(put_document(namespace, TOKENS)) == {PutStatus.STORED}
        assert hit(namespace, TOKENS) == len(TOKENS)
    assert reopened(url, identity, TOKENS) == len(TOKENS)
    assert reopened(url, identity, [*TOKENS[:17], 1, 2, 3]) == 16
    for level in Level:
        report = verify(store, VerifyOptions(level=level))
        assert (report.findings, report.num_good) == ([], 11)
    with pytest.raises(StoreExists):
        Store.create(url)


def test_chunks_of_real_size_come_back_in_ranges(store: Store, url: str) -> None:
    identity = real_identity()
    tokens = document(2 * 256)
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, tokens)
    assert reopened(url, identity, tokens) == 512


def test_index_is_compacted_and_old_segments_go(store: Store, url: str, identity: Identity) -> None:
    options = WriterOptions(flush_after_chunks=1, grace_ms=0)
    with store.namespace(identity, create=True, writer=options) as namespace:
        put_document(namespace, document(4 * 40, seed=3))
        time.sleep(1.1)  # ages are told in whole seconds
        namespace.compact()
        time.sleep(1.1)
        namespace.compact()
    segments = list(store.backend.list(f"ns/{identity.fingerprint}/m"))
    assert len(segments) < 20
    assert reopened(url, identity, document(4 * 40, seed=3)) == 160


def test_place_keeps_what_it_promises(store: Store, bucket: Bucket) -> None:
    found = {probe.name: probe for probe in probe_backend(store.backend)}
    assert {probe.outcome for probe in found.values()} <= {Outcome.WORKS, Outcome.LACKING}
    assert found["create once"].outcome is Outcome.WORKS
    keeps_versions = bucket.scheme == "s3"  # the emulator of the other does not, the service does
    assert (found["delete by version"].outcome is Outcome.WORKS) == keeps_versions
    assert list(store.backend.list("tmp")) == []


_WRITER = """
import sys
from lmcache_cli.store import Store
from tests.store.pattern import document, put_document, tiny_identity
url, seeds = sys.argv[1], [int(seed) for seed in sys.argv[2:]]
with Store.open(url) as store, store.namespace(tiny_identity(), create=True) as namespace:
    for seed in seeds:
        print(*(status.value for status in put_document(namespace, document(40, seed=seed))), flush=True)
"""


def test_two_writers_share_a_store(store: Store, url: str, identity: Identity) -> None:
    seeds = [["1", "2", "3"], ["3", "2", "4"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), url, *own],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for own in seeds
    ]
    said = [writer.communicate(timeout=120)[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert set(" ".join(said).split()) <= {"stored", "present", "adopted"}
    for seed in (1, 2, 3, 4):
        assert reopened(url, identity, document(40, seed=seed)) == 40
    report = verify(store, VerifyOptions(level=Level.FULL))
    assert report.findings == []
    assert report.num_good == 40


def test_damage_is_a_miss_and_goes_to_quarantine(store: Store, url: str, identity: Identity) -> None:
    with store.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    victim = next(
        info
        for info in store.backend.list(f"ns/{identity.fingerprint}/c")
        if b'"lmcache.depth":"3"' in store.backend.read(info.name)
    )
    content = bytearray(store.backend.read(victim.name))
    content[-1] ^= 1
    store.backend.put(victim.name, [bytes(content)], durability=Durability.NONE, if_absent=False)
    assert reopened(url, identity, TOKENS) == 12
    assert [info.size_bytes for info in store.backend.list("quarantine")] == [len(content)]
    with store.namespace(identity, create=True) as namespace:
        assert PutStatus.STORED in put_document(namespace, TOKENS)
    assert reopened(url, identity, TOKENS) == len(TOKENS)


def test_storms_are_misses_and_nothing_is_forgotten(bucket: Bucket, identity: Identity) -> None:
    prefix = f"store-{os.urandom(6).hex()}"
    with Store.create(bucket.url(prefix)) as direct, direct.namespace(identity, create=True) as namespace:
        put_document(namespace, TOKENS)
    with flaky_proxy(bucket.server.endpoint) as proxy:
        opened = open_backend(bucket.url(prefix, proxy.endpoint))
        assert isinstance(opened, RetryBackend)
        policy = RetryPolicy(retries=1, pause_s=0.01, breaker_failures=1000)
        with Store.open(RetryBackend(opened.inner, policy)) as store, store.namespace(identity) as namespace:
            assert hit(namespace, TOKENS) == len(TOKENS)
            for effect in (Answer(503), Answer(403), Reset()):
                proxy.rule = lambda request, effect=effect: effect  # type: ignore[misc]
                assert hit(namespace, TOKENS) == 0
                proxy.forget()
                assert hit(namespace, TOKENS) == len(TOKENS)
        report = verify(store, VerifyOptions(level=Level.FULL))  # a store that was closed opens again
    assert report.findings == []


def test_lost_answers_while_storing_lose_nothing(bucket: Bucket, identity: Identity) -> None:
    prefix = f"store-{os.urandom(6).hex()}"
    Store.create(bucket.url(prefix)).close()
    with flaky_proxy(bucket.server.endpoint) as proxy:
        opened = open_backend(bucket.url(prefix, proxy.endpoint))
        assert isinstance(opened, RetryBackend)
        backend = RetryBackend(opened.inner, RetryPolicy(pause_s=0.01))
        proxy.rule = lambda request: (
            Reset(after_asking=True) if request.method in ("PUT", "POST") and request.number % 3 == 0 else None
        )
        with Store.open(backend) as store, store.namespace(identity, create=True) as namespace:
            statuses = put_document(namespace, TOKENS)
    assert set(statuses) <= {PutStatus.STORED, PutStatus.ADOPTED, PutStatus.PRESENT}
    assert reopened(bucket.url(prefix), identity, TOKENS) == len(TOKENS)


def test_server_killed_while_chunks_are_written_loses_none_that_was_confirmed(s3_bucket: Bucket) -> None:
    identity = real_identity()
    url = s3_bucket.url(f"store-{os.urandom(6).hex()}")
    documents = [document(256, seed=seed) for seed in range(8)]
    Store.create(url).close()
    opened = open_backend(url)
    assert isinstance(opened, RetryBackend)
    assert isinstance(opened.inner, CloudBackend)
    bare = CloudBackend(opened.inner.service, Deadlines(call_s=5.0))
    confirmed: list[list[int]] = []

    def write(namespace: Namespace, tokens: list[int]) -> None:
        put_document(namespace, tokens)
        namespace.flush()
        confirmed.append(tokens)

    def write_and_kill(namespace: Namespace, tokens: list[int]) -> None:
        """The server goes right after the first confirmation, while another writer is in the middle of its chunk."""
        write(namespace, tokens)
        with killing:
            if len(confirmed) == 1:
                s3_bucket.server.kill()

    killing = threading.Lock()
    with Store.open(bare) as store:
        namespace = store.namespace(identity, create=True)
        with ThreadPoolExecutor(2) as pool:
            works = [pool.submit(write_and_kill, namespace, tokens) for tokens in documents]
        failures = [work.exception() for work in works if work.exception() is not None]
        assert all(isinstance(failure, Unavailable) for failure in failures)
        assert failures, "the server was killed too late to matter"
        with pytest.raises(Unavailable):
            bare.stat("store.000001.json")
        s3_bucket.server.start()
        with Store.open(url) as other, other.namespace(identity) as reader:
            assert [hit(reader, tokens) for tokens in confirmed] == [256] * len(confirmed)
        for tokens in documents:
            write(namespace, tokens)
        namespace.close()
    with Store.open(url) as other:
        with other.namespace(identity) as reader:
            assert [hit(reader, tokens) for tokens in documents] == [256] * len(documents)
        assert verify(other, VerifyOptions(level=Level.FULL)).findings == []
