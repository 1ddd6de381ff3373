"""The options of `ExtractNewDocumentState` as one value: Debezium's names and strings in, enums and tuples out.

A new option is a field of `UnwrapOptions` and a line of `_options`. Its effect on records is in `cdc_core.unwrap`, on tables in
`cdc_core.schema.names` (names and values of fields) and `cdc_core.silver.reduce` (rows and deletes). See CONTRIBUTING.md.

All options of the SMT have their own names, also those of older versions:

    delete.tombstone.handling.mode    takes precedence; if missing, `drop.tombstones` and `delete.handling.mode`
                                      (their defaults are `true` and `drop`) decide together; without any of the three
                                      it is `tombstone`
    operation.header                  adds a header `__op`, as `add.headers=op`
    add.source.fields                 adds fields of `source`, as `add.fields=source.<f>:<f>` with the prefix `__`
    sanitize.field.names              `true` means `field.name.adjustment.mode=avro`, unless that one is given

Options that only Kafka or the relational SMT reads are accepted and ignored (`IGNORED`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cdc_core import errors
from cdc_core.properties import types as values

CLASSES = (
    "io.debezium.connector.mongodb.transforms.ExtractNewDocumentState",
    "io.debezium.connector.mongodb.transforms.UnwrapFromMongoDbEnvelope",
)
"""The classes of the transformation; the second is its name before Debezium 0.10."""


class ArrayEncoding(enum.Enum):
    """`array.encoding`: arrays stay arrays, or become documents with the fields `_0`, `_1`, …"""

    ARRAY = "array"
    DOCUMENT = "document"


class ArrayDocument(dict[str, Any]):
    """An array as a document with the fields `_0`, `_1`, …; a value that does not fit its column is written as an array."""


class FieldNameAdjustment(enum.Enum):
    """`field.name.adjustment.mode`: names as they are, or valid in Avro."""

    NONE = "none"
    AVRO = "avro"
    AVRO_UNICODE = "avro_unicode"

    def adjusted(self, name: str) -> str:
        """The name of a field in this mode. Debezium replaces UTF-16 units, of which an emoji has two."""
        match self:
            case FieldNameAdjustment.NONE:
                return name
            case FieldNameAdjustment.AVRO:
                return _avro(name)
            case FieldNameAdjustment.AVRO_UNICODE:
                return _avro_unicode(name)


class DeleteMode(enum.Enum):
    """`delete.tombstone.handling.mode`, and two combinations that only the older options can express.

    For a table exactly one of `removes_row`, `marks_deleted` and `keeps_row` is true. A delete record is rewritten
    (`rewrites_delete`), dropped (`drops_delete`), or becomes its key with a null value; tombstones depend on
    `keeps_tombstone`. Tables implement it in `cdc_core.silver.reduce.decided` and `pipelines.silver.deletes`, records
    in `cdc_core.unwrap.new_document_state`.
    """

    DROP = "drop"
    TOMBSTONE = "tombstone"
    REWRITE = "rewrite"
    REWRITE_WITH_TOMBSTONE = "rewrite-with-tombstone"
    DELETE_TO_TOMBSTONE = "delete-to-tombstone"
    OLDER_NONE_WITH_TOMBSTONE = "delete.handling.mode=none, drop.tombstones=false"
    OLDER_DROP_WITH_TOMBSTONE = "delete.handling.mode=drop, drop.tombstones=false"

    @property
    def removes_row(self) -> bool:
        """A delete removes the row from silver; its key is remembered."""
        return not self.marks_deleted and not self.keeps_row

    @property
    def marks_deleted(self) -> bool:
        """A delete keeps the row in silver, with `__deleted` true."""
        return self is DeleteMode.REWRITE

    @property
    def keeps_row(self) -> bool:
        """A delete keeps the row in silver unchanged."""
        return self is DeleteMode.DROP

    @property
    def adds_deleted(self) -> bool:
        """Every record, and every row of silver, has `__deleted`."""
        return self.rewrites_delete

    @property
    def rewrites_delete(self) -> bool:
        """A delete record becomes the pre-image with `__deleted` true."""
        return self in (DeleteMode.REWRITE, DeleteMode.REWRITE_WITH_TOMBSTONE)

    @property
    def drops_delete(self) -> bool:
        """A delete record is dropped."""
        return self in (DeleteMode.DROP, DeleteMode.OLDER_DROP_WITH_TOMBSTONE)

    @property
    def keeps_tombstone(self) -> bool:
        """A tombstone record passes with a rebuilt key; otherwise it is dropped."""
        return self in (
            DeleteMode.REWRITE_WITH_TOMBSTONE,
            DeleteMode.OLDER_NONE_WITH_TOMBSTONE,
            DeleteMode.OLDER_DROP_WITH_TOMBSTONE,
        )


DELETE_MODES = (
    DeleteMode.DROP,
    DeleteMode.TOMBSTONE,
    DeleteMode.REWRITE,
    DeleteMode.REWRITE_WITH_TOMBSTONE,
    DeleteMode.DELETE_TO_TOMBSTONE,
)


@dataclass(frozen=True)
class AddedField:
    """One entry of `add.fields` or `add.headers`: its source, and its whole name (with the prefix).

    `struct` is `""` for the envelope itself, else `source`, `transaction`, `updateDescription` or the given name. A
    field that the struct does not have is looked up in the envelope.
    """

    struct: str
    field: str
    name: str


@dataclass(frozen=True)
class FieldNames:
    """The effect of the options on field names, in records and in tables.

    A table's schema stores it with the columns, so that later fields are named like earlier ones.
    """

    adjustment: FieldNameAdjustment = FieldNameAdjustment.NONE

    def of(self, name: str) -> str:
        """The field's name in the output."""
        return self.adjustment.adjusted(name)

    def to_json(self) -> dict[str, object]:
        """The options as plain JSON values."""
        return {"adjustment": self.adjustment.value}

    @staticmethod
    def from_json(fields: Mapping[str, object]) -> FieldNames:
        """The inverse of `to_json`; ignores the keys of `FieldValues`, which share the JSON object.

        Schemas that were stored before an option existed lack its key.
        """
        return FieldNames(FieldNameAdjustment(fields["adjustment"]))


@dataclass(frozen=True)
class FieldValues:
    """The effect of the options on field values, in records and in tables.

    A table's schema stores it with the columns, so that later values have the form of earlier ones.
    """

    arrays: ArrayEncoding = ArrayEncoding.ARRAY

    def of(self, value: Any) -> Any:
        """The value in the output, as parsed type-exact JSON; call it again for each value inside."""
        if isinstance(value, list) and self.arrays_as_documents:
            return ArrayDocument((f"_{index}", item) for index, item in enumerate(value))
        return value

    @property
    def are_kept(self) -> bool:
        """Whether all values stay as they are."""
        return self == FieldValues()

    @property
    def arrays_as_documents(self) -> bool:
        """`array.encoding=document`."""
        return self.arrays is ArrayEncoding.DOCUMENT

    def to_json(self) -> dict[str, object]:
        """The options as plain JSON values."""
        return {"arrays_as_documents": self.arrays_as_documents}

    @staticmethod
    def from_json(fields: Mapping[str, object]) -> FieldValues:
        """The inverse of `to_json`; ignores the keys of `FieldNames`, which share the JSON object.

        Schemas that were stored before an option existed lack its key.
        """
        return FieldValues(ArrayEncoding.DOCUMENT if fields["arrays_as_documents"] else ArrayEncoding.ARRAY)


@dataclass(frozen=True)
class UnwrapOptions:
    """The options of one collection or of one call; the defaults are the SMT's."""

    flatten_struct: bool = False
    flatten_struct_delimiter: str = "_"
    delete_tombstone_handling_mode: DeleteMode = DeleteMode.TOMBSTONE
    rewrite_with_id: bool = False
    add_fields: tuple[AddedField, ...] = ()
    add_headers: tuple[AddedField, ...] = ()
    field_names: FieldNames = FieldNames()
    field_values: FieldValues = FieldValues()


class OlderDeleteMode(enum.Enum):
    """`delete.handling.mode`, the predecessor of `delete.tombstone.handling.mode`."""

    DROP = "drop"
    NONE = "none"
    REWRITE = "rewrite"


_NO_PREDICATES = "the options apply to every event; silver.collections sets others for a collection"

IGNORED: Mapping[str, str] = {
    "type": "the class of the transformation: Kafka Connect reads it",
    "predicate": _NO_PREDICATES,
    "negate": _NO_PREDICATES,
    "route.by.field": "only the SMT for relational databases reads it",
    "replace.null.with.default": "documents are JSON strings, and have no defaults",
    "drop.fields.header.name": "only the SMT for relational databases reads it",
    "drop.fields.from.key": "only the SMT for relational databases reads it",
    "drop.fields.keep.schema.compatible": "only the SMT for relational databases reads it",
}

_IGNORED_BOOLEANS = ("negate", "replace.null.with.default", "drop.fields.from.key", "drop.fields.keep.schema.compatible")

_MISSING = object()
_Choice = TypeVar("_Choice", bound=enum.Enum)
_Value = TypeVar("_Value")


def parse(options: Mapping[str, object], *, where: str = "") -> UnwrapOptions:
    """The options from their Debezium names, with or without `transforms.<alias>.` in front.

    Values are strings as in a connector's JSON, or booleans and lists of strings as in YAML. Raises `SettingsError`
    with all mistakes at once, each with the option's name (below `where`), the allowed values, or the most similar
    name.
    """
    reader = _Reader(_without_alias(options), where)
    result = _options(reader)
    reader.refuse_unknown()
    if reader.problems:
        raise errors.SettingsError(reader.problems)
    return result


def ignored(options: Mapping[str, object]) -> tuple[str, ...]:
    """The given options that have no effect here, each with its reason, for a warning."""
    return tuple(f"{name}: {IGNORED[name]}" for name in _without_alias(options) if name in IGNORED and name != "type")


def aliases(connector: Mapping[str, object]) -> tuple[str, ...]:
    """The aliases of a connector's transformations: those that `transforms` lists, which may have dots, then others with properties."""
    listed = values.NameList().read(values.written(connector.get("transforms")))
    starts = tuple(f"transforms.{alias}." for alias in listed)
    others = (name for name in connector if name.startswith("transforms.") and not name.startswith(starts))
    return tuple(dict.fromkeys([*listed, *(name.split(".")[1] for name in others)]))


def _options(reader: _Reader) -> UnwrapOptions:
    fields_prefix, headers_prefix = reader.text("add.fields.prefix", "__"), reader.text("add.headers.prefix", "__")
    older_fields = [AddedField("source", name, f"__{name}") for name in reader.items("add.source.fields")]
    older_header = [AddedField("", "op", "__op")] if reader.boolean("operation.header", False) else []
    # Read nevertheless, so that an invalid value is refused, as in Kafka Connect.
    for name in _IGNORED_BOOLEANS:
        reader.boolean(name, False)
    return UnwrapOptions(
        field_values=FieldValues(reader.choice("array.encoding", tuple(ArrayEncoding), ArrayEncoding.ARRAY)),
        flatten_struct=reader.boolean("flatten.struct", False),
        # Kafka Connect trims it, unlike the prefixes, which Debezium reads.
        flatten_struct_delimiter=reader.text("flatten.struct.delimiter", "_").strip(),
        delete_tombstone_handling_mode=_delete_mode(reader),
        rewrite_with_id=reader.boolean("delete.tombstone.handling.mode.rewrite-with-id", False),
        add_fields=tuple(dict.fromkeys(_with_older(reader.added("add.fields", fields_prefix), older_fields))),
        # A record repeats headers that are given more than once.
        add_headers=_with_older(reader.added("add.headers", headers_prefix), older_header),
        field_names=FieldNames(_adjustment(reader)),
    )


def _delete_mode(reader: _Reader) -> DeleteMode:
    # The newest option takes precedence; the older ones count only if one of them is given.
    older_given = reader.is_given("drop.tombstones") or reader.is_given("delete.handling.mode")
    drop_tombstones = reader.boolean("drop.tombstones", True)
    older = reader.choice("delete.handling.mode", tuple(OlderDeleteMode), OlderDeleteMode.DROP)
    if reader.is_given("delete.tombstone.handling.mode") or not older_given:
        return reader.choice("delete.tombstone.handling.mode", DELETE_MODES, DeleteMode.TOMBSTONE)
    match (older, drop_tombstones):
        case (OlderDeleteMode.DROP, True):
            return DeleteMode.DROP
        case (OlderDeleteMode.DROP, False):
            return DeleteMode.OLDER_DROP_WITH_TOMBSTONE
        case (OlderDeleteMode.NONE, True):
            return DeleteMode.TOMBSTONE
        case (OlderDeleteMode.NONE, False):
            return DeleteMode.OLDER_NONE_WITH_TOMBSTONE
        case (OlderDeleteMode.REWRITE, True):
            return DeleteMode.REWRITE
        case _:
            return DeleteMode.REWRITE_WITH_TOMBSTONE


def _adjustment(reader: _Reader) -> FieldNameAdjustment:
    older = FieldNameAdjustment.AVRO if reader.boolean("sanitize.field.names", False) else FieldNameAdjustment.NONE
    return reader.choice("field.name.adjustment.mode", tuple(FieldNameAdjustment), older)


def _with_older(added: Sequence[AddedField], older: Iterable[AddedField]) -> tuple[AddedField, ...]:
    """The fields, with those of older options whose names are not among them."""
    names = {field.name for field in added}
    return (*added, *(field for field in older if field.name not in names))


def _without_alias(options: Mapping[str, object]) -> dict[str, object]:
    return {_bare(name): value for name, value in options.items()}


def _bare(name: str) -> str:
    parts = name.split(".", 2)
    return parts[2] if len(parts) == 3 and parts[0] == "transforms" else name


class _Reader:
    """Reads options one by one and collects all problems; invalid values read as the default.

    `names` and `booleans` are the options that were read.
    """

    def __init__(self, options: Mapping[str, object], where: str) -> None:
        self.options = options
        self.where = where
        self.problems: list[errors.Problem] = []
        self.names: list[str] = []
        self.booleans: list[str] = []

    def is_given(self, name: str) -> bool:
        value = self.options.get(name)
        return value is not None and (not isinstance(value, str) or value.strip() != "")

    def text(self, name: str, default: str) -> str:
        self.names.append(name)
        value = self.options.get(name, _MISSING)
        if value is _MISSING or value is None:
            return default
        if isinstance(value, str):
            return value
        self._refuse(name, "a string is expected", values.shown(value))
        return default

    def boolean(self, name: str, default: bool) -> bool:
        self.booleans.append(name)
        return self._read(name, values.Boolean("one of true, false"), default)

    def choice(self, name: str, members: tuple[_Choice, ...], default: _Choice) -> _Choice:
        return self._read(name, values.Choice(members), default)

    def items(self, name: str) -> tuple[str, ...]:
        """The entries of a comma-separated list, without blank ones and surrounding spaces."""
        return self._read(name, values.NameList("a comma-separated list of field names"), ())

    def _read(self, name: str, type_: values.PropertyType, default: _Value) -> _Value:
        self.names.append(name)
        if not self.is_given(name):
            return default
        try:
            value: _Value = type_.read(self.options[name])
        except values.InvalidValue as error:
            self._refuse(name, f"{error.expected} is expected", values.shown(self.options[name]), error.hint)
            return default
        return value

    def added(self, name: str, prefix: str) -> list[AddedField]:
        fields = (self._added(name, item, prefix) for item in self.items(name))
        return [field for field in fields if field is not None]

    def _added(self, name: str, item: str, prefix: str) -> AddedField | None:
        # Java splits for Debezium, and leaves out empty parts at the end: `op:` is `op`.
        reference, *new_names = (part.strip() for part in item.rstrip(":").split(":"))
        if len(new_names) > 1 or not reference or "" in new_names:
            self._refuse(name, "each entry is expected as [struct.]field[:new_name]", item)
            return None
        struct, _, field_path = reference.partition(".")
        field = field_path.partition(".")[0]
        if not field:
            return AddedField(_struct_of(struct), struct, prefix + (new_names or [struct])[0])
        return AddedField(struct, field, prefix + (new_names or [f"{struct}_{field}"])[0])

    def refuse_unknown(self) -> None:
        for name in self.options:
            if name not in NAMES:
                self._refuse(name, "there is no such option", hint=values.did_you_mean(name, NAMES))

    def _refuse(self, name: str, message: str, value: str = "", hint: str = "") -> None:
        path = f"{self.where}.{name}" if self.where else name
        self.problems.append(errors.Problem(path, f"{message}, found {value}" if value else message, hint))


def _every() -> _Reader:
    reader = _Reader({}, "")
    # Reading from no options records all names.
    _options(reader)
    return reader


_EVERY = _every()
NAMES: tuple[str, ...] = tuple(dict.fromkeys((*_EVERY.names, *IGNORED)))
"""All options: those that `_options` reads, and the ignored ones."""

BOOLEANS = frozenset(_EVERY.booleans)
"""The options with the values `true` and `false`."""

OLDER: Mapping[str, tuple[str, ...]] = {
    "delete.tombstone.handling.mode": ("drop.tombstones", "delete.handling.mode"),
    "field.name.adjustment.mode": ("sanitize.field.names",),
}
"""Options with the older ones that they override."""


def _struct_of(field: str) -> str:
    """The struct in which the SMT looks up a field that is given without one."""
    match field:
        case "id" | "total_order" | "data_collection_order":
            return "transaction"
        case "op" | "ts_ms" | "ts_us" | "ts_ns":
            return ""
        case "updateDescription":
            return "updateDescription"
        case _:
            return "source"


def _units(name: str) -> list[int]:
    # Debezium replaces Java's `char`s one by one; a character outside the basic plane consists of two.
    data = name.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[start : start + 2], "big") for start in range(0, len(data), 2)]


def _avro(name: str) -> str:
    text = re.sub(r"[^A-Za-z0-9_]", lambda found: "_" * len(_units(found[0])), name)
    return f"_{text}" if text[:1].isdigit() else text


def _avro_unicode(name: str) -> str:
    return re.sub(r"^[0-9]|[^A-Za-z0-9]", lambda found: "".join(map(_escaped, _units(found[0]))), name)


def _escaped(unit: int) -> str:
    """`_u` and the code; Debezium pads codes of one or two hex digits with `00`, and does not pad longer ones."""
    digits = f"{unit:x}"
    return "_u" + ("00" + digits if len(digits) <= 2 else digits)
