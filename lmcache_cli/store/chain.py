"""Several stores as one: the nearest is asked first, and gets a copy of what another one had to be asked for.

    with StoreChain.open(["/srv/kv", "s3://bucket/kv"]) as chain, chain.namespace(identity) as namespace:
        buffers, result = namespace.load(namespace.match(token_ids))    # from /srv/kv, else from the bucket

What is written goes to the first store alone. The others are only read: whatever they hold, prune and migrate there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from lmcache_cli.backends import Backend, BackendError
from lmcache_cli.backends.closing import Closing
from lmcache_format.geometry import Part
from lmcache_format.identity import Identity
from lmcache_format.keys import ChunkKey, KeyList, MultimodalItem
from lmcache_format.shard import ShardMeta
from lmcache_format.superblock import Operation

from .acceptances import copy_acceptances, read_acceptances
from .chunk import ChunkBuffer
from .errors import NoSuchNamespace, Refused, StoreError
from .events import Event, Events
from .far import FarNamespace, FarOptions, FarStore, Takes
from .live_index import WriterOptions
from .matching import ChunkRef, Match, ReadResult
from .namespace import Namespace
from .promotion import Promoter, PromotionOptions
from .reading import Fault, ReadFault
from .state import Entry
from .store import Store


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """How the stores behind the first are asked, and what of theirs is written to the first."""

    far: FarOptions = field(default_factory=FarOptions)
    promotion: PromotionOptions = field(default_factory=PromotionOptions)

    @classmethod
    def of(
        cls, *, timeout_s: float, promote: bool, promote_max_store_bytes: int | None, promote_min_free_bytes: int
    ) -> ChainOptions:
        """From what configurations of engines say."""
        return cls(
            FarOptions(timeout_s=timeout_s), PromotionOptions(promote, promote_max_store_bytes, promote_min_free_bytes)
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens `start` to `stop` of a match would be read from the store at `url`."""

    url: str
    start: int
    stop: int


class ChainedNamespace(Namespace):
    """The namespace of the first store, which reads from others what the first lacks.

    A match is the longest prefix that the stores hold together, each chunk whole in one of them. It waits for the first
    store at most, as always; what is known of the others is in memory. A read takes each chunk from the first store
    that has it, sound: what is missing or damaged in one is asked of the next.
    """

    behind: tuple[FarNamespace, ...] = ()
    takes: Takes | None = None
    """Whose shards a read takes from the stores behind, for a reader that cares who computed; None: anybody's."""
    _promoter: Promoter | None = None

    def __init__(
        self,
        store: Store,
        identity: Identity,
        behind: Sequence[FarNamespace],
        options: ChainOptions | None = None,
        *,
        need: Part | None = None,
        allow_lossy: bool = False,
        writer: WriterOptions | None = None,
        reader_threads: int = 6,
        may_write: bool = True,
    ) -> None:
        super().__init__(
            store.backend,
            identity,
            need=need,
            allow_lossy=allow_lossy,
            writer=writer,
            events=store.events,
            reader_threads=reader_threads,
            may_write=may_write and store.may(Operation.WRITE),
        )
        self.behind = tuple(behind)
        self._asks_far = False
        promotion = (options or ChainOptions()).promotion
        if promotion.is_on and self._may_write and self.behind:
            queue_bytes = min(far.memory_bytes for far in self.behind) // 2
            self._promoter = Promoter(store, self, promotion, queue_bytes)

    def match_keys(self, keys: KeyList) -> int:
        """How many chunks, from the first on, some store has."""
        count = super().match_keys(keys)
        while count < len(keys):
            rest = keys.after(count)
            further = max((self._matched_behind(far, rest) for far in self.behind), default=0)
            if not further:
                break
            count += further
            if count < len(keys):
                count += super().match_keys(keys.after(count))
        return count

    def num_kept(self, keys: KeyList) -> int:
        """See `Namespace`: the first store alone counts. What was computed although another lists it is kept here."""
        return super().match_keys(keys)

    def hear_of(self, keys: KeyList) -> None:
        """See `Namespace`; waits for the stores behind until their deadline."""
        super().hear_of(keys)
        for far in self.behind:
            known = self.match_keys(keys)
            if known == len(keys):
                return
            far.hear_of(keys.after(known))

    def shards(self, key: ChunkKey) -> list[Entry]:
        """The shards of the first store that has the chunk, whole."""
        holder = self._holder(key)
        return super().shards(key) if holder is None else holder.shards(key)

    def headers(self, wanted: Sequence[tuple[ChunkRef, Entry]]) -> list[ShardMeta | None]:
        """See `Namespace`. Every shard is asked of the store that has its chunk; those behind have until their
        deadline."""
        found: list[ShardMeta | None] = []
        for holder, group in groupby(wanted, key=lambda one: self._holder(one[0].key)):
            ask = super().headers if holder is None else holder.headers
            found += ask(list(group))
        return found

    def read(self, chunks: Sequence[ChunkRef], out: Sequence[ChunkBuffer]) -> ReadResult:
        """See `Namespace`. A store behind that does not answer in time is a miss, and left alone for a while."""
        self._asks_far = False
        return super().read(chunks, out)

    def answers(self, match: Match) -> list[Answer]:
        """Which store each run of chunks would be read from. Changes nothing."""
        runs: list[Answer] = []
        for chunk in match.chunks():
            start = chunk.depth * self.identity.chunk_tokens
            holder = self._holder(chunk.key)
            url = self._backend.url if holder is None else holder.url
            if runs and runs[-1].url == url:
                runs[-1] = replace(runs[-1], stop=start + chunk.num_tokens)
            else:
                runs.append(Answer(url, start, start + chunk.num_tokens))
        return runs

    def wait_promoted(self, timeout_s: float) -> bool:
        """Wait until what was read from stores behind is in the first one, or given up."""
        return self._promoter is None or self._promoter.wait_idle(timeout_s)

    def close(self) -> None:
        """Write what waits to be promoted, for some seconds; let go of all stores' namespaces."""
        if self._promoter is not None:
            self._promoter.close()
        super().close()
        for far in self.behind:
            far.close()

    # ---- how --------------------------------------------------------------------------------------------------

    def _match_tail(
        self, parent: ChunkKey, depth: int, words: Any, items: Sequence[MultimodalItem], start: int
    ) -> ChunkRef | None:
        best = super()._match_tail(parent, depth, words, items, start)
        for far in self.behind:
            namespace = far.answering()
            tail = None if namespace is None else namespace._match_tail(parent, depth, words, items, start)
            if tail is not None and (best is None or tail.num_tokens > best.num_tokens):
                best = tail
        return best

    def _matched_behind(self, far: FarNamespace, keys: KeyList) -> int:
        try:
            return far.match_keys(keys)
        except Exception as problem:  # noqa: BLE001  the serving path: any doubt is a miss
            self.events.problem(Event.FAR_UNAVAILABLE, far.url, f"{type(problem).__name__}: {problem}")
            return 0

    def _read_chunk(self, chunk: ChunkRef, out: ChunkBuffer) -> int:
        try:
            return super()._read_chunk(chunk, out)
        except ReadFault as fault:
            if not self.behind:
                raise
            return self._read_behind(chunk, out, fault)

    def _read_behind(self, chunk: ChunkRef, out: ChunkBuffer, first: ReadFault) -> int:
        self._asks_far = True
        told = first
        for far in self.behind:
            try:
                fetched = far.read(chunk, out, self.takes)
            except ReadFault as fault:
                told = fault if told.fault is Fault.MISSING else told
                continue
            size_bytes = sum(one.size_bytes for one in fetched)
            for one in fetched:
                if self._promoter is None:
                    one.lease.release()
                else:
                    self._promoter.offer(one)
            return size_bytes
        raise told

    def _most_readers(self) -> int:
        return self._reader_threads if self._asks_far else super()._most_readers()

    def _holder(self, key: ChunkKey) -> FarNamespace | None:
        """The first store behind that has a chunk which the first store lacks; None: the first store, or nobody."""
        if self._count_present(KeyList(key)):
            return None
        return next((far for far in self.behind if self._matched_behind(far, KeyList(key))), None)

    def _is_anywhere(self) -> bool:
        """Whether any store lists a chunk."""
        open_ones = [namespace for far in self.behind if (namespace := far.answering()) is not None]
        return any(len(namespace.state()) for namespace in (self, *open_ones))

    def _after_fork(self) -> None:
        super()._after_fork()
        for far in self.behind:
            far.after_fork()
        if self._promoter is not None:
            self._promoter.after_fork()


class StoreChain(Closing):
    """An open store with others behind it, which need not answer. Opens namespaces as `Store` does.

    `wait_s` is how long opening a namespace waits for the stores behind; what is not open by then is opened behind the
    scenes, and found from then on.
    """

    def __init__(self, store: Store, behind: Sequence[str | Backend], options: ChainOptions | None = None) -> None:
        """Raises `Unsupported` for a URL that no back-end is for, `Refused` for one store twice."""
        self.first = store
        self.options = options or ChainOptions()
        self.wait_s = self.options.far.timeout_s
        self.behind = tuple(FarStore(where) for where in behind)
        urls = [store.url, *(far.url for far in self.behind)]
        if len(set(urls)) < len(urls):
            raise Refused(f"a store stands twice in {', '.join(urls)}", next_step="name each store once")

    @classmethod
    def open(cls, places: Sequence[str | Backend], options: ChainOptions | None = None) -> StoreChain:
        """Open the first of some stores, with the others behind it, in this order. Raises what `Store.open` does."""
        if not places:
            raise Refused("a chain of no stores", next_step="name at least one")
        store = Store.open(places[0])
        try:
            return cls(store, places[1:], options)
        except BaseException:
            store.close()
            raise

    @property
    def url(self) -> str:
        """Where the first store lies."""
        return self.first.url

    @property
    def backend(self) -> Backend:
        """The first store's."""
        return self.first.backend

    @property
    def events(self) -> Events:
        """What was counted, the stores behind included."""
        return self.first.events

    def namespace(
        self,
        identity: Identity,
        *,
        create: bool = False,
        missing_ok: bool = True,
        need: Part | None = None,
        allow_lossy: bool = False,
        allow_unverified: bool = False,
        writer: WriterOptions | None = None,
        reader_threads: int = 6,
        may_write: bool = True,
    ) -> ChainedNamespace:
        """Open the namespace of an identity in all stores; by default one that none has is an empty one. Without
        `may_write` nothing changes in any of them.

        Raises what `Store.namespace` does, and `StoreError` where a store behind answers within `wait_s` that it cannot
        be used: there is none, or it is of a newer release. One that does not answer is no error.
        """
        self.first.admit(identity, create=create, missing_ok=True, allow_unverified=allow_unverified)
        behind = [
            self._far_namespace(far, identity, need, allow_lossy, allow_unverified, reader_threads, may_write)
            for far in self.behind
        ]
        chained = ChainedNamespace(
            self.first,
            identity,
            behind,
            self.options,
            need=need,
            allow_lossy=allow_lossy,
            writer=writer,
            reader_threads=reader_threads,
            may_write=may_write,
        )
        try:
            deadline = time.monotonic() + self.wait_s
            for far in behind:
                far.begin()  # all at once
            for far in behind:
                far.ready(deadline - time.monotonic(), is_strict=True)
            if not missing_ok and not chained._is_anywhere():
                raise NoSuchNamespace(
                    f"{self.url} and the stores behind it have nothing for {identity.model!r} ({identity.fingerprint})",
                    next_step="see: lmcache ls",
                )
        except StoreError:
            chained.close()
            raise
        return chained

    def _far_namespace(
        self,
        far: FarStore,
        identity: Identity,
        need: Part | None,
        allow_lossy: bool,
        allow_unverified: bool,
        reader_threads: int,
        may_write: bool,
    ) -> FarNamespace:
        def opener() -> Namespace:
            store = far.open()
            store.admit(identity, create=False, missing_ok=True, allow_unverified=allow_unverified)
            if may_write and self.options.promotion.is_on and self.first.may(Operation.WRITE):
                self._bring_acceptances(store, identity)
            return Namespace(
                store.backend,
                identity,
                need=need,
                allow_lossy=allow_lossy,
                events=store.events,
                reader_threads=reader_threads,
                may_write=False,
            )

        return FarNamespace(far.url, identity, opener, self.events, self.options.far)

    def _bring_acceptances(self, store: Store, identity: Identity) -> None:
        """What is read from behind was computed by the engines of others: what probes found of them is needed here."""
        try:
            if read_acceptances(store.backend, identity.fingerprint, self.events):
                self.first.admit(identity, create=True, missing_ok=False, allow_unverified=True)
                copy_acceptances(store.backend, self.first.backend, identity.fingerprint, self.events)
        except BackendError as problem:
            self.events.problem(Event.PROMOTION_FAILED, f"{self.url}: acceptances", problem)

    def close(self) -> None:
        """Give back what the back-ends hold."""
        self.first.close()
        for far in self.behind:
            try:
                far.close()
            except BackendError as problem:
                self.events.problem(Event.FAR_UNAVAILABLE, far.url, problem)
