"""One namespace for the base model, and one for each adapter, opened when it is first needed."""

from __future__ import annotations

import threading
from dataclasses import replace

from lmcache_cli.store import Namespace, Store, WriterOptions
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity


class Namespaces:
    """The namespaces of one engine in a store. `need` is the part of chunks this process reads or asks for.

    The base model's is opened at once, so that what is wrong is told at the start. Raises what `Store.namespace` does.
    """

    def __init__(
        self,
        store: Store,
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

    def close(self) -> None:
        """Flush and close all of them, and the store."""
        with self._lock:
            for namespace in self._open.values():
                namespace.close()
            self._open.clear()
            self._store.close()
