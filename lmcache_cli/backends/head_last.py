"""Objects whose first bytes are made from the rest: a header with the checksums of what follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload


class HeadLast(Sequence[memoryview | bytes], ABC):
    """Head and body of an object, as the two parts of a put; the head is made when it is asked for.

    A back-end that can put the head in its place last takes `blocks()` first and `head()` then: each block was read a
    moment before, for the head, so that writing it finds it in the CPU's cache. To all others it is a plain sequence.
    """

    def __init__(self, head_bytes: int, body: memoryview) -> None:
        self.head_bytes = head_bytes
        self.body = body
        """Flat bytes, format "B"; they must not change until the put is over."""

    @property
    def size_bytes(self) -> int:
        """Of the whole object; asking for it makes no head."""
        return self.head_bytes + self.body.nbytes

    @abstractmethod
    def blocks(self) -> Iterator[memoryview]:
        """The body in order, each block right after it was read. May be started again."""

    @abstractmethod
    def head(self) -> bytes:
        """Exactly `head_bytes`. Reads the body, unless `blocks()` came to its end before."""

    def __len__(self) -> int:
        return 2

    @overload
    def __getitem__(self, index: int) -> memoryview | bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview | bytes]: ...

    def __getitem__(self, index: int | slice) -> memoryview | bytes | Sequence[memoryview | bytes]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(2))]
        match index:
            case 0 | -2:
                return self.head()
            case 1 | -1:
                return self.body
            case _:
                raise IndexError(index)
