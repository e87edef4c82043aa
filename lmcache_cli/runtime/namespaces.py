"""One namespace for the base model, and one for each adapter, opened when it is first needed."""

from __future__ import annotations

import threading
from dataclasses import replace

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_cli.store.chain import StoreChain
from lmcache_cli.store.events import FAR_EVENTS
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity


class Namespaces:
    """The namespaces of one engine in a store. `need` is the part of chunks this process reads or asks for.

    The base model's is opened at once, so that what is wrong is told at the start. Raises what `Store.namespace` does.
    An adapter's is opened while its request waits, so that stores behind are not waited for any more then.
    """

    def __init__(
        self,
        store: Store | StoreChain,
        identity: Identity,
        *,
        need: Part,
        writer: WriterOptions | None = None,
        allow_unverified: bool = False,
        allow_lossy: bool = False,
    ) -> None:
        self.identity = identity
        self.need = need
        self._store = store
        self._writer = writer
        self._allow_unverified = allow_unverified
        self._allow_lossy = allow_lossy
        self._lock = threading.Lock()
        self._open: dict[str | None, Namespace] = {}
        self.of(identity.adapter)
        if isinstance(store, StoreChain):
            store.wait_s = 0.0

    def of(self, adapter: str | None) -> Namespace:
        """The namespace of the model with an adapter (`sha256:…`), or without one."""
        with self._lock:
            found = self._open.get(adapter)
            if found is None:
                found = self._open[adapter] = self._store.namespace(
                    replace(self.identity, adapter=adapter),
                    create=self._writer is not None,
                    missing_ok=True,
                    need=self.need,
                    writer=self._writer,
                    allow_unverified=self._allow_unverified,
                    allow_lossy=self._allow_lossy,
                )
            return found

    def archive_counts(self) -> dict[str, int]:
        """What was counted of stores behind, and of what they gave."""
        return {event.value: count for event in FAR_EVENTS if (count := self._store.events[event])}

    def close(self) -> None:
        """Flush and close all of them, and the store."""
        with self._lock:
            for namespace in self._open.values():
                namespace.close()
            self._open.clear()
            self._store.close()
