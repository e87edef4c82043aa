"""Chunks in memory, and in stores behind it: the memory holds what was used last, the stores what was ever saved.

Several stores are read as one `StoreChain`; nothing here knows how many there are.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from lmcache_cli.store import ChunkRef, Namespace
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, KeyList

from .memory import MemoryObj, MemoryPool
from .saving import BackgroundWriter, SaveJob

_WRITE_CHUNKS = 8


class StorageManager:
    """`num_chunks` may be in memory beside those on their way. Methods may be called from several threads.

    A `MemoryObj` that is returned is the caller's claim: release it. Chunks are read from `source` (None: memory alone)
    and written to every one of `targets`, each by a thread of its own; one that is not open now (None) goes without.
    Namespaces stay the caller's.
    """

    def __init__(
        self,
        identity: Identity,
        part: Part,
        source: Namespace | None,
        targets: Sequence[Callable[[], Namespace | None]],
        num_chunks: int,
    ) -> None:
        self.identity = identity
        self.counts: Counter[str] = Counter()
        self._source = source
        self._targets = list(targets)
        self._num_chunks = num_chunks
        self._pool = MemoryPool(identity, part, num_chunks + _WRITE_CHUNKS)
        self._writers = [BackgroundWriter() for _ in targets]
        self._lock = threading.Lock()
        self._hot: OrderedDict[ChunkKey, MemoryObj] = OrderedDict()

    def allocate(self, num_tokens: int, *, timeout_s: float = 0.0) -> MemoryObj | None:
        """Memory for a chunk; chunks that were used longest ago make room. None where everything is on its way."""
        memory = self._pool.lease(self.identity, num_tokens)
        while memory is None and self._evict():
            memory = self._pool.lease(self.identity, num_tokens)
        if memory is None and timeout_s:
            memory = self._pool.lease(self.identity, num_tokens, timeout_s=timeout_s)
        return memory

    def put(self, chunk: ChunkRef, memory_obj: MemoryObj) -> None:
        """Keep a chunk; takes the claim over. Stores are written in the background."""
        for target, writer in zip(self._targets, self._writers, strict=True):
            namespace = target()
            if namespace is None:
                self.counts["save_not_open"] += 1
            else:
                writer.submit(SaveJob(namespace, chunk, memory_obj.share()))
        self._keep(chunk.key, memory_obj)

    def batched_put(self, chunks: Sequence[ChunkRef], memory_objs: Sequence[MemoryObj]) -> None:
        """Keep several chunks."""
        for chunk, memory_obj in zip(chunks, memory_objs, strict=True):
            self.put(chunk, memory_obj)

    def get(self, chunk: ChunkRef, *, timeout_s: float = 1.0) -> MemoryObj | None:
        """A verified chunk, from memory or from a store; None where nobody has it, or no memory."""
        with self._lock:
            hot = self._hot.get(chunk.key)
            if hot is not None:
                self._hot.move_to_end(chunk.key)
                self.counts["hit_memory"] += 1
                return hot.share()
        if self._source is not None and self._source.match_keys(KeyList(chunk.key)):
            memory = self.allocate(chunk.num_tokens, timeout_s=timeout_s)
            if memory is None:
                self.counts["no_memory"] += 1
                return None
            if self._source.read([chunk], [memory.buffer]).fault is None:
                self.counts["hit_store"] += 1
                self._keep(chunk.key, memory.share())
                return memory
            memory.release()
        self.counts["miss"] += 1
        return None

    def contains(self, chunk: ChunkRef) -> bool:
        """Whether somebody has it. Changes nothing."""
        with self._lock:
            if chunk.key in self._hot:
                return True
        return self._source is not None and bool(self._source.match_keys(KeyList(chunk.key)))

    def is_kept(self, chunk: ChunkRef) -> bool:
        """Whether it need not be put: it is in memory, or in the nearest store. Changes nothing."""
        with self._lock:
            if chunk.key in self._hot:
                return True
        return self._source is not None and bool(self._source.num_kept(KeyList(chunk.key)))

    def clear(self) -> int:
        """Forget what is in memory; stores keep theirs. Returns how many chunks that were."""
        count = 0
        while self._evict():
            count += 1
        return count

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the background writes; False where that took too long."""
        return all(writer.wait_idle(timeout_s) for writer in self._writers)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is pending, and forget what is in memory."""
        for writer in self._writers:
            writer.close(timeout_s)
        self.clear()

    @property
    def num_hot(self) -> int:
        """Chunks in memory."""
        with self._lock:
            return len(self._hot)

    @property
    def num_leased(self) -> int:
        """Chunks' worth of memory in use, those in memory included."""
        return self._pool.num_leased

    def _keep(self, key: ChunkKey, memory_obj: MemoryObj) -> None:
        with self._lock:
            if self._num_chunks and key not in self._hot:
                self._hot[key] = memory_obj
                while len(self._hot) > self._num_chunks:
                    self._hot.popitem(last=False)[1].release()
                return
        memory_obj.release()

    def _evict(self) -> bool:
        with self._lock:
            if not self._hot:
                return False
            self._hot.popitem(last=False)[1].release()
            return True
