"""Compares gold with the source independently: written from the rules, and not from the code that implements them.

It reads BSON and Delta tables with its own code and the `deltalake` package (no Spark, nothing of the project), and returns the
differences as sentences. Every document must have one row, every value a column or an entry in `__rescued`, and the row nothing else.
Absent equals null, NaN equals NaN, and the order of fields does not matter.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute
from bson import Decimal128
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS
from deltalake import DeltaTable, QueryBuilder
from pymongo.collection import Collection

# --- BSON ---------------------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A BSON value: MongoDB's alias of its type, and its content."""

    type: str
    held: Any = None


def read_bson(raw: bytes) -> Value:
    """A BSON document as a `Value` that holds a list of (name, value)."""
    return _document(raw, 0)[0]


def _document(raw: bytes, at: int) -> tuple[Value, int]:
    end = at + struct.unpack_from("<i", raw, at)[0]
    fields: list[tuple[str, Value]] = []
    at += 4
    while at < end - 1:
        kind, (name, after) = raw[at], _cstring(raw, at + 1)
        value, at = _value(kind, raw, after)
        fields.append((name, value))
    return Value("object", fields), end


def _value(kind: int, raw: bytes, at: int) -> tuple[Value, int]:
    match kind:
        case 0x01:
            return Value("double", struct.unpack_from("<d", raw, at)[0]), at + 8
        case 0x02 | 0x0D | 0x0E:
            text, after = _string(raw, at)
            return Value({0x02: "string", 0x0D: "javascript", 0x0E: "symbol"}[kind], text), after
        case 0x03:
            return _document(raw, at)
        case 0x04:
            document, after = _document(raw, at)
            return Value("array", [value for _, value in document.held]), after
        case 0x05:
            length, subtype = struct.unpack_from("<iB", raw, at)
            data = raw[at + 5 : at + 5 + length]
            return Value("binData", (data[4:] if subtype == 2 else data, subtype)), at + 5 + length
        case 0x06 | 0x0A:
            return Value("null"), at
        case 0x07:
            return Value("objectId", raw[at : at + 12].hex()), at + 12
        case 0x08:
            return Value("bool", raw[at] == 1), at + 1
        case 0x09:
            return Value("date", struct.unpack_from("<q", raw, at)[0]), at + 8
        case 0x0B:
            (pattern, after) = _cstring(raw, at)
            (options, after) = _cstring(raw, after)
            return Value("regex", (pattern, options)), after
        case 0x0C:
            name, after = _string(raw, at)
            return Value("dbPointer", (name, raw[after : after + 12].hex())), after + 12
        case 0x0F:
            code, after = _string(raw, at + 4)
            scope, after = _document(raw, after)
            return Value("javascriptWithScope", (code, scope)), after
        case 0x10:
            return Value("int", struct.unpack_from("<i", raw, at)[0]), at + 4
        case 0x11:
            increment, seconds = struct.unpack_from("<II", raw, at)
            return Value("timestamp", (seconds, increment)), at + 8
        case 0x12:
            return Value("long", struct.unpack_from("<q", raw, at)[0]), at + 8
        case 0x13:
            return Value("decimal", str(Decimal128.from_bid(raw[at : at + 16]))), at + 16
        case 0x7F:
            return Value("maxKey"), at
        case 0xFF:
            return Value("minKey"), at
    raise AssertionError(f"BSON type {kind:#x}")


def _cstring(raw: bytes, at: int) -> tuple[str, int]:
    end = raw.index(b"\0", at)
    return raw[at:end].decode("utf-8", "replace"), end + 1


def _string(raw: bytes, at: int) -> tuple[str, int]:
    length = struct.unpack_from("<i", raw, at)[0]
    return raw[at + 4 : at + 3 + length].decode("utf-8", "replace"), at + 4 + length


# --- Extended JSON ------------------------------------------------------------------------------------------

_LOOKS_LIKE_WRAPPER = re.compile(
    r"\$+(oid|symbol|numberInt|numberLong|numberDouble|numberDecimal|binary|uuid|code|timestamp|regularExpression"
    r"|regex|dbPointer|date|minKey|maxKey|undefined|ref)"
)


def extended_json(value: Value) -> Any:
    """The value as parsed type-exact Extended JSON v2, without null fields, because absent equals null."""
    held = value.held
    match value.type:
        case "object":
            return {
                f"${name}" if _LOOKS_LIKE_WRAPPER.fullmatch(name) else name: extended_json(inner)
                for name, inner in held
                if inner.type != "null"
            }
        case "array":
            return [extended_json(inner) for inner in held]
        case "string" | "bool" | "int":
            return held
        case "null":
            return None
        case "double":
            return held if math.isfinite(held) else {"$numberDouble": _not_finite(held)}
        case "long":
            return {"$numberLong": str(held)}
        case "decimal":
            return {"$numberDecimal": held}
        case "date":
            return {"$date": {"$numberLong": str(held)}}
        case "objectId":
            return {"$oid": held}
        case "binData":
            return {"$binary": {"base64": base64.b64encode(held[0]).decode(), "subType": f"{held[1]:02x}"}}
        case "timestamp":
            return {"$timestamp": {"t": held[0], "i": held[1]}}
        case "regex":
            return {"$regularExpression": {"pattern": held[0], "options": held[1]}}
        case "symbol":
            return {"$symbol": held}
        case "javascript":
            return {"$code": held}
        case "javascriptWithScope":
            return {"$code": held[0], "$scope": extended_json(held[1])}
        case "dbPointer":
            return {"$dbPointer": {"$ref": held[0], "$id": {"$oid": held[1]}}}
        case "minKey":
            return {"$minKey": 1}
        case "maxKey":
            return {"$maxKey": 1}
    raise AssertionError(value.type)


def _not_finite(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def is_json_of(text: Any, value: Value) -> bool:
    """Whether a text is the type-exact Extended JSON of a value."""
    try:
        return _same(_defined(json.loads(text)), extended_json(value))
    except (TypeError, ValueError):
        return False


def _defined(parsed: Any) -> Any:
    """Parsed Extended JSON with undefined as null, and without the null fields of documents."""
    if isinstance(parsed, list):
        return [_defined(inner) for inner in parsed]
    if not isinstance(parsed, dict):
        return parsed
    if parsed == {"$undefined": True}:
        return None
    return {name: found for name, inner in parsed.items() if (found := _defined(inner)) is not None}


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right) and (not isinstance(left, float) or math.copysign(1, left) == math.copysign(1, right))


# --- keys ---------------------------------------------------------------------------------------------------


def key(value: Value) -> Any:
    """A hashable value that is equal for `_id`s that are equal in MongoDB's unique index."""
    return _hashable(_canonical(value))


def key_of_text(text: str) -> Any:
    """The same for a text of the column `__key`."""
    return _hashable(json.loads(text))


def _canonical(value: Value) -> Any:
    held = value.held
    match value.type:
        case "int" | "long" | "double" | "decimal":
            return _canonical_number(value)
        case "object":
            return {f"${name}" if _LOOKS_LIKE_WRAPPER.fullmatch(name) else name: _canonical(inner) for name, inner in held}
        case "array":
            return [_canonical(inner) for inner in held]
        case "symbol":
            return held
        case "javascriptWithScope":
            return {"$code": held[0], "$scope": _canonical(held[1])}
        case _:
            return extended_json(value)


def _canonical_number(value: Value) -> Any:
    held = value.held
    number = decimal.Decimal(held)
    if number.is_nan():
        return {"$numberDecimal": "NaN"}
    if number.is_infinite():
        return {"$numberDecimal": "Infinity" if number > 0 else "-Infinity"}
    if number == number.to_integral_value() and -(2**63) <= number < 2**63:
        return int(number)
    sign, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    if value.type == "double" and len(stripped) > 34:
        return {"$numberDouble": repr(held)}
    return {"$numberDecimal": f"{'-' if sign else ''}{stripped}E{int(exponent) + len(text) - len(stripped)}"}


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return ("document", *((name, _hashable(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return ("array", *map(_hashable, value))
    return (type(value).__name__, value)


# --- columns ------------------------------------------------------------------------------------------------

_REFUSED = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def fits(column: str, name: str) -> bool:
    """Whether a field's column may have this name: the field's name without forbidden characters, numbered after a collision."""
    cleaned = _REFUSED.sub("_", name) or "_"
    return column == cleaned or bool(re.fullmatch(re.escape(cleaned) + r"_\d+", column))


@dataclass
class Judgement:
    """The comparison of one document with its row; in a rebuilt table a text column may hold any value as JSON."""

    where: str
    rescued: Mapping[str, str]
    is_rebuilt: bool = False
    differences: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def differ(self, path: str, what: str) -> None:
        self.differences.append(f"{self.where}: {path or 'the field without a name'}: {what}")

    def value(self, value: Value, cell: Any, type_: pa.DataType | None, path: str, *, in_array: bool = False) -> None:
        """Compare one value with its cell; without a column (`type_` None) only `__rescued` can hold it."""
        if value.type == "null":
            if cell is not None:
                self.differ(path, f"null in the source, {_shown(cell)} in gold")
            return
        if path in self.rescued:
            self.used.add(path)
            blank = value.type == "object" and not extended_json(value)
            if not is_json_of(self.rescued[path], value):
                self.differ(path, f"{value.type} rescued as {self.rescued[path][:80]!r}")
            if cell is not None and not blank:
                self.differ(path, f"rescued, and {_shown(cell)} in its column too")
            return
        if type_ is None or cell is None:
            self.differ(path, f"{value.type} is neither in a column nor rescued")
        elif value.type == "object" and pa.types.is_struct(type_):
            self.fields(value, cell, type_, path, in_array=in_array)
        elif value.type == "object" and pa.types.is_map(type_):
            self.entries(value, dict(cell), type_, path)
        elif value.type == "array" and (pa.types.is_list(type_) or pa.types.is_large_list(type_)):
            self.elements(value, cell, type_, path)
        elif not (
            holds(value, cell) or ((in_array or self.is_rebuilt) and isinstance(cell, str) and is_json_of(cell, value))
        ):
            self.differ(path, f"{value.type} {_shown(value.held)} is {_shown(cell)} in gold")

    def fields(
        self, value: Value, cell: Mapping[str, Any], type_: pa.StructType, path: str | None, *, in_array: bool
    ) -> None:
        free = {type_.field(number).name: type_.field(number).type for number in range(type_.num_fields)}
        for name, inner in sorted(value.held, key=lambda item: item[0] not in free):
            column = self.column(name, free, cell)
            column_type = None if column is None else free.pop(column)
            inner_cell = None if column is None else cell.get(column)
            self.value(inner, inner_cell, column_type, _joined(path, name), in_array=in_array)
        self.nothing_else(free, cell, path)

    def column(self, name: str, free: Iterable[str], cell: Mapping[str, Any]) -> str | None:
        """The column of a field: of the possible ones one that has a value, otherwise the one with the shortest name."""
        candidates = sorted((column for column in free if fits(column, name)), key=len)
        filled = [column for column in candidates if cell.get(column) is not None]
        return (filled or candidates or [None])[0]

    def nothing_else(self, columns: Iterable[str], cell: Mapping[str, Any], path: str | None) -> None:
        for column in columns:
            if cell.get(column) is not None:
                self.differ(_joined(path, column), f"{_shown(cell[column])} in gold, nothing in the source")

    def entries(self, value: Value, cell: Mapping[str, Any], type_: pa.MapType, path: str) -> None:
        for name, inner in value.held:  # all entries share a type, as elements of an array do
            self.value(inner, cell.get(name), type_.item_type, _joined(path, name), in_array=True)
        for name in cell.keys() - {name for name, _ in value.held}:
            self.differ(_joined(path, name), "an entry in gold, nothing in the source")

    def elements(self, value: Value, cell: Sequence[Any], type_: Any, path: str) -> None:
        if len(cell) != len(value.held):
            self.differ(path, f"{len(value.held)} elements in the source, {len(cell)} in gold")
            return
        for number, (inner, inner_cell) in enumerate(zip(value.held, cell, strict=True)):
            self.value(inner, inner_cell, type_.value_type, f"{path}.{number}", in_array=True)


def holds(value: Value, cell: Any) -> bool:
    """Whether the cell of a scalar column equals the BSON value, by the mapping of types."""
    held = value.held
    match value.type:
        case "double":
            return isinstance(cell, float) and (
                (math.isnan(held) and math.isnan(cell))
                or (held == cell and math.copysign(1, held) == math.copysign(1, cell))
            )
        case "int" | "long":
            return isinstance(cell, int | float | decimal.Decimal) and not isinstance(cell, bool) and cell == held
        case "decimal":
            if isinstance(cell, decimal.Decimal):
                return cell == decimal.Decimal(held)
            return bool(cell == held)
        case "string" | "symbol" | "javascript" | "objectId":
            return bool(cell == held)
        case "bool":
            return cell is held
        case "date":
            return isinstance(cell, datetime.datetime) and cell - _EPOCH == datetime.timedelta(milliseconds=held)
        case "timestamp":
            return isinstance(cell, datetime.datetime) and cell - _EPOCH == datetime.timedelta(seconds=held[0])
        case "binData":
            return bool(cell == held[0])
        case "regex":
            return bool(cell == {"regex": held[0], "options": held[1]})
        case "javascriptWithScope":
            return isinstance(cell, dict) and cell.get("code") == held[0] and is_json_of(cell.get("scope"), held[1])
        case "dbPointer":
            return isinstance(cell, dict) and list(cell.values()) == list(held)
        case "minKey":
            return bool(cell == "MinKey")
        case "maxKey":
            return bool(cell == "MaxKey")
        case _:
            return False


def _joined(path: str | None, name: str) -> str:
    """The dotted path of a field; `path` is None for the document itself, and empty for a field with an empty name."""
    return name if path is None else f"{path}.{name}"


def _shown(value: Any) -> str:
    return repr(value)[:80]


# --- tables -------------------------------------------------------------------------------------------------


def compare(
    collection: Collection[Any],
    gold: Path | str,
    *,
    flatten: str | None = None,
    added: Sequence[str] = (),
    limit: int = 20,
) -> list[str]:
    """The differences between a collection and its gold table; none if they are equal.

    `flatten` is the delimiter if `flatten.struct` is set; `added` names the columns of `add.fields`.
    """
    documents = [
        read_bson(bytes(found.raw)) for found in collection.with_options(codec_options=DEFAULT_RAW_BSON_OPTIONS).find()
    ]
    table = read(gold) if Path(str(gold), "_delta_log").exists() else pa.table({"__key": pa.array([], pa.string())})
    return list(_limited(_differences(documents, table, flatten=flatten, added=added), limit))


def read(table: Path | str, *, columns: Sequence[str] | None = None, version: int | None = None) -> pa.Table:
    """A Delta table or some of its columns, at its newest version or at another.

    A table with a `%` in its path is copied first, because delta-rs decodes the path and then does not find the table.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "table") if "%" in str(table) else Path(table)
        if plain != Path(table):
            shutil.copytree(table, plain)
        chosen = "*" if columns is None else ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
        # A query supports deletion vectors; `to_pyarrow_table` refuses them.
        rows = pa.table(
            QueryBuilder().register("held", DeltaTable(str(plain), version=version)).execute(f"SELECT {chosen} FROM held")
        )
        return rows.cast(pa.schema([item.with_type(_without_views(item.type)) for item in rows.schema]))


def rows(held: pa.Table, *, by: str) -> list[dict[str, Any]]:
    """Rows in the order of a column, with Spark's Python values: maps as dicts, times without a zone."""
    ordered = held.sort_by(by)
    return [{field.name: _plain(row[field.name], field.type) for field in held.schema} for row in ordered.to_pylist()]


def _plain(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {field.name: _plain(value[field.name], field.type) for field in type_}
    if pa.types.is_map(type_):
        return {name: _plain(item, type_.item_type) for name, item in value}
    if pa.types.is_list(type_):
        return [_plain(item, type_.value_type) for item in value]
    return value.replace(tzinfo=None) if pa.types.is_timestamp(type_) else value


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type with strings and binaries instead of their views, which Arrow cannot compare."""
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([item.with_type(_without_views(item.type)) for item in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    return kind


def differences(
    documents: Sequence[Value],
    table: pa.Table,
    *,
    flatten: str | None = None,
    added: Sequence[str] = (),
    is_rebuilt: bool = False,
) -> list[str]:
    """The differences between documents and the rows of a gold table."""
    return list(_differences(documents, table, flatten=flatten, added=added, is_rebuilt=is_rebuilt))


def _differences(
    documents: Sequence[Value], table: pa.Table, *, flatten: str | None, added: Sequence[str], is_rebuilt: bool = False
) -> Iterator[str]:
    engine = {"__key", "__rescued", *added}
    columns = pa.struct([item for item in table.schema if item.name not in engine])
    rows: dict[Any, dict[str, Any]] = {}
    for row in table.to_pylist():
        identity = key_of_text(row["__key"])
        if identity in rows:
            yield f"{row['__key']}: more than one row"
        rows[identity] = row
    for document in documents:
        value = dict(document.held)["_id"]
        row = rows.pop(key(value), None)  # type: ignore[assignment]
        where = json.dumps(extended_json(value))[:120]
        if row is None:
            yield f"{where}: no row in gold"
            continue
        cells = {item.name: row[item.name] for item in columns}
        judgement = Judgement(where, dict(row.get("__rescued") or ()), is_rebuilt)
        if flatten is None:
            judgement.fields(document, cells, columns, None, in_array=False)
        else:
            _judge_flattened(judgement, document, cells, columns, flatten)
        yield from judgement.differences
        for path in sorted(judgement.rescued.keys() - judgement.used):
            yield f"{where}: {path}: rescued {judgement.rescued[path][:80]!r}, nothing such in the source"
    for row in rows.values():
        yield f"{row['__key']}: a row in gold, no document in the source"


def _judge_flattened(
    judgement: Judgement, document: Value, cells: Mapping[str, Any], columns: pa.StructType, delimiter: str
) -> None:
    free = {item.name: item.type for item in columns}
    for path, value in _leaves(document, (), judgement.rescued):
        column = judgement.column(delimiter.join(path), free, cells)
        column_type = None if column is None else free.pop(column)
        judgement.value(value, cells.get(column or ""), column_type, ".".join(path))
    judgement.nothing_else(free, cells, None)


def _leaves(value: Value, path: tuple[str, ...], rescued: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Value]]:
    """The paths and values that have their own column if documents are flattened."""
    for name, inner in value.held:
        here = (*path, name)
        whole = ".".join(here) in rescued or not extended_json(inner) if inner.type == "object" else True
        if whole:
            yield here, inner
        else:
            yield from _leaves(inner, here, rescued)


def _limited(found: Iterable[str], limit: int) -> Iterator[str]:
    for number, difference in enumerate(found):
        if number == limit:
            yield "… and more"
            return
        yield difference


def bronze_tokens(table: Path | str, *, kind: str = "change") -> list[str]:
    """The resume tokens of a bronze table's events, in the order of their offsets."""
    rows = read(table, columns=["resume_token", "kind", "offset"])
    rows = rows.filter(pa.compute.equal(rows["kind"], kind)).sort_by("offset")
    return [str(token) for token in rows["resume_token"].to_pylist()]


def first_token(table: Path | str) -> str:
    """The resume token of a bronze table's first row, snapshot rows excluded: the start of its stream."""
    rows = read(table, columns=["resume_token", "kind", "offset"])
    rows = rows.filter(pa.compute.not_equal(rows["kind"], "snapshot")).sort_by("offset")
    return str(rows["resume_token"][0].as_py())
