"""A server with any number of objects that nobody has to store: it knows listings alone, of S3 and GCS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.loopback import serving

PAGE = 1000


def name_of(number: int) -> str:
    """Names as long as those of shards."""
    digest = f"{number:016x}" * 4
    return f"ns/{digest[:32]}/c/{digest[-2:]}/{digest[-4:-2]}/{digest}.l0-30h0-3.raw.safetensors"


@contextmanager
def listing_server(num_objects: int) -> Iterator[str]:
    """Its endpoint, for the time of the block."""

    class Handler(_Handler):
        pass

    Handler.num_objects = num_objects
    with serving(Handler) as endpoint:
        yield endpoint


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    num_objects: int

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        start = int(query.get("continuation-token") or query.get("pageToken") or 0)
        stop = min(start + PAGE, self.num_objects)
        prefix = query["prefix"]
        names = [prefix + name_of(number) for number in range(start, stop)]
        content = (_s3_page if "list-type" in query else _gcs_page)(names, stop if stop < self.num_objects else None)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return None


def _s3_page(names: list[str], following: int | None) -> bytes:
    item = (
        "<Contents><Key>{}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        '<ETag>"0123456789abcdef0123456789abcdef"</ETag><Size>5902336</Size><StorageClass>STANDARD</StorageClass>'
        "</Contents>"
    )
    more = "" if following is None else f"<NextContinuationToken>{following}</NextContinuationToken>"
    items = "".join(item.format(name) for name in names)
    truncated = "false" if following is None else "true"
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<IsTruncated>{truncated}</IsTruncated>{more}{items}</ListBucketResult>"
    ).encode()


def _gcs_page(names: list[str], following: int | None) -> bytes:
    about = {
        "size": "5902336",
        "generation": "1795960632685629",
        "timeCreated": "2026-01-02T03:04:05.678Z",
        "crc32c": "mtfdrA==",
        "md5Hash": "QnAIs/4ZL2Y9Zl9WzXVxbA==",
    }
    page: dict[str, object] = {"items": [{"name": name, **about} for name in names]}
    if following is not None:
        page["nextPageToken"] = str(following)
    return json.dumps(page).encode()
