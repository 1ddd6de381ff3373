"""A connector's file in, a settings file out: `medallion import-debezium`. What becomes of a property is in
`cdc_core.settings.debezium_import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from cdc_core import errors
from cdc_core.settings import debezium_import
from pipelines.settings import file as settings_file


@dataclass(frozen=True)
class Import:
    """The text of the settings file, and what a person has to know about it, a line each."""

    text: str
    variables: tuple[str, ...]
    notes: tuple[str, ...]


def read(path: Path, *, root: str) -> Import:
    """The settings file that a connector's JSON becomes, its tables below `root`.

    Raises `SettingsError` with all mistakes of the connector, or where the file is not JSON. Holds no secret.
    """
    return settings_text(_json(path), root=root, where=path.name)


def settings_text(connector: object, *, root: str, where: str) -> Import:
    """The settings file that a connector becomes; `where` names it in messages and in the file."""
    found = debezium_import.imported(connector, root=root, where=where)
    variables = tuple(f"{each.name}: {each.holds}" for each in found.variables)
    notes = (*debezium_import.said(found.notes), *found.warnings)
    text = settings_file.rendered(
        found.document,
        before=[f"Imported from {where} by `medallion import-debezium`.", *_listed("Variables to set:", variables)],
        after=_listed("Properties of the connector that are not above as they stood:", notes),
    )
    return Import(text, variables, notes)


def _listed(head: str, lines: tuple[str, ...]) -> list[str]:
    return [head, *(f"  {line}" for line in lines)] if lines else []


def _json(path: Path) -> object:
    where = str(path)
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        problem = errors.Problem(f"{where}:{error.lineno}:{error.colno}", f"not JSON: {error.msg}")
        raise errors.SettingsError(problem) from None
    except OSError as error:
        raise errors.SettingsError(errors.Problem(where, f"it cannot be read: {error.strerror}")) from None
