"""Reads settings files, and writes imported ones. The only module that knows YAML.

A settings file uses the core schema of YAML 1.2: only `true` and `false` are booleans (`yes`, `no`, `on`, `off` are strings), and there
are no dates and no base-60 numbers.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.settings import secrets


def load(
    path: str | Path, *, placed: Callable[[settings.Lakehouse], settings.Lakehouse] = lambda lakehouse: lakehouse
) -> settings.Settings:
    """The validated settings in the file at `path`, with the tables where `placed` puts them.

    Raises `SettingsError` if the file is missing or not YAML (with line and column), for duplicate keys, and with all mistakes in
    its content, each with its line. Resolves variables in `lakehouse`, so that one file serves several environments; other references
    stay unresolved.
    """
    where = str(path)
    root = _composed(content(path), where)
    lines, duplicates = _keys(root, where)
    if duplicates:
        raise errors.SettingsError(duplicates)
    settings_document = _constructed(root, where)
    try:
        parsed = settings.parse(settings_document, where=where)
        # Before its variables are resolved: a deployment with a place of its own need not have those of another one.
        return _resolved(dataclasses.replace(parsed, lakehouse=placed(parsed.lakehouse)), Path(path))
    except errors.SettingsError as error:
        problems = sorted(error.problems, key=lambda problem: _line(problem.path, lines))
        raise errors.SettingsError([_located(problem, where, lines) for problem in problems]) from None


def document(path: str | Path) -> object:
    """The content of any YAML or JSON file.

    Raises `SettingsError` if the file is missing or not YAML, and for duplicate keys.
    """
    where = str(path)
    root = _composed(content(path), where)
    duplicates = _keys(root, where)[1]
    if duplicates:
        raise errors.SettingsError(duplicates)
    return _constructed(root, where)


def _resolved(parsed: settings.Settings, path: Path) -> settings.Settings:
    """The settings with the variables in `lakehouse` resolved, and gold's folders located."""
    problems: list[errors.Problem] = []

    def resolved(name: str, text: Any) -> Any:
        """The text with its variables; an empty one, about which there is nothing else to say, where one is not set."""
        try:
            return secrets.resolve(text) if isinstance(text, str) else text
        except errors.SettingsError as error:
            problems.extend(errors.Problem(f"lakehouse.{name}", problem.message, problem.hint) for problem in error.problems)
            return ""

    lakehouse = parsed.lakehouse
    places = {name: resolved(name, getattr(lakehouse, name)) for name in ("root", "catalog", "schema_prefix")}
    if reason := tables.unusable(places["root"] or "/"):
        shown = tables.without_login(places["root"])
        problems.append(errors.Problem("lakehouse.root", f"{shown} is no folder or URL", reason))
    elif file := _file_at(places["root"] or "/"):
        problems.append(errors.Problem("lakehouse.root", f"{file} is a file", "a folder is expected, which need not exist"))
    if not tables.SCHEMA_PREFIX.fullmatch(places["schema_prefix"]):
        message = f"letters, digits and _ are expected, found {places['schema_prefix']}"
        problems.append(errors.Problem("lakehouse.schema_prefix", message))
    if problems:
        raise errors.SettingsError(problems)
    gold = dataclasses.replace(
        parsed.gold, models=_found(parsed.gold.models, path), expectations=_found(parsed.gold.expectations, path)
    )
    return dataclasses.replace(parsed, lakehouse=dataclasses.replace(lakehouse, **places), gold=gold)


def _file_at(root: str) -> Path | None:
    """The file that is where a root's folder, or one above it, should be."""
    local_root = re.sub("^file:/*", "/", root)
    if not (local_root.startswith("/") or tables.is_relative(local_root)):
        return None
    folder = Path(os.path.normpath(local_root))
    # Not `Path.exists`, which raises an error below a folder that the user may not look into.
    nearest = next((each for each in (folder, *folder.parents) if os.path.exists(each)), None)
    return None if nearest is None or os.path.isdir(nearest) else nearest


def _found(folder: str | None, path: Path) -> str | None:
    """The path of a folder in the settings: relative to the working directory, else to the file's folder or its parent, as in a job."""
    # Not `Path.is_dir`, which raises an error for a folder that the user may not look into.
    if folder is None or os.path.isdir(folder):
        return folder
    candidates = [parent / folder for parent in path.resolve().parents[:2]]
    return next((str(candidate) for candidate in candidates if os.path.isdir(candidate)), folder)


def below(folder: str | Path, *endings: str) -> list[Path]:
    """The files below a folder whose names have one of these endings, in order; follows links to folders in it.

    Leaves out hidden files and all that is in hidden folders: a mounted ConfigMap of Kubernetes has each file a second time in one, and
    editors keep copies in them. Raises `SettingsError` if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # one that was just removed is no longer there
            raise errors.SettingsError(errors.Problem(str(error.filename), f"it cannot be read: {error.strerror}")) from None

    paths: list[Path] = []
    top, seen = os.path.realpath(folder), set[str]()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        # A link that leads back, or to another place.
        if (real := os.path.realpath(place)) in seen or not Path(real).is_relative_to(top):
            folders.clear()
            continue
        seen.add(real)
        # The root of a volume has `lost+found`, which only root may read.
        folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
        # A folder with such a name is a mistake, which whoever reads it reports.
        paths += (Path(place, name) for name in (*folders, *names) if not name.startswith(".") and name.endswith(endings))
    return sorted(paths)


def content(path: str | Path) -> str:
    """The text of a file; raises `SettingsError` if it cannot be read."""
    where = str(path)
    try:
        # Some editors write a byte order mark, which YAML would read as part of the first key.
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = "name it with --config; conf/shop.yml is an example"
        raise errors.SettingsError(errors.Problem(where, "there is no such file", hint)) from None
    except UnicodeDecodeError as error:
        raise errors.SettingsError(errors.Problem(where, f"not UTF-8 at byte {error.start}")) from None
    except OSError as error:
        raise errors.SettingsError(errors.Problem(where, f"it cannot be read: {error.strerror}")) from None


def rendered(document: Mapping[str, object], *, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """The text of a settings file that loads as `document`, with comment lines before and after."""
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "".join([*map(_comment, before), text, *map(_comment, after)])


def write(path: str | Path, text: str) -> None:
    """Write a new settings file, or to a pipe or a device; raises `SettingsError` if the file exists with another text."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            Path(path).write_text(text, encoding="utf-8")
            return
        # Mode x creates the file or fails: a check before would leave time for another process to create it.
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                # The next attempt would refuse a partial file as one with another text.
                Path(path).unlink(missing_ok=True)
                raise
    except FileExistsError:
        if content(path) != text:
            hint = "move it away, or choose another --out"
            raise errors.SettingsError(errors.Problem(str(path), "the file already exists", hint)) from None
    except OSError as error:
        raise errors.of_file(error, errors.Problem(str(path), f"it cannot be written: {error.strerror}")) from None


def _comment(line: str) -> str:
    # A line break would end the comment, so that the rest of a property would be read as settings; YAML forbids other control characters.
    words = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(line.splitlines()))
    return f"# {words}".rstrip() + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or this loader would read as another type."""


class _Loader(yaml.SafeLoader):
    """Plain YAML: mappings, lists, strings, booleans, integers, floats, null."""

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        # JSON escapes a character beyond U+FFFF as two surrogates, which PyYAML leaves apart.
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        return node


_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError, AttributeError, KeyError)
"""What PyYAML raises; the last two for a value that does not match its tag."""


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return int(loader.construct_scalar(node))
    except ValueError:
        raise yaml.constructor.ConstructorError(None, None, "too many digits", node.start_mark) from None


# PyYAML follows YAML 1.1: it reads `0500` as octal, `on` as true, `1:30` as 90 and 2026-01-01 as a date.
_Loader.yaml_constructors = {**yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:int": _decimal}
_Loader.yaml_implicit_resolvers = {}
for _tag, _regex, _first in (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
):
    for _core in (_Loader, _Dumper):
        _core.add_implicit_resolver(_tag, re.compile(f"^(?:{_regex})$"), [*_first, *([""] if "null" in _tag else [])])


def _composed(text: str, where: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not YAML: the character U+{error.character:04X} is not allowed"
        raise errors.SettingsError(errors.Problem(f"{where}:{line}", message)) from None
    except _UNREADABLE as error:
        raise _not_yaml(error, where) from None


def _constructed(root: yaml.Node | None, where: str) -> object:
    loader = _Loader("")
    loader.deep_construct = True  # refuses a value that contains itself, and so has no end
    try:
        return None if root is None else loader.construct_document(root)
    except _UNREADABLE as error:
        raise _not_yaml(error, where) from None


def _keys(root: yaml.Node | None, where: str) -> tuple[dict[str, int], list[errors.Problem]]:
    """The line of every key by its path, and the duplicate keys."""
    lines: dict[str, int] = {}
    duplicates: list[errors.Problem] = []
    for path, line, is_repeated in _walk(root, "", set()):
        if is_repeated:
            message = "duplicate key"
            duplicates.append(errors.Problem(f"{where}:{line}: {path}", message, f"first in line {lines[path]}"))
        lines.setdefault(path, line)
    return lines, duplicates


def _walk(node: yaml.Node | None, path: str, walked: set[int]) -> Iterator[tuple[str, int, bool]]:
    # Each mapping once: an anchor may have many aliases, in itself and in each other.
    if not isinstance(node, yaml.MappingNode) or id(node) in walked:
        return
    walked.add(id(node))
    earlier_keys: set[str] = set()
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else str(key.value)
        yield name, key.start_mark.line + 1, key.value in earlier_keys if isinstance(key.value, str) else False
        if isinstance(key.value, str):
            earlier_keys.add(key.value)
        yield from _walk(value, name, walked)


def _line(path: str, lines: dict[str, int]) -> int:
    """The line of a key, or of its nearest parent that exists; 0 for the whole file."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path, 0)


def _located(problem: errors.Problem, where: str, lines: dict[str, int]) -> errors.Problem:
    if problem.path in ("", where):
        return errors.Problem(where, problem.message, problem.hint)
    line = _line(problem.path, lines)
    place = f"{where}:{line}" if line else where
    return errors.Problem(f"{place}: {problem.path}", problem.message, problem.hint)


def _not_yaml(error: Exception, where: str) -> errors.SettingsError:
    """The error with place and reason, without the text at that place: it may be a password."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return errors.SettingsError(errors.Problem(where, "not YAML"))
    reason = str(error.problem)
    # A line without a colon is the one where the key begins, and an open quote where it opens, not where the parser gives up.
    is_earlier = "expected ':'" in reason or "unexpected end of stream" in reason
    mark = error.context_mark if is_earlier and error.context_mark else error.problem_mark
    if reason.startswith("but "):
        reason = f"{error.context}, {reason}"
    if any(word in reason for word in ("alias", "anchor", "tag", "handle", "directive")):
        reason = re.sub(r"'.*'", "'…'", reason)
    hint = next((hint for sign, hint in _HINTS.items() if sign in reason), "")
    if "mapping values" in reason and ": " not in _line_before(mark):
        # The first colon of its line: the line goes on with the value above it.
        hint = "indent the line as those beside it"
    return errors.SettingsError(errors.Problem(f"{where}:{mark.line + 1}:{mark.column + 1}", f"not YAML: {reason}", hint))


def _line_before(mark: yaml.Mark) -> str:
    """The text of the marked line before the mark."""
    return (mark.buffer or "")[: mark.pointer].rpartition("\n")[2]


_HINTS = {
    "'\\t'": "write spaces instead of the tab",
    "expected ':'": "a key is followed by a colon and a space",
    "expected <block end>, but found '<block mapping start>'": "indent the line as those beside it",
    "unexpected end of stream": "a quote that opens there does not close",
    "recursive": "an alias must not stand within its own anchor",
    "too many digits": "put the value in quotes",
    "alias": "put a value that begins with * in quotes",
    "expected alphabetic or numeric character": "put a value that begins with * or & in quotes",
    "escape": "in double quotes a backslash is written twice; in single quotes once",
    "cannot start any token": "put the value in quotes",
    "mapping values are not allowed": "put the value in quotes",
}
