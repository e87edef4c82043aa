"""From blocking callers to fsspec's event loop, which runs in a thread of its own.

A call returns only when its coroutine has ended, whatever ended it: the buffers it was given are then nobody else's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from lmcache_cli.backends.errors import Unavailable

T = TypeVar("T")
_CANCEL_S = 10.0


def run(work: Coroutine[Any, Any, T], *, limit_s: float, what: str) -> T:
    """The result of the coroutine. Raises what it raises, and `Unavailable` where it takes longer than `limit_s`."""
    ended = threading.Event()

    async def bounded() -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(bounded(), get_loop())
    try:
        return future.result()
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer within {limit_s:.0f} s") from error
    except BaseException:
        if not ended.is_set():  # interrupted while waiting
            future.cancel()
            ended.wait(_CANCEL_S)
        raise


def run_aside(work: Coroutine[Any, Any, None], *, limit_s: float) -> None:
    """Run it from wherever a finaliser happens to run; whether it succeeds is nobody's business any more."""
    loop = get_loop()
    if not loop.is_running():
        work.close()
        return
    future = asyncio.run_coroutine_threadsafe(work, loop)
    if _is_loop_of_this_thread(loop):
        return
    with suppress(Exception):
        future.result(limit_s)


def _is_loop_of_this_thread(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def all_of(works: Iterable[Callable[[], Coroutine[Any, Any, T]]], *, at_once: int) -> list[T]:
    """Run them together, `at_once` at most. The first failure ends the others, and is raised once they have ended."""
    room = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with room:
            return await work()

    tasks = [asyncio.ensure_future(one(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
