"""The types of settings: what each reads, and how it describes what it expects.

Values come from YAML, or from a connector's JSON, in which everything is a string. So `true` and `"true"`, `5` and
`"5"` are read alike, and so are a list and its entries separated by commas. `read` raises nothing but `InvalidValue`.
"""

from __future__ import annotations

import difflib
import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cdc_core.extended_json import query


class InvalidValue(Exception):
    """A value that does not fit its type: what was expected, and a hint."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint


_REFERENCE = re.compile(r"\$\{(env|secret):([^{}]*)\}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"[^/\s]+/[^/\s]+")


@dataclass(frozen=True)
class Reference:
    """A text with unresolved references: its printed form shows ``${env:NAME}`` and never a secret."""

    template: str

    def __str__(self) -> str:
        return self.template

    def __repr__(self) -> str:
        return f"Reference({self.template!r})"

    def parts(self) -> list[tuple[str, str]]:
        """The parts of the text in order: ``("", text)``, ``("env", NAME)`` and ``("secret", "scope/key")``."""
        parts: list[tuple[str, str]] = []
        position = 0
        for match in _REFERENCE.finditer(self.template):
            if match.start() > position:
                parts.append(("", self.template[position : match.start()]))
            parts.append((match[1], match[2]))
            position = match.end()
        if position < len(self.template):
            parts.append(("", self.template[position:]))
        return parts


class PropertyType(Protocol):
    """The type of a setting."""

    @property
    def expected(self) -> str:
        """The allowed values, in a few words."""

    def read(self, value: object) -> Any:
        """The value; raises `InvalidValue`."""


@dataclass(frozen=True)
class Text:
    expected: str = "a text"

    def read(self, value: object) -> str:
        if isinstance(value, str) and "${" in value:
            raise InvalidValue(f"{self.expected} without a reference")
        _refuse_null(value, self.expected)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise InvalidValue(self.expected, f'put it in quotes: "{value}"')
        raise InvalidValue(self.expected)


@dataclass(frozen=True)
class Location:
    """A text that may contain variables, but no secrets: locations differ between machines."""

    expected: str

    def read(self, value: object) -> str:
        if not isinstance(value, str) or "${" not in value:
            return Text(self.expected).read(value)
        reference = Referable(self.expected).read(value)
        if any(kind == "secret" for kind, _ in reference.parts()):
            raise InvalidValue(f"{self.expected}, literally or as ${{env:NAME}}")
        return reference.template


@dataclass(frozen=True)
class Boolean:
    expected: str = "true or false"

    def read(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        raise InvalidValue(self.expected)


@dataclass(frozen=True)
class Integer:
    minimum: int
    maximum: int = 2**63 - 1

    @property
    def expected(self) -> str:
        if self.maximum >= 2**63 - 1:
            return f"a whole number, {self.minimum} or more"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def read(self, value: object) -> int:
        number = self._number(value)
        if not self.minimum <= number <= self.maximum:
            raise InvalidValue(self.expected)
        return number

    def _number(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", value.strip()):
            return int(value)
        raise InvalidValue(self.expected)


@dataclass(frozen=True)
class Choice:
    """One member of an enum, in any case; `older` has former names."""

    members: Iterable[enum.Enum]
    older: Mapping[str, enum.Enum] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self._names())}"

    def read(self, value: object) -> enum.Enum:
        name = ("true" if value else "false") if isinstance(value, bool) else str(value).strip().lower()
        members_by_name = self._names()
        if name in members_by_name:
            return members_by_name[name]
        if name in self.older:
            return self.older[name]
        raise InvalidValue(self.expected, did_you_mean(name, members_by_name))

    def _names(self) -> dict[str, enum.Enum]:
        return {str(member.value): member for member in self.members}


@dataclass(frozen=True)
class Choices:
    """Members of an enum, each once, in the given order."""

    members: type[enum.Enum]

    @property
    def expected(self) -> str:
        return f"a comma-separated list of {', '.join(str(member.value) for member in self.members)}"

    def read(self, value: object) -> tuple[enum.Enum, ...]:
        choice = Choice(self.members)
        try:
            return tuple(dict.fromkeys(choice.read(name) for name in NameList().read(value)))
        except InvalidValue as error:
            raise InvalidValue(self.expected, error.hint) from None


@dataclass(frozen=True)
class NameList:
    """A list, or its entries separated by commas; spaces around entries and empty entries are ignored."""

    expected: str = "a comma-separated list"

    def read(self, value: object) -> tuple[str, ...]:
        return tuple(entry.strip() for entry in self._entries(value) if entry.strip())

    def _entries(self, value: object) -> Sequence[str]:
        if isinstance(value, str):
            return self._split(value)
        if isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value):
            return value
        raise InvalidValue(self.expected)

    def _split(self, text: str) -> Sequence[str]:
        return text.split(",")


@dataclass(frozen=True)
class SelectionList(NameList):
    """A list that selects something, of which commas alone, or empty entries, are refused: without an entry it would select everything.

    So are references, which nothing resolves here: with them it would select nothing.
    """

    def read(self, value: object) -> tuple[str, ...]:
        names = super().read(value)
        is_empty = not value.strip() if isinstance(value, str) else not value
        if not names and not is_empty:
            raise InvalidValue(self.expected, "name at least one entry, or leave the setting out")
        for name in names:
            _refuse_reference(name, self.expected)
        return names


@dataclass(frozen=True)
class Patterns(SelectionList):
    """Regular expressions; a comma in a group, a set or a quantifier, or after a backslash, does not separate."""

    expected: str = "a comma-separated list of regular expressions"

    def _split(self, text: str) -> Sequence[str]:
        return split_top_level(text, ",")


@dataclass(frozen=True)
class CollectionName:
    expected: str = "a collection, as database.collection"

    def read(self, value: object) -> str:
        db, dot, collection = value.strip().partition(".") if isinstance(value, str) else ("", "", "")
        if not (db and dot and collection):
            raise InvalidValue(self.expected)
        _refuse_reference(f"{db}.{collection}", self.expected)
        return f"{db}.{collection}"


@dataclass(frozen=True)
class Referable:
    """A text that may contain references."""

    expected: str = "a text, ${env:NAME} or ${secret:scope/key}"

    def read(self, value: object) -> Reference:
        if not isinstance(value, str) or not value.strip():
            raise InvalidValue(self.expected)
        _refuse_null(value, self.expected)
        reference = Reference(value.strip())
        _check_references(reference)
        return reference


@dataclass(frozen=True)
class Secret:
    """A text that consists of references only."""

    expected: str = "a reference: ${env:NAME} or ${secret:scope/key}"

    def read(self, value: object) -> Reference:
        reference = Referable(self.expected).read(value)
        if not _is_reference(reference.template):
            raise InvalidValue(self.expected, "the value itself never stands in a settings file")
        return reference


@dataclass(frozen=True)
class ConnectionString:
    """A connection string with a reference for its password, or for the whole string."""

    expected: str = "a connection string such as mongodb://host:27017/?replicaSet=rs0, or a reference to one"

    def read(self, value: object) -> Reference:
        reference = Referable(self.expected).read(value)
        text = _REFERENCE.sub(_PLACEHOLDER, reference.template)
        if not text.startswith((_PLACEHOLDER, "mongodb://", "mongodb+srv://")):
            raise InvalidValue(self.expected, "it starts with mongodb:// or mongodb+srv://")
        if _has_literal_password(text):
            raise InvalidValue(
                "a connection string without a literal password",
                "write ${env:NAME} or ${secret:scope/key} in the password's place, or for the whole string",
            )
        return reference


@dataclass(frozen=True)
class Stages:
    """Aggregation stages, as JSON text or as a list of mappings; stored as JSON text."""

    expected: str = "a JSON array of aggregation stages"

    def read(self, value: object) -> str:
        stages = _parsed(value, self.expected)
        if not isinstance(stages, list) or not all(_is_stage(stage) for stage in stages):
            raise InvalidValue(self.expected, "each stage is a document with one field, whose name starts with $")
        return _extended_json(stages, self.expected)


@dataclass(frozen=True)
class FindFilter:
    """A find filter, as JSON text or as a mapping; stored as JSON text."""

    expected: str = "a find filter as a JSON document"

    def read(self, value: object) -> str:
        document = _parsed(value, self.expected)
        if not isinstance(document, dict):
            raise InvalidValue(self.expected)
        return _extended_json(document, self.expected)


def did_you_mean(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """A hint with the most similar of the known names; empty if none is similar."""
    lowered = {known_name.lower(): known_name for known_name in known}
    nearest = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return f"did you mean {lowered[nearest[0]]}?" if nearest else ""


def shown(value: object) -> str:
    """A short form of a value for messages; the caller makes sure that it is not a secret."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return (value if len(value) <= 60 else f"{value[:59]}…") or "an empty text"
        case int() | float():
            return str(value)
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def kind(value: object) -> str:
    """As `shown`, for a place where a text may be a secret, such as a connection string in place of a section."""
    return "a text" if isinstance(value, str) else shown(value)


def written(value: object) -> str:
    """A value as in a settings file; empty for none."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case enum.Enum():
            return str(value.value)
        case tuple():
            return ", ".join(written(item) for item in value)
        case _:
            return str(value)


def split_top_level(text: str, separator: str) -> list[str]:
    """The parts of a regular expression between separators (``,`` or ``|``).

    A separator counts unless it is escaped, quoted by ``\\Q…\\E``, inside ``(…)`` or ``[…]``, or part of ``{m,n}``.
    """
    entries = [""]
    depth = 0
    for token in _PATTERN_TOKEN.findall(text):
        if token == separator and depth == 0:
            entries.append("")
            continue
        depth = max(0, depth + (token == "(") - (token == ")"))
        entries[-1] += token
    return entries


_PATTERN_TOKEN = re.compile(
    r"""\\Q.*?(?:\\E|\Z)              # quoted
      | \\.                           # escaped
      | \[\^?\]?(?:\\.|[^\]\\])*\]    # a set
      | \{[0-9]*,[0-9]*\}             # a quantifier
      | .""",
    re.VERBOSE | re.DOTALL,
)
_PLACEHOLDER = "\0"
SECRET_OPTIONS = {"tlsCertificateKeyFilePassword": "MONGODB_TLS_KEY_PASSWORD", "proxyPassword": "MONGODB_PROXY_PASSWORD"}
"""Options of a connection string that contain a secret, with the variable that an import puts in its place."""
SESSION_TOKEN = re.compile(r"(AWS_SESSION_TOKEN(?::|%3A))([^&;,]*)", re.IGNORECASE)
"""The secret inside the option `authMechanismProperties`."""
_SECRET_OPTIONS = re.compile(rf"[?&;]({'|'.join(SECRET_OPTIONS)})=([^&;]*)", re.IGNORECASE)


_HOST = r"(?:\[[^\]/?@]*\]|[^\[\]:/?@,]*)(?::[0-9]+)?"
_OPTION = r"(?:[^=&;?]+=[^&;]*|0*)"
_ADDRESS = re.compile(rf"(?:([^/?@]*)@)?{_HOST}(?:,{_HOST})*(?:/[^/?@]*)?(?:\?{_OPTION}(?:[&;]{_OPTION})*)?")


def login(address: str) -> str:
    """User and password of a connection string without its scheme: where it is malformed, all before its last @, so that nothing of a
    password with signs such as / and ? remains.
    """
    # References, and their placeholders, as digits: a port may be one, too.
    match = _ADDRESS.fullmatch(re.sub(r"\$\{[^{}]*\}|\0", lambda found: "0" * len(found[0]), address))
    return address[: max(0, match.end(1) if match else address.rfind("@"))]


def without_references(text: str) -> str:
    """The text without its references."""
    return _REFERENCE.sub("", text)


def _refuse_null(value: object, expected: str) -> None:
    # No path, host or login can have it: the system refuses the call.
    if isinstance(value, str) and "\0" in value:
        raise InvalidValue(f"{expected} without the character U+0000")


def _refuse_reference(name: str, expected: str) -> None:
    # Not of the two kinds alone: another one, such as `${file:…}`, is part of no name either.
    if re.search(r"\$\{\w+:", name):
        raise InvalidValue(f"{expected} without a reference", f"only secrets may be references, and not {name}")


def _is_reference(text: str) -> bool:
    return bool(text) and not without_references(text)


def _has_literal_password(text: str) -> bool:
    """Whether a connection string, with placeholders for its references, contains a secret."""
    password = login(text.partition("://")[2]).partition(":")[2]
    secrets = [
        password,
        *(match[2] for match in _SECRET_OPTIONS.finditer(text)),
        *(match[2] for match in SESSION_TOKEN.finditer(text)),
    ]
    return any(secret.replace(_PLACEHOLDER, "") for secret in secrets)


def _check_references(reference: Reference) -> None:
    for kind, name in reference.parts():
        if kind == "env" and not _ENV_NAME.fullmatch(name):
            raise InvalidValue("a reference such as ${env:MONGODB_URI}", "letters, digits and _ name a variable")
        if kind == "secret" and not _SECRET_NAME.fullmatch(name):
            raise InvalidValue("a reference such as ${secret:scope/key}")
        if kind == "" and "${" in name:
            raise InvalidValue("a reference of the form ${env:NAME} or ${secret:scope/key}")


def _parsed(value: object, expected: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(expected, f"not JSON: {error}") from None


def _extended_json(value: object, expected: str) -> str:
    """The JSON text of stages or of a filter; raises `InvalidValue` if it cannot be sent to a server."""
    try:
        text = json.dumps(value)
        query.checked(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(expected, str(error)) from None
    return text


def _is_stage(stage: object) -> bool:
    return isinstance(stage, dict) and len(stage) == 1 and str(next(iter(stage))).startswith("$")
