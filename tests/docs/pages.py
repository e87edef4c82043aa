"""The pages people read, and what stands in them: fenced blocks, commands, links, paths."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
COOKBOOK = ROOT / "docs" / "cookbook.md"

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
        *(ROOT / "format").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
"""Everything written for readers."""

_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:docs|format|kernels|lmcache_cli|scripts|tests)/[\w./*-]*)`")
_COMMAND = re.compile(r"(?:^|[\s/])lmcache (?P<arguments>[a-z].*)$", re.MULTILINE)
_INLINE_COMMAND = re.compile(r"`lmcache ([a-z][^`]*)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `info` is what follows the fence."""

    info: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(info.strip(), text) for info, text in _FENCE.findall(page.read_text(encoding="utf-8"))]


def links(page: Path) -> list[str]:
    """Targets of the links of a page that lead to files of the project."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def named_paths(page: Path) -> list[str]:
    """Files and folders of the project that the text of a page names as code."""
    return _PATH.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end with."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of every `lmcache` command in a page: in fenced blocks, units and crontabs included, and inline."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        for found in _COMMAND.finditer(block.text):
            yield split(found["arguments"])
    for arguments in _INLINE_COMMAND.findall(_FENCE.sub("", text)):
        yield split(" ".join(arguments.split()))


def split(command: str) -> list[str]:
    """Words of a command line, without its comment and what follows a pipe."""
    words = shlex.split(command.replace("\\|", "|"), comments=True)
    return words[: words.index("|")] if "|" in words else words


def shell_lines(text: str) -> list[str]:
    """The command lines of a block, without comments and empty ones."""
    lines = [re.sub(r"\s+# .*$", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def tour() -> list[str]:
    """The lines of the tour in README.md."""
    return shell_lines(next(block.text for block in blocks(README) if "lmcache init" in block.text))


def file_tree() -> dict[str, str]:
    """Path and role of every line of the file tree in README.md."""
    section = README.read_text(encoding="utf-8").partition("## What is where")[2]
    match = _FENCE.search(section)
    assert match is not None
    return dict(line.split(maxsplit=1) for line in match[2].splitlines())


def packages() -> list[str]:
    """Folders of the rooms that are packages; in a clone only what is committed counts."""
    listed = subprocess.run(
        ["git", "ls-files", "*/__init__.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    found = listed or [str(path.relative_to(ROOT)) for path in ROOT.glob("*/*/__init__.py")]
    return sorted({str(Path(path).parent) for path in found if path.count("/") == 2})
