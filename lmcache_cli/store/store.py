"""A store: a superblock, and one namespace for each identity."""

from __future__ import annotations

import time

from lmcache_cli import __version__
from lmcache_cli.backends import AlreadyExists, Backend, Durability, NotFound, open_backend
from lmcache_cli.backends.closing import Closing
from lmcache_format.errors import BadName, FormatError, UnsupportedVersion
from lmcache_format.geometry import Part
from lmcache_format.identity import MAX_IDENTITY_BYTES, Fingerprint, Identity, fingerprint_of
from lmcache_format.names import (
    CACHEDIR_TAG,
    NAMESPACES,
    identity_path,
    new_ulid,
    parse_superblock_path,
    superblock_path,
)
from lmcache_format.superblock import MAX_SUPERBLOCK_BYTES, Operation, Superblock

from .errors import NoStore, NoSuchNamespace, Refused, StoreDamaged, StoreExists, StoreTooNew
from .events import Event, Events
from .live_index import WriterOptions
from .namespace import Namespace

_CACHEDIR_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This directory holds key/value caches of language models, which can be computed again.
# For what a cache directory tag is, see https://bford.info/cachedir/
"""


def _place_of(url: str) -> str:
    """What to look at where a store was expected and none is."""
    return "the path, and that its disk is mounted" if url.startswith("file://") else "the URL"


class Store(Closing):
    """An open store. Opening reads the superblock alone; namespaces are opened one by one."""

    def __init__(self, backend: Backend, superblock: Superblock) -> None:
        self.backend = backend
        self.superblock = superblock
        self.events = Events()

    @property
    def url(self) -> str:
        """Where the store lies; credentials are shown as `***`."""
        return self.backend.url

    @classmethod
    def create(cls, where: str | Backend) -> Store:
        """Make a store where there is none. Raises `StoreExists`, `BackendError`."""
        backend = open_backend(where) if isinstance(where, str) else where
        if _generations(backend):
            raise StoreExists(f"{backend.url} is a store already", next_step="use it as it is, or choose another place")
        now = time.time_ns() // 1_000_000
        superblock = Superblock(store_id=new_ulid(now), created_ms=now, writer=f"lmcache-toolkit {__version__}")
        try:
            backend.put(superblock_path(1), [superblock.to_json()], durability=Durability.FULL)
        except AlreadyExists:
            raise StoreExists(f"{backend.url} was made a store by somebody else just now") from None
        try:
            backend.put(CACHEDIR_TAG, [_CACHEDIR_TAG_TEXT], durability=Durability.FULL)
        except AlreadyExists:
            pass
        return cls(backend, superblock)

    @classmethod
    def open(cls, where: str | Backend, operation: Operation = Operation.READ) -> Store:
        """Open a store for `operation`. Raises `NoStore`, `StoreTooNew`, `StoreDamaged`, `BackendError`."""
        backend = open_backend(where) if isinstance(where, str) else where
        generations = _generations(backend)
        if not generations:
            raise NoStore(
                f"there is no store at {backend.url}",
                next_step=f"check {_place_of(backend.url)}; to make one there: lmcache init --store {backend.url}",
            )
        path = superblock_path(generations[-1])
        try:
            superblock = Superblock.from_json(read_start(backend, path, MAX_SUPERBLOCK_BYTES))
            superblock.check(operation)
        except UnsupportedVersion as problem:
            raise StoreTooNew(
                f"{backend.url}/{path}: {problem}", next_step="use a newer release of lmcache-toolkit"
            ) from None
        except FormatError as problem:
            raise StoreDamaged(
                f"{backend.url}/{path}: {problem}",
                next_step="restore that file from a copy of the store; shards are intact",
            ) from None
        if superblock.generation != generations[-1]:
            raise StoreDamaged(
                f"{backend.url}/{path}: expected generation {generations[-1]}, as its name says, "
                f"found {superblock.generation}",
                next_step="restore that file from a copy of the store; shards are intact",
            )
        return cls(backend, superblock)

    def check(self, operation: Operation) -> None:
        """Raise `StoreTooNew` where this release must not do `operation` with the store."""
        try:
            self.superblock.check(operation)
        except UnsupportedVersion as problem:
            raise StoreTooNew(f"{self.url}: {problem}", next_step="use a newer release of lmcache-toolkit") from None

    def may(self, operation: Operation) -> bool:
        """Whether this release may do `operation` with the store."""
        try:
            self.check(operation)
        except StoreTooNew:
            return False
        return True

    def fingerprints(self) -> list[Fingerprint]:
        """Namespaces of the store, by name, whether or not this release can read them. Raises `BackendError`."""
        found = []
        for info in self.backend.list(NAMESPACES, recursive=False):
            name = info.name.rstrip("/").rpartition("/")[2]
            if info.is_prefix and len(name) == 32 and set(name) <= set("0123456789abcdef"):
                found.append(Fingerprint(name))
        return sorted(found)

    def identity(self, fingerprint: Fingerprint) -> Identity:
        """What a namespace is for. Raises `NoSuchNamespace`, `StoreDamaged`, `StoreTooNew`, `BackendError`."""
        path = identity_path(fingerprint)
        try:
            data = read_start(self.backend, path, MAX_IDENTITY_BYTES)
        except NotFound:
            raise NoSuchNamespace(f"{self.url} has no namespace {fingerprint}", next_step="see: lmcache ls") from None
        if fingerprint_of(data) != fingerprint:
            raise StoreDamaged(
                f"{self.url}/{path} does not hash to its name; expected {fingerprint}, found {fingerprint_of(data)}",
                next_step="run: lmcache repair; the next writer of this model restores the file",
            )
        try:
            return Identity.from_json(data)
        except UnsupportedVersion as problem:
            raise StoreTooNew(f"{self.url}/{path}: {problem}", next_step="use a newer release") from None
        except FormatError as problem:
            raise StoreDamaged(f"{self.url}/{path}: {problem}", next_step="run: lmcache verify") from None

    def namespace(
        self,
        identity: Identity,
        *,
        create: bool = False,
        missing_ok: bool = False,
        need: Part | None = None,
        allow_lossy: bool = False,
        allow_unverified: bool = False,
        writer: WriterOptions | None = None,
        reader_threads: int = 6,
    ) -> Namespace:
        """Open the namespace of an identity; with `create`, make it if need be and be ready to write; with `missing_ok`
        one that does not exist is an empty one.

        Raises `NoSuchNamespace` without `create`, and `Refused` for weights that nobody can tell apart from others of
        the same name, unless `allow_unverified`.
        """
        self.admit(identity, create=create, missing_ok=missing_ok, allow_unverified=allow_unverified)
        return Namespace(
            self.backend,
            identity,
            need=need,
            allow_lossy=allow_lossy,
            writer=writer,
            events=self.events,
            reader_threads=reader_threads,
            may_write=self.may(Operation.WRITE),
        )

    def admit(self, identity: Identity, *, create: bool, missing_ok: bool, allow_unverified: bool) -> None:
        """What `namespace` asks of an identity before it opens anything, and raises; with `create`, make it."""
        if not identity.is_verified and not allow_unverified:
            raise Refused(
                f"the weights of {identity.model!r} are not identified ({identity.weights})",
                next_step="give a revision or a local directory, or allow unverified weights",
            )
        if create:
            self.check(Operation.WRITE)
            self._write_identity(identity)
        elif not missing_ok and self.backend.stat(identity_path(identity.fingerprint)) is None:
            raise NoSuchNamespace(
                f"{self.url} has nothing for {identity.model!r} ({identity.fingerprint})", next_step="see: lmcache ls"
            )

    def close(self) -> None:
        """Give back what the back-end holds."""
        self.backend.close()

    def _write_identity(self, identity: Identity) -> None:
        """Put `ns.json` in place; a damaged one is replaced, since its right content is known."""
        path, data = identity_path(identity.fingerprint), identity.canonical_json()
        try:
            found = read_start(self.backend, path, MAX_IDENTITY_BYTES)
        except NotFound:
            try:
                self.backend.put(path, [data], durability=Durability.FULL)
            except AlreadyExists:
                pass  # by another writer of the same bytes
            return
        if found != data:
            self.events.problem(Event.READ_DAMAGED, path, "identity does not hash to its own name; written again")
            self.backend.put(path, [data], durability=Durability.FULL, if_absent=False)


def read_start(backend: Backend, path: str, most_bytes: int) -> bytes:
    """All of an object, but of one that is longer than it may be a byte more than that: enough to be refused."""
    with backend.open_read(path) as handle:
        content = bytearray(min(handle.size, most_bytes + 1))
        handle.read_into(0, [memoryview(content)])
        return bytes(content)


def _generations(backend: Backend) -> list[int]:
    generations = []
    for info in backend.list("", recursive=False):
        try:
            generations.append(parse_superblock_path(info.name))
        except BadName:
            continue
    return sorted(generations)
