"""Faults on demand, for tests: at the level of a back-end, or of the system calls below `LocalBackend`.

script = FaultScript(Fault("put", Fail(NoSpace("full")), on_call=2), Fault("read_into", FlipBit(8 * 4096)))
backend = FaultBackend(LocalBackend(path), script)
backend = LocalBackend(path, faulty_calls(FaultScript(Fault("pwritev", FullAfter(50_000)))))
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, TypeVar

from lmcache_cli.backends.errors import NoSpace, ShortRead, Unavailable
from lmcache_cli.backends.local.syscalls import SystemCalls
from lmcache_cli.backends.protocol import Backend, Durability, ObjectInfo, ReadHandle
from lmcache_cli.backends.wrapper import BackendWrapper, HandleWrapper

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise and do nothing."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LoseResponse:
    """Do it, then raise all the same."""

    error: Exception


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Read: one bit of the object, counted from its start, arrives flipped."""

    bit: int


@dataclass(frozen=True, slots=True)
class CutShort:
    """Read: the object seems to end at that byte. Write (pwritev): no more than that in one call."""

    at_bytes: int


@dataclass(frozen=True, slots=True)
class FullAfter:
    """Write: ENOSPC once that many bytes went through, over all calls."""

    size_bytes: int
    code: int = errno.ENOSPC


@dataclass(frozen=True, slots=True)
class TruncateListing:
    """List: end quietly after so many items, as back-ends must not."""

    keep: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Say that the call was reached, then wait to be let go, for a bounded time."""

    reached: threading.Event
    go_on: threading.Event
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Delay:
    seconds: float
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process as a crash does, before the call or after it."""

    after: bool = False
    hook: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)


Effect = Fail | LoseResponse | FlipBit | CutShort | FullAfter | TruncateListing | Hold | Delay | Kill


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens when. `operation` is a method of the back-end or a field of `SystemCalls`; `*` is any of them."""

    operation: str
    effect: Effect
    on_call: int | None = None
    """The how manieth matching call, from 1; None: every one."""
    name: str = ""
    """Only for objects with this in their name."""


class FaultScript:
    """The faults of a test, and how many calls there were. Thread-safe."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self._lock = threading.Lock()
        self._matched = [0] * len(faults)
        self.calls: dict[str, int] = {}
        self.written_bytes = 0

    def effects(self, operation: str, name: str = "") -> list[Effect]:
        """Those of this call, which is counted."""
        due: list[Effect] = []
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            for index, fault in enumerate(self.faults):
                if fault.operation in (operation, "*") and fault.name in name:
                    self._matched[index] += 1
                    if fault.on_call in (None, self._matched[index]):
                        due.append(fault.effect)
        return due

    def room(self, effect: FullAfter, wanted: int) -> int:
        """How many of the wanted bytes still fit; they are counted as written."""
        with self._lock:
            fits = max(0, min(wanted, effect.size_bytes - self.written_bytes))
            self.written_bytes += fits
            return fits


def before(effects: Sequence[Effect]) -> None:
    """What comes before the call: waiting, dying, failing."""
    for effect in effects:
        if isinstance(effect, Hold):
            effect.reached.set()
            if not effect.go_on.wait(effect.timeout_s):
                raise TimeoutError(f"nobody let the held call go on within {effect.timeout_s} s")
        elif isinstance(effect, Delay):
            effect.sleep(effect.seconds)
        elif isinstance(effect, Kill) and not effect.after:
            effect.hook()
        elif isinstance(effect, Fail):
            raise effect.error


def after(effects: Sequence[Effect]) -> None:
    """What comes after the call: dying, losing the response."""
    for effect in effects:
        if isinstance(effect, Kill) and effect.after:
            effect.hook()
        elif isinstance(effect, LoseResponse):
            raise effect.error


class FaultBackend(BackendWrapper):
    """`inner`, with the faults of the script."""

    def __init__(self, inner: Backend, script: FaultScript) -> None:
        super().__init__(inner)
        self.script = script

    def _run(self, operation: str, name: str, call: Callable[[], T]) -> T:
        effects = self.script.effects(operation, name)
        before(effects)
        result = call()
        after(effects)
        return result

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        effects = self.script.effects("read", name)
        before(effects)
        with self.inner.open_read(name) as handle:
            content = bytearray(max(handle.size - offset, 0) if length is None else length)
            handle.read_into(offset, [memoryview(content)])
            damage(effects, name, offset, [memoryview(content)])
            after(effects)
            return bytes(content)

    def open_read(self, name: str) -> ReadHandle:
        inner = self._run("open_read", name, lambda: self.inner.open_read(name))
        return FaultReadHandle(inner, self.script)

    def put(
        self, name: str, parts: Sequence[memoryview | bytes], *, durability: Durability, if_absent: bool = True
    ) -> ObjectInfo:
        effects = self.script.effects("put", name)
        before(effects)
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        for effect in effects:
            if isinstance(effect, FullAfter) and self.script.room(effect, size_bytes) < size_bytes:
                raise NoSpace(f"{name}: full after {effect.size_bytes} bytes", name=name)
        result = self.inner.put(name, parts, durability=durability, if_absent=if_absent)
        after(effects)
        return result

    def stat(self, name: str) -> ObjectInfo | None:
        return self._run("stat", name, lambda: self.inner.stat(name))

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        effects = self.script.effects("list", prefix)
        before(effects)
        items = self.inner.list(prefix, recursive=recursive)
        for effect in effects:
            if isinstance(effect, TruncateListing):
                items = islice(items, effect.keep)
        yield from items
        after(effects)

    def delete(self, name: str, *, version: str | None) -> bool:
        return self._run("delete", name, lambda: self.inner.delete(name, version=version))

    def move(self, name: str, to: str) -> None:
        self._run("move", name, lambda: self.inner.move(name, to))

    def now_ms(self) -> int:
        return self._run("now_ms", "", self.inner.now_ms)

    def sync_names(self) -> None:
        self._run("sync_names", "", self.inner.sync_names)

    def collect_staging(self, *, older_than_ms: int) -> int:
        return self._run("collect_staging", "", lambda: self.inner.collect_staging(older_than_ms=older_than_ms))


class FaultReadHandle(HandleWrapper):
    """A handle with the faults of `read_into`."""

    __slots__ = ("_script",)

    def __init__(self, inner: ReadHandle, script: FaultScript) -> None:
        super().__init__(inner)
        self._script = script

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        effects = self._script.effects("read_into", self.name)
        before(effects)
        self.inner.read_into(offset, buffers)
        damage(effects, self.name, offset, buffers)
        after(effects)


def damage(effects: Sequence[Effect], name: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """What happens to bytes that were read from the offset on."""
    for effect in effects:
        if isinstance(effect, CutShort) and offset + sum(buffer.nbytes for buffer in buffers) > effect.at_bytes:
            raise ShortRead(f"{name}: the object ends at {effect.at_bytes}", name=name)
        if isinstance(effect, FlipBit):
            _flip(effect.bit, offset, buffers)


def _flip(bit: int, offset: int, buffers: Sequence[memoryview]) -> None:
    position = bit // 8 - offset
    for buffer in buffers:
        if 0 <= position < buffer.nbytes:
            buffer[position] ^= 1 << bit % 8
        position -= buffer.nbytes


def faulty_calls(script: FaultScript, base: SystemCalls | None = None) -> SystemCalls:
    """System calls with the faults of the script; errors to raise are OSErrors there."""
    base = base or SystemCalls()
    made = {field.name: _faulty_call(script, field.name, getattr(base, field.name)) for field in fields(base)}
    made["pwritev"] = _faulty_call(script, "pwritev", _limited_write(script, base.pwritev))
    return SystemCalls(**made)


def _faulty_call(script: FaultScript, operation: str, call: Callable[..., T]) -> Callable[..., T]:
    def faulty(*args: Any, **kwargs: Any) -> T:
        effects = script.effects(operation, " ".join(value for value in args if isinstance(value, str)))
        before(effects)
        result = call(*args, **kwargs)
        after(effects)
        return result

    return faulty


def _limited_write(script: FaultScript, pwritev: Callable[..., int]) -> Callable[..., int]:
    """pwritev that writes less (CutShort), or nothing more once the device is full (FullAfter)."""
    limits = [fault.effect for fault in script.faults if fault.operation == "pwritev"]

    def limited(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        allowed = sum(buffer.nbytes for buffer in buffers)
        for effect in limits:
            if isinstance(effect, CutShort):
                allowed = min(allowed, effect.at_bytes)
            elif isinstance(effect, FullAfter):
                allowed = script.room(effect, allowed)
                if allowed == 0:
                    raise OSError(effect.code, os.strerror(effect.code))
        return pwritev(fd, _head(buffers, allowed), offset)

    return limited


def _head(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    head: list[memoryview] = []
    for buffer in buffers:
        if size_bytes <= 0:
            break
        head.append(buffer[:size_bytes])
        size_bytes -= buffer.nbytes
    return head


def unavailable(code: int = errno.EIO) -> Unavailable:
    """What a back-end says when the device fails."""
    return Unavailable(f"injected: {os.strerror(code)}")
