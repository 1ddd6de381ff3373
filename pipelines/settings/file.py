"""Reads a settings file, and writes one that was imported. The only module that knows YAML.

A settings file is YAML 1.2 in its plain core: `true` and `false` are booleans (`yes`, `no`, `on`, `off` are
texts), and there are no dates and no numbers to the base 60.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cdc_core import errors
from cdc_core.settings import parse as settings
from cdc_core.tables import layout as tables
from pipelines.settings import secrets


def load(path: str | Path) -> settings.Settings:
    """The validated settings in the file at `path`.

    Raises `SettingsError` for a file that is missing or not YAML (with line and column), for a key that is
    there twice, and with all mistakes of its content, each with its line. Variables in `lakehouse` are
    resolved here, so that one file serves a machine, a test and a production catalog; everything else stays a
    reference.
    """
    where = str(path)
    text = content(path)
    lines, repeated = _keys(text, where)
    if repeated:
        raise errors.SettingsError(repeated)
    try:
        return _placed(settings.parse(_document(text, where), where=where), Path(path))
    except errors.SettingsError as error:
        problems = sorted(error.problems, key=lambda problem: _line(problem.path, lines))
        raise errors.SettingsError([_located(problem, where, lines) for problem in problems]) from None


def document(path: str | Path) -> object:
    """What the YAML or JSON file at `path` holds, whatever it is about.

    Raises `SettingsError` for a file that is missing or not YAML, and for a key that is there twice.
    """
    where = str(path)
    text = content(path)
    repeated = _keys(text, where)[1]
    if repeated:
        raise errors.SettingsError(repeated)
    return _document(text, where)


def _placed(parsed: settings.Settings, path: Path) -> settings.Settings:
    """The settings with the variables in `lakehouse` resolved, and gold's folders found."""
    problems: list[errors.Problem] = []

    def resolved(name: str, text: Any) -> Any:
        try:
            return secrets.resolve(text) if isinstance(text, str) else text
        except errors.SettingsError as error:
            problems.extend(errors.Problem(f"lakehouse.{name}", each.message, each.hint) for each in error.problems)
            return text

    own = parsed.lakehouse
    places = {name: resolved(name, getattr(own, name)) for name in ("root", "catalog", "schema_prefix")}
    if wrong := tables.unusable(places["root"] or "/"):
        problems.append(errors.Problem("lakehouse.root", f"{places['root']} is no folder or URL", wrong))
    if problems:
        raise errors.SettingsError(problems)
    gold = dataclasses.replace(
        parsed.gold, models=_found(parsed.gold.models, path), expectations=_found(parsed.gold.expectations, path)
    )
    return dataclasses.replace(parsed, lakehouse=dataclasses.replace(own, **places), gold=gold)


def _found(folder: str | None, path: Path) -> str | None:
    """A folder of the settings: from the working directory, else from the file's folder or the one above, where a job
    finds it."""
    if folder is None or Path(folder).is_dir():
        return folder
    beside = (path.resolve().parent / folder, path.resolve().parents[1] / folder)
    return next((str(each) for each in beside if each.is_dir()), folder)


def content(path: str | Path) -> str:
    """What a file holds; `SettingsError` where it cannot be read."""
    where = str(path)
    try:
        # Some editors put a byte order mark in front, which YAML would take for a part of the first key.
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = "name it with --config; conf/shop.yml is an example"
        raise errors.SettingsError(errors.Problem(where, "there is no such file", hint)) from None
    except UnicodeDecodeError as error:
        raise errors.SettingsError(errors.Problem(where, f"not UTF-8 at byte {error.start}")) from None
    except OSError as error:
        raise errors.SettingsError(errors.Problem(where, f"it cannot be read: {error.strerror}")) from None


def rendered(document: Mapping[str, object], *, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    """The text of a settings file that loads as `document`, with lines of comment before and after it."""
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return "".join([*map(_comment, before), text, *map(_comment, after)])


def write(path: str | Path, text: str) -> None:
    """Write a new settings file. One that is there already with this text is left, with another one it is refused."""
    try:
        # Mode x creates the file or fails; a look before would leave time for another process to create it.
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                # Half of a file would be refused by the next try as another one.
                Path(path).unlink(missing_ok=True)
                raise
    except FileExistsError:
        if content(path) != text:
            hint = "move it away, or choose another --out"
            raise errors.SettingsError(errors.Problem(str(path), "the file already exists", hint)) from None
    except OSError as error:
        raise errors.SettingsError(errors.Problem(str(path), f"it cannot be written: {error.strerror}")) from None


def _comment(line: str) -> str:
    # Whatever ends a line would end the comment, and a property's own text go on as settings; other signs may stand in no YAML.
    words = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(line.splitlines()))
    return f"# {words}".rstrip() + "\n"


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML's older core or ours would take for something else."""


class _Loader(yaml.SafeLoader):
    """Plain YAML: mappings, lists, texts, booleans, integers, floats, null."""


_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError, AttributeError, KeyError)
"""What PyYAML raises; the last two of a text that is not what its tag says."""


# PyYAML's own resolvers are those of YAML 1.1: they read `on` as true, `1:30` as 90 and 2026-01-01 as a date.
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


def _document(text: str, where: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except _UNREADABLE as error:
        raise _not_yaml(error, where) from None


def _keys(text: str, where: str) -> tuple[dict[str, int], list[errors.Problem]]:
    """The line of every key by its path, and the keys that one mapping holds twice."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except _UNREADABLE as error:
        raise _not_yaml(error, where) from None
    lines: dict[str, int] = {}
    repeated: list[errors.Problem] = []
    for path, line, is_repeated in _walk(root, "", ()):
        if is_repeated:
            message = "duplicate key"
            repeated.append(errors.Problem(f"{where}:{line}: {path}", message, f"first in line {lines[path]}"))
        lines.setdefault(path, line)
    return lines, repeated


def _walk(node: yaml.Node | None, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, int, bool]]:
    # An anchor may hold an alias of itself: such a document has no end.
    if not isinstance(node, yaml.MappingNode) or id(node) in above:
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else str(key.value)
        yield name, key.start_mark.line + 1, key.value in seen if isinstance(key.value, str) else False
        if isinstance(key.value, str):
            seen.add(key.value)
        yield from _walk(value, name, (*above, id(node)))


def _line(path: str, lines: dict[str, int]) -> int:
    """The line of a key, or of what the key would stand in; 0 for the file as a whole."""
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
    """The place and the reason, without the text that stands there: it may be a password."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return errors.SettingsError(errors.Problem(where, "not YAML"))
    mark = error.problem_mark
    reason = str(error.problem)
    if any(word in reason for word in ("alias", "anchor", "tag", "handle", "directive")):
        reason = re.sub(r"'.*'", "'…'", reason)
    hint = next((hint for sign, hint in _HINTS.items() if sign in reason), "")
    return errors.SettingsError(errors.Problem(f"{where}:{mark.line + 1}:{mark.column + 1}", f"not YAML: {reason}", hint))


_HINTS = {
    "'\\t'": "a tab cannot indent",
    "escape": "in double quotes a backslash is written twice; in single quotes once",
    "cannot start any token": "put the value in quotes",
    "mapping values are not allowed": "put the value in quotes",
}
