"""A model: one query over gold tables and other models, parsed from the text of its file.

The notation is dbt's, for references and settings:

    {{ config(materialized='incremental', unique_key='customer') }}
    SELECT o.customer, count(*) AS orders
    FROM {{ ref('shop.orders', key='customer') }} AS o
    JOIN {{ ref('customers_by_city') }} AS c ON c._id = o.customer
    GROUP BY o.customer

`ref('database.collection')` is a collection's gold table, `ref('name')` another model. `{# … #}` is a comment; a tag in
SQL's own comments and strings is text. There are no loops or conditions: a model is one query.

`key` (not in dbt) names the columns of the referenced table that hold the result's `unique_key`. A row of an
incremental model may only depend on rows with its own key in tables that have a `key`. So the keys of changed rows,
before and after the change, are the keys whose results may change.
"""

from __future__ import annotations

import ast
import enum
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cdc_core import errors
from cdc_core.properties import types as values

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# A closing tag alone is text, as in dbt: JSON in a query ends with }}.
_TAG = re.compile(r"\{\{(.*?)\}\}|(\{%.*?%\}|\{\{|\{%|\{#|\$\{\s*(?:ref|config)\b.*?\}|\$(?:ref|config)\()", re.DOTALL)


def _bracketed(levels: int) -> str:
    """A comment in brackets, which may contain others."""
    inner = f"{_bracketed(levels - 1)}|" if levels else ""
    return rf"/\*(?:{inner}[^*/]|\*(?!/)|/(?!\*))*\*/"


_COMMENT = rf"--(?:\\\n|[^\n])*|{_bracketed(5)}"
_OPAQUE = re.compile(
    rf"""{_COMMENT}|(?<!\w)[rR](?:'[^']*'|"[^"]*")|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`""", re.DOTALL
)
"""SQL comments, strings and quoted names, whose content is text."""
_OPAQUE_OR_COMMENT = re.compile(rf"(?P<opaque>{_OPAQUE.pattern})|\{{#.*?#\}}", re.DOTALL)
_OPAQUE_OR_TAG = re.compile(f"(?P<opaque>{_OPAQUE.pattern})|{_TAG.pattern}", re.DOTALL)
_END = re.compile(rf";(?:[\s;]|{_COMMENT})*\Z", re.DOTALL)
_OPAQUE_OR_END = re.compile(f"(?P<opaque>{_OPAQUE.pattern})|{_END.pattern}", re.DOTALL)
_KNOWN = "known are {{ ref('…') }} and {{ config(…) }}"


class Materialization(enum.Enum):
    """How a model's rows are stored."""

    TABLE = "table"
    VIEW = "view"
    INCREMENTAL = "incremental"


@dataclass(frozen=True)
class Ref:
    """A table that a model reads; `key` are its columns that hold the model's `unique_key`."""

    name: str
    key: tuple[str, ...] = ()

    @property
    def is_collection(self) -> bool:
        """Whether it names a collection's gold table instead of a model."""
        return "." in self.name


@dataclass(frozen=True)
class Model:
    """One model. `parts` is its query, split at the references; `where` names its file in messages."""

    name: str
    parts: tuple[str | Ref, ...]
    where: str
    materialized: Materialization = Materialization.TABLE
    unique_key: tuple[str, ...] = ()
    description: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns with their comments."""

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The references without duplicates, in the order of the text."""
        return tuple(dict.fromkeys(part for part in self.parts if isinstance(part, Ref)))

    @property
    def names(self) -> tuple[str, ...]:
        """Their names without duplicates."""
        return tuple(dict.fromkeys(ref.name for ref in self.refs))

    @property
    def digest(self) -> str:
        """A short hash that changes with the model."""
        parts = [
            [[part.name, *part.key] if isinstance(part, Ref) else part for part in self.parts],
            self.materialized.value,
            self.unique_key,
            self.description,
            self.columns,
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def query(self, relation: Callable[[Ref], str]) -> str:
        """The query with each reference as `relation` renders it; line numbers are those of the file."""
        return "".join(part if isinstance(part, str) else relation(part) for part in self.parts)


def parse(name: str, text: str, *, where: str) -> Model:
    """The model in a file's text. Raises `SettingsError` with all mistakes and their lines."""
    problems: list[errors.Problem] = []
    if not _NAME.fullmatch(name):
        problems.append(
            errors.Problem(where, "a model's name is letters, digits and _", "it is the file's name without .sql")
        )
    parts: list[str | Ref] = []
    config: dict[str, object] | None = None
    # Keeps the line breaks of comments, so that line numbers in messages are right.
    uncommented = _OPAQUE_OR_COMMENT.sub(lambda found: found["opaque"] or "\n" * found[0].count("\n"), text)
    for tag in _tagged(uncommented):
        if isinstance(tag, str):
            parts.append(tag)
            continue
        location = f"{where}:{tag.line}"
        try:
            call = _call(tag.body)
            if call.name == "config" and config is None:
                config = call.named
                _check_config(call)
            elif call.name == "config":
                raise _Mistake("config(…) is there twice")
            else:
                parts.append(_ref(call))
        except _Mistake as mistake:
            problems.append(errors.Problem(location, str(mistake), mistake.hint))
    options = config or {}
    model = Model(
        name,
        _without_end(parts),
        where,
        _materialized(options.get("materialized")),
        _columns(options.get("unique_key")),
    )
    problems += _inconsistent(model) if not problems else []
    # The words of the query itself, at their lines.
    code = _END.sub("", _OPAQUE_OR_TAG.sub(lambda found: "\n" * found[0].count("\n"), uncommented))
    problems += _early_ends(code, where)
    problems += _limits(code, model)
    if problems:
        raise errors.SettingsError(problems)
    return model


def _early_ends(code: str, where: str) -> Iterator[errors.Problem]:
    """Problems that end the query too early: a semicolon, or an unmatched closing parenthesis.

    The query becomes a part of other statements, so Spark would report other places, or accept the text that follows.
    """
    depth = 0
    for match in re.finditer(r"[();]", code):
        depth += {"(": 1, ")": -1, ";": 0}[match[0]]
        location = f"{where}:{code.count(chr(10), 0, match.start()) + 1}"
        if match[0] == ";":
            yield errors.Problem(
                location, "a semicolon ends the query here, and a model is one query", "split it into two models"
            )
            return
        if depth < 0:
            yield errors.Problem(location, "unmatched )")
            return


_BRACKET_OR_LIMIT = re.compile(r"[()]|\b(?:LIMIT|OFFSET)(?=\s+\d)", re.IGNORECASE)


def _limits(code: str, model: Model) -> Iterator[errors.Problem]:
    """The first limit on all rows of an incremental model. With fewer keys than its number a run does not show that the model depends on
    it, and each later key would get a row.
    """
    depth = 0
    for match in _BRACKET_OR_LIMIT.finditer(code if model.materialized is Materialization.INCREMENTAL else ""):
        if match[0] in "()":
            depth += 1 if match[0] == "(" else -1
        elif not depth:  # in a subquery it may be one within a key
            location = f"{model.where}:{code.count(chr(10), 0, match.start()) + 1}"
            key = ", ".join(model.unique_key)
            message = f"{match[0].upper()} selects among the keys, so the rows of one {key} cannot be computed separately"
            yield errors.Problem(location, message, "use materialized='table'")
            return


@dataclass(frozen=True)
class _Tag:
    body: str
    line: int


@dataclass(frozen=True)
class _Call:
    name: str
    positional: tuple[object, ...]
    named: dict[str, object]


class _Mistake(Exception):
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _tagged(text: str) -> Iterator[str | _Tag]:
    """The text between tags, and the tags."""
    start = 0
    for match in _OPAQUE_OR_TAG.finditer(text):
        if match["opaque"] is not None:
            continue
        yield text[start : match.start()]
        line = text.count("\n", 0, match.start()) + 1
        yield _Tag(match[3] if match[2] is None else match[2], line)
        if match[2] is not None:
            yield "\n" * match[0].count("\n")
        start = match.end()
    yield text[start:]


def _call(body: str) -> _Call:
    """A tag's content as a call with literal arguments."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise _Mistake("this is no reference", _KNOWN)
        # Only literals: reading a model must not run code.
        arguments = tuple(ast.literal_eval(argument) for argument in tree.args)
        keywords = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise _Mistake("this cannot be read", _KNOWN) from None
    if tree.func.id not in ("ref", "config"):
        hint = values.did_you_mean(tree.func.id, ("ref", "config")) or _KNOWN
        raise _Mistake(f"there is no {tree.func.id}(…) here", hint)
    return _Call(tree.func.id, arguments, keywords)


def _ref(call: _Call) -> Ref:
    if len(call.positional) != 1 or not isinstance(call.positional[0], str) or not call.positional[0].strip():
        raise _Mistake("ref takes one name", "ref('database.collection') or ref('model')")
    if set(call.named) - {"key"}:
        raise _Mistake(f"ref takes no {', '.join(sorted(set(call.named) - {'key'}))}", "key='column' is what it takes")
    key = call.named.get("key")
    if key is not None and not _columns(key):
        raise _Mistake("key takes the name of a column, or a list of them")
    return Ref(call.positional[0].strip(), _columns(key))


def _check_config(call: _Call) -> None:
    known = ("materialized", "unique_key")
    for name in call.named:
        if name not in known:
            raise _Mistake(f"config has no {name}", values.did_you_mean(name, known) or f"known are {', '.join(known)}")
    if call.positional:
        raise _Mistake("config takes names with values", "config(materialized='table')")
    materialized = call.named.get("materialized", "table")
    choices = [member.value for member in Materialization]
    if materialized not in choices:
        hint = values.did_you_mean(str(materialized), choices)
        raise _Mistake(f"materialized is one of {', '.join(choices)}, found {values.shown(materialized)}", hint)
    if call.named.get("unique_key") is not None and not _columns(call.named["unique_key"]):
        raise _Mistake("unique_key takes the name of a column, or a list of them")


def _materialized(value: object) -> Materialization:
    return next((member for member in Materialization if member.value == value), Materialization.TABLE)


def _columns(value: object) -> tuple[str, ...]:
    """One name or several as a tuple; empty for anything else."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        return ()
    return tuple(names)


def _without_end(parts: Sequence[str | Ref]) -> tuple[str | Ref, ...]:
    """The query without a final semicolon and the comments after it."""
    query_parts = [part for part in parts if part != ""]
    # A configuration may come after the semicolon.
    while len(query_parts) > 1 and isinstance(last := query_parts[-1], str) and isinstance(one := query_parts[-2], str):
        query_parts[-2:] = [one + last]
    if query_parts and isinstance(query_parts[-1], str):
        query_parts[-1] = _OPAQUE_OR_END.sub(lambda each: each["opaque"] or "", query_parts[-1])
    return tuple(query_parts)


def without_comments(query: str) -> str:
    """The query without comments, and without spaces before and after it."""
    return _OPAQUE.sub(lambda found: "" if found[0].startswith(("--", "/*")) else found[0], query).strip()


def _inconsistent(model: Model) -> Iterator[errors.Problem]:
    """Contradictions within one model."""
    if not any(isinstance(part, Ref) or re.sub(_COMMENT, "", part).strip() for part in model.parts):
        yield errors.Problem(model.where, "there is no query in it")
    keyed_refs = [ref for ref in model.refs if ref.key]
    if model.materialized is not Materialization.INCREMENTAL:
        if model.unique_key or keyed_refs:
            name = "unique_key" if model.unique_key else "ref's key"
            yield errors.Problem(
                model.where, f"{name} is for materialized='incremental'", "remove it, or set materialized='incremental'"
            )
        return
    if not model.unique_key:
        yield errors.Problem(model.where, "an incremental model needs a unique_key", "config(…, unique_key='column')")
    elif not keyed_refs:
        hint = f"ref('{model.names[0] if model.names else '…'}', key='the column that holds {model.unique_key[0]}')"
        yield errors.Problem(
            model.where, "an incremental model needs a ref with key='…', to find the keys that changed", hint
        )
    for ref in keyed_refs:
        if model.unique_key and len(ref.key) != len(model.unique_key):
            message = f"ref('{ref.name}') has {len(ref.key)} key columns, unique_key has {len(model.unique_key)}"
            yield errors.Problem(model.where, message, "they must match, in the same order")
    for name in model.names:
        if len({ref.key for ref in keyed_refs if ref.name == name}) > 1:
            yield errors.Problem(
                model.where, f"ref('{name}') is there with two keys", "a table leads to the keys in one way"
            )


def described(models: Sequence[Model], document: object, *, where: str, unread: Sequence[str] = ()) -> tuple[Model, ...]:
    """The models with the descriptions from a YAML file beside them, in dbt's format; it may also name `unread` models.

    Raises `SettingsError` with all mistakes.
    """
    problems: list[errors.Problem] = []
    names = dict.fromkeys(model.name for model in models)
    descriptions: dict[str, dict[str, Any]] = {}
    section = _section(document, ("models", "version"), where, problems)
    for number, entry in enumerate(_listed(section.get("models"), f"{where}: models", problems)):
        location = f"{where}: models[{number}]"
        model_section = _section(entry, ("name", "description", "columns"), location, problems)
        name = model_section.get("name")
        if name in unread:
            continue
        if not isinstance(name, str):
            problems.append(errors.Problem(f"{location}.name", f"a name is expected, found {values.shown(name)}"))
            continue
        if name not in names:
            hint = values.did_you_mean(name, names) or f"known are {', '.join(names)}"
            problems.append(errors.Problem(f"{location}.name", f"there is no model {values.shown(name)}", hint))
            continue
        columns = tuple(_described_columns(model_section.get("columns"), location, problems))
        descriptions[name] = {"description": _text(model_section.get("description")), "columns": columns}
    if problems:
        raise errors.SettingsError(problems)
    # Not by name: `graph` refuses two models with one name.
    return tuple(replace(model, **descriptions.get(model.name, {})) for model in models)


def _described_columns(value: object, place: str, problems: list[errors.Problem]) -> Iterator[tuple[str, str]]:
    for number, entry in enumerate(_listed(value, f"{place}.columns", problems)):
        section = _section(entry, ("name", "description"), f"{place}.columns[{number}]", problems)
        if isinstance(section.get("name"), str):
            yield str(section["name"]), _text(section.get("description"))
        else:
            problems.append(errors.Problem(f"{place}.columns[{number}]", "a name is expected"))


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _section(value: object, known: tuple[str, ...], place: str, problems: list[errors.Problem]) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(errors.Problem(place, f"a mapping is expected, found {values.shown(value)}"))
        return {}
    for name in value:
        if name not in known:
            hint = values.did_you_mean(str(name), known) or f"known are {', '.join(known)}"
            if name in ("tests", "data_tests"):
                hint = "expectations lie in the folder gold.expectations"
            problems.append(errors.Problem(f"{place}.{name}", "there is no such key", hint))
    return value


def _listed(value: object, place: str, problems: list[errors.Problem]) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        problems.append(errors.Problem(place, f"a list is expected, found {values.shown(value)}"))
        return []
    return value
