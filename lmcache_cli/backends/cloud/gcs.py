"""Google Cloud Storage by its JSON API, over the session and credentials that gcsfs sets up.

    gs://bucket/prefix[?endpoint_url=…&project=…&token=anon&requester_pays=true]

Without `token` the credentials are those Google's programs find by themselves. Versions are generations. The buckets
for which gcsfs switches to gRPC (zonal ones) are not served: their objects cannot be put in one conditional request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError
from yarl import URL

from lmcache_cli.backends.cloud.backend import CloudBackend
from lmcache_cli.backends.cloud.body import Body
from lmcache_cli.backends.cloud.bucket import Bucket
from lmcache_cli.backends.cloud.checksums import crc32c_of
from lmcache_cli.backends.cloud.service import Conditions, Page, Remote
from lmcache_cli.backends.cloud.urls import BucketUrl, is_true, redacted
from lmcache_cli.backends.errors import (
    AlreadyExists,
    BackendError,
    NoSpace,
    NotFound,
    ShortRead,
    Unavailable,
    Unsupported,
    VersionChanged,
)

CONNECT_S, IDLE_S = 5.0, 20.0
PAGE_ITEMS = 1000
_TOKENS = frozenset({"anon", "cloud", "google_default", "cache"})
_PUBLIC: Mapping[str, frozenset[str] | None] = {
    "endpoint_url": None,
    "project": None,
    "token": _TOKENS,
    "requester_pays": None,
}
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S)
_FIELDS = "name,size,generation,timeCreated,crc32c,md5Hash"
_CREDENTIALS = "check the credentials (GOOGLE_APPLICATION_CREDENTIALS), and what they may do in that bucket"
_TRANSIENT_REASONS = ("rateLimitExceeded", "userRateLimitExceeded", "backendError")


class Refusal(Exception):
    """An answer of 400 or more."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{said[:300]} ({status})")
        self.status = status
        self.said = said


class GcsBody:
    """See `Fetched`."""

    def __init__(self, service: GcsService, name: str, answer: aiohttp.ClientResponse, start: int) -> None:
        self._service, self._name, self._answer = service, name, answer
        self.version = answer.headers["X-Goog-Generation"]
        span = answer.headers.get("Content-Range")
        self.total_bytes = int(span.rpartition("/")[2]) if span else int(answer.headers["Content-Length"])
        if start and not span:
            self.close()
            raise Unavailable(f"{name}: {service.url} ignores ranges", name=name, transient=False)

    async def read(self, size: int) -> bytes:
        with self._service.translating("read", self._name):
            return await self._answer.content.read(size)

    def close(self) -> None:
        self._answer.close()


class GcsService(Bucket):
    """See `CloudService`."""

    no_version = "1"
    lists_crc32c = True

    def __init__(self, where: BucketUrl) -> None:
        if where.key or where.secret:
            raise Unsupported(f"{where.shown(_PUBLIC)}: keys have no place in {where.scheme}:// URLs; use ?token=…")
        super().__init__(where, _PUBLIC)
        self._prefix = f"{where.prefix}/" if where.prefix else ""
        self._file_system: Any = None
        self._connecting: asyncio.Lock | None = None

    async def connect(self) -> Any:
        """The file system of gcsfs with an open session, made on first use."""
        if self._file_system is None:
            if self._connecting is None:
                self._connecting = asyncio.Lock()
            async with self._connecting:
                if self._file_system is None:
                    made = await asyncio.to_thread(self._new_file_system)  # may look for credentials on the network
                    await made._set_session()
                    self._file_system = made
        return self._file_system

    def _new_file_system(self) -> Any:
        options = self._where.options
        given = {name: options[name] for name in ("endpoint_url", "project", "token") if name in options}
        return GCSFileSystem(
            **given,
            requester_pays=is_true(options.get("requester_pays", "")),
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    async def documented_conditions(self) -> Conditions | None:
        """Google keeps both; emulators may not."""
        with self.translating("connect", self._where.bucket):
            file_system = await self.connect()
        host = urlsplit(file_system.base).hostname or ""
        return Conditions(create=True, delete=True) if host.endswith(".googleapis.com") else None

    async def head(self, name: str) -> Remote | None:
        with self.translating("look up", name):
            try:
                return _remote(await self._json("GET", self._object(name), fields=_FIELDS))
            except Refusal as error:
                if error.status != 404:
                    raise
        await self._check_bucket()
        return None

    async def fetch(self, name: str, start: int, stop: int | None, version: str | None) -> GcsBody:
        headers = {"Accept-Encoding": "identity"}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        with self.translating("read", name):
            try:
                answer = await self._send(
                    "GET", f"download:{self._object(name)}", headers=headers, alt="media", ifGenerationMatch=version
                )
            except Refusal as error:
                if error.status == 404:
                    await self._check_bucket()
                raise
            return GcsBody(self, name, answer, start)

    async def put(self, name: str, body: Body, *, create: bool) -> Remote:
        """One multipart request: what it is, with the checksum to hold it against, then the bytes."""
        about = {"name": self._prefix + name, "crc32c": body.crc32c_base64}
        upload = _Upload(about, body)
        with self.translating("put", name):
            made = await self._json(
                "POST",
                f"upload:b/{self._bucket}/o",
                headers=upload.headers,
                data=upload,
                uploadType="multipart",
                ifGenerationMatch="0" if create else None,
                fields=_FIELDS,
            )
            return _remote(made)

    async def delete(self, name: str, version: str | None) -> bool:
        with self.translating("delete", name):
            try:
                (await self._send("DELETE", self._object(name), ifGenerationMatch=version)).release()
            except Refusal as error:
                if error.status != 404:
                    raise
                return False
        return True

    async def copy(self, name: str, to: str, source: Remote, *, create: bool) -> Remote:
        path = f"{self._object(name)}/rewriteTo/{self._object(to)}"
        conditions = {
            "ifGenerationMatch": "0" if create else None,
            "ifSourceGenerationMatch": source.version,
        }
        token: str | None = None
        with self.translating("copy", name, taken=to):
            while True:  # large objects take several requests
                answer = await self._json("POST", path, rewriteToken=token, **conditions)
                if answer["done"]:
                    return _remote(answer["resource"])
                token = answer["rewriteToken"]

    async def list_page(self, prefix: str, *, deep: bool, token: str | None) -> Page:
        with self.translating("list", prefix or "/"):
            try:
                answer = await self._json(
                    "GET",
                    f"b/{self._bucket}/o",
                    prefix=self._prefix + prefix or None,
                    delimiter=None if deep else "/",
                    pageToken=token,
                    maxResults=str(PAGE_ITEMS),
                    fields=f"items({_FIELDS}),prefixes,nextPageToken",
                )
            except Refusal as error:
                if error.status == 404:
                    raise self._no_bucket() from error
                raise
            skip = len(self._prefix)
            objects = [(item["name"][skip:], _remote(item)) for item in answer.get("items", ())]
            prefixes = [name[skip:] for name in answer.get("prefixes", ())]
        self._bucket_is_there = True
        return Page(objects, prefixes, answer.get("nextPageToken") or None)

    async def now_ms(self) -> int:
        with self.translating("ask for the time", "the store's clock"):
            try:
                answer = await self._send("GET", f"b/{self._bucket}/o", maxResults="1", fields="kind")
            except Refusal as error:
                if error.status == 404:
                    raise self._no_bucket() from error
                raise
            answer.release()
            self._bucket_is_there = True
            return int(parsedate_to_datetime(answer.headers["Date"]).timestamp()) * 1000

    async def close(self) -> None:
        file_system, self._file_system = self._file_system, None
        if file_system is not None:
            await file_system.session.close()

    @property
    def _bucket(self) -> str:
        return quote(self._where.bucket, safe="")

    def _object(self, name: str) -> str:
        return f"b/{self._bucket}/o/{quote(self._prefix + name, safe='')}"

    async def _json(self, method: str, path: str, **options: Any) -> Mapping[str, Any]:
        answer = await self._send(method, path, **options)
        async with answer:
            found: Mapping[str, Any] = json.loads(await answer.read())
            return found

    async def _send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: Any = None, **query: str | None
    ) -> aiohttp.ClientResponse:
        """The answer with its body unread. Raises `Refusal` for a status of 400 or more."""
        file_system = await self.connect()
        base: str = file_system.base
        kind, separator, rest = path.partition(":")
        if separator:
            base, path = base.replace("/storage/v1/", f"/{kind}/storage/v1/"), rest
        answer: aiohttp.ClientResponse = await file_system.session.request(
            method,
            URL(base + path, encoded=True),
            params=file_system._get_params(query),
            headers=file_system._get_headers(headers),
            data=data,
            timeout=_TIMEOUT,
        )
        if answer.status >= 400:
            async with answer:
                raise Refusal(answer.status, (await answer.read()).decode("utf-8", "replace"))
        return answer

    @contextmanager
    def translating(self, doing: str, name: str, taken: str | None = None) -> Iterator[None]:
        """Turns what session, credentials and answers raise into the errors of `errors.py`."""
        try:
            yield
        except Refusal as error:
            raise self._answered(error, doing, name, taken or name) from error
        except GoogleAuthError as error:
            retryable = bool(error.retryable)
            next_step = "" if retryable else _CREDENTIALS
            raise self._unavailable(error, doing, name, transient=retryable, next_step=next_step) from error
        except (aiohttp.InvalidURL, HttpError) as error:
            raise self._unavailable(error, doing, name, transient=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError) as error:
            raise self._unavailable(error, doing, name, transient=True) from error

    def _answered(self, error: Refusal, doing: str, name: str, taken: str) -> BackendError:
        status = error.status
        text = f"{name}: could not {doing} in {self.url}: {redacted(str(error), self._secrets)}"
        if status == 404:
            return NotFound(f"{name}: no such object in {self.url}", name=name)
        if status == 412 and doing in ("put", "copy"):
            return AlreadyExists(f"{taken}: exists in {self.url}", name=taken)
        if status in (304, 412):
            return VersionChanged(f"{name}: another version is in {self.url}", name=name)
        if status == 416:
            return ShortRead(f"{name}: the range lies past the end", name=name)
        if status == 507:
            return NoSpace(f"{text}; free some space or raise the quota", name=name)
        if status == 501:
            return Unsupported(text, name=name)
        throttled = status == 403 and any(reason in error.said for reason in _TRANSIENT_REASONS)
        transient = throttled or status in (408, 409, 429) or status >= 500
        next_step = _CREDENTIALS if status in (401, 403) and not transient else ""
        return Unavailable(text, name=name, transient=transient, next_step=next_step)


class _Upload:
    """`multipart/related` of the object's description and its bytes, streamed."""

    def __init__(self, about: Mapping[str, str], body: Body) -> None:
        boundary = secrets.token_hex(16)
        self._head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(about)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self._body = body
        self.headers = {
            "Content-Type": f"multipart/related; boundary={boundary}",
            "Content-Length": str(len(self._head) + body.size_bytes + len(self._tail)),
        }

    async def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        yield self._head
        for piece in self._body.pieces():
            yield piece
        yield self._tail


def _remote(item: Mapping[str, Any]) -> Remote:
    """Of an object resource."""
    made = datetime.fromisoformat(item["timeCreated"])
    return Remote(
        int(item.get("size", 0)),
        str(item["generation"]),
        int(made.timestamp()) * 1000,
        crc32c_of(item.get("crc32c")),
        item.get("md5Hash", ""),
    )


def open_url(url: str) -> CloudBackend:
    """The bucket and prefix of the URL; touches nothing yet. Raises `Unsupported` for a URL that makes no sense."""
    return CloudBackend(GcsService(BucketUrl.parse(url, options=frozenset(_PUBLIC))))
