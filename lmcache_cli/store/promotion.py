"""What was read from a store behind is written to the one in front, off the path of whoever asked.

A shard that was fetched whole is copied as `migrate` copies it, byte for byte and under its own nonce (under another
one where this very write was removed here). Of a shard that was fetched in part, the part is written as a shard of its
own, and says what it was made from. A promotion that fails is counted, logged once, and tried by the next read again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lmcache_cli.backends import NoSpace
from lmcache_cli.backends.local import LocalBackend
from lmcache_cli.backends.local.place import place_of
from lmcache_format.encodings import get_encoding
from lmcache_format.shard import RAW

from .copying import copy_bytes, verified
from .events import Event, Events
from .far import Fetched
from .index import Index
from .namespace import Namespace
from .recoding import entry_of_header, provenance_of, recoded_meta, write_encoded
from .state import Entry
from .store import Store

_SIZED_FOR_S = 60.0


@dataclass(frozen=True, slots=True)
class PromotionOptions:
    """Nothing is promoted while the store in front lists more than `max_store_bytes` (None: no bound), while its disk
    has less than `min_free_bytes` free, and for `pause_s` after it was full."""

    is_on: bool = True
    max_store_bytes: int | None = None
    min_free_bytes: int = 1 << 30
    pause_s: float = 30.0


class Promoter:
    """Writes to `namespace` of `store`, by one thread that the first promotion starts; at most `queue_bytes` wait."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        options: PromotionOptions,
        queue_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._options = options
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._events: Events = store.events
        self._paused_until = -float("inf")
        self._is_admitted = False
        self._sized_at = -float("inf")
        self._listed_bytes = 0
        self._is_closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """Threads and locks of this process; what waited is left to the other one."""
        self._changed = threading.Condition()
        self._jobs: deque[Fetched] = deque()
        self._held: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def offer(self, fetched: Fetched) -> None:
        """Take it over; returns at once."""
        name = _name_of(fetched)
        with self._changed:
            is_known = name in self._held
            is_full = sum(self._held.values()) + fetched.memory_bytes > self._queue_bytes
            is_taken = not (is_known or is_full or self._is_closed) and fetched.may_be_kept
            if is_taken:
                self._held[name] = fetched.memory_bytes
                self._jobs.append(fetched)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="lmcache-promote", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if not is_taken:
            fetched.lease.release()
            if not is_known:
                reason = "more waits than may" if is_full else "a part of a lossy shard is not a shard of its own"
                self._events.problem(Event.PROMOTION_SKIPPED, f"{self._store.url}: {reason}", fetched.wanted.name.path)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything so far is written or given up; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, for `timeout_s` at most; what is left then is given up."""
        self.wait_idle(timeout_s)
        with self._changed:
            self._is_closed = True
            dropped = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for fetched in dropped:
            fetched.lease.release()
        self._events.count(Event.PROMOTION_SKIPPED, len(dropped))
        if self._thread is not None:
            self._thread.join(timeout=max(1.0, timeout_s))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                fetched = self._jobs.popleft()
            try:
                self._promote_guarded(fetched)
            finally:
                fetched.lease.release()
                with self._changed:
                    self._held.pop(_name_of(fetched), None)
                    self._changed.notify_all()

    def _promote_guarded(self, fetched: Fetched) -> None:
        where = self._store.url
        try:
            if why := self._why_not(fetched.size_bytes):
                self._events.problem(Event.PROMOTION_SKIPPED, f"{where}: {why}", fetched.wanted.name.path)
                return
            self._promote(fetched)
        except NoSpace as problem:
            self._paused_until = self._clock() + self._options.pause_s
            self._events.problem(Event.PROMOTION_FAILED, where, problem)
        except Exception as problem:  # noqa: BLE001  the serving path: a promotion may fail, the reader may not
            self._events.problem(Event.PROMOTION_FAILED, where, f"{type(problem).__name__}: {problem}")

    def _why_not(self, size_bytes: int) -> str:
        """Why there is no room; empty where there is."""
        if self._clock() < self._paused_until:
            return "it was full a moment ago"
        backend = self._store.backend
        if (
            isinstance(backend, LocalBackend)
            and place_of(backend).free_bytes < self._options.min_free_bytes + size_bytes
        ):
            return f"less than {self._options.min_free_bytes} bytes of its disk would be free"
        most = self._options.max_store_bytes
        if most is None:
            return ""
        if self._clock() - self._sized_at > _SIZED_FOR_S:
            self._listed_bytes, self._sized_at = listed_bytes(self._store), self._clock()
        return f"it would list more than {most} bytes" if self._listed_bytes + size_bytes > most else ""

    def _promote(self, fetched: Fetched) -> None:
        namespace, wanted = self._namespace, fetched.wanted
        if not self._is_admitted:
            self._store.admit(wanted.identity, create=True, missing_ok=False, allow_unverified=True)
            self._is_admitted = True
        namespace.refresh()  # what others removed here must come back as another write
        entry = self._copy(fetched) if fetched.buffer is None else self._write_piece(fetched)
        if entry is not None:
            namespace.record(entry)
            self._listed_bytes += entry.size_bytes
            self._events.count(Event.PROMOTED)

    def _copy(self, fetched: Fetched) -> Entry | None:
        wanted, name = fetched.wanted, fetched.wanted.name
        shard = verified(name, wanted.identity, fetched.lease.view, fetched.version)
        backend, is_removed = self._store.backend, self._namespace.is_removed
        copied = copy_bytes(backend, name, wanted.identity, shard, is_removed=is_removed, read_back=False)
        return entry_of_header(copied.header, copied.crc32c)

    def _write_piece(self, fetched: Fetched) -> Entry | None:
        assert fetched.buffer is not None
        assert fetched.header is not None
        header, encoding = fetched.header, get_encoding(RAW)
        made_of = {"parts": [{**provenance_of(header), "part": str(header.meta.part)}]}
        meta = recoded_meta(header, encoding, self._namespace.writer_id)
        meta = replace(meta, part=fetched.piece, provenance=made_of)
        is_removed = self._namespace.is_removed
        return write_encoded(self._store.backend, meta, fetched.buffer, encoding, is_removed=is_removed).entry


def _name_of(fetched: Fetched) -> str:
    """What is held under: the same piece of the same shard is promoted once at a time."""
    return f"{fetched.wanted.name.path} {fetched.piece}"


def listed_bytes(store: Store) -> int:
    """What the indexes of a store list, of all namespaces. Raises `BackendError`."""
    states = (Index(store.backend, fingerprint).state for fingerprint in store.fingerprints())
    return sum(int(state.adds["size_bytes"].sum()) for state in states)
