"""`lmcache rm`: take one thing out of a store: a namespace, a tenant, a chunk, a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmcache_cli.commands.asked_prompt import AskedPrompt, ModelChoice
from lmcache_cli.commands.chunk_targets import (
    NamespaceStart,
    checked_key,
    chunk_with_key,
)
from lmcache_cli.commands.command import Session, command, literal
from lmcache_cli.commands.pruning import DEFAULT_GRACE, Consent, DryRun, Grace, Wait, Yes, run_prune
from lmcache_cli.errors import Refused
from lmcache_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmcache_cli.store import Store
    from lmcache_cli.store.prune import PruneRules
    from lmcache_format import Fingerprint


@command(
    examples=(
        "lmcache rm --store /srv/kv 3f9a --dry-run",
        "lmcache rm --store /srv/kv 0b5c1d22 --yes",
        "lmcache rm --store /srv/kv --salt tenant-7 --yes --wait",
        "lmcache rm --store /srv/kv --model ./SmolLM2 --prompt-file handbook.txt --yes",
    ),
    exit_codes=(ExitCode.DAMAGE, ExitCode.NO_STORE, ExitCode.TOO_NEW, ExitCode.INTERRUPTED),
)
def rm(
    session: Session,
    target: Annotated[
        str | None,
        typer.Argument(parser=literal, help="The start of a namespace's fingerprint, or of a chunk's key."),
    ] = None,
    namespace: NamespaceStart = None,
    *,
    asked: AskedPrompt,
    choice: ModelChoice,
    dry_run: DryRun = False,
    yes: Yes = False,
    wait: Wait = False,
    grace: Grace = DEFAULT_GRACE,  # type: ignore[assignment]
) -> ExitCode:
    """Take a namespace, a tenant's chunks, a chunk, or a prompt out of the store. The plan is shown; --yes does it.

    Of a namespace, or with --salt of one tenant, everything goes that is not pinned; a chunk goes with all that come
    after it. Of a prompt those chunks go that no other sequence needs: its last ones with all after them, and of the
    beginning what nobody shares.

    As with 'lmcache prune' readers miss at once what goes, and a later run, or --wait, deletes its bytes.
    """
    from lmcache_cli.store import Store
    from lmcache_format.superblock import Operation

    if asked.is_given and target is not None:
        raise Refused(f"found {target!r} beside a prompt", "leave one of them out")
    choice.refuse_without(asked)
    consent = Consent(dry_run=dry_run, yes=yes, wait=wait, grace_s=grace)
    with Store.open(session.settings.required_store(), Operation.PRUNE) as store:
        rules = _of_prompt(choice, asked) if asked.is_given else _of_target(store, target, namespace, asked.salt)
        return run_prune(session, store, rules, consent)


def _of_prompt(choice: ModelChoice, asked: AskedPrompt) -> PruneRules:
    from lmcache_cli.store.prune import PromptChunks, PruneRules
    from lmcache_format import root_key
    from lmcache_format.keys import token_words

    identity, document = choice.read(asked)
    root = root_key(identity.fingerprint, document.salt)
    return PruneRules(prompt=PromptChunks(root, token_words(document.tokens)), namespaces=(identity.fingerprint,))


def _of_target(store: Store, target: str | None, namespace: str | None, salt: str | None) -> PruneRules:
    from lmcache_cli.commands.ls import find_namespace
    from lmcache_cli.store.prune import PruneRules

    scope = None if namespace is None else find_namespace(store, namespace)
    if target is None:
        if salt is None:
            raise Refused(
                "nothing says what is to go",
                "give the start of a namespace or of a key, --salt for all of a tenant, or a prompt",
            )
        return PruneRules(everything=True, salt=salt, namespaces=None if scope is None else (scope,))
    whole = _namespace_of(store, target) if scope is None else None
    if whole is not None:
        return PruneRules(everything=True, salt=salt, namespaces=(whole,))
    if salt is not None:
        raise Refused("a key belongs to one tenant, found --salt beside it", "leave one of them out")
    chunk = chunk_with_key(store, checked_key(target), scope)
    return PruneRules(key=chunk.key.hex(), namespaces=(chunk.namespace,))


def _namespace_of(store: Store, start: str) -> Fingerprint | None:
    """The namespace that is meant, if one is."""
    found = [fingerprint for fingerprint in store.fingerprints() if start and fingerprint.startswith(start.lower())]
    if len(found) > 1:
        raise Refused(f"{len(found)} namespaces start with {start!r}", "write more of its fingerprint")
    return found[0] if found else None
