"""Converts a connector's JSON or `.properties` file into a settings file: `medallion import-debezium`.

`cdc_core.settings.debezium_import` maps Debezium properties to settings.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

import javaproperties
import orjson

from cdc_core import errors
from cdc_core.settings import debezium_import
from pipelines.settings import file as settings_file


@dataclass(frozen=True)
class Import:
    """The text of the settings file, the variables to set, and notes for the user, one line each."""

    text: str
    variables: tuple[str, ...]
    notes: tuple[str, ...]


def read(path: Path, *, root: str) -> Import:
    """The settings file for the connector in a JSON or `*.properties` file, with its tables below `root`. It contains no secrets.

    Raises `SettingsError` with all mistakes of the connector, or if the file cannot be read.
    """
    return settings_text(_within(_connector(path), where=path.name), root=root, where=path.name)


def settings_text(connector: object, *, root: str, where: str) -> Import:
    """The settings file for a connector; `where` names the connector in messages and in the file."""
    conversion = debezium_import.imported(connector, root=root, where=where)
    variables = tuple(f"{variable.name}: {variable.holds}" for variable in conversion.variables)
    notes = (*debezium_import.remarks(conversion.notes), *conversion.warnings)
    text = settings_file.rendered(
        conversion.document,
        before=[f"Imported from {where} by `medallion import-debezium`.", *_listed("Variables to set:", variables)],
        after=_listed("Properties of the connector that are not above as they stood:", notes),
    )
    return Import(text, variables, notes)


def _listed(head: str, lines: tuple[str, ...]) -> list[str]:
    return [head, *(f"  {line}" for line in lines)] if lines else []


def _within(document: object, *, where: str) -> object:
    """The connector in a resource of Strimzi, or in Kafka Connect's answer about all connectors, if there is only one.

    Raises `SettingsError` if there are several.
    """
    match document:
        case {"kind": "KafkaConnector", "spec": {"class": class_, "config": {**properties}}}:
            return {"connector.class": class_, **properties}
        case {**connectors}:
            match [*connectors.values()]:
                case [{"info": connector}]:
                    return connector
                case [{"info": _}, *_]:
                    names = ", ".join(map(str, connectors))
                    raise errors.SettingsError(errors.Problem(where, f"it has the connectors {names}", "keep one of them"))
    return document


def _connector(path: Path) -> object:
    where = str(path)
    try:
        # Some editors write a byte order mark, which would be read as part of the first key.
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        return javaproperties.loads(_properties_text(content)) if path.suffix == ".properties" else orjson.loads(content)
    except orjson.JSONDecodeError as error:
        problem = errors.Problem(f"{where}:{error.lineno}:{error.colno}", f"not JSON: {error.msg}", _hint(content))
        raise errors.SettingsError(problem) from None
    except ValueError as error:  # an invalid escape, or UTF-16
        raise errors.SettingsError(errors.Problem(where, f"not valid Java properties: {error}")) from None
    except OSError as error:
        raise errors.SettingsError(errors.Problem(where, f"it cannot be read: {error.strerror}")) from None


def _hint(content: bytes) -> str:
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"{\0", b"\0{"):
        return "it is UTF-16, as PowerShell writes files: save it as UTF-8"
    return "" if content.lstrip()[:1] in b"{[" else "files with Java properties must have the extension .properties"


def _properties_text(content: bytes) -> str:
    """The text of a properties file: UTF-8, as editors and Debezium Server have it, or Latin-1, as Kafka Connect reads it."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        if b"\0" in content:  # UTF-16
            raise
        return content.decode("latin-1")
