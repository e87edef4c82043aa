"""C38: an exception while an object is written still publishes it. Absent or whole, never short; and a rerun finishes.

fsspec's files commit on close, and `__exit__` and `__del__` close whatever happened. So ours are put whole: here on
such a file system, and on SeaweedFS, with every way in which writing three parts can end.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from lmcache_cli.backends import Backend, BackendError, Durability, open_backend
from lmcache_cli.backends.cloud.body import Body
from lmcache_cli.store import Store
from lmcache_cli.store.index import Index
from lmcache_cli.store.migrate import MigrateOptions, MigrateResult, apply_migrate, plan_migrate
from lmcache_cli.store.verify import verify
from tests.store.made_kv import CHUNK_TOKENS, KV_IDENTITY, read_kv, store_of_kv
from tests.store.pattern import document

SMALL_BYTES = 3000
"""Below: superblocks, identities, probes. They are to get through."""
PARTS = [b"a" * 70_000, b"b" * 70_000, b"c" * 70_000]
NUM_CHUNKS = 6
TOKENS = document(NUM_CHUNKS * CHUNK_TOKENS)


class Broken(Exception):
    """What goes wrong while a part is written."""


class OnClose(AbstractBufferedFile):
    """As files of object stores are: what was written until it is closed becomes the object, however it is closed."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.publish(self.path, b"".join(self.parts))
        return True


def thirds(data: memoryview) -> Iterator[memoryview]:
    step = len(data) // 3 + 1
    for start in range(0, len(data), step):
        yield data[start : start + step]


class CommitsOnClose(MemoryFileSystem):
    """`failing(n)` is called before the n-th write of a file."""

    protocol = "commits-on-close"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing: ClassVar[Callable[[int], None]] = staticmethod(lambda number: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("commits-on-close://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **options)
        opened = OnClose(self, path, "wb", block_size=5 << 20)
        write, numbers = opened.write, iter(range(1 << 20))

        def checked(data: Any) -> int:
            if len(data) > SMALL_BYTES // 3:
                type(self).failing(next(numbers))
            return int(write(data))

        opened.write = checked
        return opened

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self.open(path, "wb") as file:
            for piece in thirds(memoryview(value)):
                file.write(bytes(piece))

    def publish(self, path: str, content: bytes) -> None:
        with MemoryFileSystem._open(self, path, "wb") as file:
            file.write(content)


def raises(error: type[BaseException]) -> Callable[[int], None]:
    def fail(number: int) -> None:
        if number == 2:
            raise error("after part 2")

    return fail


@dataclass
class Place:
    """Where objects go, and how to make the next put fail after its second part."""

    url: str
    fail: Callable[[Callable[[int], None]], None]


@pytest.fixture(params=["commits on close", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "commits on close":
        fsspec.register_implementation("commits-on-close", CommitsOnClose, clobber=True)
        yield Place(
            f"commits-on-close://place-{os.urandom(4).hex()}",
            lambda failing: monkeypatch.setattr(CommitsOnClose, "failing", staticmethod(failing)),
        )
        CommitsOnClose.store.clear()
        return
    pieces = Body.pieces

    def fail(failing: Callable[[int], None]) -> None:
        def checked(self: Body) -> Iterator[memoryview]:
            numbers = iter(range(1 << 20))
            for piece in pieces(self):
                for third in thirds(piece):
                    if self.size_bytes > SMALL_BYTES:
                        failing(next(numbers))
                    yield third

        monkeypatch.setattr(Body, "pieces", checked)

    yield Place(request.getfixturevalue("s3_url"), fail)


def objects(backend: Backend, below: str = "") -> dict[str, int]:
    return {info.name: info.size_bytes for info in backend.list(below)}


@pytest.mark.parametrize("error", [Broken, OSError, KeyboardInterrupt, GeneratorExit])
def test_a_put_that_ends_on_the_way_publishes_nothing(place: Place, error: type[BaseException]) -> None:
    if error in (KeyboardInterrupt, GeneratorExit) and place.url.startswith("s3"):
        pytest.skip("would end the event loop; see test_interrupted_put_has_ended_and_publishes_nothing")
    backend = open_backend(place.url)
    place.fail(raises(error))
    with pytest.raises((error, BackendError)):
        backend.put("ns/x", PARTS, durability=Durability.DATA)
    gc.collect()
    assert backend.stat("ns/x") is None
    assert not objects(backend, "ns")
    place.fail(lambda number: None)
    backend.put("ns/x", PARTS, durability=Durability.DATA)
    assert backend.read("ns/x") == b"".join(PARTS)
    assert objects(backend, "ns") == {"ns/x": sum(map(len, PARTS))}
    backend.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with store_of_kv(tmp_path / "src", TOKENS) as made:
        yield made


def archive(source: Store, url: str, result: MigrateResult) -> MigrateResult:
    with Store.open(url) as target:
        return apply_migrate(source, target, plan_migrate(source, target, MigrateOptions(concurrency=1)), result)


@pytest.mark.parametrize("error", [Broken, OSError])
def test_an_archive_that_breaks_off_holds_whole_shards_and_goes_on(
    place: Place, source: Store, error: type[Exception]
) -> None:
    Store.create(place.url).close()
    begun: list[int] = []

    def third_object(number: int) -> None:
        begun.extend([number] * (number == 0))
        if len(begun) >= 3 and number == 1:
            raise error("in the third object, and in all after it")

    place.fail(third_object)
    first = MigrateResult()
    with pytest.raises((error, BackendError)):
        archive(source, place.url, first)
    gc.collect()
    place.fail(lambda number: None)
    sizes = objects(source.backend, f"ns/{KV_IDENTITY.fingerprint}/c")
    with Store.open(place.url) as target:
        there = objects(target.backend, f"ns/{KV_IDENTITY.fingerprint}/c")
        assert there.items() <= sizes.items()
        assert len(there) < NUM_CHUNKS
        listed = Index(target.backend, KV_IDENTITY.fingerprint).state
        assert len(listed) <= len(there)  # only what stands there is listed
        assert verify(target).num_damaged == verify(target).num_missing == 0
    second = archive(source, place.url, MigrateResult())
    assert second.is_whole
    assert second.num_copied + second.num_present == NUM_CHUNKS
    with Store.open(place.url) as target, target.namespace(KV_IDENTITY) as namespace:
        assert read_kv(namespace, TOKENS) == len(TOKENS)
        assert verify(target).is_sound
    assert archive(source, place.url, MigrateResult()).num_copied == 0
