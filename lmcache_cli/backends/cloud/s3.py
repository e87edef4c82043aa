"""S3 and what speaks it, over the client that s3fs sets up: its credentials, profiles, endpoints and regions.

    s3://bucket/prefix[?endpoint_url=…&profile=…&region=…&anon=true&addressing_style=path&requester_pays=true]

Everything else comes from where AWS programs look for it (`AWS_PROFILE`, `AWS_ENDPOINT_URL_S3`, `~/.aws/config`, …).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import s3fs
from aiobotocore.session import AioSession
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

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
CONNECTIONS = 64
PUT_MAX_BYTES = 5 << 30
_PUBLIC: Mapping[str, frozenset[str] | None] = {
    "endpoint_url": None,
    "profile": None,
    "region": None,
    "anon": None,
    "addressing_style": None,
    "requester_pays": None,
}
_AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "OperationAborted"}
)
_CREDENTIAL_ERRORS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of ~/.aws: ?profile=… in the URL"
_RIGHTS = "check the credentials, and what they may do in that bucket"
_FULL_CODES = frozenset({"QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "InsufficientStorage"})
_REFUSED_CODES = frozenset({"NotImplemented", "EntityTooLarge", "XNotImplemented"})


class S3Body:
    """See `Fetched`."""

    def __init__(self, service: S3Service, name: str, answer: Mapping[str, Any], start: int) -> None:
        self._service, self._name, self._body = service, name, answer["Body"]
        self.version: str = answer["ETag"]
        span = answer.get("ContentRange")
        self.total_bytes = int(span.rpartition("/")[2]) if span else int(answer["ContentLength"])
        if start and not span:
            self.close()
            raise Unavailable(f"{name}: {service.url} ignores ranges", name=name, transient=False)

    async def read(self, size: int) -> bytes:
        with self._service.translating("read", self._name):
            piece: bytes = await self._body.read(size)
            return piece

    def close(self) -> None:
        self._body.close()


class S3Service(Bucket):
    """See `CloudService`. Versions are ETags: a hash of the bytes, or at least different for different bytes."""

    no_version = '"00000000000000000000000000000000"'
    lists_crc32c = False

    def __init__(self, where: BucketUrl) -> None:
        super().__init__(where, _PUBLIC)
        self._prefix = f"{where.prefix}/" if where.prefix else ""
        self._client: Any = None
        self._file_system: Any = None
        self._connecting: asyncio.Lock | None = None

    async def documented_conditions(self) -> Conditions | None:
        """AWS keeps both; of others nobody knows."""
        with self.translating("connect", self._where.bucket):
            client = await self.connect()
        return Conditions(create=True, delete=True) if is_aws(client.meta.endpoint_url) else None

    async def connect(self) -> Any:
        """The client, made on first use."""
        if self._client is None:
            if self._connecting is None:
                self._connecting = asyncio.Lock()
            async with self._connecting:
                if self._client is None:
                    self._client = await self._new_client()
        return self._client

    async def _new_client(self) -> Any:
        options = self._where.options
        given = {
            "endpoint_url": options.get("endpoint_url"),
            "key": self._where.key,
            "secret": self._where.secret,
        }
        config: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT_S,
            "read_timeout": IDLE_S,
            "max_pool_connections": CONNECTIONS,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        if "addressing_style" in options:
            config["s3"] = {"addressing_style": options["addressing_style"]}
        self._file_system = s3fs.S3FileSystem(
            **{name: value for name, value in given.items() if value},
            anon=is_true(options.get("anon", "")),
            requester_pays=is_true(options.get("requester_pays", "")),
            client_kwargs={"region_name": options["region"]} if "region" in options else {},
            config_kwargs=config,
            session=_new_session(options.get("profile")),
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        client = await self._file_system.set_session()
        client.meta.events.register("before-sign.s3.PutObject", _without_expect)
        return client

    async def head(self, name: str) -> Remote | None:
        with self.translating("look up", name):
            try:
                answer = await self._call("head_object", name, ChecksumMode="ENABLED")
            except boto.ClientError as error:
                if _status(error) != 404:
                    raise
                answer = None
        if answer is None:
            await self._check_bucket()
            return None
        return _remote(answer)

    async def fetch(self, name: str, start: int, stop: int | None, version: str | None) -> S3Body:
        wanted: dict[str, Any] = {}
        if start or stop is not None:
            wanted["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if version is not None:
            wanted["IfMatch"] = version
        with self.translating("read", name):
            return S3Body(self, name, await self._call("get_object", name, **wanted), start)

    async def put(self, name: str, body: Body, *, create: bool) -> Remote:
        if body.size_bytes > PUT_MAX_BYTES:
            raise Unsupported(f"{name}: {body.size_bytes} bytes are more than one request may put", name=name)
        condition = {"IfNoneMatch": "*"} if create else {}
        with self.translating("put", name):
            try:
                answer = await self._call("put_object", name, Body=body, ChecksumCRC32C=body.crc32c_base64, **condition)
            except boto.ClientError as error:
                if create and _status(error) == 409:  # others write or delete it right now
                    await self._raise_conflict(name)
                raise
        made = await self.head(name)
        if made is None:
            raise Unavailable(f"{name}: put into {self.url}, but not there", name=name)
        if made.version != answer["ETag"]:  # replaced since
            return Remote(body.size_bytes, answer["ETag"], _date_ms(answer), body.crc32c)
        return made

    async def _raise_conflict(self, name: str) -> None:
        if await self.head(name) is not None:
            raise AlreadyExists(f"{name}: exists in {self.url}", name=name)
        raise Unavailable(f"{name}: others write or delete it in {self.url} at this moment", name=name)

    async def delete(self, name: str, version: str | None) -> bool:
        condition = {} if version is None else {"IfMatch": version}
        with self.translating("delete", name):
            try:
                await self._call("delete_object", name, **condition)
            except boto.ClientError as error:
                if _code(error) == "NoSuchKey":
                    return False
                raise
        return True

    async def copy(self, name: str, to: str, source: Remote, *, create: bool) -> Remote:
        origin = {"Bucket": self._where.bucket, "Key": self._prefix + name}
        client = await self.connect()
        known = client.meta.service_model.operation_model("CopyObject").input_shape.members
        condition = {"IfNoneMatch": "*"} if create and "IfNoneMatch" in known else {}
        with self.translating("copy", name, taken=to):
            await self._call("copy_object", to, CopySource=origin, CopySourceIfMatch=source.version, **condition)
        made = await self.head(to)
        if made is None:
            raise Unavailable(f"{to}: copied within {self.url}, but not there", name=to)
        return made

    async def list_page(self, prefix: str, *, deep: bool, token: str | None) -> Page:
        options: dict[str, Any] = {} if deep else {"Delimiter": "/"}
        if token is not None:
            options["ContinuationToken"] = token
        with self.translating("list", prefix or "/"):
            client = await self.connect()
            answer = await client.list_objects_v2(
                Bucket=self._where.bucket, Prefix=self._prefix + prefix, **self._payer("list_objects_v2"), **options
            )
            skip = len(self._prefix)
            objects = [(item["Key"][skip:], _remote(item)) for item in answer.get("Contents", ())]
            prefixes = [item["Prefix"][skip:] for item in answer.get("CommonPrefixes", ())]
            more = answer["NextContinuationToken"] if answer["IsTruncated"] else None
        self._bucket_is_there = True
        return Page(objects, prefixes, more)

    async def now_ms(self) -> int:
        with self.translating("ask for the time", "the store's clock"):
            client = await self.connect()
            try:
                answer = await client.head_bucket(Bucket=self._where.bucket)
            except boto.ClientError as error:
                if _status(error) == 404:
                    raise self._no_bucket() from error
                raise
            self._bucket_is_there = True
            return _date_ms(answer)

    async def close(self) -> None:
        client, self._client, self._file_system = self._client, None, None
        if client is not None:
            await client.close()

    async def _call(self, method: str, name: str, **parameters: Any) -> Mapping[str, Any]:
        client = await self.connect()
        answer: Mapping[str, Any] = await getattr(client, method)(
            Bucket=self._where.bucket, Key=self._prefix + name, **self._payer(method), **parameters
        )
        self._bucket_is_there = True
        return answer

    def _payer(self, method: str) -> dict[str, str]:
        return {"RequestPayer": "requester"} if is_true(self._where.options.get("requester_pays", "")) else {}

    @contextmanager
    def translating(self, doing: str, name: str, taken: str | None = None) -> Iterator[None]:
        """Turns what client and connection raise into the errors of `errors.py`."""
        try:
            yield
        except boto.ClientError as error:
            raise self._answered(error, doing, name, taken or name) from error
        except (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, ResponseParserError) as error:
            raise self._unavailable(error, doing, name, transient=True) from error
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError) as error:
            raise self._unavailable(error, doing, name, transient=True) from error
        except _CREDENTIAL_ERRORS as error:
            raise self._unavailable(error, doing, name, transient=False, next_step=_CREDENTIALS) from error
        except (boto.BotoCoreError, ValueError) as error:  # parameters
            raise self._unavailable(error, doing, name, transient=False) from error

    def _answered(self, error: boto.ClientError, doing: str, name: str, taken: str) -> BackendError:
        status, code = _status(error), _code(error)
        said = redacted(f"{error.response['Error'].get('Message', '')} ({status} {code})", self._secrets)
        text = f"{name}: could not {doing} in {self.url}: {said}"
        if code == "NoSuchBucket":
            return self._no_bucket()
        if status == 404:
            return NotFound(f"{name}: no such object in {self.url}", name=name)
        if status == 412 and doing in ("put", "copy"):
            return AlreadyExists(f"{taken}: exists in {self.url}", name=taken)
        if status == 412:
            return VersionChanged(f"{name}: another version is in {self.url}", name=name)
        if status == 416:
            return ShortRead(f"{name}: the range lies past the end", name=name)
        if status == 507 or code in _FULL_CODES:
            return NoSpace(f"{text}; free some space or raise the quota", name=name)
        if status == 501 or code in _REFUSED_CODES:
            return Unsupported(text, name=name)
        transient = status in (408, 409, 429) or status >= 500 or code in _TRANSIENT_CODES
        next_step = _RIGHTS if status in (401, 403) and not transient else ""
        return Unavailable(text, name=name, transient=transient, next_step=next_step)


def _new_session(profile: str | None) -> AioSession:
    session = AioSession(profile=profile)
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_parsed_time)
    return session


def _parsed_time(text: str) -> datetime:
    """What listings have, read at a fraction of the cost of `parse_timestamp`, which takes two thirds of their time."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        parsed: datetime = parse_timestamp(text)
        return parsed


def _without_expect(request: Any, **_: object) -> None:
    """No waiting for `100 Continue`: some services never say it, and it costs the others a round trip."""
    if "Expect" in request.headers:
        del request.headers["Expect"]


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _remote(answer: Mapping[str, Any]) -> Remote:
    """Of a HEAD, or of an item of a listing."""
    size = answer["Size"] if "Size" in answer else answer["ContentLength"]
    modified: datetime = answer["LastModified"]
    etag = str(answer["ETag"])
    return Remote(int(size), etag, int(modified.timestamp()) * 1000, crc32c_of(answer.get("ChecksumCRC32C")), etag)


def _date_ms(answer: Mapping[str, Any]) -> int:
    date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
    return int(parsedate_to_datetime(date).timestamp()) * 1000


def is_aws(endpoint_url: str) -> bool:
    """Whether AWS itself answers there."""
    return (urlsplit(endpoint_url).hostname or "").endswith(_AWS_HOSTS)


def open_url(url: str) -> CloudBackend:
    """The bucket and prefix of the URL; touches nothing yet. Raises `Unsupported` for a URL that makes no sense."""
    return CloudBackend(S3Service(BucketUrl.parse(url, options=frozenset(_PUBLIC))))
