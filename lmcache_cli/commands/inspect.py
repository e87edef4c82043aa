"""`lmcache inspect`: look into a store, a namespace, a chunk, or a shard file on its own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.explaining import explain_miss
from lmcache_cli.errors import DamageFound, Refused, TooNew
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import fields_of, utc_time
from lmcache_cli.settings import without_credentials

if TYPE_CHECKING:
    from lmcache_cli.store import Namespace, Store
    from lmcache_cli.store.documents import Document
    from lmcache_format import Identity
    from lmcache_format.shard import ShardHeader

RUN_COLUMNS = (
    "level", "key", "depth", "num_chunks", "num_tokens", "end_tokens", "size_bytes", "last_used", "num_hits",
    "detached", "labels",
)  # fmt: skip
RUN_TERMINAL_COLUMNS = ("tree", "num_chunks", "end_tokens", "size_bytes", "last_used", "num_hits", "labels")
DOCUMENT_COLUMNS = ("name", "status", "num_tokens", "num_usable_tokens", "key")
PIN_TERMINAL_COLUMNS = ("key", "labels", "end_tokens", "expires", "num_chunks", "size_bytes")
DOCUMENT_TERMINAL_COLUMNS = ("name", "status", "num_tokens")
LEAST_KEY_DIGITS = 8


@command(
    examples=(
        "lmcache inspect --store /srv/kv",
        "lmcache inspect --store /srv/kv 3f9a",
        "lmcache inspect --store /srv/kv 0b5c1d22 --json",
        "lmcache inspect chunk.safetensors",
        "lmcache inspect --store /srv/kv --model ./SmolLM2 --prompt-file handbook.txt",
        "lmcache inspect --store /srv/kv --archive s3://bucket/kv --model ./SmolLM2 --prompt-file handbook.txt",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def inspect(
    session: Session,
    target: Annotated[
        str | None,
        typer.Argument(
            parser=literal, help="A shard file, or the start of a namespace's fingerprint or a chunk's key."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Runs, and documents, of a namespace to show; 0 for all.")
    ] = 200,
    *,
    asked: AskedPrompt,
    choice: ModelChoice,
    archive: Annotated[
        list[str] | None,
        typer.Option(
            "--archive",
            parser=literal,
            metavar="URL",
            help="With a prompt: a store behind this one, as an engine may have it. [repeatable]",
        ),
    ] = None,
) -> ExitCode:
    """Look into a store, a namespace, a chunk or a file; or see why a prompt would miss.

    Of a store it shows its properties and namespaces; of a namespace its identity, documents, pins, and the tree of
    prefixes, a line for every run of chunks without a branch; of a chunk (at least 8 digits of its key) what its shards
    say about themselves; of a file the same, with every checksum compared. With a prompt and a model it says how many
    tokens would hit, which chunk is the first that does not, and what differs from what is stored; with archives behind
    the store also which of them would answer which tokens.
    """
    if asked.is_given:
        if target is not None:
            raise Refused(
                f"a prompt is looked up in the whole store, found {target!r} beside it", "leave one of them out"
            )
        return explain_miss(session, asked, choice, archive or ())
    if archive:
        raise Refused("--archive without a prompt", "add --prompt, --prompt-file or --tokens, and --model")
    choice.refuse_without(asked)
    if target is not None and Path(target).is_file():
        return _inspect_file(session, Path(target))
    if target is not None and set(target) & set("./"):
        raise _no_shard_file(target)
    from lmcache_cli.store import Store

    with Store.open(session.settings.required_store()) as store:
        if target is None:
            return _inspect_store(session, store)
        if not target or set(target.lower()) - set("0123456789abcdef"):
            raise Refused(f"expected a file, a fingerprint or a key, found {target!r}", "run 'lmcache ls' to see them")
        return _inspect_named(session, store, target.lower(), limit or sys.maxsize)


def _no_shard_file(target: str) -> Refused:
    if "://" in target:
        return Refused(f"{without_credentials(target)}: expected a shard file, found a URL", "for a store: --store URL")
    if Path(target).is_dir():
        return Refused(f"{target}: expected a shard file, found a directory", f"for a store: --store {target}")
    return Refused(f"{target}: there is no such file", "name a file, or the start of a fingerprint or a key")


def _inspect_store(session: Session, store: Store) -> ExitCode:
    from lmcache_cli.commands.init import described_store
    from lmcache_cli.commands.ls import list_namespaces

    session.output.record("store", described_store(store))
    return list_namespaces(session, store)


def _inspect_named(session: Session, store: Store, start: str, limit: int) -> ExitCode:
    """A namespace or chunks by the start of the name; a namespace goes first, being what one can see in `ls`."""
    from lmcache_cli.commands.overview import open_for_reading

    fingerprints = store.fingerprints()
    matching = [fingerprint for fingerprint in fingerprints if fingerprint.startswith(start)]
    if len(matching) > 1:
        raise Refused(f"{len(matching)} namespaces start with {start!r}", "write more of its fingerprint")
    if matching:
        with open_for_reading(store, store.identity(matching[0])) as namespace:
            return _inspect_namespace(session, store, namespace, limit)
    if len(start) < LEAST_KEY_DIGITS:
        raise Refused(
            f"no namespace starts with {start!r} in {store.url}",
            f"run 'lmcache ls', or write at least {LEAST_KEY_DIGITS} digits of a chunk's key",
        )
    return _inspect_chunks(session, store, start)


def _inspect_namespace(session: Session, store: Store, namespace: Namespace, limit: int) -> ExitCode:
    from lmcache_cli.commands.pin import COLUMNS as PIN_COLUMNS
    from lmcache_cli.commands.pin import described_pin
    from lmcache_cli.commands.prefix_tree import PrefixTree
    from lmcache_cli.store.chunk_table import chunk_table
    from lmcache_cli.store.documents import documents_of
    from lmcache_cli.store.targets import held_pins
    from lmcache_format.geometry import whole_part

    output, identity = session.output, namespace.identity
    output.record("identity", _described_identity(identity))
    table = chunk_table(namespace.state(), whole_part(identity))
    documents = sorted(documents_of(table, identity.chunk_tokens), key=lambda document: document.is_complete)
    if documents:
        output.table(
            "document",
            map(_described_document, documents[:limit]),
            columns=DOCUMENT_COLUMNS,
            terminal_columns=DOCUMENT_TERMINAL_COLUMNS,
        )
    pins = held_pins(store, namespace.fingerprint)
    if pins:
        output.table("pin", map(described_pin, pins), columns=PIN_COLUMNS, terminal_columns=PIN_TERMINAL_COLUMNS)
    tree = PrefixTree(table)
    rows = ({"tree": run.tree, **fields_of(run)} for run in itertools.islice(tree.runs(), limit))
    num_shown = output.table("prefix", rows, columns=RUN_COLUMNS, terminal_columns=RUN_TERMINAL_COLUMNS)
    num_left_out = tree.num_runs - num_shown + max(len(documents) - limit, 0)
    if num_left_out:
        output.note(f"{num_left_out} more runs and documents are left out; pass --limit 0 to see all")
    num_complete = sum(document.is_complete for document in documents)
    output.summary(
        "{num_runs} runs, {num_shards} shards; documents: {documents}",
        num_runs=tree.num_runs,
        num_left_out=num_left_out,
        num_shards=len(table.state),
        num_pins=len(pins),
        num_documents=len(documents),
        num_complete_documents=num_complete,
        documents=_completeness(num_complete, len(documents)),
    )
    return ExitCode.OK


def _completeness(num_complete: int, num_documents: int) -> str:
    """`complete (5/5)`, `incomplete (3/5)`, or `none`."""
    if not num_documents:
        return "none"
    return f"{'complete' if num_complete == num_documents else 'incomplete'} ({num_complete}/{num_documents})"


def _described_document(document: Document) -> dict[str, object]:
    return {"complete": document.is_complete, "status": document.status, **fields_of(document)}


def _inspect_chunks(session: Session, store: Store, start: str) -> ExitCode:
    """Every shard of every chunk whose key starts so, found by its name: the manifest is not asked."""
    from lmcache_cli.store.reading import read_header
    from lmcache_format import BadName, FormatError, UnsupportedVersion
    from lmcache_format.names import ShardName

    num_shards = num_damaged = 0
    for fingerprint in store.fingerprints():
        for info in store.backend.list(f"ns/{fingerprint}/c/{start[:2]}/{start[2:4]}"):
            try:
                name = ShardName.parse(info.name)
            except BadName:
                continue
            if not name.key.hex().startswith(start):
                continue
            num_shards += 1
            try:
                with store.backend.open_read(info.name) as handle:
                    described = _described_shard(info.name, read_header(handle))
                session.output.record("shard_header", described)
            except UnsupportedVersion as newer:
                session.output.warning(f"{info.name}: {newer}")
            except FormatError as damaged:
                num_damaged += 1
                session.output.warning(f"{info.name}: {damaged}")
    if not num_shards:
        raise Refused(f"no namespace and no chunk starts with {start!r} in {store.url}", "run 'lmcache ls' to see them")
    session.output.summary("{num_shards} shards, {num_damaged} damaged", num_shards=num_shards, num_damaged=num_damaged)
    return ExitCode.DAMAGE if num_damaged else ExitCode.OK


def _inspect_file(session: Session, path: Path) -> ExitCode:
    """A shard file wherever it lies. Raises DamageFound, TooNew, or Refused for a file that is no shard."""
    from lmcache_format import FormatError, UnsupportedVersion
    from lmcache_format.checks import verify_data
    from lmcache_format.shard import MAX_HEADER_BYTES, header_bytes, looks_like_shard, parse_header

    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(MAX_HEADER_BYTES)
        if not looks_like_shard(first):
            raise Refused(f"{path}: expected a shard file, found {size_bytes} bytes that do not begin as one")
        try:
            header = parse_header(first[: header_bytes(first, size_bytes)], size_bytes)
            session.output.record("shard_header", _described_shard(str(path), header))
            file.seek(header.data_start)
            verify_data(header, file.read(header.data_bytes))
        except UnsupportedVersion as newer:
            raise TooNew(f"{path}: {newer}", "use a newer release of lmcache-toolkit") from newer
        except FormatError as damaged:
            raise DamageFound(f"{path}: {damaged}", "delete the file; a cache can be computed again") from damaged
    session.output.summary("{num_shards} shard, every checksum right", num_shards=1, num_damaged=0)
    return ExitCode.OK


def _described_identity(identity: Identity) -> dict[str, object]:
    return {"namespace": identity.fingerprint, "verified": identity.is_verified, **identity.to_dict()}


def _described_shard(path: str, header: ShardHeader) -> dict[str, object]:
    meta = header.meta
    return {
        "path": path,
        "namespace": meta.fingerprint,
        "key": meta.key,
        "parent": meta.parent,
        "depth": meta.depth,
        "num_tokens": meta.num_tokens,
        "tail": meta.is_tail,
        "part": str(meta.part),
        "dtype": meta.dtype,
        "encoding": meta.encoding.label,
        "encoding_parameters": meta.encoding.parameters,
        "lossless": meta.encoding.is_lossless,
        "num_tensors": len(header.tensors),
        "header_bytes": header.data_start,
        "data_bytes": header.data_bytes,
        "nonce": meta.nonce,
        "writer": meta.writer,
        "created": utc_time(meta.created_ms),
        "producer": meta.producer,
        "provenance": meta.provenance,
        "has_tokens": meta.tokens is not None,
    }
