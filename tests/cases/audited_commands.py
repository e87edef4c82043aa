"""Runs commands one after the other and prints, for each, its exit code, what it said, and what code it tried to run.

    python tests/cases/audited_commands.py < calls.json       [[word, …], …]

Every command runs twice; the second time counts, when everything it needs is imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lmcache_cli.app import main
from lmcache_cli.store import Store, StoreError
from tests.cases.pattern_engine import ENGINE_IDENTITY, install
from tests.store.pattern import hit

WATCHED = {
    "pickle.find_class",
    "import",
    "exec",
    "compile",
    "marshal.loads",
    "os.system",
    "os.exec",
    "subprocess.Popen",
}

events: list[str] | None = None


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if events is None or event not in WATCHED:
        return
    if event == "exec":
        events.append(f"exec {getattr(arguments[0], 'co_filename', '?')}")
    else:
        events.append(f"{event} {arguments[:2]!r}"[:200])


def watched(words: list[str]) -> dict[str, object]:
    global events
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(words)
        events = []
        code = main(words)
    seen, events = events, None
    return {"code": code, "said": said.getvalue(), "events": sorted(set(seen))}


def read(store: str, tokens: list[int]) -> int:
    """As an engine does that looks for its prompt; the tokens it gets, 0 where the store is refused."""
    try:
        with Store.open(store) as opened, opened.namespace(ENGINE_IDENTITY, missing_ok=True) as namespace:
            return hit(namespace, tokens)
    except StoreError:
        return 0


def watched_read(store: str, tokens: list[int]) -> dict[str, object]:
    global events
    read(store, tokens)
    events = []
    found = read(store, tokens)
    seen, events = events, None
    return {"code": 0, "said": "", "hit_tokens": found, "events": sorted(set(seen))}


def control() -> dict[str, object]:
    """That the hook sees a pickle being loaded."""
    global events
    events = []
    pickle.loads(b"cos\ngetpid\n)R.")
    seen, events = events, None
    return {"events": seen}


if __name__ == "__main__":
    sys.addaudithook(hook)
    install(setattr, 0.0)
    request = json.load(sys.stdin)
    answers = [control(), *(watched(words) for words in request["calls"])]
    answers += [watched_read(store, request["tokens"]) for store in request["reads"]]
    sys.stdout.write(json.dumps(answers))
