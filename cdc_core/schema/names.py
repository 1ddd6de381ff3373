"""The names that a document's fields have as columns: adjusted, fit for Delta, and never two alike.

A name passes through these steps, and keeps what it can of itself:

    unescaped     a user's key that looks like a wrapper lost the `$` that its Extended JSON carries (`wrappers.unescape_key`)
    adjusted      `field.name.adjustment.mode` (Debezium's rules)
    fit           characters that Delta refuses without column mapping (`` ,;{}()\\n\\t=``, other control characters)
                  become `_`; an empty name becomes `_`; more than 200 characters become 191 and a digest
    unique        Spark compares names without case: the later of two that meet gets `_2`, `_3`, …; a top-level
                  name that one of the engine's columns has is taken, and what Spark or a statement reads as its own

Dots stay. Which name a path got is kept in the document schema, so that it is the same for ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cdc_core.properties import unwrap as unwrap_options

ENGINE = frozenset({"__key", "__sequence", "__batch", "__document", "__rescued", "__deleted", "__incomplete", "__known"})
"""The engine's own columns of a silver or gold table."""

LAYOUT_OPTIONS = ("flatten.struct", "flatten.struct.delimiter", "array.encoding", "field.name.adjustment.mode")
"""The options of `ExtractNewDocumentState` that lay a document's columns out: those of a table stay as they were."""

SPOKEN_FOR = frozenset(
    {
        *("__action", "__choice", "__file", "__given", "__gone", "__guard", "__held", "__is_new", "__row", "__typed"),
        *("_metadata", "_change_type", "_commit_version", "_commit_timestamp"),
    }
)
"""Names that no column of a document gets: what statements over its table call columns of their own, and what Spark and
Delta read as theirs."""

MAX_LENGTH = 200
"""Characters of a column's name; a longer one is cut, and gets a digest."""

_REFUSED = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")


@dataclass(frozen=True)
class ColumnNaming:
    """How the columns of one collection are named and laid out."""

    flatten: bool = False
    delimiter: str = "_"
    fields: unwrap_options.FieldNames = unwrap_options.FieldNames()
    values: unwrap_options.FieldValues = unwrap_options.FieldValues()
    reserved: frozenset[str] = ENGINE | SPOKEN_FOR

    @staticmethod
    def of(options: unwrap_options.UnwrapOptions) -> ColumnNaming:
        """What the options of the unwrap say about names; the names of `add.fields` and `add.headers` are taken."""
        return ColumnNaming(
            flatten=options.flatten_struct,
            delimiter=options.flatten_struct_delimiter,
            fields=options.field_names,
            values=options.field_values,
            reserved=ENGINE | SPOKEN_FOR | {added.name for added in (*options.add_fields, *options.add_headers)},
        )

    def lays_out_as(self, other: ColumnNaming) -> bool:
        """Whether both give a document the same columns; reserved names do not count, nor a delimiter that joins nothing."""
        mine, others = ({**each.to_json(), "delimiter": each.flatten and each.delimiter} for each in (self, other))
        return mine == others

    def to_json(self) -> dict[str, object]:
        """Plain JSON values; what is reserved is not kept, it only matters when a name is given."""
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
    """The name without what Delta refuses; never empty, never longer than `MAX_LENGTH`."""
    cleaned = _REFUSED.sub("_", name).encode("utf-8", "replace").decode() or "_"
    if len(cleaned) <= MAX_LENGTH:
        return cleaned
    return f"{cleaned[: MAX_LENGTH - 9]}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"


def without_case(name: str) -> str:
    """What two names have in common that Spark takes for one: each character's capital, made small again.

    More than the small letters of Unicode: `ı` and `i`, `µ` and `μ`, `ſ` and `s`. Characters stay single, as in Java:
    `ß` is not `ss`.
    """
    # Spark also compares whole names in small letters, where `İ` is `i` and a dot above it: all three are one here.
    return "".join(map(_without_case, name)).replace("i\u0307", "i")


def _without_case(character: str) -> str:
    capital = character.upper()
    small = (capital if len(capital) == 1 else character).lower()
    return small if len(small) == 1 else small[0]


class UsedNames:
    """The names that are given already, compared without case."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {without_case(name) for name in names}

    def unique(self, name: str) -> str:
        """The name itself, or with the first of `_2`, `_3`, … that is free; in use from now on."""
        candidate, number = name, 1
        while without_case(candidate) in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(without_case(candidate))
        return candidate


def nested(name: str, *, taken: UsedNames, naming: ColumnNaming) -> str:
    """The name of a field inside a struct whose other fields have taken theirs."""
    return taken.unique(fit(naming.fields.of(name)))


def top_level(path: Collection[str], *, taken: UsedNames, naming: ColumnNaming) -> str:
    """The name of a column of the table: of a top-level field, or of a leaf where documents are flattened."""
    return taken.unique(fit(naming.delimiter.join(naming.fields.of(part) for part in path)))
