"""The data files of a Delta table on a file system that this process sees: which are live in a version, and what rows
they hold.

For a table that changes with every second: a version is read from the commits since the last one that was, and neither Spark
nor Delta is called. Source: Delta's protocol, "Action Reconciliation", "Deletion Vectors", "Schema Serialization Format".
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from cdc_core.tables import definition, deletion_vector
from pipelines.delta import local_log

MANY_ROWS = 2_000_000
"""Keys are looked for in files of at most so many rows; among more, executors find them sooner."""

MANY_BYTES = 64 * 2**20
"""Rows are read here from files of at most so many bytes: a document may have 16 MB."""

PART_ROWS = 1 << 16
"""Rows of many are read so many at a time, and fewer where they are large."""

READS = frozenset(
    {"columnMapping", "deletionVectors", "typeWidening", "typeWidening-preview", "v2Checkpoint", "vacuumProtocolCheck"}
)
"""The reader features that may be supported: column mapping that is off, and of `v2Checkpoint` the classic form."""


class NotReadable(Exception):
    """The table, or this version of it, uses what is not read here."""


@dataclass
class LiveFiles:
    """The files of one table, at `version`: `add` actions by file and deletion vector, and the table's own definition."""

    folder: Path
    version: int = -1
    configuration: dict[str, str] = field(default_factory=dict)
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    schema_json: str = '{"type": "struct", "fields": []}'
    _files: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)
    _is_readable: bool = True
    _commit: tuple[int, int] | None = None

    def at(self, version: int) -> bool:
        """Go to a version; whether it can be read here. Where not, the next one is tried anew."""
        try:
            # A table that was removed and made again, or brought back from a backup, has the same numbers over again.
            is_same = self.version >= 0 and self._commit == _stamp(self.folder, self.version)
            if is_same and version == self.version:
                return self._is_readable
            if not is_same or version < self.version or not self._follow(version):
                self._begin(version)
            self._commit = _stamp(self.folder, self.version)
        except (OSError, ValueError, pa.ArrowException, NotReadable):
            self.version, self._is_readable = -1, False
        return self._is_readable

    def files(self) -> list[dict[str, Any]]:
        """The `add` actions of the live files."""
        return list(self._files.values())

    def row_count(self) -> int:
        """How many rows the live files have, deleted ones too; very many where Delta's statistics do not say it."""
        return sum(map(_count, self.files()))

    def holds(self, files: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all of these are live, with the same deleted rows."""
        return all(_identity(each) in self._files for each in files)

    def by_size(self, *, rows: int, size_bytes: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The files with the fewest rows, as many as have so many rows and bytes together, and the others."""
        files = sorted(self.files(), key=_count)
        for number, each in enumerate(files):
            rows, size_bytes = rows - _count(each), size_bytes - each["size"]
            if rows < 0 or size_bytes < 0:
                return files[:number], files[number:]
        return files, []

    # --- rows

    def rows(self, files: Sequence[Mapping[str, Any]]) -> pa.Table:
        """All rows of these files but the deleted ones, as the table's schema types them.

        Raises `NotReadable` where they are of more than `MANY_BYTES`.
        """
        self._refuse_large(files, set(self.schema.names))
        found = [
            conformed(_present(self.folder, each, _read(self.folder, each, self.schema.names)), self.schema)
            for each in files
        ]
        return pa.concat_tables(found) if found else self.schema.empty_table()

    def places(self, column: str, values: Sequence[str]) -> list[tuple[dict[str, Any], list[int]]]:
        """The files that hold one of these values, each with the numbers of the rows; those that are deleted already
        among them.

        Raises `NotReadable` where too many rows would have to be looked through.
        """
        if self.is_many(column, values):
            raise NotReadable
        wanted = sorted(set(values))
        files = [each for each in self.files() if _may_hold(each, column, wanted)]
        held = pa.array(wanted, pa.string())
        found = []
        for each in files:
            is_wanted = pc.is_in(_read(self.folder, each, [column])[column], value_set=held)
            rows = pc.indices_nonzero(is_wanted).to_pylist()
            if rows:
                found.append((each, rows))
        return found

    def rows_above(self, column: str, bound: int, *, columns: Sequence[str], limit: int) -> pa.Table:
        """The rows whose `column`, a BIGINT, is greater than `bound`, as the table's schema types them.

        Raises `NotReadable` where the files that may hold some have more than `limit` rows, or `MANY_BYTES`.
        """
        files = self._files_above(column, bound)
        if sum(_count(each) for each in files) > limit:
            raise NotReadable
        self._refuse_large(files, {*columns, column})
        found = [*self.parts_above(column, bound, columns=columns)]
        return pa.concat_tables(found) if found else _schema_of(self.schema, columns).empty_table()

    def count_above(self, column: str, bound: int) -> int:
        """How many rows the files have that may hold a `column` greater than `bound`: at least as many as there are."""
        return sum(_count(each) for each in self._files_above(column, bound))

    def parts_above(self, column: str, bound: int, *, columns: Sequence[str]) -> Iterator[pa.Table]:
        """What `rows_above` gives, of any number of rows: in parts of at most `PART_ROWS` rows and about `MANY_BYTES`.

        Raises `NotReadable`, perhaps after some parts.
        """
        schema, names = _schema_of(self.schema, columns), list(dict.fromkeys([*columns, column]))
        try:
            for file in self._files_above(column, bound):
                for part in _parts(self.folder, file, names):
                    above = part.filter(pc.fill_null(pc.greater(part[column], bound), False))
                    if above.num_rows:
                        yield conformed(above, schema)
        except (OSError, pa.ArrowException) as error:
            raise NotReadable from error

    def _files_above(self, column: str, bound: int) -> list[dict[str, Any]]:
        return [each for each in self.files() if _stats(each).get("maxValues", {}).get(column, bound + 1) > bound]

    def _refuse_large(self, files: Sequence[Mapping[str, Any]], columns: Collection[str]) -> None:
        paths = [local_log.data_path(self.folder, each["path"]) for each in files]
        if sum(local_log.columns_bytes(path, columns) for path in paths) > MANY_BYTES:
            raise NotReadable

    # --- the log

    def _follow(self, version: int) -> bool:
        """Apply the commits after `self.version`; whether all of them were there."""
        try:
            for number in range(self.version + 1, version + 1):
                for action in _actions(self.folder, number):
                    self._apply(action)
                self.version = number
        except FileNotFoundError:
            return False
        return True

    def _begin(self, version: int) -> None:
        """The version from the newest checkpoint up to it."""
        self._files.clear()
        self.version, self._is_readable = -1, True
        checkpoints = sorted((self.folder / "_delta_log").glob("*.checkpoint.parquet"))
        fitting = [each for each in checkpoints if _CHECKPOINT.fullmatch(each.name) and int(each.name[:20]) <= version]
        if fitting:
            for action in _checkpointed(fitting[-1]):
                self._apply(action)
            self.version = int(fitting[-1].name[:20])
        if not self._follow(version):
            raise NotReadable

    def _apply(self, action: Mapping[str, Any]) -> None:
        if added := action.get("add"):
            self._files[_identity(added)] = added
        elif removed := action.get("remove"):
            self._files.pop(_identity(removed), None)
        elif metadata := action.get("metaData"):
            self._define(metadata)
        elif protocol := action.get("protocol"):
            if not READS.issuperset(protocol.get("readerFeatures") or ()) or protocol["minReaderVersion"] == 2:
                raise NotReadable
        elif action.get("sidecar"):
            raise NotReadable

    def _define(self, metadata: Mapping[str, Any]) -> None:
        self.configuration = dict(metadata.get("configuration") or {})
        if metadata.get("partitionColumns") or self.configuration.get("delta.columnMapping.mode", "none") != "none":
            raise NotReadable
        self.schema_json = metadata["schemaString"]
        self.schema = arrow_schema(json.loads(self.schema_json))

    def spark_schema(self) -> StructType:
        """The table's columns as Spark has them, with their metadata."""
        return StructType.fromJson(json.loads(self.schema_json))

    def has_vectors(self) -> bool:
        """Whether rows may be marked as deleted: with deletion vectors, and without a change feed, whose readers want
        updates."""
        feed = self.configuration.get("delta.enableChangeDataFeed")
        return self.configuration.get(definition.DELETION_VECTORS) == "true" and feed != "true"

    def is_many(self, column: str, values: Sequence[str]) -> bool:
        """Whether `places` would have to look through too many rows for these values."""
        wanted = sorted(set(values))
        return sum(_count(each) for each in self.files() if _may_hold(each, column, wanted)) > MANY_ROWS

    def is_unchecked(self) -> bool:
        """Whether the table asks nothing of a row that is written, beside its type."""
        return not any(name.startswith("delta.constraints.") for name in self.configuration) and all(
            each.nullable and not each.metadata for each in self.schema
        )


def _schema_of(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in columns])


def _present(folder: Path, file: Mapping[str, Any], table: pa.Table) -> pa.Table:
    """The rows of a file that are not deleted."""
    vector = file.get("deletionVector")
    if not vector:
        return table
    return table.filter(_mask(folder, vector, len(table)))


def _mask(folder: Path, vector: Mapping[str, Any], rows: int) -> pa.BooleanArray:
    """Which of a file's rows are not deleted."""
    is_present = [True] * rows
    for row in deletion_vector.rows(_vector(folder, vector)):
        is_present[row] = False
    return pa.array(is_present, pa.bool_())


def _parts(folder: Path, file: Mapping[str, Any], columns: list[str]) -> Iterator[pa.Table]:
    """Columns of the rows of a data file that are not deleted, part by part."""
    path = local_log.data_path(folder, file["path"])
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as parquet:
        count = parquet.metadata.num_rows
        vector = file.get("deletionVector")
        is_present = _mask(folder, vector, count) if vector else None
        held = _held(parquet, columns)
        row_bytes = local_log.columns_bytes(path, held) // max(1, count)
        start = 0
        for batch in parquet.iter_batches(max(1, min(PART_ROWS, MANY_BYTES // max(1, row_bytes))), columns=held):
            part = pa.Table.from_batches([batch])
            yield part if is_present is None else part.filter(is_present.slice(start, len(part)))
            start += len(part)


def _vector(folder: Path, vector: Mapping[str, Any]) -> bytes:
    """A deletion vector: from the log itself, or from the file that it names."""
    if vector["storageType"] == "i":
        return deletion_vector.inline(vector["pathOrInlineDv"], vector["sizeInBytes"])
    if vector["storageType"] != "u":
        raise NotReadable
    path = folder / deletion_vector.relative_path(vector["pathOrInlineDv"])
    with open(path, "rb") as file:
        file.seek(vector.get("offset") or 0)
        return deletion_vector.framed(file.read(vector["sizeInBytes"] + 8))


def _read(folder: Path, file: Mapping[str, Any], columns: list[str]) -> pa.Table:
    """Columns of a data file, with the rows that are deleted in it."""
    path = local_log.data_path(folder, file["path"])
    # Spark's own form of a timestamp, by default, which in nanoseconds would end in 2262.
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as parquet:
        return parquet.read(_held(parquet, columns))


def _held(parquet: pq.ParquetFile, columns: Collection[str]) -> list[str]:
    """Those of the columns that a file has: one that is older than a column has none of it."""
    names = set(parquet.schema_arrow.names)  # once: Arrow makes a schema of the footer each time
    return [name for name in columns if name in names]


_CHECKPOINT = re.compile(r"[0-9]{20}\.checkpoint\.parquet")


def _stamp(folder: Path, version: int) -> tuple[int, int] | None:
    """What tells a version's commit from another one of the same number; None where the log has none."""
    try:
        found = (folder / "_delta_log" / f"{version:020}.json").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _actions(folder: Path, version: int) -> Iterator[dict[str, Any]]:
    text = (folder / "_delta_log" / f"{version:020}.json").read_text("utf-8")
    return (json.loads(line) for line in text.split("\n") if line)


def _checkpointed(path: Path) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, as a commit would have them."""
    with pq.ParquetFile(path) as held:
        # Neither says what is live: fences and tombstones are most of a long log's checkpoint.
        names = [name for name in held.schema_arrow.names if name not in ("txn", "remove")]
        for row in held.read(names).to_pylist():
            for name, action in row.items():
                if action is not None:
                    yield {name: {key: _plain(key, value) for key, value in action.items() if _is_said(key, value)}}


def _is_said(key: str, value: Any) -> bool:
    return value is not None and not key.endswith("_parsed")


_MAPS = ("partitionValues", "tags", "configuration")


def _plain(key: str, value: Any) -> Any:
    """A value as JSON has it: Parquet's maps are lists of pairs, and its structs hold nulls."""
    if key in _MAPS:
        return dict(value)
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def _identity(file: Mapping[str, Any]) -> tuple[object, ...]:
    """What Delta knows a file by: its name and its deletion vector."""
    vector = file.get("deletionVector") or {}
    return file["path"], vector.get("storageType"), vector.get("pathOrInlineDv"), vector.get("offset")


def share_deleted(file: Mapping[str, Any]) -> float:
    """How much of a file's rows is deleted, from 0 to 1."""
    return float((file.get("deletionVector") or {}).get("cardinality", 0) / max(1, _count(file)))


def _stats(file: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(file.get("stats") or "{}")


def _count(file: Mapping[str, Any]) -> int:
    """How many rows a file has, deleted ones too."""
    return int(_stats(file).get("numRecords", MANY_ROWS + 1))


def _may_hold(file: Mapping[str, Any], column: str, values: Sequence[str]) -> bool:
    """Whether a file's bounds leave room for one of the sorted values."""
    stats = _stats(file)
    low, high = (stats.get(each, {}).get(column) for each in ("minValues", "maxValues"))
    if low is None or high is None:
        return True
    at = bisect.bisect_left(values, low)
    return at < len(values) and bool(values[at] <= high)


# --- schemas

_TYPES = {
    "string": pa.string(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}
_DECIMAL = re.compile(r"decimal\(([0-9]+),\s*([0-9]+)\)")


def arrow_schema(struct: Mapping[str, Any]) -> pa.Schema:
    """A table's columns in Arrow; those of which Delta demands something (an expression, an identity) have metadata.

    Raises `NotReadable` for a type that no table of ours has.
    """
    demands = {"delta.generationExpression", "delta.invariants", "delta.identity.start", "CURRENT_DEFAULT"}
    return pa.schema(
        [
            pa.field(
                each["name"],
                _arrow(each["type"]),
                nullable=each["nullable"],
                metadata={"demanded": "true"} if demands & (each.get("metadata") or {}).keys() else None,
            )
            for each in struct["fields"]
        ]
    )


def _arrow(type_: Any) -> pa.DataType:
    if isinstance(type_, str):
        if decimal := _DECIMAL.fullmatch(type_):
            return pa.decimal128(*map(int, decimal.groups()))
        if type_ not in _TYPES:
            raise NotReadable
        return _TYPES[type_]
    if type_["type"] == "struct":
        return pa.struct([pa.field(each["name"], _arrow(each["type"])) for each in type_["fields"]])
    if type_["type"] == "array":
        return pa.list_(_arrow(type_["elementType"]))
    if type_["type"] == "map":
        return pa.map_(_arrow(type_["keyType"]), _arrow(type_["valueType"]))
    raise NotReadable


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns in the order and with the types of a schema, null where it has none of them.

    Raises `NotReadable` where a value has no place there.
    """
    names = {name: number for number, name in enumerate(table.column_names)}
    try:
        columns = [
            _conformed(table.column(names[each.name]).combine_chunks(), each.type)
            if each.name in names
            else pa.nulls(len(table), each.type)
            for each in schema
        ]
    except pa.ArrowException as error:
        raise NotReadable from error
    return pa.table(columns, schema=schema)


def _conformed(values: pa.Array, type_: pa.DataType) -> pa.Array:
    if values.type.equals(type_):
        return values
    if pa.types.is_struct(type_) and pa.types.is_struct(values.type):
        names = {each.name for each in values.type}
        if not names <= {each.name for each in type_}:
            raise NotReadable
        # Not `flatten`, which hides what lies below a null: the validity stays that of the struct.
        columns = [
            _conformed(values.field(each.name), each.type) if each.name in names else pa.nulls(len(values), each.type)
            for each in type_
        ]
        return pa.StructArray.from_arrays(columns, fields=list(type_), mask=values.is_null())
    if pa.types.is_list(type_) and pa.types.is_list(values.type):
        # Values that a slice leaves out are left out of its offsets, too.
        plain = pa.concat_arrays([values])
        return pa.ListArray.from_arrays(
            plain.offsets, _conformed(plain.values, type_.value_type), type=type_, mask=plain.is_null()
        )
    if pa.types.is_map(type_) and pa.types.is_map(values.type):
        plain = pa.concat_arrays([values])
        items = _conformed(plain.items, type_.item_type)
        return pa.MapArray.from_arrays(plain.offsets, plain.keys, items, type=type_, mask=plain.is_null())
    return values.cast(type_)
