"""Translates errors of Spark and Delta over one table into errors of this project, and limits the attempts of a commit.

Delta's exceptions are identified by class or error condition, never by the text of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.spark import failures as spark_failures

Answer = TypeVar("Answer")

COMMIT_ATTEMPTS = 8


SPARK_ERRORS = (PySparkException, Py4JJavaError)
"""Exceptions of a statement. Delta's conflicts are PySpark exceptions only where its Python package is imported."""


_CONFLICTS = (
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "DELTA_MAX_COMMIT_RETRIES_EXCEEDED",
)


_CONFLICT_CLASSES = (
    "ConcurrentAppendException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentTransactionException",
    "ConcurrentWriteException",
    "MetadataChangedException",
    "ProtocolChangedException",
)


def commit_attempts(table: tables.TableRef) -> Iterator[int]:
    """The numbers of the attempts at one commit, from 0; raises `CommitConflict` after the last one.

    The caller leaves the loop after a successful commit, and waits between attempts.
    """
    yield from range(COMMIT_ATTEMPTS)
    raise conflict(table)


_MISSING = (
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_ONLY_OPERATION",
    "DELTA_ONLY_OPERATION",
    "DELTA_MISSING_TABLE",
    "EXPECT_TABLE_NOT_VIEW",
    "TABLE_OR_VIEW_NOT_FOUND",
    "SCHEMA_NOT_FOUND",
    "PATH_NOT_FOUND",
)


def is_missing(error: BaseException) -> bool:
    """Whether a statement found no Delta table."""
    return spark_failures.condition(error).startswith(_MISSING)


def unless_missing(table: tables.TableRef, ask: Callable[[], Answer]) -> Answer | None:
    """The answer of Spark or its catalog; None where the table or its schema is missing."""
    try:
        return ask()
    except SPARK_ERRORS as error:
        if is_missing(error):
            return None
        raise translated(error, table) from error


def is_conflict(error: BaseException) -> bool:
    """Whether Delta refused a commit because of a concurrent one."""
    java = getattr(error, "java_exception", None)
    name = type(error).__name__ if java is None else str(java.getClass().getSimpleName())
    return name in _CONFLICT_CLASSES or spark_failures.condition(error).startswith(_CONFLICTS)


def translated(error: BaseException, table: tables.TableRef) -> BaseException:
    """The error of this project for a Spark or Delta error that has a meaning for the user; otherwise the error itself."""
    if is_conflict(error):
        return conflict(table)
    condition = spark_failures.condition(error)
    if condition.startswith(("DELTA_TABLE_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")):
        return errors.TableNotOurs(f"{table.label}: there is no such table; run the layer before it first")
    # A path that goes through a file, such as a root that is one, has no condition.
    if condition == "DELTA_CANNOT_CREATE_LOG_PATH" or spark_failures.is_caused_by(error, ("NotDirectoryException",)):
        return errors.DecisionNeeded(
            f"{table.label}: this folder cannot be created; give this user write access, or choose another lakehouse.root"
        )
    if condition == "DELTA_CANNOT_MODIFY_APPEND_ONLY":
        return errors.DecisionNeeded(
            f"{table.label}: the table is append-only, but its rows must change. To allow it: ALTER TABLE {table} SET "
            "TBLPROPERTIES ('delta.appendOnly' = 'false')"
        )
    if (demand := spark_failures.broken_demand(error)) is not None:
        return errors.DecisionNeeded(
            f"{table.label}: a row violates {demand}, a constraint that was added to the table; nothing of this commit "
            f"was written. To accept the row: ALTER TABLE {table} DROP CONSTRAINT {demand}, or ALTER COLUMN {demand} "
            "DROP NOT NULL. An expectation checks rows without stopping the collection"
        )
    if (file_path := spark_failures.missing_file(error)) is not None:
        return errors.FilesMissing(
            f"{table.label}: its log names the file {file_path.rpartition('/')[2]}, which does not exist: it was deleted "
            "by hand or by a VACUUM, or lost with a disk. Start again; if the error comes back, run medallion repair "
            "--config …"
        )
    if spark_failures.is_full(error):
        return _storage_exhausted(table)
    return spark_failures.of_store(error, table.label) or error


def disk_error(error: OSError, table: tables.TableRef) -> BaseException:
    """`StorageExhausted` for a full disk, `CommitConflict` where the table's folder is gone; otherwise the error itself."""
    if isinstance(error, FileNotFoundError):
        return errors.CommitConflict(
            f"{table.label}: its folder was removed while it was written; nothing was committed. Start again"
        )
    return _storage_exhausted(table) if spark_failures.is_full(error) else error


def _storage_exhausted(table: tables.TableRef) -> errors.StorageExhausted:
    return errors.StorageExhausted(
        f"{table.label}: no space left; nothing of this commit is in the table. Free some space and start again"
    )


def conflict(table: tables.TableRef) -> errors.CommitConflict:
    return errors.CommitConflict(f"{table.label}: other commits came first {COMMIT_ATTEMPTS} times; try again later")


@contextmanager
def translating(table: tables.TableRef) -> Iterator[None]:
    try:
        yield
    except SPARK_ERRORS as error:
        translation = translated(error, table)
        if translation is error:
            raise
        raise translation from error
