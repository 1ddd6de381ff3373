"""The live data files of a version of a Delta table that this process can read, and their rows.

Neither Spark nor Delta is called. A newer version is read from the commits after the one that was read before. Source: Delta's protocol,
"Action Reconciliation", "Deletion Vectors", "Schema Serialization Format".
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from cdc_core.tables import definition
from cdc_core.tables import layout as tables
from pipelines.delta import (
    deleted_rows,
    file_statistics,
    key_index,
    key_search,
    local_log,
    stored_files,
    stored_ranges,
    table_files,
    table_schema,
)
from pipelines.delta.key_search import Places
from pipelines.delta.table_files import LocalFiles

MANY_ROWS = 50_000_000
"""Keys are searched here in files with at most this many rows in all; a million rows take less than 0.1 s. Executors find keys among more
rows sooner."""

MANY_KEYS = 5_000_000
"""`places_of` reads the keys of all rows of a table with at most so many."""

MANY_REWRITTEN_BYTES = 128 * 2**20
"""Where a table has no deletion vectors, files of at most this size in all are rewritten here to replace some of their rows. A compaction
makes files of this size, too."""

MANY_BYTES = 64 * 2**20
"""Rows are read here at once up to this size: a document may have 16 MB."""

FEW_BYTES = 2**20
"""So many bytes, or fewer, are read without threads of their own, which would take longer to start."""

PART_BYTES = 16 * 2**20
"""The size of one part. A hop has several of them in memory, and a service up to four hops at once."""

PART_ROWS = 1 << 16
"""The most rows of one part."""

_READ_ROWS = 4096
"""Rows of one read; a part consists of several. Only reading shows how large the rows are."""

IN_MEMORY = 4
"""Size in memory relative to that in a file without dictionaries: Arrow adds offsets and nulls."""


@dataclass
class LiveFiles:
    """The files of one table at `version`: `add` actions by file and deletion vector, and the table's definition."""

    folder: Path
    version: int = -1
    configuration: dict[str, str] = field(default_factory=dict)
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    schema_json: str = '{"type": "struct", "fields": []}'
    _files: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)
    _is_readable: bool = True
    _commit: tuple[int, int] | None = None

    def move_to_newest(self) -> bool:
        """Go to the table's newest version; false where there is none, or it cannot be read here. Raises `OSError` where the store cannot
        be read."""
        stored_files.follow(self.folder)
        newest = local_log.newest_version(self.folder)
        return newest is not None and self.move_to(newest)

    def move_to(self, version: int) -> bool:
        """Go to a version; false where it cannot be read here. After a failure the next call reads from the checkpoint again."""
        try:
            # A table that was removed and created again, or restored from a backup, uses the same version numbers again.
            current, stamp = self.version, self._commit
            is_same = current >= 0 and stamp == local_log.stamp(self.folder, current)
            if is_same and version == current:
                return self._is_readable
            # Compared again afterwards: while a copied log is read, it may turn out to be another table's.
            is_followed = (
                is_same and version > current and self._follow(version) and stamp == local_log.stamp(self.folder, current)
            )
            if not is_followed:
                self._begin(version)
            self._commit = local_log.stamp(self.folder, self.version)
        except (OSError, ValueError, pa.ArrowException, table_schema.NotReadable):
            self.version, self._is_readable = -1, False
        return self._is_readable

    def files(self) -> list[dict[str, Any]]:
        """The `add` actions of the live files."""
        return list(self._files.values())

    def row_count(self) -> int:
        """The number of rows in the live files, deleted ones included; at least `file_statistics.UNKNOWN_ROWS` where statistics lack it."""
        return sum(map(file_statistics.row_count, self.files()))

    def holds(self, files: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all of these files are live, with the same deletion vectors."""
        return all(table_files.identity(each) in self._files for each in files)

    def by_size(self, *, rows: int, size_bytes: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The smallest files by rows, up to `rows` and `size_bytes` in all, and the other files."""
        files = sorted(self.files(), key=file_statistics.row_count)
        for number, file in enumerate(files):
            rows, size_bytes = rows - file_statistics.row_count(file), size_bytes - file["size"]
            if rows < 0 or size_bytes < 0:
                return files[:number], files[number:]
        return files, []

    # --- rows

    def rows(self, files: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these files that are not deleted, with the table's types; all columns, or `columns`.

        Raises `NotReadable` where they have more than `MANY_BYTES`.
        """
        schema = self.schema if columns is None else _schema_of(self.schema, columns)
        names, parts, size = schema.names, [], 0
        _refuse_large(self.folder, files, set(names))
        for file in files:
            for part in _parts(self.folder, file, names):
                parts.append(table_schema.conformed(part, schema))
                # The footer has the size of the distinct values for a dictionary-encoded column, and not that of the rows.
                size += part.nbytes
                if size > IN_MEMORY * MANY_BYTES:
                    raise table_schema.NotReadable
        return pa.concat_tables(parts) if parts else schema.empty_table()

    def places(self, column: str, values: Sequence[str]) -> Places:
        """The files that hold one of the values in a STRING column, each with the row numbers; deleted rows included.

        Raises `NotReadable` where too many rows would have to be searched (`is_many`).
        """
        sorted_values = sorted(set(values))
        files = self._files_with(column, sorted_values)
        if sum(map(file_statistics.row_count, files)) > MANY_ROWS:
            raise table_schema.NotReadable
        is_kept = key_index.is_large(self.row_count(), sorted_values) or stored_files.copied(self.folder) is not None
        return key_search.places(self.folder, files, column, sorted_values, is_kept=is_kept) if files else []

    def rows_above(self, column: str, bound: int, *, columns: Sequence[str], limit: int) -> pa.Table:
        """The rows whose `column`, a BIGINT, is greater than `bound`, with the table's types.

        Raises `NotReadable` where the files that may hold such rows have more than `limit` rows, or `MANY_BYTES`.
        """
        files = self._files_above(column, bound)
        if sum(file_statistics.row_count(each) for each in files) > limit:
            raise table_schema.NotReadable
        _refuse_large(self.folder, files, {*columns, column})
        parts = [*self.parts_above(column, bound, columns=columns)]
        return pa.concat_tables(parts) if parts else _schema_of(self.schema, columns).empty_table()

    def count_above(self, column: str, bound: int) -> int:
        """An upper bound of the number of rows whose `column` is greater than `bound`: all rows of the files that may hold some."""
        return sum(file_statistics.row_count(each) for each in self._files_above(column, bound))

    def parts_above(self, column: str, bound: int, *, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of `rows_above`, without its limits, in parts of at most `PART_ROWS` rows and about `PART_BYTES`.

        Raises `NotReadable`, possibly after some parts.
        """
        schema, names = _schema_of(self.schema, columns), list(dict.fromkeys([*columns, column]))
        try:
            files = self._files_above(column, bound)
            _bring(self.folder, files)
            for file in files:
                for part in _parts(self.folder, file, names):
                    # A file of another writer without the column: it is null, which is not greater than `bound`.
                    if column not in part.column_names:
                        continue
                    above = table_schema.chosen(part, pc.fill_null(pc.greater(part[column], bound), False))
                    if above.num_rows:
                        yield table_schema.conformed(above, schema)
        except (OSError, pa.ArrowException) as error:
            raise table_schema.NotReadable from error

    def parts(self, files: Sequence[Mapping[str, Any]], *, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of `rows`, without its limit, in parts as of `parts_above`. Raises `NotReadable`, possibly after some parts."""
        yield from _others(self, [(file, ()) for file in files], _schema_of(self.schema, columns))

    def _files_above(self, column: str, bound: int) -> list[dict[str, Any]]:
        highest = ((each, file_statistics.column_statistics(each, column)[2]) for each in self.files())
        return [each for each, high in highest if high is None or high > bound]

    # --- the log

    def _follow(self, version: int) -> bool:
        """Apply the commits after `self.version`; false where one of them is missing."""
        try:
            for number in range(self.version + 1, version + 1):
                for action in local_log.actions(self.folder, number):
                    self._apply(action)
                self.version = number
        except FileNotFoundError:
            return False
        return True

    def _begin(self, version: int) -> None:
        """Read the version anew, from the newest checkpoint at or before it."""
        self._files.clear()
        self.version, self._is_readable = -1, True
        copied_log = stored_files.copied(self.folder)
        # Otherwise the copies hold the version, as of the last look or as this process has committed it.
        if copied_log is not None and (copied_log.newest is None or copied_log.newest < version):
            copied_log.follow()
        for action in local_log.replayed(self.folder, version):
            self._apply(action)
        self.version = version

    def _apply(self, action: Mapping[str, Any]) -> None:
        if add := action.get("add"):
            self._files[table_files.identity(add)] = file_statistics.AddAction(add)
        elif remove := action.get("remove"):
            self._files.pop(table_files.identity(remove), None)
        else:
            table_schema.check(action)
            if metadata := action.get("metaData"):
                self.configuration = dict(metadata.get("configuration") or {})
                self.schema_json = metadata["schemaString"]
                self.schema = table_schema.arrow_schema(json.loads(self.schema_json))

    def spark_schema(self) -> StructType:
        """The table's columns as Spark's type, with their metadata."""
        return StructType.fromJson(json.loads(self.schema_json))

    def is_many(self, column: str, values: Sequence[str]) -> bool:
        """Whether `places` would have to search more than `MANY_ROWS` rows for these values, or to replace the rows files that are too
        large would have to be rewritten (`rewrites_many`)."""
        if self.row_count() <= MANY_ROWS and not rewrites_many(self, self.files()):
            return False
        files = self._files_with(column, sorted(set(values)))
        return sum(map(file_statistics.row_count, files)) > MANY_ROWS or rewrites_many(self, files)

    def _files_with(self, column: str, sorted_values: Sequence[str]) -> list[dict[str, Any]]:
        return [each for each in self.files() if file_statistics.may_hold(each, column, sorted_values)]

    def takes_rows(self, version: int) -> bool:
        """Go to a version; whether this process may add rows to it, and replace rows: by deletion vectors, or by rewriting their files.

        That needs a version that is readable here, and a table that requires nothing of a row but its types.
        """
        return (
            self.move_to(version)
            and not definition.follows_rows(self.configuration)
            and not any(name.startswith("delta.constraints.") for name in self.configuration)
            and not any(each.metadata for each in self.schema)
        )


def of(spark: SparkSession, table: tables.TableRef) -> LiveFiles | None:
    """The files of a path table that this process can read, on a local file system or in a store; None for any other table."""
    folder = local_log.place(spark, table)
    return None if folder is None else LiveFiles(folder)


def measured_columns(live: LiveFiles) -> list[str]:
    """The columns for which Delta keeps the minimum and maximum of each file."""
    names, setting = live.schema.names, live.configuration.get("delta.dataSkippingStatsColumns")
    if setting is None:
        count = int(live.configuration.get("delta.dataSkippingNumIndexedCols", 32))
        return names if count < 0 else names[:count]
    listed_names = {each.strip().strip("`") for each in setting.split(",")}
    return [name for name in names if name in listed_names]


def _refuse_large(folder: Path, files: Sequence[Mapping[str, Any]], columns: Collection[str]) -> None:
    """Raise `NotReadable` where these columns of the files have more than `MANY_BYTES`. Copies the files of a table in a store."""
    _bring(folder, files)
    paths = [local_log.data_path(folder, each["path"]) for each in files]
    if sum(local_log.columns_bytes(path, columns) for path in paths) > MANY_BYTES:
        raise table_schema.NotReadable


def _bring(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Copy these files and their deletion vectors where the table is in a store. Raises `OSError`."""
    stored_files.bring(folder, ((unquote(each["path"]), each["size"]) for each in files))
    _bring_vectors(folder, files)


def _bring_vectors(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Copy the deletion vectors of these files where the table is in a store. Raises `OSError`."""
    vectors = (each["deletionVector"] for each in files if each.get("deletionVector"))
    stored_files.bring(folder, ((deleted_rows.file_of(each), None) for each in vectors if each["storageType"] == "u"))


def places_of(live: LiveFiles, keys: pa.Table) -> Places:
    """As `LiveFiles.places`, of keys in several columns, of any types that Arrow compares; null is equal to null.

    Raises `NotReadable` where more than `MANY_KEYS` rows would have to be read, and `OSError`.
    """
    if live.row_count() > MANY_KEYS:
        raise table_schema.NotReadable
    return key_search.places_of(live.folder, live.files(), keys, _schema_of(live.schema, keys.column_names))


def rows_at(live: LiveFiles, places: Places, *, columns: Sequence[str], size_bytes: int, read_bytes: int) -> pa.Table:
    """Columns of the rows at these places (`LiveFiles.places`) that are not deleted, with the table's types.

    Raises `NotReadable` where they have more than `size_bytes`, or where the columns of their row groups have more than `read_bytes`, or
    than `stored_ranges.READ_BYTES` for a table in a store. Raises `OSError`.
    """
    schema, remaining_bytes = _schema_of(live.schema, columns), size_bytes
    present_places = present(live, places)
    sources = stored_ranges.sources(live.folder, [file for file, _ in present_places])
    read_size = sum(
        local_log.columns_bytes(source, set(columns), rows=rows)
        for source, (_, rows) in zip(sources, present_places, strict=True)
    )
    is_stored = stored_files.copied(live.folder) is not None
    if read_size > (min(read_bytes, stored_ranges.READ_BYTES) if is_stored else read_bytes):
        raise table_schema.NotReadable

    def read(path: stored_ranges.Source, numbers: Sequence[int]) -> list[pa.Table]:
        nonlocal remaining_bytes
        parts = []
        for part in _parts_at(path, numbers, list(columns)):
            remaining_bytes -= part.nbytes
            if remaining_bytes < 0:
                raise table_schema.NotReadable
            parts.append(table_schema.conformed(part, schema))
        return parts

    with key_search.mapped(is_little=read_size <= FEW_BYTES) as map_:
        part_lists = map_(read, sources, (numbers for _, numbers in present_places))
        return pa.concat_tables([schema.empty_table(), *itertools.chain.from_iterable(part_lists)])


def present(live: LiveFiles, places: Places) -> Places:
    """The places (`LiveFiles.places`) whose rows are not deleted. Raises `OSError`."""
    _bring_vectors(live.folder, [file for file, _ in places])
    present_places = []
    for file, numbers in places:
        if vector := file.get("deletionVector"):
            is_present = _mask(live.folder, vector, file_statistics.row_count(file)).take(pa.array(numbers, pa.int64()))
            numbers = list(itertools.compress(numbers, is_present.to_pylist()))
        if numbers:
            present_places.append((file, numbers))
    return present_places


def rewrites_many(live: LiveFiles, files: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the table has no deletion vectors, and these files have more than `MANY_REWRITTEN_BYTES`."""
    size_bytes = sum(file["size"] for file in files)
    return size_bytes > MANY_REWRITTEN_BYTES and not definition.replaces_rows(live.configuration)


def rest(live: LiveFiles, places: Places) -> Iterator[pa.Table]:
    """The other rows of the files of these places, in parts as of `LiveFiles.parts`. Raises `NotReadable`, possibly after some parts."""
    return _others(live, places, live.schema)


def _others(
    live: LiveFiles, places: Sequence[tuple[Mapping[str, Any], Sequence[int]]], schema: pa.Schema
) -> Iterator[pa.Table]:
    """`rest`, with the columns and types of a schema."""
    try:
        _bring(live.folder, [file for file, _ in places])
        for file, rows in places:
            for part in _parts(live.folder, file, schema.names, without=rows):
                yield table_schema.conformed(part, schema)
    except (OSError, pa.ArrowException) as error:
        raise table_schema.NotReadable from error


def rows_beyond(live: LiveFiles, other: LiveFiles, *, limit: int) -> Places:
    """The rows of the version `live` that the version `other` of the same table does not have.

    These are the rows of files that `other` lacks, and the rows that only `other` has deleted in files of both. Raises `NotReadable` where
    there are more than `limit`, and `OSError`.
    """
    other_files = {file["path"]: file for file in other.files()}
    changed = [(file, other_files.get(file["path"])) for file in live.files() if not other.holds([file])]
    own_files = [file for file, there in changed if there is None]
    pairs = [(file, there) for file, there in changed if there is not None]
    count = sum(map(file_statistics.row_count, own_files))
    # At least so many: the vectors, which grow with the table's age, are read only where they may differ by few rows.
    least = sum(max(0, file_statistics.deleted_count(there) - file_statistics.deleted_count(file)) for file, there in pairs)
    if count + least > limit:
        raise table_schema.NotReadable
    _bring_vectors(live.folder, [file for pair in pairs for file in pair])
    files = LocalFiles(live.folder)
    beyond = [(file, _deleted(there, files) - _deleted(file, files)) for file, there in pairs]
    if count + sum(len(rows) for _, rows in beyond) > limit:
        raise table_schema.NotReadable
    own_places = present(live, [(file, list(range(file_statistics.row_count(file)))) for file in own_files])
    return [*own_places, *((file, list(rows)) for file, rows in beyond if rows)]


def _deleted(file: Mapping[str, Any], files: LocalFiles) -> BitMap64:
    """The rows of a file that its deletion vector deletes."""
    vector = file.get("deletionVector")
    return deleted_rows.of(vector, files) if vector else BitMap64()


def _parts_at(path: stored_ranges.Source, numbers: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
    """Columns of rows of a data file, whose `numbers` are in ascending order."""
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as parquet:
        present_columns, groups = _held(parquet, columns), local_log.row_groups(parquet, numbers)
        for group, rows in groups.items():
            start = rows.start
            at_a_time = _rows_at_a_time(parquet, present_columns, group)
            for batch in parquet.iter_batches(at_a_time, row_groups=[group], columns=present_columns):
                low, high = (bisect.bisect_left(numbers, bound) for bound in (start, start + len(batch)))
                if low < high:
                    yield pa.Table.from_batches([batch.take(pa.array([each - start for each in numbers[low:high]]))])
                start += len(batch)


def _schema_of(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in columns])


def _mask(folder: Path, vector: Mapping[str, Any] | None, rows: int, *, without: Sequence[int] = ()) -> pa.BooleanArray:
    """True for each row of a file that is not deleted, and not one of `without`."""
    is_present = np.ones(rows, dtype=bool)
    deleted = np.asarray(deleted_rows.of(vector, LocalFiles(folder)).to_array()) if vector else np.empty(0, dtype=np.int64)
    is_present[deleted[deleted < rows]] = False
    is_present[np.asarray(without, dtype=np.int64)] = False
    return pa.array(is_present)


def _parts(folder: Path, file: Mapping[str, Any], columns: list[str], *, without: Sequence[int] = ()) -> Iterator[pa.Table]:
    """Columns of a data file's rows that are not deleted, and not one of `without`, in parts of at most `PART_ROWS` rows and about
    `PART_BYTES`."""
    vector = file.get("deletionVector")
    parts: list[pa.Table] = []
    is_present: pa.BooleanArray | None = None
    start = rows = size = 0
    with pq.ParquetFile(local_log.data_path(folder, file["path"]), coerce_int96_timestamp_unit="us") as parquet:
        count = parquet.metadata.num_rows
        is_present = _mask(folder, vector, count, without=without) if vector or without else None
        present_columns = _held(parquet, columns)
        for at_a_time, batch in _batches(parquet, present_columns):
            part = pa.Table.from_batches([batch])
            parts.append(part if is_present is None else table_schema.chosen(part, is_present.slice(start, len(part))))
            start, rows, size = start + len(part), rows + len(parts[-1]), size + parts[-1].nbytes
            if rows + at_a_time > PART_ROWS or size >= PART_BYTES:
                yield pa.concat_tables(parts)
                parts, rows, size = [], 0, 0
    if parts:
        yield pa.concat_tables(parts)


def _batches(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A file's rows in order, each batch with the most rows that it may have. A file may begin with small rows and go on with large ones."""
    for group in range(parquet.num_row_groups):
        if parquet.metadata.row_group(group).num_rows:
            at_a_time = _rows_at_a_time(parquet, columns, group)
            yield from ((at_a_time, batch) for batch in parquet.iter_batches(at_a_time, row_groups=[group], columns=columns))


def _rows_at_a_time(parquet: pq.ParquetFile, columns: list[str], group: int) -> int:
    most = min(_READ_ROWS, PART_ROWS)
    return local_log.rows_at_a_time(parquet, columns, most=most, size_bytes=PART_BYTES, group=group)


def _held(parquet: pq.ParquetFile, columns: Collection[str]) -> list[str]:
    """The columns that the file has. A file that is older than a column, or of another writer, may lack it.

    Where it has none of them, its first column, which gives the number of rows.
    """
    names = dict.fromkeys(parquet.schema_arrow.names)  # once: Arrow builds the schema from the footer at each access
    return [name for name in columns if name in names] or [*names][:1]
