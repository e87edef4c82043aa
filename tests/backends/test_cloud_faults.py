"""C36 and C38 on object stores: whatever network and service do, unknown is not absent and nothing appears in part."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lmcache_cli.backends import (
    AlreadyExists,
    Backend,
    Durability,
    NoSpace,
    NotFound,
    Unavailable,
    Unsupported,
    open_backend,
)
from lmcache_cli.backends.cloud.backend import CloudBackend, Deadlines
from lmcache_cli.backends.retry import RetryBackend, RetryPolicy
from tests.backends.contract import pattern
from tests.flaky_proxy import (
    Answer,
    BreakOff,
    Effect,
    FlakyProxy,
    FlipUpload,
    HalfUpload,
    Hang,
    Request,
    Reset,
    flaky_proxy,
)
from tests.servers import Bucket

pytestmark = pytest.mark.slow
NONE = Durability.NONE
BIG = 20_000_000
QUICK = RetryPolicy(pause_s=0.01, pause_max_s=0.05)


@dataclass
class Place:
    """The same place reached directly, through a proxy, and through it with retries."""

    proxy: FlakyProxy
    direct: Backend
    bare: CloudBackend
    retried: RetryBackend

    def always(self, effect: Effect) -> None:
        self.proxy.rule = lambda request: effect

    def first(self, count: int, effect: Effect, *methods: str) -> None:
        """The first so many requests of these methods from now on."""
        self.proxy.counts.clear()
        self.proxy.rule = lambda request: effect if request.method in methods and request.number <= count else None


@pytest.fixture(params=["s3", "gcs"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    bucket: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    prefix = f"faults-{os.urandom(6).hex()}"
    with flaky_proxy(bucket.server.endpoint) as proxy:
        opened, direct = open_backend(bucket.url(prefix, proxy.endpoint)), open_backend(bucket.url(prefix))
        assert isinstance(opened, RetryBackend)
        assert isinstance(opened.inner, CloudBackend)
        bare = opened.inner
        bare.put("known", [pattern(100_000, 1)], durability=NONE)
        yield Place(proxy, direct, bare, RetryBackend(bare, QUICK))
        proxy.forget()
        bare.close()
        direct.close()


def after_the_first(effect: Effect, request: Request) -> Effect | None:
    return effect if request.number > 1 else None


def calls(backend: Backend) -> dict[str, Callable[[], object]]:
    return {
        "stat": lambda: backend.stat("known"),
        "stat of what is absent": lambda: backend.stat("absent"),
        "read": lambda: backend.read("known"),
        "read of a range": lambda: backend.read("absent", offset=5, length=7),
        "open_read": lambda: backend.open_read("known"),
        "list": lambda: list(backend.list()),
        "flat list": lambda: list(backend.list("", recursive=False)),
        "delete": lambda: backend.delete("known", version=None),
        "delete of a version": lambda: backend.delete("known", version="1"),
        "move": lambda: backend.move("known", "moved"),
        "put": lambda: backend.put("new", [b"x"], durability=NONE),
        "put over": lambda: backend.put("known", [b"x"], durability=NONE, if_absent=False),
        "now_ms": backend.now_ms,
        "collect_staging": lambda: backend.collect_staging(older_than_ms=0),
    }


@pytest.mark.parametrize(
    ("effect", "transient"),
    [
        (Answer(503), True),
        (Answer(500, b"not even XML <"), True),
        (Answer(429), True),
        (Answer(403), False),
        (Answer(401), False),
        (Answer(400), False),
        (Reset(), True),
    ],
    ids=["503", "500", "429", "403", "401", "400", "reset"],
)
def test_no_fault_is_taken_for_absence(place: Place, effect: Effect, transient: bool) -> None:
    place.always(effect)
    for call in calls(place.bare).values():
        with pytest.raises(Unavailable) as caught:
            call()
        assert caught.value.transient == transient
    place.proxy.forget()
    assert place.direct.read("known") == pattern(100_000, 1)
    assert [info.name for info in place.direct.list() if not info.name.startswith("tmp/")] == ["known"]


def test_only_404_means_absent(place: Place) -> None:
    assert place.bare.stat("absent") is None
    with pytest.raises(NotFound):
        place.bare.read("absent")


def test_missing_bucket_is_not_an_empty_store(place: Place) -> None:
    url = place.direct.url.replace("://kv-", "://no-such-")
    nowhere = open_backend(url)
    for call in (lambda: nowhere.stat("a"), lambda: nowhere.read("a"), lambda: list(nowhere.list())):
        with pytest.raises(Unavailable, match="there is no bucket") as caught:
            call()
        assert not caught.value.transient
    nowhere.close()


@pytest.mark.parametrize("effect", [Answer(503), Reset(), Answer(429)], ids=["503", "reset", "429"])
def test_a_storm_that_ends_is_sat_out(place: Place, effect: Effect) -> None:
    for operation, call in calls(place.retried).items():
        if "absent" in operation or operation in ("stat", "read", "open_read", "list", "flat list", "now_ms"):
            place.first(3, effect, "GET", "HEAD")
            try:
                call()
            except NotFound:
                assert operation == "read of a range"
    assert place.retried.read("known") == pattern(100_000, 1)


def test_a_storm_that_goes_on_is_told_after_four_tries(place: Place) -> None:
    place.always(Answer(503))
    place.proxy.counts.clear()
    with pytest.raises(Unavailable):
        place.retried.stat("known")
    assert place.proxy.counts.total() == 4


def test_full_is_told_as_full(place: Place) -> None:
    place.first(99, Answer(507), "PUT", "POST")
    with pytest.raises(NoSpace):
        place.bare.put("new", [b"x"], durability=NONE)
    assert place.direct.stat("new") is None


def test_answers_that_break_off_are_no_answers(place: Place) -> None:
    content = pattern(BIG, 3)
    place.direct.put("big", [content], durability=NONE)
    for cut in (0, 1, 1000, 100_000):
        place.always(BreakOff(cut))
        with pytest.raises(Unavailable):
            place.bare.read("big")
    place.proxy.forget()
    with place.retried.open_read("big") as handle:
        target = bytearray(BIG)
        place.first(2, BreakOff(3_000_000), "GET")
        handle.read_into(0, [memoryview(target)])
        assert target == content


def test_reading_ends_before_the_buffers_are_given_back(place: Place) -> None:
    place.direct.put("big", [pattern(BIG, 3)], durability=NONE)
    with place.bare.open_read("big") as handle:
        target = bytearray(BIG)
        place.first(1, BreakOff(10), "GET")
        with pytest.raises(Unavailable):
            handle.read_into(0, [memoryview(target)])
        seen = bytes(target)
        time.sleep(0.5)
        assert target == seen, "a range was still being read"


def test_listing_that_fails_on_the_second_page_raises(place: Place) -> None:
    for number in range(1100):
        place.direct.put(f"many/{number}", [b""], durability=NONE)
    place.proxy.counts.clear()
    for effect in (Answer(503), Reset(), BreakOff(5000)):
        place.proxy.counts.clear()
        place.proxy.rule = partial(after_the_first, effect)
        listing = place.retried.list("many")
        assert len([next(listing) for _ in range(1000)]) == 1000
        with pytest.raises(Unavailable):
            next(listing)


def test_lost_answer_of_a_create_is_told_as_existing_and_the_object_is_whole(place: Place) -> None:
    content = pattern(300_000, 5)
    place.first(1, Reset(after_asking=True), "PUT", "POST")
    with pytest.raises((AlreadyExists, Unavailable)):
        place.retried.put("ours", [content], durability=NONE)
    assert place.direct.read("ours") == content


def test_lost_answer_of_a_delete_is_told_as_gone(place: Place) -> None:
    place.first(1, Reset(after_asking=True), "DELETE")
    place.retried.delete("known", version=None)
    assert place.direct.stat("known") is None


def test_lost_answers_of_a_move_are_no_failure(place: Place) -> None:
    for method in ("PUT", "POST", "DELETE"):
        place.direct.put(f"from-{method.lower()}", [pattern(5000, 2)], durability=NONE)
        place.first(1, Reset(after_asking=True), method)
        place.retried.move(f"from-{method.lower()}", f"to/{method.lower()}")
        assert place.direct.read(f"to/{method.lower()}") == pattern(5000, 2)
        assert place.direct.stat(f"from-{method.lower()}") is None


def test_half_an_upload_publishes_nothing(place: Place) -> None:
    place.first(1, HalfUpload(), "PUT", "POST")
    with pytest.raises(Unavailable):
        place.bare.put("half", [pattern(2_000_000, 1), pattern(2_000_000, 2)], durability=NONE)
    time.sleep(0.5)
    assert place.direct.stat("half") is None
    assert place.retried.put("half", [b"again"], durability=NONE).size_bytes == 5


def test_upload_that_arrives_altered_is_an_error(place: Place, request: pytest.FixtureRequest) -> None:
    place.first(1, FlipUpload(), "PUT", "POST")
    with pytest.raises(Unavailable):
        place.bare.put("altered", [pattern(100_000, 1)], durability=NONE)
    if place.direct.url.startswith("s3"):  # the emulator of the other does not compare checksums; the service does
        assert place.direct.stat("altered") is None


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the tests run in the background, where a shell has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_put_has_ended_and_publishes_nothing(place: Place) -> None:
    place.first(1, Hang(4.0), "PUT", "POST")
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        place.bare.put("interrupted", [bytes(1000)], durability=NONE)
    assert time.monotonic() - started < 3.5
    time.sleep(0.2)
    assert place.direct.stat("interrupted") is None


def test_no_call_waits_longer_than_its_deadline(place: Place) -> None:
    place.always(Hang(8.0))
    impatient = CloudBackend(place.bare.service, Deadlines(call_s=1.0))
    for name in ("stat", "read", "list", "delete", "now_ms"):
        started = time.monotonic()
        with pytest.raises(Unavailable, match="no answer within 1 s") as caught:
            calls(impatient)[name]()
        assert caught.value.transient
        assert time.monotonic() - started < 6.0


@pytest.mark.parametrize("refused", [Answer(501), None], ids=["refused", "ignored"])
def test_services_without_conditions_are_known_and_looked_at_first(place: Place, refused: Answer | None) -> None:
    if refused is None and place.direct.url.startswith("s3"):
        pytest.skip("its requests are signed, conditions and all")
    plain = CloudBackend(place.bare.service)

    def no_conditions(request: Request) -> Effect | None:
        return refused if request.has_condition and request.method in ("PUT", "POST", "DELETE") else None

    place.proxy.rule = no_conditions
    place.proxy.hide_conditions = refused is None
    try:
        made = plain.put("a", [b"1"], durability=NONE)
        assert not plain.capabilities.conditional_create
        assert not plain.capabilities.conditional_delete
        with pytest.raises(AlreadyExists):
            plain.put("a", [b"2"], durability=NONE)
        assert plain.read("a") == b"1"
        assert plain.delete("a", version=made.version)
    finally:
        place.proxy.hide_conditions = False


def test_missing_credentials_come_with_a_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="ProfileNotFound") as raised:
        open_backend("s3://bucket/place?profile=nobody").stat("a")
    assert "?profile=" in raised.value.next_step
    assert not raised.value.transient


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIDEXAMPLE:wJalrXUtnFEMI@bucket/place?endpoint_url=http://user:hunter22@127.0.0.1:9",
        "gs://bucket/place?token=/home/me/key-of-mine.json&endpoint_url=http://user:hunter22@127.0.0.1:9",
        "s3://AKIDEXAMPLE:wJalrXUtnFEMI@bucket/place?secret=wJalrXUtnFEMI",
        "sftp://me:hunter22@127.0.0.1:9/place?key=wJalrXUtnFEMI",
    ],
)
def test_credentials_are_never_shown(url: str) -> None:
    said = []
    try:
        backend = open_backend(url)
        said.append(backend.url)
        backend.stat("a")
    except (Unavailable, Unsupported) as error:
        said.append(str(error))
    assert said
    for secret in ("AKIDEXAMPLE", "wJalrXUtnFEMI", "hunter22", "key-of-mine"):
        assert secret not in " ".join(said)
