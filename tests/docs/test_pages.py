"""What the pages say about files, commands and figures is so."""

import re
import subprocess
import sys

import pytest

from tests.docs.pages import (
    COOKBOOK,
    PAGES,
    README,
    ROOT,
    anchors,
    blocks,
    commands,
    file_tree,
    links,
    named_paths,
    packages,
    tour,
)

PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
WRITTEN_PAGES = [page for page in PAGES if page.name != "cli.md"]  # that one is made from the commands themselves


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(found), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_named_files_are_there(page):
    missing = [path for path in named_paths(page) if not any(ROOT.glob(path.rstrip("/"))) and "NNNN" not in path]
    assert missing == []


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist_with_the_options_that_are_shown(page):
    from lmcache_cli.commands.root import COMMANDS, GROUPS, build_root

    for arguments in commands(page):
        name = " ".join(arguments[: 2 if arguments[0] in GROUPS else 1])
        assert name in COMMANDS or name in GROUPS or arguments[0] == "--help", f"no command {name!r}"
        command, rest = build_root(), arguments
        while hasattr(command, "commands") and rest:
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        shown = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert shown <= known | {"--help", "-h"}, f"lmcache {' '.join(arguments)}"
        if "FILE" not in "".join(rest) and any(word.startswith("--") for word in rest):
            command.make_context(name, list(rest))  # values parse, nothing required is missing


def test_the_pages_show_commands():
    assert len(list(commands(README))) >= 9
    assert len(list(commands(COOKBOOK))) >= 25


def test_the_file_tree_names_what_exists():
    tree = file_tree()
    assert [path for path in tree if not (ROOT / path).exists()] == []
    assert [path for path in tree if path.endswith("/") != (ROOT / path).is_dir()] == []


def test_the_file_tree_leaves_no_package_out():
    named = {path.rstrip("/") for path in file_tree()}
    assert [package for package in packages() if package not in named] == []


def test_the_tour_has_ten_lines():
    assert len(tour()) == 10


def test_figures_are_fresh():
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs_figures", "--check"], capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_every_exit_code_has_a_recipe():
    from lmcache_cli.exit_codes import ExitCode

    section = COOKBOOK.read_text(encoding="utf-8").partition("## What to do on each exit code")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    explained = {int(number) for cell in cells for number in re.findall(r"\d+", cell)}
    assert explained == {int(code) for code in ExitCode}


def test_every_kind_of_place_is_named():
    from lmcache_cli.backends.registry import SCHEMES

    text = "".join(page.read_text(encoding="utf-8") for page in WRITTEN_PAGES)
    assert [scheme for scheme in SCHEMES if f"{scheme}://" not in text] == []


def test_every_command_is_named_in_the_readme_or_the_cookbook():
    from lmcache_cli.commands.root import COMMANDS

    shown = {" ".join(words[:count]) for page in (README, COOKBOOK) for words in commands(page) for count in (1, 2)}
    assert [name for name in COMMANDS if name not in shown] == []


def test_every_decision_is_listed_and_has_its_three_parts():
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.glob("0*.md"))
    listed = [target for target in links(folder / "README.md") if target.startswith("0")]
    assert [page.name for page in pages] == listed
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.name[:4]} ")
        assert all(f"\n**{part}.** " in text for part in ("Context", "Choice", "Cost")), page.name


def test_fenced_blocks_are_closed():
    for page in PAGES:
        fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
        assert len(fences) == 2 * len(blocks(page)), page.name
