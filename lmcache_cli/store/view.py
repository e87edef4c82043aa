"""What one reader can use of a namespace: presence of chunks for the part it needs, for whole prompts at once.

A `View` is the state of the manifest (sorted arrays, never changed) with, in front of it, what came or went since it
was built (small dicts). It is not thread-safe; the namespace that owns it holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from lmcache_format.geometry import Part
from lmcache_format.keys import ChunkKey, KeyList
from lmcache_format.segment import key_number

from .coverage import covers
from .state import Entry, State

KEY_NUMBER = np.dtype(">u8")
PARTS_A_WORD = 64


class View:
    """`need` is the part the reader wants; `can_read` says which encodings it accepts."""

    def __init__(self, state: State, need: Part, can_read: Callable[[str], bool], chunk_tokens: int) -> None:
        self.state = state
        self.need = need
        self._can_read = can_read
        self._chunk_tokens = chunk_tokens
        self._recent: dict[bytes, list[Entry]] = {}
        self._recent_tails: dict[int, set[int]] = {}
        self._dropped: set[str] = set()
        self._keys, self._rest, self._present = self._presence()
        self._has_collisions = bool((self._keys[1:] == self._keys[:-1]).any())
        self._tail_parents, self._tail_tokens = self._tail_lengths()

    def match(self, keys: KeyList) -> int:
        """How many of `keys`, from the first on, are present without a gap."""
        count = len(keys)
        if count == 0:
            return 0
        numbers = np.frombuffer(keys.blob, KEY_NUMBER).reshape(count, 4)
        wanted = numbers[:, 0].astype(np.uint64)
        found = np.zeros(count, np.bool_)
        if len(self._keys):
            at = np.searchsorted(self._keys, wanted)
            at[at == len(self._keys)] = 0
            found = (self._keys[at] == wanted) & (self._rest[at] == numbers[:, 1]) & self._present[at]
        length = count if found.all() else int(found.argmin())
        if self._recent or self._has_collisions:
            while length < count and (found[length] or self._is_beside(keys[length])):
                length += 1
        return length

    def entries(self, key: bytes) -> list[Entry]:
        """Every readable shard of a chunk, raw ones first."""
        entries = [self.state.entry(row) for row in self.state.rows_of(key)]
        entries += self._recent.get(key[:16], [])
        usable = [e for e in entries if e.nonce not in self._dropped and self._can_read(e.encoding)]
        return sorted(usable, key=lambda entry: (entry.encoding != "raw", entry.encoding))

    def is_present(self, key: bytes) -> bool:
        """True where the readable shards of the chunk cover the part needed."""
        return covers([entry.part for entry in self.entries(key)], self.need)

    def tails(
        self, parent: bytes, depth: int, most_tokens: int, key_of: Callable[[int], ChunkKey]
    ) -> Iterator[tuple[ChunkKey, int]]:
        """Present tails of a prompt after the chunk `parent`, longest first: key and number of tokens.

        `key_of(n)` is the key that the prompt's next n tokens have. It is asked once a length, however many tails of
        other prompts follow the same chunk.
        """
        number = np.uint64(key_number(parent))
        start, stop = (int(np.searchsorted(self._tail_parents, number, side=side)) for side in ("left", "right"))
        lengths = {*self._tail_tokens[start:stop].tolist(), *self._recent_tails.get(int(number), ())}
        for num_tokens in sorted(lengths, reverse=True):
            if num_tokens > most_tokens:
                continue
            key = key_of(num_tokens)
            shards = self.entries(key)
            is_it = any(shard.num_tokens == num_tokens and shard.depth == depth for shard in shards)
            if is_it and covers([shard.part for shard in shards], self.need):
                yield key, num_tokens

    def add(self, entry: Entry) -> None:
        """Take in a shard that was just written or found."""
        shards = self._recent.setdefault(entry.key, [])
        if any(shard.nonce == entry.nonce for shard in shards):
            return
        shards.append(entry)
        if entry.num_tokens < self._chunk_tokens:
            self._recent_tails.setdefault(entry.parent, set()).add(entry.num_tokens)

    def drop(self, entry: Entry) -> None:
        """Forget a shard that is gone or was found to be wrong."""
        self._dropped.add(entry.nonce)
        if shards := [shard for shard in self._recent.pop(entry.key, ()) if shard.nonce != entry.nonce]:
            self._recent[entry.key] = shards
        number, rest = key_number(entry.key), key_number(entry.key, 8)
        at = int(np.searchsorted(self._keys, np.uint64(number)))
        while at < len(self._keys) and int(self._keys[at]) == number:
            if int(self._rest[at]) == rest:
                self._present[at] = self.is_present(entry.key)
                break
            at += 1

    def is_dropped(self, nonce: str) -> bool:
        """True for a shard that `drop` was told about."""
        return nonce in self._dropped

    def _is_beside(self, key: bytes) -> bool:
        """Present by what came since the arrays were built, or hidden in them by a key that begins alike."""
        return (key[:16] in self._recent or self._has_collisions) and self.is_present(key)

    def _presence(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Unique keys, the second 8 bytes of each, and whether its readable shards cover the need."""
        state = self.state
        readable = np.array([self._can_read(name) for name in state.encodings], np.bool_)
        rest = state.adds["key_rest"]
        if len(state.keys) == 0:
            return state.keys, rest, np.zeros(0, np.bool_)
        usable = readable[state.adds["encoding"]]
        same = (state.keys[1:] == state.keys[:-1]) & (rest[1:] == rest[:-1])
        if not same.any():
            whole = np.array([part.covers(self.need) for part in state.parts], np.bool_)
            return state.keys, rest, usable & whole[state.adds["part"]]
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        return state.keys[starts], rest[starts], self._covered(usable, starts)

    def _covered(self, usable: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each group of shards of one chunk: do the parts together cover the need? Decided once a combination."""
        useful = [n for n, part in enumerate(self.state.parts) if part.intersect(self.need) is not None]
        words = [useful[start : start + PARTS_A_WORD] for start in range(0, len(useful), PARTS_A_WORD)] or [[]]
        masks = np.stack([self._part_masks(word, usable, starts) for word in words], axis=1)
        if len(words) == 1:
            unique, which = np.unique(masks[:, 0], return_inverse=True)
            combinations = unique[:, None]
        else:
            combinations, which = np.unique(masks, axis=0, return_inverse=True)
        answers = [
            covers(
                [
                    self.state.parts[number]
                    for word, mask in zip(words, combination, strict=True)
                    for bit, number in enumerate(word)
                    if int(mask) >> bit & 1
                ],
                self.need,
            )
            for combination in combinations
        ]
        return np.array(answers, np.bool_)[which.reshape(-1)]

    def _part_masks(
        self, numbers: list[int], usable: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        """For each group of shards, which of the parts `numbers` are there: bit i stands for the i-th."""
        bits = np.zeros(len(self.state.parts), np.uint64)
        for bit, number in enumerate(numbers):
            bits[number] = np.uint64(1 << bit)
        masks = np.where(usable, bits[self.state.adds["part"]], np.uint64(0))
        return np.bitwise_or.reduceat(masks, starts)

    def _tail_lengths(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Parents of all tails, in order, and how many tokens tails after them have, each once."""
        rows = np.flatnonzero(self.state.adds["num_tokens"] < self._chunk_tokens)
        parents, num_tokens = self.state.adds["parent"][rows], self.state.adds["num_tokens"][rows]
        order = np.lexsort((num_tokens, parents))
        parents, num_tokens = parents[order], num_tokens[order]
        again = (parents[1:] == parents[:-1]) & (num_tokens[1:] == num_tokens[:-1])
        first = np.concatenate([np.ones(min(len(rows), 1), np.bool_), ~again])
        return parents[first], num_tokens[first]
