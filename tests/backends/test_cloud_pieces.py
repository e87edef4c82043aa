"""The pieces of the object-store back-end that need no server: URLs, bodies, ranges, checksums."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.backends import Unavailable
from lmcache_cli.backends.cloud.body import Body
from lmcache_cli.backends.cloud.bridge import all_of, run
from lmcache_cli.backends.cloud.checksums import crc32c_of
from lmcache_cli.backends.cloud.reading import cut, scatter
from lmcache_cli.backends.cloud.urls import BucketUrl, redacted, without_password

PARTS = st.lists(st.binary(max_size=50), max_size=8)
OPTIONS = frozenset({"endpoint_url", "token"})
PUBLIC = {"endpoint_url": None, "token": frozenset({"anon"})}


@given(PARTS, st.integers(1, 60))
def test_a_body_is_its_parts_however_it_is_read(parts: list[bytes], size: int) -> None:
    body = Body([memoryview(part) for part in parts])
    whole = b"".join(parts)
    assert (len(body), body.crc32c) == (len(whole), crc32c(whole))
    assert crc32c_of(body.crc32c_base64) == crc32c(whole)
    for _ in range(2):
        assert body.seek(0) == 0
        assert b"".join(iter(lambda: bytes(body.read(size)), b"")) == whole
        assert body.tell() == len(whole)
    assert b"".join(body.pieces()) == whole
    assert body.seek(-len(whole), 2) == 0


async def joined(body: Body) -> bytes:
    return b"".join([bytes(piece) async for piece in body])


def test_a_body_can_be_sent_twice() -> None:
    body = Body([bytes(600_000), b"tail"])
    assert asyncio.run(joined(body)) == asyncio.run(joined(body)) == bytes(600_000) + b"tail"


@given(PARTS, st.integers(1, 60))
def test_ranges_cover_the_buffers_in_order(parts: list[bytes], size: int) -> None:
    buffers = [memoryview(bytearray(part)) for part in parts]
    runs = cut(buffers, size)
    assert b"".join(view.tobytes() for run in runs for view in run) == b"".join(parts)
    sizes = [sum(view.nbytes for view in run) for run in runs]
    assert all(found == size for found in sizes[:-1])
    assert all(0 < found <= size for found in sizes[-1:])
    scatter(memoryview(bytes(reversed(b"".join(parts)))), buffers)
    assert b"".join(buffers) == bytes(reversed(b"".join(parts)))


@pytest.mark.parametrize("text", [None, "", "AAAA", "not base64", "AAAAAAAAAAA=", "AAAAAA==-3"])
def test_other_checksums_are_none(text: str | None) -> None:
    assert crc32c_of(text) is None


def test_urls_are_read_and_shown() -> None:
    url = BucketUrl.parse("s3://bucket/a/b/?endpoint_url=http://127.0.0.1:9000&token=anon", options=OPTIONS)
    assert (url.bucket, url.prefix) == ("bucket", "a/b")
    assert url.shown(PUBLIC) == "s3://bucket/a/b?endpoint_url=http://127.0.0.1:9000&token=anon"
    assert url.secrets(PUBLIC) == ()


def test_what_is_secret_in_a_url_is_hidden() -> None:
    text = "s3://key1:pass%2Fword@bucket?endpoint_url=https://me:mine@host/x&token=/home/a.json"
    url = BucketUrl.parse(text, options=OPTIONS)
    assert (url.key, url.secret) == ("key1", "pass/word")
    assert url.shown(PUBLIC) == "s3://***@bucket?endpoint_url=https://***@host/x&token=***"
    secrets = url.secrets(PUBLIC)
    assert redacted("at pass/word, pass%2Fword: key1 mine /home/a.json", secrets) == "at ***, ***: *** *** ***"
    assert "pass" not in repr(url)
    assert without_password("no url@all") == "no url@all"


def test_a_call_that_takes_too_long_ends() -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(Unavailable, match="x: no answer within 0 s"):
        run(endless(), limit_s=0.05, what="x")
    assert ended.is_set()


def test_the_first_failure_ends_the_others_before_it_is_raised() -> None:
    running = set[int]()

    async def work(number: int) -> None:
        running.add(number)
        try:
            await asyncio.sleep(0.01)
            if number == 2:
                raise Unavailable("broken")
            await asyncio.sleep(60)
        finally:
            running.remove(number)

    started = time.monotonic()
    with pytest.raises(Unavailable, match="broken"):
        run(all_of([lambda number=number: work(number) for number in range(5)], at_once=3), limit_s=30, what="x")  # type: ignore[misc]
    assert not running
    assert time.monotonic() - started < 10
