"""Settings and where each came from: flag, then environment, then project file, then user file, then default.

The only reader of the environment. Below the commands every value is passed explicitly.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from lmcache_cli.errors import Refused, SettingsError
from lmcache_cli.progress import ProgressStyle

Value: TypeAlias = str | bool | None

_MAX_FILE_BYTES = 1 << 20
_ENVIRONMENT_PREFIX = "LMCACHE_"


class Source(StrEnum):
    """Where a value comes from, strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    PROJECT = "project file"
    USER = "user file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value and the place in it: a flag, a variable, or a file with a line, counted from 1."""

    source: Source
    where: str = ""
    line: int | None = None

    def __str__(self) -> str:
        place = f" {self.where}" if self.where else ""
        return f"{self.source.value}{place}" + (f" line {self.line}" if self.line is not None else "")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one run. `store` is a directory or URL, None when nobody named one."""

    store: str | None = None
    progress: ProgressStyle = ProgressStyle.AUTO
    debug: bool = False
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def required_store(self) -> str:
        """The store's URL. Raises Refused when none is named."""
        if self.store is None:
            raise Refused("no store is named", "pass --store URL, set LMCACHE_STORE, or run 'lmcache config show'")
        return self.store

    def shown(self) -> dict[str, Value]:
        """Every setting by key, as it may be printed: without the credentials in a URL."""
        store = None if self.store is None else without_credentials(self.store)
        return {"store": store, "progress": self.progress.value, "debug": self.debug}


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    read: Callable[[object, Path | None], object]  # the raw value and the folder of its file; raises ValueError

    @property
    def variable(self) -> str:
        return _ENVIRONMENT_PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True)
class _SettingsFile:
    source: Source
    path: Path
    text: str
    values: dict[str, object]
    table: str  # the header above the keys, empty at the top level

    def line_of(self, key: str) -> int | None:
        """The line that sets a key; None where it is written in a way that this simple search does not see."""
        inside = not self.table
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                inside = header[1].strip() == self.table
            elif inside and re.match(rf"""\s*(["']?){re.escape(key)}\1\s*[=.]""", line):
                return number
        return None

    def place_of(self, key: str) -> str:
        line = self.line_of(key)
        return f"{self.path}, line {line}" if line is not None else f"{self.path}, key {key!r}"


def load_settings(flags: Mapping[str, Value] | None = None, *, folder: Path | None = None) -> Settings:
    """Reads all sources once; `folder` is where the search for a project file begins (the current one).

    Raises SettingsError for a value that cannot be read, an unknown key, or a file that is not TOML.
    """
    files = [found for found in (_project_file(folder), _user_file()) if found is not None]
    for found in files:
        _refuse_unknown_keys(found)
        _refuse_wrong_values(found)
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for setting in _SETTINGS:
        origins[setting.key] = Origin(Source.DEFAULT)
        if (resolved := _resolve(setting, flags or {}, files)) is not None:
            values[setting.key], origins[setting.key] = resolved
    return Settings(
        store=cast("str | None", values.get("store")),
        progress=cast(ProgressStyle, values.get("progress", ProgressStyle.AUTO)),
        debug=cast(bool, values.get("debug", False)),
        origins=origins,
    )


def debug_requested(arguments: Sequence[str]) -> bool:
    """Whether a traceback is wanted, decided without parsing: it must hold for errors of the parser as well."""
    return "--debug" in arguments or os.environ.get("LMCACHE_DEBUG", "").lower() in _TRUE


def search_path() -> str | None:
    """Where commands are searched for; None where nothing says."""
    return os.environ.get("PATH")


def secret(variable: str) -> str | None:
    """The value of a variable that holds a key, for the one who sends it; None where it is not set, or empty."""
    return os.environ.get(variable) or None


def misspelt_variables() -> dict[str, str]:
    """Variables in the environment that look like ours but are none, with the nearest name that is."""
    known = [setting.variable for setting in _SETTINGS]
    unknown = [name for name in os.environ if name.startswith(_ENVIRONMENT_PREFIX) and name not in known]
    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in sorted(unknown)}
    return {name: matches[0] for name, matches in nearest.items() if matches}


def without_credentials(url: str) -> str:
    """The URL with user, password and query values as `***`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return re.sub(r"//[^/@]*@", "//***@", url)
    if "://" not in url:
        return url
    network = f"***@{parts.netloc.rpartition('@')[2]}" if "@" in parts.netloc else parts.netloc
    query = re.sub(r"=[^&]*", "=***", parts.query)
    return parts._replace(netloc=network, query=query).geturl()


def _resolve(
    setting: _Setting, flags: Mapping[str, Value], files: Sequence[_SettingsFile]
) -> tuple[object, Origin] | None:
    if (flag := flags.get(setting.key)) is not None:
        name = f"--{setting.key.replace('_', '-')}"
        return _read(setting, flag, name, None), Origin(Source.FLAG, name)
    if text := os.environ.get(setting.variable):
        return _read(setting, text, setting.variable, None), Origin(Source.ENVIRONMENT, setting.variable)
    for found in files:
        if setting.key in found.values:
            value = _read(setting, found.values[setting.key], found.place_of(setting.key), found.path.parent)
            return value, Origin(found.source, str(found.path), found.line_of(setting.key))
    return None


def _read(setting: _Setting, value: object, place: str, folder: Path | None) -> object:
    try:
        return setting.read(value, folder)
    except ValueError as error:
        raise SettingsError(f"{place}: {error}") from error


# ---------------------------------------------------------------------- files


def _project_file(folder: Path | None) -> _SettingsFile | None:
    """The nearest `lmcache.toml`, or `pyproject.toml` with a table for us, in this folder or above it."""
    try:
        start = (folder or Path.cwd()).absolute()
    except FileNotFoundError:  # the current folder was deleted
        return None
    for parent in (start, *start.parents):
        for name, table in (("lmcache.toml", ""), ("pyproject.toml", "tool.lmcache")):
            if (found := _load(Source.PROJECT, parent / name, table)) is not None:
                return found
    return None


def user_cache_dir() -> Path | None:
    """Where this user's caches go; None without a home folder. What is in it can be made again."""
    configured = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(configured) if configured else Path.home() / ".cache") / "lmcache"
    except RuntimeError:
        return None


def _user_file() -> _SettingsFile | None:
    configured = os.environ.get("XDG_CONFIG_HOME")
    try:
        base = Path(configured) if configured else Path.home() / ".config"
    except RuntimeError:  # no home folder
        return None
    return _load(Source.USER, base / "lmcache" / "config.toml", "")


def _load(source: Source, path: Path, table: str) -> _SettingsFile | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        if table:  # a pyproject.toml that we may not read is not about us
            return None
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if table and b"lmcache" not in data:
        return None
    if len(data) > _MAX_FILE_BYTES:
        raise SettingsError(f"{path}: expected a settings file of at most {_MAX_FILE_BYTES} bytes, found a larger one")
    values, text = _parse(path, data)
    for name in table.split(".") if table else ():
        inner = values.get(name)
        if not isinstance(inner, dict):
            return None
        values = inner
    return _SettingsFile(source, path, text, values, table)


def _parse(path: Path, data: bytes) -> tuple[dict[str, object], str]:
    try:
        text = data.decode("utf-8")
        return tomllib.loads(text), text
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: expected TOML in UTF-8, found other bytes at offset {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: expected TOML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: expected TOML, found values nested too deeply") from error


def _refuse_unknown_keys(found: _SettingsFile) -> None:
    known = [setting.key for setting in _SETTINGS]
    for key in found.values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            advice = f"did you mean {nearest[0]!r}?" if nearest else f"the keys are: {', '.join(known)}"
            raise SettingsError(f"{found.place_of(key)}: expected a known key, found {key!r}", advice)


def _refuse_wrong_values(found: _SettingsFile) -> None:
    """Of every key in the file, whether or not a stronger source sets it."""
    for setting in _SETTINGS:
        if setting.key in found.values:
            _read(setting, found.values[setting.key], found.place_of(setting.key), found.path.parent)


# ---------------------------------------------------------------------- the settings, one line each


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _read_store(value: object, folder: Path | None) -> str:
    """A URL or path; a relative path in a file is relative to that file, so that it means one store from everywhere."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a directory or URL as store, found {value!r}")
    if folder is None or "://" in value:
        return value
    return str(folder / Path(value).expanduser())


def _read_progress(value: object, _folder: Path | None) -> ProgressStyle:
    choices = [style.value for style in ProgressStyle]
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"expected progress to be one of {', '.join(choices)}, found {value!r}")
    return ProgressStyle(value)


def _read_switch(value: object, _folder: Path | None) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError(f"expected true or false, found {value!r}")


_SETTINGS = (
    _Setting("store", _read_store),
    _Setting("progress", _read_progress),
    _Setting("debug", _read_switch),
)
