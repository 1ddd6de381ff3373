"""Reads the log and the small files of Delta tables on a local file system, without a Spark job.

For a table in an object store it reads local copies (`stored_files`); `readable` brings them up to date.

It reads commits as lines of JSON, and checkpoints of one Parquet file. Where a table uses more of Delta's protocol (deletion vectors,
column mapping, partitions, checkpoints in parts), `rows` returns None, and the caller uses Spark.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.delta import catalog_places, checkpoint, file_statistics, stored_files, table_files, table_schema

log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9]{20}\.json")

LOOKED_THROUGH = 4000
"""`appended` searches at most this many commits: a snapshot has one for each of thousands of collections, and an hour of changes one a
second."""


UNKNOWN = -1
"""An unknown restored version, which is before all versions of a log: no commit in the log has the position of the rows."""


@dataclass(frozen=True)
class Commit:
    """One entry of a table's history: version, milliseconds since 1970, and the `userMetadata` of a commit of this project.

    `restored` is the version that a RESTORE brought back. It is `UNKNOWN` where that version is not known, or where another program
    replaced or deleted all rows, and None for every other operation. `is_foreign`: another program wrote, changed or deleted some rows.
    """

    version: int
    timestamp_ms: int
    metadata: dict[str, Any] | None
    restored: int | None = None
    is_foreign: bool = False


@dataclass(frozen=True)
class AddedFile:
    """A data file with Delta's statistics and its size in bytes."""

    path: Path
    stats: dict[str, Any]
    size: int | None = None

    def between(self, column: str) -> tuple[Any, Any] | None:
        """The minimum and maximum of a column; None where one of them is unknown."""
        return file_statistics.between(self.stats, column)

    def may_hold(self, column: str, values: Iterable[str]) -> bool:
        """Whether one of the values lies within the column's bounds."""
        bounds = self.between(column)
        return bounds is None or any(bounds[0] <= each <= bounds[1] for each in values)


def place(spark: SparkSession, table: tables.TableRef) -> Path | None:
    """The folder where this process reads a table: the table's own, or that of its copies, which may be out of date (`readable`)."""
    location = catalog_places.locate(spark, table)
    local_folder = folder(table)
    return local_folder if local_folder is not None or location is None else stored_files.place(spark, location)


def folder(table: tables.TableRef) -> Path | None:
    """The folder of a table on a local file system, or None; of a catalog's table only once it was located (`catalog_places`)."""
    location = catalog_places.location(table)
    if location is None:
        return None
    path = "/" + location[len("file:") :].lstrip("/") if location.startswith("file:") else location
    if not path.startswith("/") or location.startswith("/Volumes/"):
        return None
    # Hadoop takes `a/../b` for `b`. Where `a` is a link, the operating system would resolve it to another folder.
    return Path(os.path.normpath(path))


def readable(spark: SparkSession, table: tables.TableRef) -> Path | None:
    """The folder where this process reads a table in its current version: the table's own, or that of its copies.

    None where there is neither, or the store cannot be reached.
    """
    path = place(spark, table)
    try:
        if path is not None:
            stored_files.follow(path)
    except OSError as error:
        log.debug("%s is read by Spark: %s", table.label, error)
        return None
    return path


def bring(folder: Path, files: Iterable[AddedFile]) -> None:
    """Copy the data files that the folder of a copied log lacks. Raises `OSError`, as `stored_files.bring`."""
    stored_files.bring(folder, ((str(file.path.relative_to(folder)), file.size) for file in files))


def data_path(folder: Path, name: str) -> Path:
    """The path of a file that the table's log names."""
    if name.startswith("file:"):
        return Path("/" + unquote(name[len("file:") :]).lstrip("/"))
    return folder / unquote(name)


def exists(folder: Path) -> bool:
    """Whether the folder holds a Delta table."""
    # A killed CREATE TABLE leaves a log without a commit: not a table yet.
    return newest_version(folder) is not None


def newest_version(folder: Path) -> int | None:
    """The newest version that the log holds as JSON; None where there is none.

    Tests for file names one by one, starting at the newest version of the previous call or at Delta's last checkpoint. With a commit each
    second, a month's log has millions of entries, and listing them takes seconds.
    """
    if (copied_log := stored_files.copied(folder)) is not None:
        return copied_log.newest  # not from the files there: a single later or earlier commit may have been copied
    log, version = folder / tables.LOG, _NEWEST.get(folder)
    # A table that was removed and created again has fewer versions.
    if version is None or not (log / f"{version:020}.json").exists():
        version = checkpoint.noted(log)
    if version is None or not (log / f"{version:020}.json").exists():
        version = max((int(name[:20]) for name in _listed(log)), default=None)
        if version is None:
            return None
    while (log / f"{version + 1:020}.json").exists():
        version += 1
    _NEWEST[folder] = version
    return version


_NEWEST: dict[Path, int] = {}
"""The newest version of each log at the last look: a folder of a month's commits takes long to list."""


def _listed(log: Path) -> list[str]:
    """The names of the log's JSON commits; empty where there is no log."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [entry.name for entry in os.scandir(log) if _COMMIT.fullmatch(entry.name)]
    return []


def _newest_first(folder: Path) -> range:
    """All versions, newest first, including those whose commits were cleaned up."""
    newest = newest_version(folder)
    return range(-1 if newest is None else newest, -1, -1)


def commits(folder: Path) -> Iterator[Commit]:
    """The commits that the log holds as JSON, newest first."""
    for version in _newest_first(folder):
        entry = commit(folder, version, is_alone=False)
        if entry is None:  # cleaned up: the log goes back no further
            return
        yield entry


def commit(folder: Path, version: int, *, is_alone: bool = True) -> Commit | None:
    """One commit of any age; None where the log does not hold it as JSON. Raises `OSError`, as `stored_files.commit_path`."""
    try:
        info = table_files.commit_info(stored_files.commit_path(folder, version, is_alone=is_alone))
    except FileNotFoundError:
        return None
    return _commit(folder, version, info)


def stamp(folder: Path, version: int) -> tuple[int, int] | None:
    """Inode and modification time of a version's commit, which differ for another commit of the same number; None where there is none."""
    try:
        status = stored_files.commit_path(folder, version).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _restored_version(folder: Path, version: int) -> int:
    """The version that the RESTORE in `version` restored: the newest earlier one with the same files.

    `UNKNOWN` where the log does not reach back to it. A RESTORE to a time does not record which version it found, and its time has no time
    zone. Versions with the same files hold the same rows, so the position of the newest one is right.
    """
    differing: frozenset[tuple[Any, ...]] = frozenset()
    with contextlib.suppress(FileNotFoundError, ValueError):  # cleaned up, or damaged
        for later in range(version, 0, -1):
            differing ^= _changed(folder, later)
            if not differing:
                return later - 1
    return UNKNOWN


def _changed(folder: Path, version: int) -> frozenset[tuple[Any, ...]]:
    """The files that are in only one of a version and the version before it. With another deletion vector it is another file."""
    changed_files: set[tuple[Any, ...]] = set()
    for action in actions(folder, version):
        for file in (action.get("add"), action.get("remove")):
            if file is not None:
                changed_files ^= {table_files.identity(file)}
    return frozenset(changed_files)


@dataclass(frozen=True)
class TableSize:
    """The number and bytes of a table's live data files; `stored` are the bytes of all files in its folder, None where not counted."""

    files: int = 0
    bytes: int = 0
    stored: int | None = None


def size(folder: Path) -> TableSize | None:
    """The size of the newest version by its checksum file; None where there is none. A missing table has no files."""
    newest = newest_version(folder)
    if newest is None:
        return TableSize()
    try:
        checksum = json.loads((folder / table_files.commit_name(newest)).with_suffix(".crc").read_text("utf-8"))
        return TableSize(int(checksum["numFiles"]), int(checksum["tableSizeBytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_smaller(folder: Path, size_bytes: int) -> bool:
    """Whether the newest version is known to have fewer than `size_bytes`; true for a missing table."""
    version_size = size(folder)
    return version_size is not None and version_size.bytes < size_bytes


def rows(folder: Path, schema: pa.Schema) -> pa.Table | None:
    """All rows, in no order, with the columns of `schema`; null where a file lacks a column. None where they cannot be read here."""
    live = files(folder)
    if live is None:
        return None
    try:
        bring(folder, live)
        # Each file by itself: Arrow cannot concatenate `string` and `large_string`, which delta-rs writes.
        file_rows = [aligned(pq.ParquetFile(file.path).read(), schema) for file in live]
    except _UNREADABLE:
        return None
    return pa.concat_tables(file_rows) if file_rows else schema.empty_table()


def parts(folder: Path, file: AddedFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of one file with the columns of `schema`, a few at a time. Raises `OSError` where the file is gone."""
    bring(folder, [file])
    with pq.ParquetFile(file.path) as parquet:
        for batch in parquet.iter_batches(_SAMPLE_ROWS):
            yield aligned(pa.Table.from_batches([batch]), schema)


def files(folder: Path) -> list[AddedFile] | None:
    """The data files of the newest version, ordered by name; None where they cannot be read here."""
    try:
        return [_added_file(folder, add) for _, add in sorted(_live(folder).items())]
    except _UNREADABLE:
        return None


_UNREADABLE = (table_schema.NotReadable, OSError, ValueError, pa.ArrowException)
"""Errors of a log that uses more than this module reads, or is damaged: Delta can do without a checkpoint that a full disk cut off."""


def _live(folder: Path) -> dict[str, dict[str, Any]]:
    """The `add` actions of the newest version's files, by name. Raises one of `_UNREADABLE`."""
    newest = newest_version(folder)
    if newest is None:
        raise table_schema.NotReadable
    live: dict[str, dict[str, Any]] = {}
    for action in replayed(folder, newest):
        if add := action.get("add"):
            if not _is_plain(add):
                raise table_schema.NotReadable
            live[add["path"]] = add
        elif remove := action.get("remove"):
            live.pop(remove["path"], None)
        else:
            table_schema.check(action)
    return live


def replayed(folder: Path, version: int) -> Iterator[dict[str, Any]]:
    """The actions up to a version: those of the newest checkpoint at or before it, then those of the commits after that.

    Raises `OSError` where a commit is missing, because of a log clean-up or another writer: the files would be those of no version.
    """
    checkpoint_path = checkpoint.newest(folder, version)
    if checkpoint_path is not None:
        yield from checkpoint.actions(checkpoint_path)
    for number in range(0 if checkpoint_path is None else int(checkpoint_path.name[:20]) + 1, version + 1):
        yield from actions(folder, number)


def actions(folder: Path, version: int) -> Iterator[dict[str, Any]]:
    """The actions of one commit. Raises `OSError` where the log does not hold it as JSON."""
    for line in stored_files.commit_path(folder, version).read_text("utf-8").split("\n"):
        if line:
            yield json.loads(line)


def aligned(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's rows with the columns and types of `schema`; null where a column is missing."""
    names = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in names else pa.nulls(len(table), field.type) for field in schema
    ]
    return pa.table(columns, schema=schema)


def columns_bytes(
    source: Path | io.IOBase,
    columns: Collection[str],
    *,
    rows: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> int:
    """The uncompressed bytes of columns of a Parquet file, by its footer.

    Only those of the row groups `groups`, or of the groups that hold some of the `rows`, whose numbers are in ascending order.
    """
    with pq.ParquetFile(source) as parquet:
        numbers = groups if rows is None else row_groups(parquet, rows)
        chosen_groups = map(
            parquet.metadata.row_group, range(parquet.metadata.num_row_groups) if numbers is None else numbers
        )
        indices = [
            index for index in range(parquet.metadata.num_columns) if _is_below(parquet.schema.column(index).path, columns)
        ]
        return sum(group.column(index).total_uncompressed_size for group in chosen_groups for index in indices)


def row_groups(parquet: pq.ParquetFile, rows: Sequence[int]) -> dict[int, range]:
    """The row groups that hold some of the `rows` (in ascending order), each with the range of its row numbers."""
    groups, start = {}, 0
    for number in range(parquet.metadata.num_row_groups):
        row_range = range(start, start + parquet.metadata.row_group(number).num_rows)
        if bisect.bisect_left(rows, row_range.start) < bisect.bisect_left(rows, row_range.stop):
            groups[number] = row_range
        start = row_range.stop
    return groups


def rows_at_a_time(parquet: pq.ParquetFile, columns: Sequence[str], *, most: int, size_bytes: int, group: int = 0) -> int:
    """How many rows of a file to read at a time: at most `most`, and about `size_bytes` of the columns.

    Estimated from the first rows of the row group `group`, or of the next one that has rows.
    """
    if parquet.metadata.num_rows <= _SAMPLE_ROWS:
        return most
    # Not from the footer: for a dictionary-encoded column it has the size of the distinct values, and a row may have megabytes.
    groups = range(group, parquet.num_row_groups)
    # Arrow writes empty row groups, too.
    filled_group = next(each for each in groups if parquet.metadata.row_group(each).num_rows)
    sample = next(parquet.iter_batches(_SAMPLE_ROWS, row_groups=[filled_group], columns=list(columns)))
    return max(1, min(most, size_bytes * len(sample) // max(1, sample.nbytes)))


_SAMPLE_ROWS = 64


def _is_below(path: str, columns: Collection[str]) -> bool:
    """Whether the path begins with one of the columns, whose name may contain dots."""
    return any(name in columns for name in itertools.accumulate(path.split("."), "{}.{}".format))


def appended(folder: Path, is_before: Callable[[Commit], bool]) -> list[AddedFile] | None:
    """The files with everything that was appended after the newest append that `is_before`, and possibly some older rows.

    None where the last `LOOKED_THROUGH` commits do not reach that append, or contain a commit that is neither an append of this project
    nor a compaction.
    """
    added_files: list[AddedFile] = []
    removed_paths: set[str] = set()
    for version in _newest_first(folder)[:LOOKED_THROUGH]:
        try:
            commit_actions = [*actions(folder, version)]
        except (OSError, ValueError):
            return None
        info: dict[str, Any] = next((action["commitInfo"] for action in commit_actions if "commitInfo" in action), {})
        adds = [action["add"] for action in commit_actions if "add" in action]
        if version == 0 and not adds:
            return added_files  # the table was created here, and was empty
        if info.get("operation") == "WRITE":
            commit = _commit(folder, version, info)
            if commit.metadata is None:
                return None
            if adds and is_before(commit):
                return added_files
        elif info.get("operation") != "OPTIMIZE":  # which adds no rows, whatever its metadata
            return None
        if any("metaData" in action or "protocol" in action for action in commit_actions) or not all(map(_is_plain, adds)):
            return None
        # Newest first: `removed_paths` has a file that a later compaction removed before its own commit is reached.
        live = (each for each in adds if each["path"] not in removed_paths)
        added_files += [_added_file(folder, each) for each in live]
        removed_paths.update(action["remove"]["path"] for action in commit_actions if "remove" in action)
    return None


def _added_file(folder: Path, added: dict[str, Any]) -> AddedFile:
    return AddedFile(folder / unquote(added["path"]), file_statistics.parsed(added), added.get("size"))


def _is_plain(added: dict[str, Any]) -> bool:
    """Whether the file lies in the table's folder and has no deletion vector."""
    path = added["path"]
    return not (added.get("deletionVector") or "://" in path or path.startswith(("/", "file:")))


def _commit(folder: Path, version: int, info: Mapping[str, Any]) -> Commit:
    """The commit of a version, from its `commitInfo`."""
    operation, metadata = info.get("operation"), claims.parsed(info.get("userMetadata"))
    restored = brought_back(operation, info.get("operationParameters") or {}, metadata)
    if restored == UNKNOWN and operation == "RESTORE":  # it does not name the version
        restored = _restored_version(folder, version)
    return Commit(version, info.get("timestamp", 0), metadata, restored, is_foreign(operation, metadata))


def brought_back(operation: str | None, parameters: Mapping[str, Any], metadata: object) -> int | None:
    """`Commit.restored`, as far as the commit itself records it."""
    if operation == "RESTORE":
        return UNKNOWN if parameters.get("version") is None else int(parameters["version"])
    # A CLONE or an overwrite without our metadata, such as a restored backup: its rows are not at the position of our last commit.
    is_overwritten = parameters.get("mode") == "Overwrite" and parameters.get("predicate") in (None, "true")
    # An overwrite by `saveAsTable` is a CREATE OR REPLACE TABLE AS SELECT, too, which keeps the table's properties.
    is_replaced = is_overwritten or operation == "CLONE" or "REPLACE TABLE" in (operation or "")
    # Of no row it cannot be said that it is at a position; often a backup is inserted next.
    is_emptied = operation == "TRUNCATE" or (
        operation == "DELETE" and parameters.get("predicate") in (None, "[]", '["true"]')
    )
    return UNKNOWN if (is_replaced or is_emptied) and metadata is None else None


def is_foreign(operation: str | None, metadata: object) -> bool:
    """`Commit.is_foreign`."""
    return metadata is None and operation in ("WRITE", "STREAMING UPDATE", "COPY INTO", "MERGE", "UPDATE", "DELETE")
