"""A table's history: its versions, and the position of its rows.

Each commit of this project carries the table's position and its writer's claim as `userMetadata`; commits of others have none.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import Row, SparkSession

from cdc_core import errors
from cdc_core.tables import claims
from cdc_core.tables import layout as tables
from pipelines.delta import local_log, stored_files, table_errors
from pipelines.delta.local_log import Commit
from pipelines.delta.table_errors import Answer

RESTORED = "restored"
"""Key in the metadata of a claim after a RESTORE: the version that was claimed. Carried over until the layer commits itself."""


def commits(spark: SparkSession, table: tables.TableRef, *, limit: int) -> list[Commit]:
    """The newest commits, newest first. From the log where this process reads it, else by Spark."""
    local_commits = list(itertools.islice(_read_here(spark, table), limit))
    # A copied log may lack older commits.
    if len(local_commits) == limit or (local_commits and local_log.folder(table) is not None):
        return local_commits
    with table_errors.translating(table):
        rows = (
            spark.sql(f"DESCRIBE HISTORY {table} LIMIT {limit}")
            .select("version", "timestamp", "userMetadata", "operation", "operationParameters")
            .collect()
        )
    return [_commit(row) for row in rows]


def _commit(row: Row) -> Commit:
    metadata = claims.parsed(row.userMetadata)
    restored = local_log.brought_back(row.operation, row.operationParameters or {}, metadata)
    is_foreign = local_log.is_foreign(row.operation, metadata)
    return Commit(row.version, int(row.timestamp.timestamp() * 1000), metadata, restored, is_foreign)


def _read_here(spark: SparkSession, table: tables.TableRef) -> Iterator[Commit]:
    """The newest commits, newest first, as far back as this process reads the log."""
    folder = local_log.readable(spark, table)
    if folder is None or not (folder / tables.LOG).is_dir():
        return
    try:
        yield from local_log.commits(folder)
    except OSError:
        # A copied log lacks older commits, or the store is unreachable: Spark reads the rest.
        if local_log.folder(table) is not None:
            raise


def cached(read: Callable[[SparkSession, tables.TableRef], Answer]) -> Callable[[SparkSession, tables.TableRef], Answer]:
    """`read`, whose answer for a table is cached until the table's next commit: for what is asked for each of thousands of collections."""
    answers: dict[tables.TableRef, tuple[list[Commit], Answer]] = {}

    @functools.wraps(read)
    def cached_read(spark: SparkSession, table: tables.TableRef) -> Answer:
        newest_commit = commits(spark, table, limit=1)
        if table not in answers or answers[table][0] != newest_commit:
            answers[table] = newest_commit, read(spark, table)
        return answers[table][1]

    return cached_read


def version(spark: SparkSession, table: tables.TableRef) -> int:
    """The table's newest version."""
    return commits(spark, table, limit=1)[0].version


def since(spark: SparkSession, table: tables.TableRef, version: int) -> list[Commit]:
    """The commits after `version`, newest first; only the newest commit where there is none after it. Reads no older ones."""
    history = commits(spark, table, limit=1)
    while history[-1].version > version + 1:
        history = commits(spark, table, limit=(count := history[0].version - version))
        if len(history) < count:  # older commits were cleaned up
            break
    return [commit for commit in history if commit.version > version] or history


def changed_between(spark: SparkSession, table: tables.TableRef, before: int, after: int) -> tuple[int, int]:
    """The last version with the same rows as `before`, and the first with the same rows as `after`, as far as this process reads the log.

    The versions between them have all changes, without compactions before and after. Fewer of their files are removed by VACUUM.
    """
    folder = local_log.readable(spark, table)
    if folder is not None:
        with contextlib.suppress(OSError, ValueError):  # cleaned up, or the store is unreachable
            while before < after and not _changes_rows(folder, before + 1):
                before += 1
            while before < after and not _changes_rows(folder, after):
                after -= 1
    return before, after


def _changes_rows(folder: Path, version: int) -> bool:
    """Whether a version has other rows than the version before, and not only other files. Raises `OSError`."""
    actions = [*local_log.actions(folder, version)]
    adds, removes = ([action[kind] for action in actions if kind in action] for kind in ("add", "remove"))
    # `medallion repair` removes missing files with a `dataChange` of false, and adds none.
    return any(file.get("dataChange", True) for file in (*adds, *removes)) or (bool(removes) and not adds)


def newest_first(spark: SparkSession, table: tables.TableRef) -> Iterator[Commit]:
    """The whole history, newest first, read lazily: most callers stop after a few commits."""
    oldest: int | None = None
    for commit in _read_here(spark, table):
        oldest = commit.version
        yield commit
    if oldest == 0 or (oldest is not None and local_log.folder(table) is not None):
        return
    # In growing portions: DESCRIBE HISTORY without a limit reads every commit of the log.
    for limit in (30**power for power in itertools.count()):
        portion = commits(spark, table, limit=limit)
        for commit in portion:
            if oldest is None or commit.version < oldest:
                oldest = commit.version
                yield commit
        if len(portion) < limit or oldest == 0:
            return


def last_commit(
    spark: SparkSession, table: tables.TableRef, *, matching: Callable[[Mapping[str, Any]], bool] = lambda metadata: True
) -> Commit | None:
    """The newest commit of this project, or the newest whose metadata matches `matching`; None where there is none."""
    project_commits = (commit for commit in newest_first(spark, table) if commit.metadata is not None)
    return next((commit for commit in project_commits if matching(commit.metadata or {})), None)


def last_before(
    spark: SparkSession, table: tables.TableRef, time_ms: int, *, matching: Callable[[Mapping[str, Any]], bool]
) -> Commit | None:
    """The newest commit of this project from before a time, in milliseconds since 1970, whose metadata matches `matching`.

    None where there is none, or this process does not read the log so far back. The versions are bisected: a month of a commit a second has
    millions.
    """
    folder = local_log.readable(spark, table)
    newest_version = None if folder is None else local_log.newest_version(folder)
    if folder is None or newest_version is None:
        return None

    def is_since(version: int) -> bool:
        commit = local_log.commit(folder, version)
        return commit is not None and commit.timestamp_ms >= time_ms  # the oldest commits are cleaned up

    with contextlib.suppress(OSError):  # the store is unreachable
        first_since = bisect.bisect_left(range(newest_version + 1), True, key=is_since)
        for version in range(first_since - 1, -1, -1):
            commit = local_log.commit(folder, version)
            if commit is None or (commit.metadata is not None and matching(commit.metadata)):
                return commit
    return None


class VoidCommit(NamedTuple):
    """A commit of this project that is to be undone: by a statement whose writer had not seen a RESTORE, so that Delta ran it on the restored
    rows. `before` is the version before it, `foreign` a later one, if any, in which another program wrote rows."""

    before: int
    foreign: int | None


@dataclass(frozen=True)
class Standing:
    """The state of a table by its history, read once.

    `position` is the commit of this project that has the position of the rows: the newest one, or after a RESTORE that of the restored
    version. It is None where the history has none, or does not reach back to it. `is_restored` is true where a RESTORE is newer than all
    commits of this project except claims.
    """

    version: int = -1
    """The newest version, of any writer; less than 0 where there is no Delta table."""
    last: Commit | None = None
    """The newest commit of this project."""
    position: Commit | None = None
    is_restored: bool = False
    void: VoidCommit | None = None
    """The oldest such commit after `position`."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of `position`; empty where there is none."""
        return (self.position.metadata if self.position else None) or {}


NOT_THERE = Standing()


@stored_files.one_look()
def standing(spark: SparkSession, table: tables.TableRef) -> Standing:
    """The state of the table; `NOT_THERE` where there is none. Commits that arrive during the call may be missing."""
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
    version, last, position, base = -1, None, None, -1
    restored, foreign, void = None, None, None
    for commit in history:
        version = max(version, commit.version)
        last = last or (commit if commit.metadata is not None else None)
        if position is not None and commit.version <= base:
            break
        # Committed after the restored version and undone by the RESTORE: its position is not that of the rows.
        if restored is not None and commit.version > restored:
            continue
        if commit.restored is not None:
            if position is not None:  # its writer had read a version before this RESTORE
                void, position = VoidCommit(position.version - 1, foreign), None
            restored = commit.restored
        elif commit.metadata is not None and position is None:
            read_version = claims.commit_base(commit.metadata)
            position, base = commit, commit.version - 1 if read_version is None else read_version
            if base == commit.version - 1:
                break
        elif commit.is_foreign and position is None:
            foreign = commit.version
    is_restored = restored is not None or (position is not None and RESTORED in (position.metadata or {}))
    return Standing(version, last, position, is_restored, void)
