"""Trying again: transient `Unavailable` only, a few times, with full jitter, never past the deadline of the call.

The deadline bounds tries and pauses; it cannot interrupt a system call or a request, which carry time-outs of their own
(remote back-ends) or block their thread (a hung network file system: the runtime waits for its threads with a limit).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmcache_cli.backends.breaker import CircuitBreaker
from lmcache_cli.backends.errors import AlreadyExists, BackendError, NotFound, Unavailable
from lmcache_cli.backends.protocol import Backend, Durability, ObjectInfo, ReadHandle
from lmcache_cli.backends.wrapper import BackendWrapper, HandleWrapper

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often. The pause before retry n is uniform in [0, min(pause_max_s, pause_s · 2ⁿ)]."""

    deadline_s: float = 30.0
    retries: int = 3
    pause_s: float = 0.1
    pause_max_s: float = 2.0
    breaker_failures: int = 8
    breaker_cooldown_s: float = 10.0


class RetryBackend(BackendWrapper):
    """`inner`, tried again. Tests bring their own clock, sleep and chance.

    After a retry an answer may be about our own first try: put may raise AlreadyExists and delete return False although
    it was this call that did it.
    """

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self.breaker = CircuitBreaker(
            failures=self.policy.breaker_failures,
            cooldown_s=self.policy.breaker_cooldown_s,
            clock=clock,
            url=inner.url,
        )

    def call(self, name: str, attempt: Callable[[], T], first_try: int = 0) -> T:
        """The result of `attempt`, tried again after transient failures. Raises what the last try raised."""
        started = self._clock()
        for tried in range(first_try, self.policy.retries + 1):
            self.breaker.enter(name)
            try:
                result = attempt()
            except Unavailable as error:
                self.note(error)
                if not error.transient or not self._pause(tried, started):
                    raise
            except BackendError:
                self.breaker.answered()
                raise
            except BaseException:
                self.breaker.abandoned()
                raise
            else:
                self.breaker.answered()
                return result
        raise AssertionError("the last try returns or raises")

    def note(self, error: Unavailable) -> None:
        """Count the failure if it says something about the back-end as a whole."""
        if error.transient:
            self.breaker.failed()
        else:
            self.breaker.abandoned()

    def _pause(self, tried: int, started: float) -> bool:
        """Sleep before the next try; False if there is none."""
        pause_s = self._chance() * min(self.policy.pause_max_s, self.policy.pause_s * 2**tried)
        if tried >= self.policy.retries or self._clock() + pause_s - started >= self.policy.deadline_s:
            return False
        self._sleep(pause_s)
        return True

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self.call(name, lambda: self.inner.read(name, offset=offset, length=length))

    def open_read(self, name: str) -> ReadHandle:
        return RetryReadHandle(self.call(name, lambda: self.inner.open_read(name)), self)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        return self.call(name, lambda: self.inner.put(name, parts, durability=durability, if_absent=if_absent))

    def stat(self, name: str) -> ObjectInfo | None:
        return self.call(name, lambda: self.inner.stat(name))

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Tried again only until the first item came; after that a failure is the caller's to handle."""

        def start() -> tuple[ObjectInfo | None, Iterator[ObjectInfo]]:
            items = self.inner.list(prefix, recursive=recursive)
            return next(items, None), items

        first, items = self.call(prefix or "/", start)
        if first is None:
            return
        yield first
        try:
            yield from items
        except Unavailable as error:
            self.note(error)
            raise

    def delete(self, name: str, *, version: str | None) -> bool:
        return self.call(name, lambda: self.inner.delete(name, version=version))

    def move(self, name: str, to: str) -> None:
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            try:
                self.inner.move(name, to)
            except NotFound:
                if tries == 1 or self.inner.stat(to) is None:
                    raise  # otherwise an earlier try did it, and only its answer was lost
            except AlreadyExists:
                if tries == 1 or not self._finish_move(name, to):
                    raise

        self.call(name, attempt)

    def _finish_move(self, name: str, to: str) -> bool:
        """Where an earlier try copied the object, and went no further: remove the original."""
        source, target = self.inner.stat(name), self.inner.stat(to)
        if source is None or target is None or source.crc32c is None:
            return False
        if (source.size_bytes, source.crc32c) != (target.size_bytes, target.crc32c):
            return False
        self.inner.delete(name, version=source.version)
        return True

    def now_ms(self) -> int:
        return self.call("the store's clock", self.inner.now_ms)

    def sync_names(self) -> None:
        self.call("names", self.inner.sync_names)

    def collect_staging(self, *, older_than_ms: int) -> int:
        return self.call("staging", lambda: self.inner.collect_staging(older_than_ms=older_than_ms))


class RetryReadHandle(HandleWrapper):
    """A handle whose reads are tried again; costs nothing while they succeed."""

    __slots__ = ("_backend", "_read_into")

    def __init__(self, inner: ReadHandle, backend: RetryBackend) -> None:
        super().__init__(inner)
        self._backend = backend
        self._read_into = inner.read_into

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        try:
            self._read_into(offset, buffers)
        except Unavailable as error:
            self._backend.note(error)
            if not error.transient or self._backend.policy.retries == 0:
                raise
            self._backend.call(self.name, lambda: self._read_into(offset, buffers), first_try=1)
