"""Column names of a document's fields: adjusted, valid for Delta, and unique.

A name passes through these steps:

    unescaped     removes the `$` that Extended JSON adds to user keys that look like wrappers (`wrappers.unescape_key`)
    adjusted      `field.name.adjustment.mode` (Debezium's rules)
    fit           characters that Delta refuses without column mapping (space, `,;{}()=`, control characters) become `_`;
                  an empty name becomes `_`; more than 200 characters become 191 and a digest
    unique        Spark compares names without case: the later of two equal names gets `_2`, `_3`, …; the engine's
                  columns, and names with a meaning to Spark or to statements, are reserved at the top level

Dots stay. The document schema stores the name of each path, so it never changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cdc_core.properties import unwrap as unwrap_options

ENGINE = frozenset({"__key", "__sequence", "__batch", "__document", "__rescued", "__deleted", "__incomplete", "__known"})
"""The engine's own columns in silver and gold tables."""

LAYOUT_OPTIONS = ("flatten.struct", "flatten.struct.delimiter", "array.encoding", "field.name.adjustment.mode")
"""The options of `ExtractNewDocumentState` that define the layout of columns; existing tables keep their values."""

RESERVED = frozenset(
    {
        *("__action", "__choice", "__file", "__given", "__gone", "__guard", "__held", "__is_new", "__row", "__typed"),
        *("_metadata", "_change_type", "_commit_version", "_commit_timestamp"),
    }
)
"""Names that are never given to a document's column: temporary columns of statements, and names with a meaning to Spark or
Delta.
"""

MAX_LENGTH = 200
"""Characters of a column's name; a longer one is cut and gets a digest."""

_REFUSED = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ColumnNaming:
    """How the columns of one collection are named and laid out."""

    flatten: bool = False
    delimiter: str = "_"
    fields: unwrap_options.FieldNames = unwrap_options.FieldNames()
    values: unwrap_options.FieldValues = unwrap_options.FieldValues()
    reserved: frozenset[str] = ENGINE | RESERVED

    @staticmethod
    def of(options: unwrap_options.UnwrapOptions) -> ColumnNaming:
        """The naming for these unwrap options; the names of `add.fields` and `add.headers` are reserved."""
        return ColumnNaming(
            flatten=options.flatten_struct,
            delimiter=options.flatten_struct_delimiter,
            fields=options.field_names,
            values=options.field_values,
            reserved=ENGINE | RESERVED | {added_field.name for added_field in (*options.add_fields, *options.add_headers)},
        )

    def lays_out_as(self, other: ColumnNaming) -> bool:
        """Whether both give a document the same columns; reserved names, and the delimiter without flattening, are
        ignored.
        """
        layout, other_layout = ({**each.to_json(), "delimiter": each.flatten and each.delimiter} for each in (self, other))
        return layout == other_layout

    def to_json(self) -> dict[str, object]:
        """Plain JSON values, without the reserved names, which only matter when a name is given."""
        return {
            "flatten": self.flatten,
            "delimiter": self.delimiter,
            **self.fields.to_json(),
            **self.values.to_json(),
        }

    @staticmethod
    def from_json(fields: Mapping[str, object]) -> ColumnNaming:
        """The inverse of `to_json`."""
        return ColumnNaming(
            flatten=bool(fields["flatten"]),
            delimiter=str(fields["delimiter"]),
            fields=unwrap_options.FieldNames.from_json(fields),
            values=unwrap_options.FieldValues.from_json(fields),
        )


def fit(name: str) -> str:
    """The name without characters that Delta refuses; never empty, never longer than `MAX_LENGTH`."""
    cleaned = _REFUSED.sub("_", name).encode("utf-8", "replace").decode() or "_"
    if len(cleaned) <= MAX_LENGTH:
        return cleaned
    return f"{cleaned[: MAX_LENGTH - 9]}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"


def without_case(name: str) -> str:
    """A key that is equal for names that Spark considers equal: each character upper-cased, then lower-cased.

    This covers more than Unicode lower case: `ı` and `i`, `µ` and `μ`, `ſ` and `s`. Each character stays one character,
    as in Java: `ß` is not `ss`.
    """
    if name.isascii():  # nearly all names
        return name.lower()
    # Spark also compares whole names in lower case, where `İ` becomes `i` and a combining dot: all three are equal
    # here.
    return "".join(map(_without_case, name)).replace("i\u0307", "i")


def _without_case(character: str) -> str:
    capital = character.upper()
    lower = (capital if len(capital) == 1 else character).lower()
    return lower if len(lower) == 1 else lower[0]


class UsedNames:
    """The names already given, compared without case."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {without_case(name) for name in names}
        self._numbers: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """The name itself, or with the first of `_2`, `_3`, … that is free; it is then in use."""
        folded = candidate = without_case(name)
        number = self._numbers.get(folded, 1)  # those before it are in use
        while candidate in self._names:
            number += 1
            candidate = f"{folded}_{number}"
        self._names.add(candidate)
        self._numbers[folded] = number
        return name if candidate == folded else f"{name}_{number}"


def nested(name: str, *, used_names: UsedNames, naming: ColumnNaming) -> str:
    """The column name of a field in a struct."""
    return used_names.unique(fit(naming.fields.of(name)))


def top_level(path: Collection[str], *, used_names: UsedNames, naming: ColumnNaming) -> str:
    """The name of a table column: for a top-level field, or for a leaf of flattened documents."""
    return used_names.unique(fit(naming.delimiter.join(naming.fields.of(part) for part in path)))
