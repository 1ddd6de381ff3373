"""The tables of the documents that come from the code: `python docs/render.py` writes them between their markers.

A test holds what the documents contain to what this renders.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))

from cdc_core import errors
from cdc_core.properties import source as known
from cdc_core.properties.source import PROPERTIES, Property
from cdc_core.settings import debezium_import

CONNECTOR = FOLDER.parent / "tests" / "cases" / "connector_properties.json"
"""The connector's properties by where they are known from, each with the test that shows what it does here."""


def properties() -> str:
    """Every property of `source`."""
    rows = [(f"`{each.name}`", _values(each), _default(each), _doc(each)) for each in PROPERTIES]
    rows += [(f"`{each.prefix}*`", "librdkafka's", "", each.doc) for each in known.FAMILIES]
    return _table(("property", "values", "default", "what it is"), rows)


def connector_properties(section: str) -> str:
    """Every property of Debezium's connector: what it does here, and the test that shows it."""
    listed: Mapping[str, str | None] = json.loads(CONNECTOR.read_text(encoding="utf-8"))[section]
    rows = [(f"`{name}`", *_here(name), _shown_by(test)) for name, test in listed.items()]
    return _table(("property", "here", "what it does", "shown by"), rows)


def error_classes() -> str:
    """The classes of errors, with their exit codes."""
    rows = [
        (f"{kind.exit_code}", f"`{kind.__name__}`", (kind.__doc__ or "").strip().splitlines()[0])
        for kind in _leaves(errors.MedallionError)
    ]
    return _table(("exit code", "error", "what happened"), sorted(rows, key=lambda row: int(row[0])))


BLOCKS: Mapping[str, Callable[[], str]] = {
    "properties": properties,
    "documented": lambda: connector_properties("documented"),
    "in the code": lambda: connector_properties("in the code"),
    "older": lambda: connector_properties("older"),
    "errors": error_classes,
}

_BLOCK = re.compile(r"(<!-- begin: ([a-z ]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def rendered(document: str) -> str:
    """The document with every block as the code has it."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", document)


WITHOUT_EFFECT = (
    "poll.interval.ms",
    "tombstones.on.delete",
    "snapshot.mode.configuration.based.snapshot.schema",
    "snapshot.mode.configuration.based.snapshot.on.schema.error",
)
"""Properties that are read, checked, and change nothing: there is nothing in MongoDB or in tables for them to change."""


def _here(name: str) -> tuple[str, str]:
    """Whether the property works here, and what it does."""
    each = known.BY_NAME.get(name)
    if each is not None:
        return "accepted" if name in WITHOUT_EFFECT else "yes", _doc(each)
    if name in known.RENAMED:
        return "older name", f"`import-debezium` makes it `{known.RENAMED[name]}`."
    if name in debezium_import.OLDER:
        return "older name", _OLDER[name]
    why = known.describe_foreign(name) or ""
    state = "only for Kafka" if known.is_for_kafka_only(name) else "nothing to set"
    return state, f"{why[:1].upper()}{why[1:]}.".replace("|", "\\|")


_OLDER = {
    "mongodb.hosts": "`import-debezium` makes it a part of `mongodb.connection.string`.",
    "mongodb.name": "`import-debezium` makes it the pipeline's `name`.",
    "mongodb.members.auto.discover": "`import-debezium` makes `false` the option `directConnection` of the connection string.",
}


def _shown_by(test: str | None) -> str:
    if test is None:
        return ""
    path, _, name = test.partition("::")
    return f"[`{name}`](../{path})"


def _values(each: Property) -> str:
    return each.type.expected.replace("|", "\\|")


def _default(each: Property) -> str:
    if each.is_required:
        return "must be given"
    default = f"`{each.default_text}`" if each.default_text else ""
    theirs = f" (Debezium: `{each.debezium_default}`)" if each.debezium_default else ""
    return f"{default}{theirs}"


def _doc(each: Property) -> str:
    return f"{each.doc}{' Not one of Debezium’s.' if each.ours else ''}".replace("|", "\\|")


def _leaves(kind: type[errors.MedallionError]) -> Iterator[type[errors.MedallionError]]:
    below = kind.__subclasses__()
    if not below:
        yield kind
    for each in below:
        yield from _leaves(each)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(rendered(text), encoding="utf-8")
