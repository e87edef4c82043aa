"""Warm a store through an engine that saves by itself: ask it for one token of each document, and see what arrives.

The engine (a vLLM process with our connector, or a server that runs one) loads what is present, computes the rest, and
saves in the background. So what counts is what the store has afterwards: documents are asked for again as long as that
helps, since an engine whose buffers are full saves the rest of a document the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_cli.store import Namespace, Store
from lmcache_cli.store.index import Index
from lmcache_format.keys import ChunkKey

from .producer import TokenIds
from .warming import WarmDocument, WarmReport, label_documents, label_progress

SETTLE_S = 15.0
POLL_S = 0.2
REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine said of document `number`. `num_cached` tokens it did not compute, None where it does not tell;
    `tokens` are the ids it computed, where it tells them. `problem` is empty unless it did not compute."""

    number: int
    num_tokens: int = 0
    num_cached: int | None = None
    tokens: TokenIds | None = None
    problem: str = ""


class Asker(Protocol):
    """An engine that computes documents and saves them."""

    @property
    def max_tokens(self) -> int | None:
        """The longest document it computes; None where there is no limit, or it is not known."""
        ...

    @property
    def saves_tails(self) -> bool:
        """Whether it saves the rest of a document that fills no chunk."""
        ...

    def ask(self, numbers: Sequence[int]) -> Iterator[Asked]:
        """Compute documents, several at a time, in any order; blocks. Raises `ModelError` where it cannot go on."""
        ...


@dataclass(slots=True)
class AskedReport(WarmReport):
    """What was done, and how many shards the namespace has, before and after."""

    shards_before: int = 0
    shards_after: int = 0


@dataclass(slots=True)
class _Item:
    """A document on its way: `wanted` of its tokens are to be in the store, `present` are."""

    number: int
    document: WarmDocument
    wanted: int
    present: int
    told: int = 0
    is_guess: bool = False

    @property
    def is_done(self) -> bool:
        return 0 < self.wanted <= self.present


def warm_through(
    namespace: Namespace,
    start: Callable[[], Asker],
    documents: Sequence[WarmDocument],
    *,
    saves_tails: bool = True,
    guesses: Collection[int] = (),
    progress: Callable[[int], None] = lambda tokens: None,
    settle_s: float = SETTLE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AskedReport:
    """Have an engine compute and save what is missing of the documents; `start` is called once something is.

    Names are recorded first, as `warm` does. With `saves_tails` off, a document counts as complete when its full chunks
    are there. Token ids of the documents numbered in `guesses` are what this side believes: where the engine tells
    others, those count. After each round what the store has is looked at until it changes no more for `settle_s`.
    Raises `ModelError` where the engine cannot be used, `BackendError`.
    """
    started = clock()
    report = AskedReport(num_documents=len(documents), num_tokens=sum(len(one.tokens) for one in documents))
    namespace.refresh()
    items = list(_items(namespace, documents, saves_tails, report))
    report.shards_before = len(namespace.state())  # with those of them that no index listed
    for item in items:
        item.is_guess = item.number in guesses
    label_documents(namespace, [_cut(item) for item in items if not item.is_guess])
    known = {key for item in items for key in _present_keys(namespace, item)}
    for item in items:
        report.tokens_present += item.present
        report.num_present_before += item.present > 0
        _tell(item, item.present, progress)
    try:
        missing = [item for item in items if not item.is_done]
        if missing:
            asker = start()
            missing = list(_fitting(asker, missing, report))
            _rounds(namespace, asker, missing, report, progress, _Waiting(settle_s, clock, sleep))
    finally:
        _count(namespace, items, known, report)
        report.num_complete = sum(item.is_done for item in items)
        if report.num_complete < len(items):
            label_progress(namespace, [_cut(item) for item in items if item.wanted and not item.is_done])
        namespace.flush()
        report.seconds = clock() - started
    return report


def count_shards(store: Store) -> int:
    """Shards of all namespaces, as the index has them. Raises `BackendError`."""
    return sum(len(Index(store.backend, fingerprint).state) for fingerprint in store.fingerprints())


def wait_for_shards(
    store: Store,
    before: int,
    *,
    settle_s: float = SETTLE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until the number of shards has changed no more for a while; that number. For engines of which nobody knows
    what they were to save."""
    count, changed_at = before, clock()
    while clock() - changed_at < settle_s:
        sleep(REFRESH_S)
        found = count_shards(store)
        if found != count:
            count, changed_at = found, clock()
    return count


@dataclass(frozen=True, slots=True)
class _Waiting:
    settle_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def _items(
    namespace: Namespace, documents: Sequence[WarmDocument], saves_tails: bool, report: WarmReport
) -> Iterator[_Item]:
    size = namespace.identity.chunk_tokens
    for number, document in enumerate(documents):
        count = len(document.tokens)
        wanted = count if saves_tails else count // size * size
        if count == 0:
            report.failures.append((document.name, "the document is empty: there is nothing to compute"))
        elif wanted == 0:
            report.failures.append((document.name, _too_short(count, size)))
        else:
            yield _Item(number, document, wanted, _look(namespace, document))


def _too_short(num_tokens: int, chunk_tokens: int) -> str:
    return f"its {num_tokens} tokens fill no chunk of {chunk_tokens}; with partial_chunks the connector saves them"


def _cut(item: _Item) -> WarmDocument:
    """The document as far as it will be in the store."""
    document = item.document
    return WarmDocument(document.name, document.tokens[: max(item.wanted, item.present)], document.salt)


def _look(namespace: Namespace, document: WarmDocument) -> int:
    return namespace.match(document.tokens, salt=document.salt).num_tokens


def _present_keys(namespace: Namespace, item: _Item) -> list[ChunkKey]:
    match = namespace.match(item.document.tokens, salt=item.document.salt)
    return [chunk.key for chunk in match.chunks()]


def _fitting(asker: Asker, items: Sequence[_Item], report: WarmReport) -> Iterator[_Item]:
    for item in items:
        count = len(item.document.tokens)
        if asker.max_tokens is not None and count > asker.max_tokens:
            reason = f"{count} tokens are more than the {asker.max_tokens} the engine takes; split the document"
            report.failures.append((item.document.name, reason))
        else:
            yield item


def _rounds(
    namespace: Namespace,
    asker: Asker,
    items: list[_Item],
    report: AskedReport,
    progress: Callable[[int], None],
    waiting: _Waiting,
) -> None:
    by_number = {item.number: item for item in items}
    while items:
        before = {item.number: item.present for item in items}
        failed = set()
        for asked in asker.ask([item.number for item in items]):
            item = by_number[asked.number]
            if asked.problem:
                failed.add(asked.number)
                report.failures.append((item.document.name, asked.problem))
                continue
            if asked.tokens is not None and item.is_guess:
                _learn(namespace, item, asked.tokens, saves_tails=asker.saves_tails)
                if not item.wanted:
                    failed.add(asked.number)
                    reason = _too_short(len(asked.tokens), namespace.identity.chunk_tokens)
                    report.failures.append((item.document.name, reason))
                    continue
            cached = item.present if asked.num_cached is None else asked.num_cached
            report.tokens_computed += max(0, asked.num_tokens - cached)
            _tell(item, len(item.document.tokens), progress)
        items = [item for item in items if item.number not in failed]
        _await(namespace, items, waiting)
        items = [item for item in items if not item.is_done]
        if all(item.present <= before[item.number] for item in items):
            break
    for item in items:
        reason = (
            f"{item.present} of {item.wanted} tokens are in the store after the engine has computed all of them; "
            "does it save to this store, and is there space?"
        )
        report.failures.append((item.document.name, reason))


def _learn(namespace: Namespace, item: _Item, tokens: TokenIds, *, saves_tails: bool) -> None:
    """The engine's token ids are what is stored."""
    size, count = namespace.identity.chunk_tokens, len(tokens)
    item.document = WarmDocument(item.document.name, tokens, item.document.salt)
    item.wanted = count if saves_tails else count // size * size
    item.present, item.is_guess = _look(namespace, item.document), False
    if item.wanted:
        label_documents(namespace, [_cut(item)])


def _await(namespace: Namespace, items: Sequence[_Item], waiting: _Waiting) -> None:
    """Look until everything is there, or nothing has come for a while."""
    changed_at = refreshed_at = waiting.clock()
    is_last = False
    while True:
        total = sum(item.present for item in items)
        for item in items:
            if not item.is_done:
                item.present = max(item.present, _look(namespace, item.document))
        now = waiting.clock()
        if sum(item.present for item in items) > total:
            changed_at, is_last = now, False
        if all(item.is_done for item in items) or is_last:
            return
        is_last = now - changed_at > waiting.settle_s
        if is_last or now - refreshed_at >= REFRESH_S:
            refreshed_at = now
            namespace.refresh()
        if not is_last:
            waiting.sleep(POLL_S)


def _count(namespace: Namespace, items: Sequence[_Item], known: set[ChunkKey], report: AskedReport) -> None:
    """What came into the store, chunks that documents share counted once."""
    fresh = {key for item in items for key in _present_keys(namespace, item)} - known
    report.chunks_stored = len(fresh)
    report.bytes_written = sum(shard.size_bytes for key in fresh for shard in namespace.shards(key))
    namespace.refresh()
    report.shards_after = len(namespace.state())


def _tell(item: _Item, tokens: int, progress: Callable[[int], None]) -> None:
    """Tell how far a document has come, once."""
    if tokens > item.told:
        progress(tokens - item.told)
        item.told = tokens
