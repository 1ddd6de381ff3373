"""A table's history: its versions, and the position that its rows are at.

Every commit of ours carries the table's position and its writer's claim as `userMetadata`; what others commit has none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, stored_files, table_errors
from pipelines.delta.local_log import Commit

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


RESTORED = "restored"
"""What a claim says of a table that was restored since its last writer, and who hands it on, until a commit of the layer itself."""


def commits(spark: SparkSession, table: tables.TableRef, *, limit: int | None = None) -> list[Commit]:
    """The newest commits, newest first; from the log itself where this process reads it, which takes no Spark job."""
    is_whole = local_log.folder(table) is not None  # and no copy, of which older commits may not be there
    if is_whole or limit is not None:
        found = list(itertools.islice(_read_here(spark, table), limit))
        if len(found) == limit or (is_whole and found):
            return found
    suffix = "" if limit is None else f" LIMIT {limit}"
    with table_errors.translating(table):
        rows = (
            spark.sql(f"DESCRIBE HISTORY {table}{suffix}")
            .select("version", "timestamp", "userMetadata", "operation", "operationParameters")
            .collect()
        )
    return [_commit(row) for row in rows]


def _commit(row: Row) -> Commit:
    metadata = claims.parsed(row.userMetadata)
    restored = local_log.brought_back(row.operation, row.operationParameters or {}, metadata)
    return Commit(row.version, int(row.timestamp.timestamp() * 1000), metadata, restored)


def _read_here(spark: SparkSession, table: tables.TableRef) -> Iterator[Commit]:
    """The newest commits, newest first, as far back as this process reads the log."""
    folder = local_log.readable(spark, table)
    if folder is None or not (folder / tables.LOG).is_dir():
        return
    try:
        yield from local_log.commits(folder)
    except OSError:
        # Of a log in a store the older commits are not here, or may be out of reach just now: Spark goes on.
        if local_log.folder(table) is not None:
            raise


def version(spark: SparkSession, table: tables.TableRef) -> int:
    """The table's newest version."""
    return commits(spark, table, limit=1)[0].version


def since(spark: SparkSession, table: tables.TableRef, version: int) -> list[Commit]:
    """The commits after `version`, newest first, or the newest where there is none; no other is read, however long the history is."""
    found = commits(spark, table, limit=1)
    while found[-1].version > version + 1:
        found = commits(spark, table, limit=(wanted := found[0].version - version))
        if len(found) < wanted:  # the history goes back no further
            break
    return [commit for commit in found if commit.version > version] or found


def changed_between(spark: SparkSession, table: tables.TableRef, before: int, after: int) -> tuple[int, int]:
    """The last version that has the rows of `before`, and the first that has those of `after`, as far as this process reads the log.

    Between them is all that changed, without what a compaction put into other files meanwhile; VACUUM takes the older ones.
    """
    folder = local_log.readable(spark, table)
    if folder is not None:
        with contextlib.suppress(OSError, ValueError):  # cleaned up, or out of reach just now
            while before < after and not _changes_rows(folder, before + 1):
                before += 1
            while before < after and not _changes_rows(folder, after):
                after -= 1
    return before, after


def _changes_rows(folder: Path, version: int) -> bool:
    """Whether a version has other rows than the one before it, and not the same ones in other files. Raises `OSError`."""
    actions = [json.loads(line) for line in stored_files.commit_path(folder, version).read_text("utf-8").split("\n") if line]
    added, removed = ([each[kind] for each in actions if kind in each] for kind in ("add", "remove"))
    # A repair takes out the files that are gone as if that were no change, and puts none in their place.
    return any(file.get("dataChange", True) for file in (*added, *removed)) or (bool(removed) and not added)


def newest_first(spark: SparkSession, table: tables.TableRef) -> Iterator[Commit]:
    """The whole history, newest first, read in portions that grow: most callers stop after the first few commits."""
    oldest: int | None = None
    for commit in _read_here(spark, table):
        oldest = commit.version
        yield commit
    if oldest == 0 or (oldest is not None and local_log.folder(table) is not None):
        return
    # Most who ask stop at the first few, and DESCRIBE HISTORY without a limit reads every commit of the log.
    for limit in (30**power for power in itertools.count()):
        listed = commits(spark, table, limit=limit)
        for commit in listed:
            if oldest is None or commit.version < oldest:
                oldest = commit.version
                yield commit
        if len(listed) < limit or oldest == 0:
            return


def last_commit(
    spark: SparkSession, table: tables.TableRef, *, saying: Callable[[Mapping[str, Any]], bool] = lambda said: True
) -> Commit | None:
    """The newest commit of ours, or the newest one `saying` something: position and writer; None where history has none."""
    own = (commit for commit in newest_first(spark, table) if commit.metadata is not None)
    return next((commit for commit in own if saying(commit.metadata or {})), None)


@dataclass(frozen=True)
class Standing:
    """Where a table stands, by one look at its history.

    `position` is the commit of ours that the rows are at: the newest one, or, after a RESTORE, that of the restored version; None
    where history has none, or no longer reaches back to there. `is_restored` says that a RESTORE is newer than all of ours but claims.
    """

    version: int = -1
    """The newest version: behind `position` others committed, if anybody did. Less than 0 where no Delta table lies there."""
    last: Commit | None = None
    """The newest commit of ours."""
    position: Commit | None = None
    is_restored: bool = False

    @property
    def said(self) -> Mapping[str, Any]:
        """What `position` says; nothing where there is none."""
        return (self.position.metadata if self.position else None) or {}


NOT_THERE = Standing()


@stored_files.one_look()
def standing(spark: SparkSession, table: tables.TableRef) -> Standing:
    """Where the table stands, or `NOT_THERE`; what is committed while it is read does not count."""
    folder = local_log.readable(spark, table)
    if folder is not None and not local_log.exists(folder):
        return NOT_THERE
    try:
        return _standing(newest_first(spark, table))
    except (errors.TableNotOurs, *table_errors.SPARK_ERRORS) as error:
        if table_errors.is_missing(error.__cause__ or error):
            return NOT_THERE
        raise


def _standing(history: Iterable[Commit]) -> Standing:
    version, reached, last = -1, None, None
    for commit in history:
        version = max(version, commit.version)
        last = last or (commit if commit.metadata is not None else None)
        # Committed after the restored version and undone by the RESTORE: what it says of the rows is no longer true.
        if reached is not None and commit.version > reached:
            continue
        if commit.restored is not None:
            reached = commit.restored
        elif commit.metadata is not None:
            return Standing(version, last, commit, reached is not None or RESTORED in commit.metadata)
    return Standing(version, last, None, reached is not None)
