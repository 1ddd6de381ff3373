"""The data files of a Delta table on a file system that this process sees: which are live in a version, and what rows
they hold.

For a table that changes with every second: a version is read from the commits since the last one that was, and neither Spark
nor Delta is called. Source: Delta's protocol, "Action Reconciliation", "Deletion Vectors", "Schema Serialization Format".
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MANY_ROWS = 50_000_000
"""Keys are looked for in files of at most so many rows, of which a million takes less than a tenth of a second; among more,
executors find them sooner."""

MANY_BYTES = 64 * 2**20
"""Rows are read here from files of at most so many bytes: a document may have 16 MB."""

PART_ROWS = 1 << 16
"""Rows of many come so many at a time, and fewer where they are large."""

_READ_ROWS = 4096
"""Read at a time, of which a part is put together: how large a row is only reading it tells."""

_IN_MEMORY = 4
"""Rows in memory take so many times what they take in a file, where it has no dictionary: offsets, and what is null."""


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

    def at_newest(self) -> bool:
        """Go to the table's newest version; whether there is one, and it can be read here. Raises `OSError` where its store cannot be
        read."""
        stored_files.follow(self.folder)
        newest = local_log.newest_version(self.folder)
        return newest is not None and self.at(newest)

    def at(self, version: int) -> bool:
        """Go to a version; whether it can be read here. Where not, the next one is tried anew."""
        try:
            # A table that was removed and made again, or brought back from a backup, has the same numbers over again.
            held, stamp = self.version, self._commit
            is_same = held >= 0 and stamp == local_log.stamp(self.folder, held)
            if is_same and version == held:
                return self._is_readable
            # Once more behind it: a copied log may be found to be another's while it is read.
            is_followed = (
                is_same and version > held and self._follow(version) and stamp == local_log.stamp(self.folder, held)
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
        """How many rows the live files have, deleted ones too; very many where Delta's statistics do not say it."""
        return sum(map(file_statistics.row_count, self.files()))

    def holds(self, files: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all of these are live, with the same deleted rows."""
        return all(table_files.identity(each) in self._files for each in files)

    def by_size(self, *, rows: int, size_bytes: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The files with the fewest rows, as many as have so many rows and bytes together, and the others."""
        files = sorted(self.files(), key=file_statistics.row_count)
        for number, each in enumerate(files):
            rows, size_bytes = rows - file_statistics.row_count(each), size_bytes - each["size"]
            if rows < 0 or size_bytes < 0:
                return files[:number], files[number:]
        return files, []

    # --- rows

    def rows(self, files: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of these files but the deleted ones, as the table's schema types them; or some of their columns.

        Raises `NotReadable` where they are of more than `MANY_BYTES`.
        """
        schema = self.schema if columns is None else _schema_of(self.schema, columns)
        names, found, size = schema.names, [], 0
        _refuse_large(self.folder, files, set(names))
        for each in files:
            for part in _parts(self.folder, each, names):
                found.append(table_schema.conformed(part, schema))
                # What a footer says of a column with a dictionary is what its distinct values take, and not its rows.
                size += part.nbytes
                if size > _IN_MEMORY * MANY_BYTES:
                    raise table_schema.NotReadable
        return pa.concat_tables(found) if found else schema.empty_table()

    def places(self, column: str, values: Sequence[str]) -> Places:
        """The files that hold one of these values, each with the numbers of the rows; those that are deleted already
        among them.

        Raises `NotReadable` where too many rows would have to be looked through.
        """
        if self.is_many(column, values):
            raise table_schema.NotReadable
        wanted = sorted(set(values))
        files = [each for each in self.files() if file_statistics.may_hold(each, column, wanted)]
        is_kept = self.row_count() >= key_index.LARGE_ROWS or stored_files.copied(self.folder) is not None
        return key_search.places(self.folder, files, column, wanted, is_kept=is_kept) if files else []

    def rows_above(self, column: str, bound: int, *, columns: Sequence[str], limit: int) -> pa.Table:
        """The rows whose `column`, a BIGINT, is greater than `bound`, as the table's schema types them.

        Raises `NotReadable` where the files that may hold some have more than `limit` rows, or `MANY_BYTES`.
        """
        files = self._files_above(column, bound)
        if sum(file_statistics.row_count(each) for each in files) > limit:
            raise table_schema.NotReadable
        _refuse_large(self.folder, files, {*columns, column})
        found = [*self.parts_above(column, bound, columns=columns)]
        return pa.concat_tables(found) if found else _schema_of(self.schema, columns).empty_table()

    def count_above(self, column: str, bound: int) -> int:
        """How many rows the files have that may hold a `column` greater than `bound`: at least as many as there are."""
        return sum(file_statistics.row_count(each) for each in self._files_above(column, bound))

    def parts_above(self, column: str, bound: int, *, columns: Sequence[str]) -> Iterator[pa.Table]:
        """What `rows_above` gives, of any number of rows: in parts of at most `PART_ROWS` rows and about `MANY_BYTES`.

        Raises `NotReadable`, perhaps after some parts.
        """
        schema, names = _schema_of(self.schema, columns), list(dict.fromkeys([*columns, column]))
        try:
            files = self._files_above(column, bound)
            _bring(self.folder, files)
            for file in files:
                for part in _parts(self.folder, file, names):
                    # Of somebody else's file: null in each row, which is greater than nothing.
                    if column not in part.column_names:
                        continue
                    above = part.filter(pc.fill_null(pc.greater(part[column], bound), False))
                    if above.num_rows:
                        yield table_schema.conformed(above, schema)
        except (OSError, pa.ArrowException) as error:
            raise table_schema.NotReadable from error

    def parts(self, files: Sequence[Mapping[str, Any]], *, columns: Sequence[str]) -> Iterator[pa.Table]:
        """What `rows` gives, of any number of rows, in parts as `parts_above`. Raises `NotReadable`, perhaps after some parts."""
        schema = _schema_of(self.schema, columns)
        try:
            _bring(self.folder, files)
            for file in files:
                for part in _parts(self.folder, file, schema.names):
                    yield table_schema.conformed(part, schema)
        except (OSError, pa.ArrowException) as error:
            raise table_schema.NotReadable from error

    def _files_above(self, column: str, bound: int) -> list[dict[str, Any]]:
        highest = ((each, file_statistics.said(each, column)[2]) for each in self.files())
        return [each for each, high in highest if high is None or high > bound]

    # --- the log

    def _follow(self, version: int) -> bool:
        """Apply the commits after `self.version`; whether all of them were there."""
        try:
            for number in range(self.version + 1, version + 1):
                for action in local_log.actions(self.folder, number):
                    self._apply(action)
                self.version = number
        except FileNotFoundError:
            return False
        return True

    def _begin(self, version: int) -> None:
        """The version from the newest checkpoint up to it."""
        self._files.clear()
        self.version, self._is_readable = -1, True
        stored_files.follow(self.folder)
        for action in local_log.replayed(self.folder, version):
            self._apply(action)
        self.version = version

    def _apply(self, action: Mapping[str, Any]) -> None:
        if added := action.get("add"):
            self._files[table_files.identity(added)] = file_statistics.AddAction(added)
        elif removed := action.get("remove"):
            self._files.pop(table_files.identity(removed), None)
        else:
            table_schema.check(action)
            if metadata := action.get("metaData"):
                self.configuration = dict(metadata.get("configuration") or {})
                self.schema_json = metadata["schemaString"]
                self.schema = table_schema.arrow_schema(json.loads(self.schema_json))

    def spark_schema(self) -> StructType:
        """The table's columns as Spark has them, with their metadata."""
        return StructType.fromJson(json.loads(self.schema_json))

    def is_many(self, column: str, values: Sequence[str]) -> bool:
        """Whether `places` would have to look through too many rows for these values."""
        if self.row_count() <= MANY_ROWS:
            return False
        wanted = sorted(set(values))
        return (
            sum(file_statistics.row_count(each) for each in self.files() if file_statistics.may_hold(each, column, wanted))
            > MANY_ROWS
        )

    def takes_rows(self, version: int) -> bool:
        """Go to a version; whether rows may be put in here, and replaced by marking others as deleted: it can be read here, and the table
        asks nothing of a row beside its type."""
        return (
            self.at(version)
            and definition.replaces_rows(self.configuration)
            and not any(name.startswith("delta.constraints.") for name in self.configuration)
            and not any(each.metadata for each in self.schema)
        )


def of(spark: SparkSession, table: tables.TableRef) -> LiveFiles | None:
    """The files of a path table on a file system that this process sees, or in a store that it reaches."""
    folder = local_log.place(spark, table)
    return None if folder is None else LiveFiles(folder)


def measured_columns(live: LiveFiles) -> list[str]:
    """The columns of which Delta keeps the least and greatest values of a file."""
    names, listed = live.schema.names, live.configuration.get("delta.dataSkippingStatsColumns")
    if listed is None:
        count = int(live.configuration.get("delta.dataSkippingNumIndexedCols", 32))
        return names if count < 0 else names[:count]
    wanted = {each.strip("`") for each in listed.split(",")}
    return [name for name in names if name in wanted]


def _refuse_large(folder: Path, files: Sequence[Mapping[str, Any]], columns: Collection[str]) -> None:
    """Raise `NotReadable` where these columns of the files, which are copied if need be, are of more than `MANY_BYTES`."""
    _bring(folder, files)
    paths = [local_log.data_path(folder, each["path"]) for each in files]
    if sum(local_log.columns_bytes(path, columns) for path in paths) > MANY_BYTES:
        raise table_schema.NotReadable


def _bring(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Copy what lies in a store of these files, and which of their rows are deleted. Raises `OSError`."""
    stored_files.bring(folder, ((unquote(each["path"]), each["size"]) for each in files))
    _bring_vectors(folder, files)


def _bring_vectors(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Copy what lies in a store of which rows of these files are deleted. Raises `OSError`."""
    vectors = (each["deletionVector"] for each in files if each.get("deletionVector"))
    stored_files.bring(folder, ((deleted_rows.file_of(each), None) for each in vectors if each["storageType"] == "u"))


def rows_at(
    live: LiveFiles,
    places: Places,
    *,
    columns: Sequence[str],
    size_bytes: int,
    read_bytes: int,
) -> pa.Table:
    """Columns of the rows at these places (`LiveFiles.places`) but the deleted ones, as the table's schema types them.

    Raises `NotReadable` where they are of more than `size_bytes`, or the columns of their row groups of more than `read_bytes`, of
    a table in a store of more than `stored_ranges.READ_BYTES`; and `OSError`.
    """
    schema, left = _schema_of(live.schema, columns), size_bytes
    held = present(live, places)
    found = stored_ranges.sources(live.folder, [file for file, _ in held])
    sizes = (local_log.columns_bytes(each, set(columns), rows=rows) for each, (_, rows) in zip(found, held, strict=True))
    is_stored = stored_files.copied(live.folder) is not None
    if sum(sizes) > (min(read_bytes, stored_ranges.READ_BYTES) if is_stored else read_bytes):
        raise table_schema.NotReadable

    def read(path: stored_ranges.Source, numbers: Sequence[int]) -> list[pa.Table]:
        nonlocal left
        found = []
        for part in _parts_at(path, numbers, list(columns)):
            left -= part.nbytes
            if left < 0:
                raise table_schema.NotReadable
            found.append(table_schema.conformed(part, schema))
        return found

    with ThreadPoolExecutor(key_search.THREADS, thread_name_prefix="medallion-rows") as pool:
        parts = pool.map(read, found, (numbers for _, numbers in held))
        return pa.concat_tables([schema.empty_table(), *itertools.chain.from_iterable(parts)])


def present(live: LiveFiles, places: Places) -> Places:
    """Those of some places (`LiveFiles.places`) that are not deleted. Raises `OSError`."""
    _bring_vectors(live.folder, [file for file, _ in places])
    found = []
    for file, numbers in places:
        if vector := file.get("deletionVector"):
            is_present = _mask(live.folder, vector, file_statistics.row_count(file)).take(pa.array(numbers, pa.int64()))
            numbers = list(itertools.compress(numbers, is_present.to_pylist()))
        if numbers:
            found.append((file, numbers))
    return found


def rows_beyond(live: LiveFiles, other: LiveFiles, *, limit: int) -> Places:
    """The rows of a version of a table that another version of it has not: those of files that it lacks, and of a file that both have
    what it has deleted.

    Raises `NotReadable` where those are more than `limit`, and `OSError`.
    """
    others = {each["path"]: each for each in other.files()}
    changed = [(each, others.get(each["path"])) for each in live.files() if not other.holds([each])]
    counts = (
        file_statistics.row_count(file) if there is None else file_statistics.deleted_count(there) for file, there in changed
    )
    if sum(counts) > limit:
        raise table_schema.NotReadable
    _bring_vectors(live.folder, [there for _, there in changed if there is not None])
    files = LocalFiles(live.folder)

    def numbers(file: dict[str, Any], there: Mapping[str, Any] | None) -> list[int]:
        if there is None:
            return list(range(file_statistics.row_count(file)))
        vector = there.get("deletionVector")
        return list(deleted_rows.of(vector, files)) if vector else []

    return present(live, [(file, numbers(file, there)) for file, there in changed])


def _parts_at(path: stored_ranges.Source, numbers: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
    """Columns of these rows of a data file, whose numbers are in order."""
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as parquet:
        held, groups = _held(parquet, columns), local_log.row_groups(parquet, numbers)
        for group, rows in groups.items():
            start = rows.start
            at_a_time = _rows_at_a_time(parquet, held, group)
            for batch in parquet.iter_batches(at_a_time, row_groups=[group], columns=held):
                low, high = (bisect.bisect_left(numbers, bound) for bound in (start, start + len(batch)))
                if low < high:
                    yield pa.Table.from_batches([batch.take(pa.array([each - start for each in numbers[low:high]]))])
                start += len(batch)


def _schema_of(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in columns])


def _mask(folder: Path, vector: Mapping[str, Any], rows: int) -> pa.BooleanArray:
    """Which of a file's rows are not deleted."""
    gone = deleted_rows.of(vector, LocalFiles(folder)).bits(rows)
    return pc.invert(pa.BooleanArray.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(gone)]))


def _parts(folder: Path, file: Mapping[str, Any], columns: list[str]) -> Iterator[pa.Table]:
    """Columns of the rows of a data file that are not deleted, in parts of at most `PART_ROWS` rows and about `MANY_BYTES`."""
    vector = file.get("deletionVector")
    found: list[pa.Table] = []
    is_present: pa.BooleanArray | None = None
    start = rows = size = 0
    with pq.ParquetFile(local_log.data_path(folder, file["path"]), coerce_int96_timestamp_unit="us") as parquet:
        count = parquet.metadata.num_rows
        is_present = _mask(folder, vector, count) if vector else None
        held = _held(parquet, columns)
        at_a_time = _rows_at_a_time(parquet, held)
        for batch in parquet.iter_batches(at_a_time, columns=held):
            part = pa.Table.from_batches([batch])
            found.append(part if is_present is None else part.filter(is_present.slice(start, len(part))))
            start, rows, size = start + len(part), rows + len(found[-1]), size + found[-1].nbytes
            if rows + at_a_time > PART_ROWS or size >= MANY_BYTES:
                yield pa.concat_tables(found)
                found, rows, size = [], 0, 0
    if found:
        yield pa.concat_tables(found)


def _rows_at_a_time(parquet: pq.ParquetFile, columns: list[str], group: int = 0) -> int:
    most = min(_READ_ROWS, PART_ROWS)
    return local_log.rows_at_a_time(parquet, columns, most=most, size_bytes=MANY_BYTES, group=group)


def _held(parquet: pq.ParquetFile, columns: Collection[str]) -> list[str]:
    """Those of the columns that a file has: one that is older than a column, or somebody else's, has none of it. Where it has none of
    them at all, its first, which tells how many rows there are."""
    names = dict.fromkeys(parquet.schema_arrow.names)  # once: Arrow makes a schema of the footer each time
    return [name for name in columns if name in names] or [*names][:1]
