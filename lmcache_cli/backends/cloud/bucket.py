"""What the services of both clouds say alike: their names in messages, and buckets that are not there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lmcache_cli.backends.cloud.urls import BucketUrl, redacted
from lmcache_cli.backends.errors import Unavailable


class Bucket(ABC):
    """One bucket and prefix. `public` names the options of the URL that may be shown."""

    def __init__(self, where: BucketUrl, public: Mapping[str, frozenset[str] | None]) -> None:
        self._where = where
        self.url = where.shown(public)
        self._secrets = where.secrets(public)
        self._bucket_is_there = False

    @abstractmethod
    async def now_ms(self) -> int:
        """The clock of the service; sets `_bucket_is_there`, or raises what `_no_bucket` makes."""

    async def _check_bucket(self) -> None:
        """Absent means absent only in a bucket that exists; not every answer tells."""
        if not self._bucket_is_there:
            await self.now_ms()

    def _no_bucket(self) -> Unavailable:
        return Unavailable(
            f"{self.url}: there is no bucket {self._where.bucket!r}",
            transient=False,
            next_step="make the bucket, or correct the URL",
        )

    def _unavailable(
        self, error: Exception, doing: str, name: str, *, transient: bool, next_step: str = ""
    ) -> Unavailable:
        said = redacted(f"{type(error).__name__}: {error}", self._secrets)
        text = f"{name}: could not {doing} in {self.url}: {said}"
        return Unavailable(text, name=name, transient=transient, next_step=next_step)
