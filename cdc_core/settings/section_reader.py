"""Reads sections of a settings document, collects all mistakes, and never repeats a secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdc_core import errors
from cdc_core.properties import types as values


@dataclass(frozen=True)
class SectionKey:
    """A key outside `source`: its type, and its default."""

    type: values.PropertyType
    default: object


class SectionReader:
    """Collects mistakes while settings are read; an invalid value is replaced with its default, so that reading continues."""

    def __init__(self) -> None:
        self.problems: list[errors.Problem] = []
        self.warnings: list[str] = []

    def refuse(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(errors.Problem(path, message, hint))

    def value(self, path: str, type_: values.PropertyType, content: object, default: Any) -> Any:
        """The value as its type reads it; messages never contain secrets."""
        try:
            return type_.read(content)
        except values.InvalidValue as error:
            # A mistyped secret must not appear in a message, which ends up in logs.
            is_secret = isinstance(type_, (values.ConnectionString, values.Secret, values.Referable))
            found_text = "" if is_secret else f", found {values.shown(content)}"
            self.refuse(path, f"{error.expected} is expected{found_text}", error.hint)
            return default

    def section(self, path: str, content: object) -> Mapping[str, Any]:
        """A mapping with strings as keys; empty for None."""
        if content is None:
            return {}
        if not isinstance(content, Mapping):
            self.refuse(path, f"a mapping is expected, found {values.kind(content)}")
            return {}
        for key in content:
            if not isinstance(key, str):
                name = "null" if key is None else values.written(key)
                self.refuse(join_path(path, name), "a text is expected as key", f'put it in quotes: "{name}"')
        return {key: value for key, value in content.items() if isinstance(key, str)}

    def keys(self, path: str, content: object, known: Mapping[str, SectionKey]) -> dict[str, Any]:
        """The values of a section with a closed set of keys."""
        section = self.section(path, content)
        self.unknown(path, section, tuple(known))
        return {name: self.key(path, name, key, section) for name, key in known.items()}

    def key(self, path: str, name: str, key: SectionKey, section: Mapping[str, Any]) -> Any:
        value = section.get(name)
        return key.default if value is None else self.value(join_path(path, name), key.type, value, key.default)

    def unknown(self, path: str, section: Mapping[str, Any], known: tuple[str, ...]) -> None:
        """Refuses every unknown key."""
        for name in section:
            if name not in known:
                hint = values.did_you_mean(name, known) or f"known are {', '.join(known)}"
                self.refuse(join_path(path, name), "there is no such setting", hint)


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
