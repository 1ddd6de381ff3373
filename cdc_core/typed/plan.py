"""Documents typed natively: Extended JSON text in, a struct of the table's columns out, without Python per
row.

A `Plan` is made for one batch, from the collection's schema and from the shape of that very batch (or of
one that holds it). It parses each document once, by `from_json` with a schema that mirrors the wrappers of
Extended JSON, so that the kind of every value is known from where it lands:

    {"$numberLong": "5"}    STRUCT<`$numberLong` STRING>                  cast to BIGINT
    {"$date": {…}}          STRUCT<`$date` STRUCT<`$numberLong` STRING>>  timestamp_millis
    5 beside a wrapper      VARIANT                                       by what it is in this row
    [] without a column     STRING                                        its text, to the rescued values

A positional cast then gives every field its column's name, so that names which differ only in case, hold
dots or are empty never have to be resolved. The SQL is text: one `expr` for a column, whatever its depth,
also over Spark Connect.

What the expressions cannot decide exactly makes a row *hard*: `from_json` refused it, a number may not be
exact, a value has a kind that its column does not hold. Hard rows, and only those, go through
`document_schema.row` in an Arrow function; it stands in the plan only where the batch's shape says that
there may be such rows. A row that nobody can read is `unreadable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cdc_core.schema import document_schema
from cdc_core.schema import names as column_names
from cdc_core.schema.document_schema import Array, ColumnType, Decimal, Map, Scalar, Shape, Struct
from cdc_core.sql.names import identifier, literal
from cdc_core.typed import expressions as typed_values
from cdc_core.typed.expressions import Document, Path, at, entry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESCUED = "MAP<STRING, STRING>"
_CORRUPT = "corrupt record"
"""A name that no column has: `column_names.fit` leaves no space in one."""
_CORRUPT_KEY = "\u0001corrupt record"


@dataclass(frozen=True)
class Plan:
    """How one batch is typed: SQL over the document's text, and the schema that it fills.

    `raw` parses; `document`, `misfits` and `hard` read what it parsed (the column `__raw`); `python` says
    whether there may be hard rows, so that the exact path has to stand by.
    """

    schema: document_schema.DocumentSchema
    raw: str
    document: str
    misfits: tuple[str, ...]
    hard: str
    python: bool

    @property
    def document_ddl(self) -> str:
        """The type of the column `document`."""
        table = self.schema.table()
        fields = (f"{identifier(name)}: {document_schema.ddl(type_)}" for name, type_ in table)
        return f"STRUCT<{', '.join(fields)}>"


def plan(schema: document_schema.DocumentSchema, shape: Shape, *, column: str = "after", refused: int = 0) -> Plan:
    """The plan for a batch of this shape; `refused` is how many of its documents `try_parse_json` refuses."""
    text = identifier(column)
    root = typed_values.document(schema.struct, shape, text=text)
    type_ = f"STRUCT<{root.fields_ddl}, `{_CORRUPT_KEY}`: STRING>"
    named = f"STRUCT<{root.fields_named}, `{_CORRUPT}`: STRING>"
    options = f"map('columnNameOfCorruptRecord', {literal(_CORRUPT_KEY)}, 'allowNonNumericNumbers', 'false')"
    refusals = [f"try_parse_json({text}) IS NULL"] if refused else []
    broken = ["__raw IS NULL", f"__raw.`{_CORRUPT}` IS NOT NULL", f"rtrim({text}) NOT LIKE '%}}'"]
    flatten = schema.naming.flatten
    return Plan(
        schema=schema,
        raw=f"CAST(from_json({text}, {literal(type_)}, {options}) AS {named})",
        document=_columns(schema, root),
        misfits=(*root.misfits("__raw", Path()), *(_emptied(root, "__raw", Path()) if flatten else ())),
        hard=typed_values.any_of([*broken, *refusals, *root.whole, *root.hard("__raw")]),
        python=bool(refused) or root.risky or schema.naming.arrays_as_documents,
    )


def _columns(schema: document_schema.DocumentSchema, root: Document) -> str:
    """The struct of the table's columns."""
    found = dict(_leaves(root, (), "__raw")) if schema.naming.flatten else {}
    if not schema.naming.flatten:
        found = {(item.name,): typed_values.field_value(item, part, "__raw") for item, part in root.known}
    values = [
        f"{literal(name)}, {found.get(column.path) or f'CAST(NULL AS {document_schema.ddl(type_)})'}"
        for column, (name, type_) in zip(schema.columns, schema.table())
    ]
    return f"named_struct({', '.join(values)})"


def _leaves(document: Document, path: tuple[str, ...], raw: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The SQL of each column of flattened documents that the batch has values for."""
    for item, part in document.known:
        here = (*path, item.name)
        if isinstance(part, Document):
            yield from _leaves(part, here, at(raw, item.column))
        elif part is not None and item.type in document_schema.PARTS:
            for name in document_schema.PARTS[item.type]:  # type: ignore[index]
                yield (*here, name), at(f"({part.value(at(raw, item.column))})", name)
        elif part is not None:
            yield here, part.value(at(raw, item.column))


def _emptied(document: Document, raw: str, path: Path) -> list[str]:
    """The flattened documents that are there but have no value in any column: rescued as `{}`."""
    found = []
    for item, part in document.known:
        if isinstance(part, Document):
            here, where = at(raw, item.column), path.name(item.name)
            blank = " AND ".join([f"{sql} IS NULL" for _, sql in _leaves(part, (), here)] or ["true"])
            own = entry(f"{here} IS NOT NULL AND {blank}", where, "'{}'")
            below = _emptied(part, here, where)
            found.append(f"IF({blank}, {own}, concat({', '.join(below)}))" if below else own)
    return found


def documents(df: DataFrame, *, plan: Plan, column: str = "after") -> DataFrame:
    """`df` with three columns more: `document`, `rescued`, `unreadable`.

    `document` is a STRUCT of the table's columns in the table's order, `rescued` a MAP from dotted path to
    Extended JSON text, null where everything fitted. A null text gives a null document. `unreadable` is
    true where the text is no document that could be typed; then the other two are null. `plan` must have
    been made for `column`, from the shape of these rows or of more.
    """
    from pyspark.sql import functions as sf

    text = identifier(column)
    judged = df.withColumn("__raw", sf.expr(plan.raw)).withColumns(
        {
            "__misfits": sf.expr(_entries(plan.misfits)),
            "__hard": sf.expr(f"{text} IS NOT NULL AND ({plan.hard})"),
        }
    )
    if plan.misfits:
        # Two values may meet in one dotted path: only the exact path tells them apart.
        meet = "size(array_distinct(transform(__misfits, m -> m.path))) < size(__misfits)"
        judged = judged.withColumn("__hard", sf.expr(f"__hard OR {meet}"))
    skipped = f"{text} IS NULL OR __hard"
    native = judged.withColumns(
        {
            "document": sf.expr(f"IF({skipped}, NULL, {plan.document})"),
            "rescued": sf.expr(f"IF({skipped} OR size(__misfits) = 0, NULL, map_from_entries(__misfits))"),
            "unreadable": sf.expr("__hard"),
        }
    )
    if not plan.python:
        return native.drop("__raw", "__hard", "__misfits")
    result = f"STRUCT<document: {plan.document_ddl}, rescued: {RESCUED}, unreadable: BOOLEAN>"
    exact = sf.arrow_udf(_exact(plan.schema.to_json()), result)  # type: ignore[call-overload]
    return (
        native.withColumn("__exact", exact(sf.expr(f"IF(__hard, {text}, NULL)")))
        .withColumns(
            {
                "document": sf.expr("IF(__hard, __exact.document, document)"),
                "rescued": sf.expr("IF(__hard, __exact.rescued, rescued)"),
                "unreadable": sf.expr("__hard AND __exact.unreadable"),
            }
        )
        .drop("__raw", "__hard", "__misfits", "__exact")
    )


def _entries(misfits: Sequence[str]) -> str:
    """All values that did not fit."""
    return f"concat({', '.join(misfits)})" if misfits else f"CAST(array() AS {typed_values.ENTRIES})"


# --- the exact path -----------------------------------------------------------------------------------------


def _pairs(pairs: list[tuple[str, Any]], repeated: dict[str, str]) -> dict[str, Any]:
    """The last of two fields of one name stays; the earlier ones are kept by their name alone."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            document_schema.rescue(repeated, column_names.unescaped(key), document_schema.ejson(result[key]))
        result[key] = value
    return result


def _exact(schema_json: str) -> Callable[[pa.Array], pa.Array]:
    """The Arrow function over the texts of hard rows (null for all others)."""

    def exact(texts: pa.Array) -> pa.Array:
        schema = document_schema.DocumentSchema.from_json(schema_json)
        return rows(texts, schema)

    return exact


def rows(texts: pa.Array, schema: document_schema.DocumentSchema) -> pa.Array:
    """Each text as a struct of `document`, `rescued`, `unreadable`; null where the text is."""
    row_type = pa.struct([(name, arrow(type_)) for name, type_ in schema.table()])
    type_ = pa.struct([("document", row_type), ("rescued", pa.map_(pa.string(), pa.string())), ("unreadable", pa.bool_())])
    return pa.array([_row(text.as_py(), schema) for text in texts], type=type_)


def _row(text: str | None, schema: document_schema.DocumentSchema) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        document, repeated = parsed(text)
    except (ValueError, RecursionError):
        return {"document": None, "rescued": None, "unreadable": True}
    row, rescued = document_schema.row(document, schema)
    for path, earlier in repeated.items():
        document_schema.rescue(rescued, path, earlier)
    return {"document": row, "rescued": list(rescued.items()) or None, "unreadable": False}


def parsed(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """One document's text as parsed EJSON, and the earlier values of fields that it holds twice.

    The last of two fields of one name stays, as in every BSON library; those before it are kept under the
    field's name. Half a surrogate pair becomes U+FFFD. Raises ValueError where the text is no JSON object.
    """
    repeated: dict[str, str] = {}
    document = json.loads(text, object_pairs_hook=lambda pairs: _pairs(pairs, repeated))
    if not isinstance(document, dict):
        raise ValueError("a document is a JSON object")
    return (_whole(document) if "\\ud" in text.lower() else document), repeated


def _whole(value: Any) -> Any:
    """The value without halves of surrogate pairs."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def observer(*, arrays_as_documents: bool = False) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow` over texts and marks: one row a partition, the JSON of the shape of what can be read
    there.
    """

    def observe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape = Shape()
        for batch in batches:
            for text, mark in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
                _observe(shape, text, mark, arrays_as_documents)
        yield pa.RecordBatch.from_pydict({"shape": [json.dumps(shape.to_json())]})

    return observe


def _observe(shape: Shape, text: str, mark: str, arrays_as_documents: bool) -> None:
    try:
        document, _ = parsed(text)
    except (ValueError, RecursionError):
        return
    shape.see(document_schema.arrays_as_documents(document) if arrays_as_documents else document, mark)


def conflicts(schema_json: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow` over the paths and texts of rescued values: the JSON of each `Conflict` with the schema, once a
    partition.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = document_schema.DocumentSchema.from_json(schema_json)
        found: set[document_schema.Conflict] = set()
        for batch in batches:
            for path, text in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
                found.update(document_schema.conflicts(schema, path, text))
        yield pa.RecordBatch.from_pydict({"conflict": pa.array([each.to_json() for each in found], pa.string())})

    return look


def arrow(type_: ColumnType) -> pa.DataType:
    """The column type in Arrow, as Spark reads it."""
    match type_:
        case Struct(fields):
            return pa.struct([(item.column, arrow(item.type)) for item in fields])
        case Array(element):
            return pa.list_(arrow(element))
        case Map(value):
            return pa.map_(pa.string(), arrow(value))
        case Decimal(precision, scale):
            return pa.decimal128(precision, scale)
        case Scalar.REGEX | Scalar.CODE_WITH_SCOPE | Scalar.DB_POINTER:
            return pa.struct([(part, pa.string()) for part in document_schema.PARTS[type_]])
        case _:
            return _ARROW[type_]


_ARROW = {
    Scalar.INT: pa.int32(),
    Scalar.BIGINT: pa.int64(),
    Scalar.DOUBLE: pa.float64(),
    Scalar.STRING: pa.string(),
    Scalar.TEXT: pa.string(),
    Scalar.BOOLEAN: pa.bool_(),
    Scalar.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Scalar.BINARY: pa.binary(),
}
