"""`lmcache pin`: keep chunks from being pruned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.chunk_targets import (
    DocumentName,
    NamespaceStart,
    chunk_with_key,
    one_of,
)
from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.quantity_options import duration_s
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode
from lmcache_cli.rendering import utc_time

if TYPE_CHECKING:
    from lmcache_cli.store import Namespace, Store
    from lmcache_cli.store.targets import HeldPin, NamedChunk
    from lmcache_format import Fingerprint

COLUMNS = ("namespace", "key", "labels", "end_tokens", "expires", "num_chunks", "size_bytes")

Target = Annotated[str | None, typer.Argument(parser=literal, help="The start of a chunk's key, 8 digits at least.")]
Ttl = Annotated[
    int | None,
    typer.Option("--ttl", parser=duration_s, metavar="DURATION", help="Let go after so long: 7d.  [else: never]"),
]


@command(
    examples=(
        "lmcache pin --store /srv/kv --document handbook.txt --ttl 7d",
        "lmcache pin --store /srv/kv 0b5c1d22",
        "lmcache pin --store /srv/kv --model ./SmolLM2 --prompt-file handbook.txt",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def pin(
    session: Session,
    target: Target = None,
    document: DocumentName = None,
    namespace: NamespaceStart = None,
    *,
    asked: AskedPrompt,
    choice: ModelChoice,
    ttl: Ttl = None,
) -> ExitCode:
    """Keep a chunk, a document or a prompt, and all that comes before it, from being pruned.

    Of a prompt that is there in part the part is pinned, and the exit code is 3. A pin that is made again counts anew.
    """
    from lmcache_cli.commands.ls import find_namespace
    from lmcache_cli.store import Store
    from lmcache_format import ChunkKey
    from lmcache_format.canonical_json import MAX_INTEGER
    from lmcache_format.superblock import Operation

    one_of(target, document, asked)
    with Store.open(session.settings.required_store(), Operation.WRITE) as store:
        scope = None if namespace is None else find_namespace(store, namespace)
        is_whole = True
        if asked.is_given:
            chosen, is_whole = _of_prompt(session, store, choice, asked)
        else:
            chosen = named_chunks(store, target, document, scope)
        expires_ms = None if ttl is None else store.backend.now_ms() + ttl * 1000
        if expires_ms is not None and expires_ms > MAX_INTEGER:
            raise Refused("--ttl is longer than a pin can say", "leave it out to keep the chunk for good")
        for fingerprint, key in chosen:
            with writable(store, fingerprint) as opened:
                opened.pin(ChunkKey(key), expires_ms)
                opened.flush()
        made = held(store, chosen)
        session.output.table("pin", map(described_pin, made), columns=COLUMNS)
        session.output.summary(
            "{num_pins} pins keep {num_chunks} chunks, {size_bytes}",
            num_pins=len(made),
            num_chunks=sum(one.num_chunks for one in made),
            size_bytes=sum(one.size_bytes for one in made),
        )
    return ExitCode.OK if is_whole else ExitCode.DAMAGE


def named_chunks(
    store: Store, target: str | None, document: str | None, scope: Fingerprint | None
) -> list[tuple[Fingerprint, bytes]]:
    """The chunk of a key, or the last ones of a document in every namespace that has it. Raises Refused."""
    from lmcache_cli.store.targets import chunks_by_label

    found: Sequence[NamedChunk]
    if target is not None:
        found = [chunk_with_key(store, target, scope)]
    else:
        found = chunks_by_label(store, document or "", scope)
        if not found:
            raise Refused(f"no document {document!r} is present in {store.url}", "see: lmcache inspect NAMESPACE")
    return [(one.namespace, one.key) for one in found]


def writable(store: Store, fingerprint: Fingerprint) -> Namespace:
    """A namespace to note something in; every write is on the device before it counts."""
    from lmcache_cli.backends import Durability
    from lmcache_cli.store import WriterOptions

    identity = store.identity(fingerprint)
    options = WriterOptions(durability=Durability.FULL)
    return store.namespace(identity, allow_unverified=True, allow_lossy=True, writer=options)


def held(store: Store, chosen: Sequence[tuple[Fingerprint, bytes]]) -> list[HeldPin]:
    """The pins of some chunks that hold now."""
    from lmcache_cli.store.targets import held_pins

    keys = {(fingerprint, key[:16]) for fingerprint, key in chosen}
    namespaces = sorted({fingerprint for fingerprint, _ in chosen})
    return [pin for one in namespaces for pin in held_pins(store, one) if (one, pin.key) in keys]


def described_pin(one: HeldPin) -> dict[str, object]:
    """A pin as it is printed."""
    return {
        "namespace": one.namespace,
        "key": one.key,
        "labels": one.labels,
        "end_tokens": one.end_tokens,
        "expires": None if one.expires_ms is None else utc_time(one.expires_ms),
        "num_chunks": one.num_chunks,
        "size_bytes": one.size_bytes,
    }


def _of_prompt(
    session: Session, store: Store, choice: ModelChoice, asked: AskedPrompt
) -> tuple[list[tuple[Fingerprint, bytes]], bool]:
    """The last present chunk of a prompt, and whether that is where the prompt ends."""
    identity, document = choice.read(asked)
    with store.namespace(identity, allow_unverified=choice.allow_unverified) as opened:
        match = opened.match(document.tokens, salt=document.salt)
    chunks = match.chunks()
    if not chunks:
        raise Refused(f"nothing of the prompt is in {store.url}", "warm it first: lmcache warm")
    if match.num_tokens < len(document.tokens):
        session.output.warning(f"{match.num_tokens} of {len(document.tokens)} tokens are present, and pinned")
    return [(identity.fingerprint, chunks[-1].key)], match.num_tokens == len(document.tokens)
