"""`lmcache unpin`: let pinned chunks be pruned again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.chunk_targets import (
    DocumentName,
    NamespaceStart,
    checked_key,
    one_of,
)
from lmcache_cli.commands.command import Session, command
from lmcache_cli.commands.pin import COLUMNS, Target, described_pin, writable
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.targets import HeldPin
    from lmcache_format import Fingerprint


@command(
    examples=(
        "lmcache unpin --store /srv/kv --document handbook.txt",
        "lmcache unpin --store /srv/kv 0b5c1d22",
        "lmcache unpin --store /srv/kv --model ./SmolLM2 --prompt-file handbook.txt",
    ),
    exit_codes=(ExitCode.NO_STORE, ExitCode.TOO_NEW),
)
def unpin(
    session: Session,
    target: Target = None,
    document: DocumentName = None,
    namespace: NamespaceStart = None,
    *,
    asked: AskedPrompt,
    choice: ModelChoice,
) -> ExitCode:
    """Take back the pins of a chunk, of a document, or of any chunk of a prompt. 'lmcache inspect' shows pins."""
    from lmcache_cli.commands.ls import find_namespace
    from lmcache_cli.store import Store
    from lmcache_cli.store.targets import chunks_of_prompt, held_pins
    from lmcache_format.superblock import Operation

    one_of(target, document, asked)
    start = None if target is None else checked_key(target)
    with Store.open(session.settings.required_store(), Operation.WRITE) as store:
        scope = None if namespace is None else find_namespace(store, namespace)
        held = [pin for one in ([scope] if scope else store.fingerprints()) for pin in held_pins(store, one)]
        if asked.is_given:
            identity, found = choice.read(asked)
            keys = set(chunks_of_prompt(store, identity.fingerprint, found.tokens, found.salt))
            chosen = [pin for pin in held if pin.namespace == identity.fingerprint and pin.key in keys]
        elif start is not None:
            chosen = [pin for pin in held if pin.key.hex().startswith(start[:32])]
        else:
            chosen = [pin for pin in held if document in pin.labels]
        if not chosen:
            session.output.warning(f"no such pin holds in {store.url}; see: lmcache inspect NAMESPACE")
        for fingerprint in sorted({pin.namespace for pin in chosen}):
            _let_go(store, fingerprint, [pin for pin in chosen if pin.namespace == fingerprint])
        session.output.table("unpinned", map(described_pin, chosen), columns=COLUMNS)
        session.output.summary("{num_pins} pins taken back", num_pins=len(chosen))
    return ExitCode.OK


def _let_go(store: Store, fingerprint: Fingerprint, pins: list[HeldPin]) -> None:
    from lmcache_format import ChunkKey

    with writable(store, fingerprint) as opened:
        for pin in pins:
            opened.unpin(ChunkKey(pin.key))
        opened.flush()
