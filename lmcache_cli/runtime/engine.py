"""`LMCacheEngine`: store, look up and retrieve the KV of token sequences, under the field's names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_cli.backends import Backend, open_backend
from lmcache_cli.store import Events, Namespace, NoStore, Store, StoreExists, WriterOptions
from lmcache_cli.store.chain import ChainedNamespace, ChainOptions
from lmcache_cli.store.far import Distant, FarNamespace
from lmcache_format.geometry import Part, part_bytes, rank_part
from lmcache_format.identity import Identity
from lmcache_format.keys import Tokens

from .config import ConfigError, LMCacheEngineConfig
from .gpu_connector import GPUConnectorInterface
from .storage_manager import StorageManager
from .token_database import ChunkedTokenDatabase, Mask, TokenChunk, skipped_by


@dataclass(frozen=True, slots=True)
class LMCacheEngineMetadata:
    """Whose KV it is, and which of `world_size` tensor-parallel ranks this process is."""

    identity: Identity
    world_size: int = 1
    worker_id: int = 0

    @property
    def part(self) -> Part:
        """What this rank holds of every chunk."""
        return rank_part(self.identity, self.worker_id, self.world_size)


class LMCacheEngine:
    """One rank's cache. Build it with `LMCacheEngineBuilder`; `close` it, or destroy it there."""

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata, gpu_connector: GPUConnectorInterface
    ) -> None:
        identity = replace(metadata.identity, chunk_tokens=config.chunk_size)
        if config.save_only_first_rank and metadata.world_size > 1 and not identity.is_latent:
            raise ConfigError(
                "'save_only_first_rank' is for ranks that hold the same KV (latents); these hold heads each"
            )
        self.config = config
        self.metadata = replace(metadata, identity=identity)
        self.gpu_connector = gpu_connector
        self.token_database = ChunkedTokenDatabase(identity)
        part = self.metadata.part
        self._stores: list[Store] = []
        self._source: Namespace | None = None
        targets = self._open_stores(identity, part) if config.stores else []
        chunk_bytes = part_bytes(identity, part, identity.chunk_tokens)
        num_hot = int(config.max_local_cpu_size * 2**30) // chunk_bytes if config.local_cpu else 0
        self.storage_manager = StorageManager(identity, part, self._source, targets, num_hot)
        self._saves = metadata.worker_id == 0 or not config.save_only_first_rank

    def store(self, tokens: Tokens, mask: Mask | None = None, *, salt: str | None = None, **kwargs: Any) -> int:
        """Copy the chunks of `tokens` that neither memory nor the nearest store has out of the engine's memory, and
        keep them; stores are written in the background. `kwargs` are the connector's (`slot_mapping`). Returns how many
        tokens were taken; where memory runs out, the rest is left, since chunks without their prefix are of no use.
        """
        if not self._saves:
            return 0
        taken = 0
        for chunk in self.token_database.process_tokens(tokens, mask, salt=salt):
            if self.storage_manager.is_kept(chunk.ref):
                continue
            memory = self.storage_manager.allocate(chunk.ref.num_tokens)
            if memory is None:
                break
            try:
                self.gpu_connector.from_gpu(memory, chunk.start, chunk.end, **kwargs)
            except BaseException:
                memory.release()
                raise
            self.storage_manager.put(chunk.ref, memory)
            taken += chunk.end - chunk.start
        return taken

    def lookup(self, tokens: Tokens, *, salt: str | None = None) -> int:
        """How many leading tokens this rank can retrieve now. Changes nothing."""
        found = 0
        for chunk in self.token_database.process_tokens(tokens, salt=salt):
            if not self.storage_manager.contains(chunk.ref):
                break
            found = chunk.end
        return found

    def retrieve(
        self, tokens: Tokens, mask: Mask | None = None, *, salt: str | None = None, **kwargs: Any
    ) -> npt.NDArray[np.bool_]:
        """Write KV to the engine's memory. Returns for each token whether it was written and verified: True for a run
        that begins where `mask` does."""
        num_tokens = len(tokens)
        done = np.zeros(num_tokens, np.bool_)
        skipped_by(mask, num_tokens, self.token_database.identity.chunk_tokens)
        for chunk in self.token_database.process_tokens(tokens, mask, salt=salt):
            if not self._retrieve(chunk, kwargs):
                break
            done[chunk.start : chunk.end] = True
        return done

    def _retrieve(self, chunk: TokenChunk, kwargs: dict[str, Any]) -> bool:
        memory = self.storage_manager.get(chunk.ref)
        if memory is None:
            return False
        with memory:
            self.gpu_connector.to_gpu(memory, chunk.start, chunk.end, **kwargs)
        return True

    def _open_stores(self, identity: Identity, part: Part) -> list[Callable[[], Namespace | None]]:
        """Set what is read; returns what is written. The second store may open later, or not at all."""
        writer = WriterOptions(producer={"engine": "runtime"})
        first, *others = self.config.stores
        behind = [Distant(open_backend(url)) for url in others]
        options = self.config.chain_options
        store = _open(first)
        self._stores.append(store)
        store.admit(identity, create=True, missing_ok=False, allow_unverified=False)
        fars = [self._far(backend, identity, part, store.events, options, writer) for backend in behind]
        self._source = source = ChainedNamespace(store, identity, fars, options, need=part, writer=writer)
        try:
            for far in fars:
                far.ready(options.far.timeout_s, is_strict=True)
        except BaseException:
            self._close_stores()
            raise
        return [lambda: source, *(far.ready for far in fars)]

    def _far(
        self,
        backend: Backend,
        identity: Identity,
        part: Part,
        events: Events,
        options: ChainOptions,
        writer: WriterOptions,
    ) -> FarNamespace:
        def opener() -> Namespace:
            store = _open(backend)
            self._stores.append(store)
            return store.namespace(identity, create=True, need=part, writer=writer)

        return FarNamespace(backend.url, identity, opener, events, options.far)

    def clear(self) -> int:
        """Forget what is in memory. Returns how many chunks; stores keep theirs."""
        return self.storage_manager.clear()

    def close(self) -> None:
        """Write what is pending and let go of everything. Twice is fine."""
        self.storage_manager.close()
        self._close_stores()

    def _close_stores(self) -> None:
        if self._source is not None:
            self._source.close()
        for store in self._stores:
            store.close()
        self._source, self._stores = None, []


class LMCacheEngineBuilder:
    """The engines of this process, by name."""

    _lock = threading.Lock()
    _engines: dict[str, tuple[LMCacheEngine, LMCacheEngineConfig, LMCacheEngineMetadata]] = {}  # noqa: RUF012

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheEngineMetadata,
        gpu_connector: GPUConnectorInterface,
    ) -> LMCacheEngine:
        """The engine of that name, made where there is none. Raises `ValueError` where it was made for something
        else."""
        with cls._lock:
            known = cls._engines.get(instance_id)
            if known is None:
                engine = LMCacheEngine(config, metadata, gpu_connector)
                cls._engines[instance_id] = (engine, config, metadata)
                return engine
            engine, made_for, made_of = known
            if (made_for, made_of) != (config, metadata):
                raise ValueError(f"engine {instance_id!r} exists with another configuration; destroy it first")
            return engine

    @classmethod
    def get(cls, instance_id: str) -> LMCacheEngine | None:
        """The engine of that name, if there is one."""
        with cls._lock:
            known = cls._engines.get(instance_id)
            return None if known is None else known[0]

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and forget an engine. One that does not exist is fine."""
        with cls._lock:
            known = cls._engines.pop(instance_id, None)
        if known is not None:
            known[0].close()


def _open(where: str | Backend) -> Store:
    try:
        return Store.open(where)
    except NoStore:
        pass
    try:
        return Store.create(where)
    except StoreExists:  # another rank was faster
        return Store.open(where)
