"""Translates errors of Spark, its JVM and Delta into errors of this project, by class and error condition.

For errors at the end of a command, where no single table is known. `pipelines.delta.table_errors` translates those of statements over one
table, and uses this module.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JNetworkError

from cdc_core import errors
from pipelines.spark import jvm, stores

_FILE_MISSING = (
    "FAILED_READ_FILE.FILE_NOT_EXIST",
    "PATH_NOT_FOUND",
    "DELTA_FILE_NOT_FOUND",
    "DELTA_TRUNCATED_TRANSACTION_LOG",
)
_DEMANDS = ("DELTA_VIOLATE_CONSTRAINT_WITH_VALUES", "DELTA_NOT_NULL_CONSTRAINT_VIOLATED")
_FILE_UNREADABLE = ("FAILED_READ_FILE.NO_HINT", "FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER")
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED")
_NO_MEMORY = ("OutOfMemoryError", "MemoryError", "ArrowMemoryError")
_TASK_LOST = ("Python worker exited unexpectedly", "ExecutorLostFailure (executor")
"""Spark's messages for a Python process of its own that was killed, and for an executor that is gone. It has neither a class nor a condition
for them."""
_STOPPED = ("stopped SparkContext", "SparkContext was shut down", "SparkContext has been shutdown")
"""Spark's messages after its context was stopped, for which it has neither, too."""
_GONE = ("FileNotFoundException", "NoSuchFileException")
_DATA_FILE = re.compile(r"/(?:part-|deletion_vector_)[^/]*$")
_COMMIT = re.compile(r"/_delta_log/[0-9]{20}\.json$")
# Spark wraps a task's error two or three times, and that of a metastore four times. The limit is for cyclic chains.
_CAUSES = 8
_TRACED = re.compile(r"(?:\A|^Caused by: )([\w.$]+)(?:: (.*))?", re.MULTILINE)
"""The first line of an exception in the trace of Spark Connect's server: its class and its message."""
_NO_PYTHON = re.compile(
    r'Cannot run program "([^"]+)": (?:error=\d+, )?(.+)(?:\n\tat \S*java\.lang\.Process.+)+\n\tat org\.apache\.spark\.api\.python\.'
)
"""With the lines below the message, which say who called: Hadoop starts programs, too, such as `chmod`."""
_OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] .*: ([\d.]+) than .*: ([\d.]+)")
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_STORE_REFUSES = ("AccessDeniedException", "AccessControlException")
_STORE_FAILS = (
    "AWSApiCallTimeoutException",
    "AWSBadRequestException",  # 400, also for a session token that has expired, and 409
    "AWSClientIOException",
    "AWSNoResponseException",
    "AWSRedirectException",  # a bucket in another region
    "AWSS3IOException",
    "AWSServiceIOException",
    "AWSServiceThrottledException",
    "AWSStatus500Exception",
    "AbfsRestOperationException",
    "ConnectException",
    "ConnectTimeoutException",
    "HttpChannelEOFException",
    "NoHttpResponseException",
    "NoRouteToHostException",
    "SSLException",
    "SSLHandshakeException",
    "SocketException",
    "SocketTimeoutException",
    "UnknownHostException",
    "UnknownStoreException",
)
_NO_FILE_SYSTEM = ("ClassNotFoundException", "NoClassDefFoundError", "UnsupportedFileSystemException")
_NO_CATALOG = (
    "REQUIRES_SINGLE_PART_NAMESPACE",
    "CATALOG_NOT_FOUND",
    "NO_SUCH_CATALOG_EXCEPTION",
    "INVALID_SCHEMA_OR_RELATION_NAME",
)
_LOG_INCOMPLETE = ("DELTA_VERSIONS_NOT_CONTIGUOUS", "DELTA_TRUNCATED_TRANSACTION_LOG", "DELTA_STATE_RECOVER_ERROR")
_CATALOG_FAILS = ("MetaException", "TTransportException")
"""What the client of a Hive metastore or of AWS Glue raises where that does not answer, or refuses."""
STORE_ADVICE = "check the bucket's name, the endpoint, the credentials and their permissions"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def translated(error: BaseException) -> errors.MedallionError | None:
    """The error as one of this project; None for an unknown error."""
    if isinstance(error, errors.MedallionError):
        return error
    # First, because without the JVM all calls about a Java exception below would fail, as for an error without a class.
    if jvm.is_gone() or isinstance(error, Py4JNetworkError):
        if jvm.lacks_local_folder():
            return errors.DecisionNeeded(
                "Spark did not start: it can create a folder in none of spark.local.dir, or of the variable SPARK_LOCAL_DIRS "
                f"(log: {jvm.log_file()}); {jvm.WHERE_SETTINGS_ARE}"
            )
        return errors.SparkLost(
            f"Spark's JVM exited or stopped answering (killed, or out of memory; log: {jvm.log_file()}). Committed "
            "data is in the tables. Start again to continue"
        )
    if is_scratch_gone(error):
        return errors.SparkLost(
            "Spark's temporary folder was deleted while it ran, for example by a job that cleans up old files. "
            "Committed data is in the tables. Start again to continue; set TMPDIR to a folder that is not cleaned up"
        )
    message = str(error)
    if any(text in message for text in _STOPPED):
        return errors.SparkLost(
            "Spark was stopped while the application ran, for example because the cluster ended its application. Committed data is in the "
            "tables. Start again to continue"
        )
    is_scarce = is_caused_by(error, _NO_MEMORY) or message == "can't start new thread"
    if is_scarce or any(text in message for text in _TASK_LOST):
        # Temporary, because it may be due to the documents of one collection, or to one executor: the other collections continue.
        return errors.Temporary(
            "Spark lost an executor or a Python worker, or ran out of memory or threads, or this process did. Committed data is in "
            "the tables. Give it more memory (--conf spark.driver.memory=…, spark.executor.memory=…) or processes, as its log "
            f"says, or process less at a time (max.batch.events): {jvm.log_file()}"
        )
    if is_server_gone(error):
        return errors.SparkLost(
            "Spark Connect's server, or this session, ended or stopped answering. Committed data is in the tables. "
            "Start again to continue"
        )
    if is_full(error):
        return errors.StorageExhausted(
            "no space left in the lakehouse, in the temporary folder or where the output goes; uncommitted work is repeated. "
            "Free some space and start again"
        )
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return _no_right(error.filename or "the disk", error.strerror)  # Arrow's message includes the file name
    if (path := missing_file(error)) is not None:  # before `of_store`, because its cause may be an error of the store
        return _files_missing(path)
    if (store_error := of_store(error)) is not None:
        return store_error
    if condition(error) in _NO_CATALOG:
        return errors.SettingsError(
            "lakehouse.catalog: this Spark has no such catalog, or refuses the name of a table or schema; --debug "
            "shows which"
        )
    if condition(error) in _LOG_INCOMPLETE:
        return errors.DecisionNeeded(
            "a table's log lacks entries: files of its _delta_log were deleted, or the table was copied or restored in part. Stop the "
            "pipeline and restore the table from a backup; --debug shows which"
        )
    if is_caused_by(error, _CATALOG_FAILS):
        return errors.StoreUnreachable(
            "the catalog's metastore refuses access or does not answer; check its address, the credentials and their permissions; "
            "--debug shows its answer"
        )
    if condition(error).startswith("INSUFFICIENT_PERMISSIONS") or is_caused_by(error, ("UnauthorizedAccessException",)):
        return errors.AccessRefused(
            "the catalog refuses a privilege on itself, a schema or a table. The pipeline needs USE CATALOG, USE "
            "SCHEMA, CREATE TABLE, SELECT and MODIFY, and CREATE SCHEMA if its schemas do not exist; --debug shows "
            "which"
        )
    if system_message := _system_message(error, (errno.EROFS,)):
        return _no_right("the disk", system_message)
    if system_message := _system_message(error, _FAILS):
        return errors.Temporary(
            f"the operating system or its disk failed ({system_message}); uncommitted work is repeated. Check the system's log, "
            "and the limit of open files (ulimit -n)"
        )
    if (python_error := _of_tasks_python(message)) is not None:
        return python_error
    data_file = missing_file(error, _FILE_UNREADABLE) or ""  # in a store it may be an outage
    if data_file and stores.scheme(data_file) == "file":
        return _files_missing(data_file)
    commit = missing_file(error, _FILE_UNREADABLE, _COMMIT) or ""
    return commit_damaged(unquote(urlsplit(commit).path)) if commit and stores.scheme(commit) == "file" else None


def _of_tasks_python(message: str) -> errors.DecisionNeeded | None:
    """The error for a cluster whose machines lack a Python, its version or its packages; None for any other message."""
    remedy = "set spark.pyspark.python, or the variable PYSPARK_PYTHON, to"
    if found := _NO_PYTHON.search(message):
        program, why = found.groups()
        return errors.DecisionNeeded(
            f"Spark cannot start the Python of its tasks, {program}: {why}; {remedy} one that each machine of the cluster has"
        )
    if found := _OTHER_PYTHON.search(message):
        theirs, own = found.groups()
        return errors.DecisionNeeded(
            f"Spark's tasks run Python {theirs}, this process runs {own}; {remedy} the same version"
        )
    if found := _NO_MODULE.search(message):
        return errors.DecisionNeeded(
            f"the Python of Spark's tasks has no module {found[1]}; install mongo-medallion on each machine of the cluster, or "
            f"{remedy} a Python that has it"
        )
    return None


def of_one(error: Exception) -> Exception:
    """The translated error of one table or model, else the error itself; raises `SparkLost`, which is not theirs."""
    failure = translated(error) or error
    if isinstance(failure, errors.SparkLost):
        raise failure from error
    return failure


def commit_damaged(path: str) -> errors.DecisionNeeded:
    """The error for an entry of a table's log that cannot be read."""
    return errors.DecisionNeeded(
        f"{path}: this entry of the table's log is truncated or damaged, for example by a power failure or a full "
        "disk. Stop the pipeline. If it is the newest entry, move it away, with the .crc files of the same "
        "number: the table continues from the entry before it. Otherwise restore the table from a backup"
    )


def is_scratch_gone(error: BaseException) -> bool:
    """Whether Spark's temporary files of this process were deleted. Spark creates the folder once, so that all later queries fail."""
    message = str(error)
    return f"/spark-{os.getpid()}.tmp/" in message and any(name in message for name in _GONE)


def is_server_gone(error: BaseException) -> bool:
    """Whether a Spark Connect server did not answer, or has closed the session. It may still execute the statement."""
    status = getattr(_called(error, "getGrpcStatusCode"), "name", "")
    return condition(error).startswith("INVALID_HANDLE.SESSION") or (not condition(error) and status in _NO_ANSWER)


def is_unanswered(error: BaseException) -> bool:
    """Whether it is unknown if a statement or request takes effect later: `is_server_gone`, or a store gave no proper answer."""
    return is_server_gone(error) or is_caused_by(error, _STORE_FAILS)


_FAILS = (
    *(errno.EIO, errno.ENODEV, errno.ENXIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    # A network disk, or the program that serves a file system.
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ECONNABORTED),
)


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota is full, or a file has reached the size limit of the process."""
    return bool(_system_message(error, errors.FULL))


def _system_message(error: BaseException, numbers: Collection[int]) -> str:
    """The operating system's message of the first of these error numbers that the error has; empty if none.

    Java has no classes for these errors: its exceptions contain the message.
    """
    number, message = getattr(error, "errno", None), str(error)
    return next((text for each in numbers if (text := os.strerror(each)) in message or each == number), "")


def no_file_system(error: BaseException, location: str) -> errors.DecisionNeeded | None:
    """The error for a location whose scheme has no file system in this Spark; None for any other error."""
    scheme = stores.scheme(location)
    if scheme == "file" or not is_caused_by(error, _NO_FILE_SYSTEM):
        return None
    packages = stores.STORES.get(scheme, stores.ObjectStore()).packages
    package = f"--packages {packages[0]}, of its own Hadoop's version" if packages else "the package that has it"
    alternative = "write s3a://, or " if scheme == "s3" else ""
    return errors.DecisionNeeded(
        f"{location}: this Spark has no file system for {scheme}://; {alternative}start it with {package}"
    )


def of_store(error: BaseException, table: str = "") -> errors.MedallionError | None:
    """The error for a store that refuses access, does not answer, or has no file system in this Spark; None for any other error."""
    if (failure := no_file_system(error, table)) is not None:
        return failure
    cause = _cause(error, (*_STORE_REFUSES, *_STORE_FAILS))
    if cause is None:
        return None
    # A refusal of a local file system has a path. That of a store has a URL, a key or the whole response.
    place = str(_called(cause, "getFile") or "")
    if place.startswith("/"):
        return _no_right(place, os.strerror(errno.EACCES))
    return errors.StoreUnreachable(
        f"{table or 'the lakehouse'}: the store refuses access or does not answer ({_name(cause)}); "
        f"{STORE_ADVICE}, and whether they have expired"
    )


def _no_right(place: str, why: str | None) -> errors.DecisionNeeded:
    return errors.DecisionNeeded(
        f"{place}: {why}; give this user the right to read and write there, or choose another place"
    )


def missing_file(
    error: BaseException, conditions: Collection[str] = _FILE_MISSING, named: re.Pattern[str] = _DATA_FILE
) -> str | None:
    """The URL or path of a missing data file that a table's log names; None for any other error."""
    path = str((_parameters(error, conditions) or {}).get("path") or "")
    # A missing folder or log file may be a mistake in a path; a data file was lost.
    return path if named.search(path) else None


def broken_demand(error: BaseException) -> str | None:
    """The name of the constraint, or of the NOT NULL column, that a row violates; None for any other error."""
    parameters = _parameters(error, _DEMANDS)
    return None if parameters is None else str(parameters.get("constraintName") or parameters.get("columnName") or "")


def _parameters(error: BaseException, conditions: Collection[str]) -> Any:
    """The parameters of the message that has one of these conditions; None if neither the error nor a cause of it has one."""
    matches = (each for each in _chain(error) if _called(each, "getCondition", "getErrorClass") in conditions)
    return next((_called(each, "getMessageParameters") or {} for each in matches), None)


def is_path_gone(error: BaseException) -> bool:
    """Whether a statement failed because another process removed a file or a folder."""
    if condition(error) == "DELTA_CANNOT_CREATE_LOG_PATH":
        return True
    return is_caused_by(error, _GONE)


def is_caused_by(error: BaseException, names: Collection[str]) -> bool:
    """Whether the exception, or a Java exception that caused it, has one of these class names."""
    return _cause(error, names) is not None


def _cause(error: BaseException, names: Collection[str]) -> Any:
    """The exception, or the Java exception that caused it, that has one of these class names; None if none has."""
    return next((each for each in _chain(error) if _name(each) in names), None)


def class_name(error: BaseException) -> str:
    """The simple class name of the Java exception, else of the Python one."""
    return _name(getattr(error, "java_exception", None) or error)


def _name(throwable: Any) -> str:
    return str(_called(_called(throwable, "getClass"), "getSimpleName") or type(throwable).__name__)


def _files_missing(file: str) -> errors.FilesMissing:
    folder, name = posixpath.split(unquote(urlsplit(file).path))
    return errors.FilesMissing(
        f"{folder}: the table's log names the file {name}, which is missing or damaged: it was deleted by hand or "
        "by a VACUUM, or lost with a disk. Start again; if the error comes back, medallion repair --config … "
        "shows what was lost and repairs the table"
    )


def condition(error: BaseException) -> str:
    """Spark's error condition, such as `FAILED_READ_FILE.FILE_NOT_EXIST`; empty if there is none."""
    return _answer(error, "getCondition", "getErrorClass")


def sql_state(error: BaseException) -> str:
    """The five characters of SQLSTATE; empty if there is none."""
    return _answer(error, "getSqlState")


def _answer(error: BaseException, *names: str) -> str:
    """The result of one of these methods of the error, else of its Java exception; empty if there is none."""
    answers = (_called(each, *names) for each in (error, getattr(error, "java_exception", None)))
    return next((str(each) for each in answers if each), "")


def parameter(error: BaseException, name: str) -> str | None:
    """A parameter of Spark's error message; None if there is none."""
    value = (_called(error, "getMessageParameters") or {}).get(name)
    return None if value is None else str(value)


@dataclass(frozen=True)
class _ServerException:
    """A Java exception of Spark Connect's server, with the methods of Java that this module calls."""

    name: str
    message: str

    def getClass(self) -> _ServerException:
        return self

    def getSimpleName(self) -> str:
        return self.name

    def getFile(self) -> str:
        return self.message


def _chain(error: BaseException) -> Iterator[Any]:
    """The error, its Java exception, and the causes of that one. Over Spark Connect they are read from the server's trace."""
    yield error
    trace = _called(error, "getStackTrace")
    if isinstance(trace, str):
        yield from (_ServerException(re.split(r"[.$]", name)[-1], message) for name, message in _TRACED.findall(trace))
    # PySpark keeps that of an `AnalysisException` in `_origin`. `store_folder` raises an `OSError` from the Java exception.
    own, of_cause = (getattr(each, "java_exception", None) for each in (error, error.__cause__))
    java = own or getattr(error, "_origin", None) or of_cause
    for _ in range(_CAUSES):
        if java is None:
            return
        yield java
        java = _called(java, "getCause")


def _called(instance: Any, *names: str) -> Any:
    """The result of the first of these methods that exists; None where none does, or it fails."""
    # `getCondition` is the name in Spark 4, `getErrorClass` in Databricks' runtimes and Spark 3.
    get = next((method for name in names if (method := getattr(instance, name, None)) is not None), None)
    try:
        return None if get is None else get()
    except Exception:
        return None
