"""The rows of a range of bronze's batches: by a Spark query, or without one where they are few and this process can read the files."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from cdc_core.bronze import columns as bronze
from cdc_core.bronze.batch_range import BatchRange
from cdc_core.tables import layout as tables
from pipelines.bronze import recent_files
from pipelines.delta import local_log, table_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MANY_FILES = 32
"""The number of files above which Spark would list them with a job."""

READ_FILES = 100
"""The number of files above which Spark is faster at reading one collection's rows in them. Small ones, which are read once for all
collections, do not count."""

MANY_BYTES = 64 * 2**20
"""The bytes of rows above which executors read them: a document may have 16 MB, and a service reads several collections at a time."""

BESIDE_BYTES = 256 * 2**20
"""The bytes above which Spark reads the rows of a span in files that hold other rows as well."""

_READERS = min(2, os.cpu_count() or 1)

PART_ROWS = 4096
"""The rows that are read at a time to find those of one collection."""

_HERE = fs.LocalFileSystem()
_Condition: TypeAlias = tuple[str, str, Any]
_Conditions: TypeAlias = list[_Condition] | list[list[_Condition]]
"""Filters of pyarrow: a conjunction, or a disjunction of conjunctions."""
_GLOB = re.compile(r"[\\{}\[\]*?]")
"""Characters that Spark reads as a pattern in the path of a file."""


def rows(
    spark: SparkSession, table: tables.TableRef, span: BatchRange, *, among: Mapping[str, str] | None = None
) -> DataFrame:
    """The rows of a span of batches, in no order, with the columns of `cdc_core.bronze.columns.SCHEMA`.

    `among` gives the wanted values of some columns: files without them may be left out, other rows of the files are not.

    A few commits of a table on a local file system are read as the Parquet files that they added. That saves Delta's job for each
    query, and the code that Spark compiles has no numbers that change from span to span, for which the JVM would optimize it again.
    """
    files = _files(table, span, among or {})
    if not files:
        return spark.table(str(table)).where(span.predicate)
    return spark.read.schema(bronze.COLUMNS_DDL).parquet(*files)


class SweepRow(NamedTuple):
    """A row that may cause a sweep: a heartbeat, of which only batch and payload are used, or a schema change."""

    offset: int
    kind: str
    batch: int
    db: str
    collection: str
    sequence: str
    payload: str


def few_rows(
    spark: SparkSession,
    table: tables.TableRef,
    span: BatchRange,
    columns: Sequence[str],
    *,
    limit: int,
    size_bytes: int | None = None,
    among: Mapping[str, str] | None = None,
) -> pa.Table | None:
    """Columns of the rows of a span, in no order, read by this process; None where they are more than `limit`, or have more than
    `size_bytes` (default `MANY_BYTES`), or where it cannot read all their files.

    `among` gives the wanted values of some of the columns; rows with other values are left out. They count towards `limit`.
    """
    files = here(spark, table, span, among or {}, limit=limit)
    if not files:
        compacted_rows = _from_compacted(table, span, columns, among or {}, limit=limit)
        return None if compacted_rows is None or compacted_rows.nbytes > (size_bytes or MANY_BYTES) else compacted_rows
    # Small files are counted when they are read.
    measured_files = [file for file in files if not among or not _is_small(file)]
    if (bytes_of(measured_files, columns, among) or 0) > (size_bytes or MANY_BYTES):
        return None
    if among:
        return _matching(files, columns, among, size_bytes or MANY_BYTES)
    return read([file.path for file in files], list(columns), where=None)


def _from_compacted(
    table: tables.TableRef, span: BatchRange, columns: Sequence[str], among: Mapping[str, str], *, limit: int
) -> pa.Table | None:
    """Columns of the rows of a span whose files hold other batches as well, after a compaction (every `bronze.log.COMPACT_EVERY`
    commits). None as in `few_rows`, and for tables in a store: copying whole files takes too long."""
    folder = local_log.folder(table)
    files = [] if folder is None else span_files(folder, span, among, is_alone=False)
    if not among and sum(file.stats.get("numRecords", 0) for file in files if _is_inside(file, span)) > limit:
        return None
    small_files: list[local_log.AddedFile] = []
    other_files: list[local_log.AddedFile] = []
    for file in files:
        (small_files if among and _is_small(file) and _is_inside(file, span) else other_files).append(file)
    size_bytes = bytes_of(other_files, columns, among)
    if not files or size_bytes is None or size_bytes > BESIDE_BYTES:
        return None
    where: list[_Condition] = [("batch", ">", span.after), ("batch", "<=", span.to)]
    where += _equal(among)
    span_rows = read([file.path for file in other_files], list(columns), where=where)
    if span_rows is not None and small_files:
        small_rows = _matching(small_files, columns, among, BESIDE_BYTES)
        span_rows = None if small_rows is None else pa.concat_tables([span_rows, small_rows])
    return None if span_rows is None or span_rows.num_rows > limit else span_rows


def _is_inside(file: local_log.AddedFile, span: BatchRange) -> bool:
    """Whether a file holds no rows of other batches."""
    low, high = file.between("batch") or (0, span.to + 1)
    return span.after < low and high <= span.to


_recent = recent_files.RecentFiles()
"""The small files that any collection of this process has read last."""


def _is_small(file: local_log.AddedFile) -> bool:
    return file.size is not None and file.size <= recent_files.SMALL_BYTES


def _matching(
    files: Sequence[local_log.AddedFile], columns: Sequence[str], among: Mapping[str, str], size_bytes: int
) -> pa.Table | None:
    """Columns of the rows with these values; None as in `read`, and where they take more than `size_bytes`.

    The sizes are measured: for a column with a dictionary, which OPTIMIZE may write, the footer has the size of the distinct values.
    """
    schema = pa.schema([bronze.SCHEMA.field(name) for name in columns])

    part_bytes: list[int] = []

    def parts_of(file: local_log.AddedFile) -> list[pa.Table]:
        parts: list[pa.Table] = []
        for part_rows in _parts(file, columns, among, size_bytes):
            part_bytes.append(part_rows.nbytes)
            if sum(part_bytes) > size_bytes:
                break
            parts.append(local_log.aligned(part_rows, schema))
        return parts

    try:
        if sum(not _is_small(file) for file in files) > 1:  # One column takes nearly all of the time: files in parallel.
            with ThreadPoolExecutor(_READERS, thread_name_prefix="medallion-read") as pool:
                all_parts = [*itertools.chain.from_iterable(pool.map(parts_of, files))]
        else:
            all_parts = [*itertools.chain.from_iterable(map(parts_of, files))]
    except (OSError, pa.ArrowException):
        return None
    if sum(part_bytes) > size_bytes:
        return None
    return pa.concat_tables(all_parts) if all_parts else schema.empty_table()


def of_file(file: local_log.AddedFile, columns: Sequence[str], among: Mapping[str, str]) -> pa.Table | None:
    """Columns of the rows of a file with these values, those of a small file from the cache; None where it cannot be read."""
    rows = None
    if _is_small(file):
        try:
            rows = _recent.rows(file.path, columns, among)
        except (OSError, pa.ArrowException):
            return None
    return read([file.path], list(columns), where=[*_equal(among)]) if rows is None else rows


def _equal(among: Mapping[str, str]) -> Iterator[_Condition]:
    return ((name, "==", value) for name, value in among.items())


def _parts(
    file: local_log.AddedFile, columns: Sequence[str], among: Mapping[str, str], size_bytes: int
) -> Iterator[pa.Table]:
    """The rows of a file with these values, in parts; those of small files come from the cache."""
    if _is_small(file) and (cached_rows := _recent.rows(file.path, columns, among)) is not None:
        if cached_rows.num_rows:
            yield cached_rows
        return
    groups = _groups(file.path, among)
    if groups:
        with pq.ParquetFile(file.path) as parquet:
            batch_size = local_log.rows_at_a_time(parquet, columns, most=PART_ROWS, size_bytes=size_bytes, group=groups[0])
            for part in parquet.iter_batches(batch_size, row_groups=groups, columns=list(columns)):
                rows = pa.Table.from_batches([part])
                is_wanted = functools.reduce(pc.and_, (pc.equal(rows[name], value) for name, value in among.items()))
                yield recent_files.at(rows, pc.indices_nonzero(is_wanted).to_numpy())


def _groups(path: Path, among: Mapping[str, str]) -> list[int]:
    """The row groups of a file that may have rows with these values: a large commit has several (`bronze.row_groups`)."""
    condition = functools.reduce(operator.and_, (ds.field(name) == value for name, value in among.items()))
    return [group.id for group in ds.ParquetFileFormat().make_fragment(str(path), _HERE).subset(condition).row_groups]


def behind(table: tables.TableRef, batch: int, columns: Sequence[str], *, limit: int) -> pa.Table | None:
    """Columns of all rows of later batches, in no order; None where this process cannot read their files, or these have more than
    `limit` rows."""
    folder = local_log.folder(table)
    files = None if folder is None else local_log.files(folder)
    later_files = [file for file in files or () if (file.between("batch") or (0, batch + 1))[1] > batch]
    if files is None or sum(file.stats.get("numRecords", limit + 1) for file in later_files) > limit:
        return None
    return read([file.path for file in later_files], list(columns), where=[("batch", ">", batch)])


def bytes_of(
    files: Sequence[local_log.AddedFile], columns: Sequence[str], among: Mapping[str, str] | None = None
) -> int | None:
    """The bytes of these columns when they are read, of the row groups with values `among` these; None where a file cannot be read."""
    try:
        row_groups = [_groups(file.path, among) if among else None for file in files]
        return sum(local_log.columns_bytes(file.path, columns, groups=groups) for file, groups in zip(files, row_groups))
    except (OSError, pa.ArrowException):
        return None


def _files(table: tables.TableRef, span: BatchRange, among: Mapping[str, str]) -> list[str]:
    """The files of `span_files` as URIs for Spark; none where they are many."""
    folder = local_log.folder(table)
    if folder is None or _GLOB.search(str(folder)):
        return []
    files = span_files(folder, span, among)
    # Spark skips an empty file without an error, even if the log says that it has rows; Delta does not.
    is_plain = len(files) <= MANY_FILES and all(table_files.is_whole(file.path, file.size) for file in files)
    return [f"file://{file.path}" for file in files] if is_plain else []


def here(
    spark: SparkSession,
    table: tables.TableRef,
    span: BatchRange,
    among: Mapping[str, str],
    *,
    limit: int | None = None,
) -> list[local_log.AddedFile]:
    """`span_files` for this process to read, copied where the table is in a store; also none where they have more than `limit` rows."""
    folder = local_log.readable(spark, table)
    if folder is None:
        return []
    files = span_files(folder, span, among)
    large_count = sum(not _is_small(file) for file in files)
    if among and (large_count > READ_FILES or len(files) - large_count > recent_files.MOST_FILES):
        return []
    if limit is not None and sum(file.stats.get("numRecords", limit + 1) for file in files) > limit:
        return []
    try:
        local_log.bring(folder, files)
    except OSError:
        return []
    return files


def span_files(
    folder: Path, span: BatchRange, among: Mapping[str, str] = {}, *, is_alone: bool = True
) -> list[local_log.AddedFile]:
    """The files with all rows of the span that have values `among` these, the oldest first; none where they are unknown.

    With `is_alone`, none where a file holds rows of other batches as well.
    """
    newest_version = local_log.newest_version(folder)
    files = (
        None
        if newest_version is None
        else _appended(folder, span.after, newest_version, local_log.stamp(folder, newest_version))
    )
    in_span: list[local_log.AddedFile] = []
    for file in files or ():
        batches = file.between("batch")
        if batches is None:
            return []
        if not all(file.may_hold(column, [value]) for column, value in among.items()):
            continue
        low, high = batches
        if high <= span.after or low > span.to:
            continue
        # After a compaction a file holds rows of this span and of others, which only a predicate separates.
        if is_alone and not _is_inside(file, span):
            return []
        in_span.append(file)
    # In commit order: rows that are read in order need not be sorted.
    return sorted(in_span, key=lambda file: file.between("batch") or ())


@functools.lru_cache(maxsize=4)
def _appended(folder: Path, after: int, newest: int, stamp: tuple[int, int] | None) -> Sequence[local_log.AddedFile] | None:
    """The files with batches after `after`, in the log that ends with this commit; cached for thousands of collections."""
    return local_log.appended(folder, lambda commit: _is_up_to(after, commit))


def _is_up_to(batch: int, commit: local_log.Commit) -> bool:
    commit_batch = (commit.metadata or {}).get("batch")
    return isinstance(commit_batch, int) and commit_batch <= batch


def brought(
    folder: Path, files: Sequence[local_log.AddedFile], columns: list[str], *, where: _Conditions | None
) -> pa.Table | None:
    """`read` of files of the table in this folder, which are copied first where the table is in a store."""
    try:
        local_log.bring(folder, files)
    except OSError:
        return None
    return read([file.path for file in files], columns, where=where)


def of_kinds(
    folder: Path, columns: list[str], *kinds: bronze.RowKind, begins: Sequence[str] = (), limit: float = math.inf
) -> pa.Table | None:
    """Columns of all rows of these kinds whose payload begins with one of `begins`, if given; None where this process cannot read
    them, or their files have more than `limit` rows."""
    values, files = [kind.value for kind in kinds], local_log.files(folder)
    candidates = [file for file in files or () if file.may_hold("kind", values)]
    if files is None or sum(file.stats.get("numRecords", limit + 1) for file in candidates) > limit:
        return None
    is_kind: _Condition = ("kind", "in", values)
    # As bounds, by which nearly all row groups of a long log are skipped.
    conditions = [[is_kind, ("payload", ">=", prefix), ("payload", "<", _after_prefix(prefix))] for prefix in begins]
    return brought(folder, candidates, columns, where=conditions or [[is_kind]])


def _after_prefix(begin: str) -> str:
    """The least string after all strings that begin with `begin`."""
    return begin[:-1] + chr(ord(begin[-1]) + 1)


def last_of_kind(folder: Path, kind: bronze.RowKind) -> list[dict[str, Any]] | None:
    """Payload and offset of the last row of a kind, as a list of one; empty where there is none, None where this process cannot read
    it."""
    files = local_log.files(folder)
    spans = [(file.between("offset"), file) for file in files or () if file.may_hold("kind", [kind.value])]
    ends = [(span[1], file) for span, file in spans if span is not None]
    if files is None or len(ends) < len(spans):
        return None
    newest_rows: list[dict[str, Any]] = []
    for end, file in sorted(ends, key=lambda each: each[0], reverse=True):
        if newest_rows and newest_rows[0]["offset"] > end:  # Compacted files may overlap.
            break
        rows = read([file.path], ["payload", "offset"], where=[("kind", "==", kind.value)])
        if rows is None:
            return None
        newest_rows = sorted([*newest_rows, *rows.to_pylist()], key=lambda row: row["offset"])[-1:]
    return newest_rows


def read(paths: Sequence[Path], columns: list[str], *, where: _Conditions | None) -> pa.Table | None:
    """Columns of Parquet files of bronze; None where one of them was vacuumed, or cannot be read."""
    schema = pa.schema([bronze.SCHEMA.field(name) for name in columns])
    if not paths:
        return schema.empty_table()
    try:
        return pq.read_table([str(path) for path in paths], columns=columns, filters=where, partitioning=None).cast(schema)
    except (OSError, pa.ArrowException):
        return None
