"""Translation of Spark's errors by class and condition, with fakes of them."""

from __future__ import annotations

import errno
import os

import pyarrow as pa
import pytest
from grpc import StatusCode
from py4j.protocol import Py4JNetworkError
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import table_errors
from pipelines.spark import failures, jvm, parallel
from pipelines.spark import session as sparks

FILE = "file:/lake/silver/shop/orders/part-00000-a%20b.snappy.parquet"


class Raised(Exception):
    """An error of Spark, or a Java exception, with a condition."""

    def __init__(self, condition: str = "", path: str = "", cause: Raised | None = None) -> None:
        super().__init__(condition)
        self.condition, self.path, self.cause = condition, path, cause

    def getCondition(self) -> str:
        return self.condition

    def getMessageParameters(self) -> dict[str, str]:
        return {"path": self.path}

    def getCause(self) -> Raised | None:
        return self.cause


class NotDirectoryException(Raised):
    """Java's error for a path that goes through a file."""

    def getClass(self) -> NotDirectoryException:
        return self

    def getSimpleName(self) -> str:
        return type(self).__name__


class OfJava(Exception):
    """As raised by py4j: it contains the Java exception."""

    def __init__(self, java: Raised) -> None:
        super().__init__("An error occurred while calling o1.collect")
        self.java_exception = java


@pytest.mark.parametrize(
    "error",
    [
        Raised("FAILED_READ_FILE.FILE_NOT_EXIST", FILE),
        OfJava(Raised("", "", Raised("FAILED_READ_FILE.FILE_NOT_EXIST", FILE))),
    ],
)
def test_a_missing_file_is_told_with_its_table_and_what_to_do(error: Exception) -> None:
    """Also if it is only the cause of the raised error."""
    told = failures.translated(error)
    assert isinstance(told, errors.FilesMissing) and told.exit_code == 3
    assert str(told).startswith("/lake/silver/shop/orders: the table's log names the file part-00000-a b.snappy.parquet")
    assert "medallion repair" in str(told) and "\n" not in str(told)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "full"), OSError(errno.EFBIG, "limit"), Raised("java.io.IOException: No space left on device")],
)
def test_a_full_disk_is_temporary(error: Exception) -> None:
    assert isinstance(failures.translated(error), errors.StorageExhausted)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_place_that_cannot_be_written_is_for_a_person(number: int) -> None:
    """The error names the path, and is no bug."""
    told = failures.translated(OSError(number, os.strerror(number), "/lake/bronze"))
    assert isinstance(told, errors.DecisionNeeded) and str(told).startswith(f"/lake/bronze: {os.strerror(number)}; give")
    table = tables.TableRef.at("/lake/bronze/shop")
    for error in (Raised("DELTA_CANNOT_CREATE_LOG_PATH"), OfJava(NotDirectoryException())):
        refused = table_errors.translated(error, table)
        assert isinstance(refused, errors.DecisionNeeded) and str(refused).startswith(
            "/lake/bronze/shop: this folder cannot be created"
        )


def test_a_folder_that_arrow_may_not_write_is_for_a_person() -> None:
    """Errors of Arrow only have the file's name in their message, and those of Java for a read-only file system have no class."""
    said = "Failed to open local file '/lake/a.parquet'. Detail: [errno 13] Permission denied"
    for error in (PermissionError(errno.EACCES, said), Raised("FileSystemException: /lake/a: Read-only file system")):
        assert type(failures.translated(error)) is errors.DecisionNeeded


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Error reading bytes from file"),
        OSError(errno.EMFILE, "Too many open files", "/lake/_delta_log"),
        Raised("java.nio.file.FileSystemException: /lake/_delta_log: Too many open files"),
        Raised("java.io.IOException: Stale file handle"),
        OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/lake/bronze"),
        Raised("java.nio.file.FileSystemException: /lake/bronze: Connection timed out"),
        Raised('java.io.IOException: Cannot run program "python3": error=11, Resource temporarily unavailable'),
        MemoryError(),
        pa.ArrowMemoryError("malloc of size 64 failed"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_system_that_fails_for_now_is_no_bug(error: Exception) -> None:
    """A disk, a network or a program that serves a file system and fails, or an exhausted limit: a later attempt succeeds."""
    told = failures.translated(error)
    assert type(told) is errors.Temporary and "\n" not in str(told)


def test_a_temporary_folder_that_was_emptied_is_the_end_of_its_spark() -> None:
    """Spark creates the folders for its blocks once: without them no query succeeds, and a new JVM creates its own."""
    mine = f"/tmp/medallion-0/spark-{os.getpid()}.tmp/blockmgr-5076b76c/0e"
    error = Raised(f"Job aborted: Task serialization failed: java.nio.file.NoSuchFileException: {mine}")
    assert isinstance(failures.translated(error), errors.SparkLost)
    assert failures.translated(Raised(f"java.io.IOException: {mine}")) is None


class OfStore(Raised):
    """An error of a store's file system in Java."""

    def __init__(self, name: str, file: str = "", cause: Raised | None = None) -> None:
        super().__init__("", "", cause)
        self.name, self.file = name, file

    def getClass(self) -> OfStore:
        return self

    def getSimpleName(self) -> str:
        return self.name

    def getFile(self) -> str:
        return self.file


REFUSED = OfStore("AccessDeniedException", "s3a://lake/house/silver: PUT")


@pytest.mark.parametrize(
    "error",
    [
        OfJava(REFUSED),
        OfJava(OfStore("SparkException", cause=REFUSED)),
        *(OfJava(OfStore(name)) for name in ("AWSStatus500Exception", "ConnectException")),
        # A session token that has expired, a bucket in another region, a request that took too long, a connection that was cut.
        *(OfJava(OfStore(name)) for name in ("AWSBadRequestException", "AWSRedirectException")),
        *(OfJava(OfStore(name)) for name in ("AWSApiCallTimeoutException", "SocketException", "SSLHandshakeException")),
    ],
)
def test_a_store_that_refuses_in_the_middle_of_a_run_is_no_bug(error: Exception) -> None:
    """Credentials expire, and permissions are revoked. As at the start, a scheduler tries again, and the message says where to look."""
    told = failures.translated(error)
    assert isinstance(told, errors.StoreUnreachable) and "the credentials and their permissions" in str(told)
    of_table = table_errors.translated(error, tables.TableRef.at("s3a://lake/house/silver/shop/orders"))
    assert isinstance(of_table, errors.StoreUnreachable)
    assert str(of_table).startswith("s3a://lake/house/silver/shop/orders: the store refuses")
    # As `stored_files` raises it, which reads a store without Spark.
    read = OSError(errno.EIO, "AccessDeniedException", "/tmp/copies/x")
    read.__cause__ = error
    assert isinstance(failures.translated(read), errors.StoreUnreachable)


def of_server(*causes: str) -> SparkConnectGrpcException:
    """An error of Spark Connect's server, with the trace that PySpark builds of its causes."""
    lines = ["org.apache.spark.SparkException", *(f"Caused by: {cause}" for cause in causes)]
    trace = "\n".join(f"{line}\n\tat org.apache.spark.A.b(A.scala:1)" for line in lines)
    return SparkConnectGrpcException("Job aborted", server_stacktrace=trace, grpc_status_code=StatusCode.INTERNAL)


@pytest.mark.parametrize(
    "causes",
    [
        ["java.nio.file.AccessDeniedException: s3a://lake/house/silver: PUT: 403"],
        ["java.io.IOException: x", "org.apache.hadoop.net.ConnectTimeoutException: "],
    ],
)
def test_a_store_that_fails_a_server_of_spark_connect_is_no_bug(causes: list[str]) -> None:
    """Its client has no Java exception: the classes are only in the server's trace."""
    told = failures.translated(of_server(*causes))
    assert isinstance(told, errors.StoreUnreachable) and told.exit_code == 75
    assert failures.is_unanswered(of_server(*causes)) == ("ConnectTimeoutException" in str(told))
    assert failures.translated(of_server("java.lang.IllegalStateException: AccessDeniedException")) is None


class AnalysisException(Raised):
    """As PySpark raises it: it keeps the Java exception to itself."""

    def __init__(self, java: Raised) -> None:
        super().__init__("_LEGACY_ERROR_TEMP_3065")
        self._origin = java


def test_a_metastore_that_does_not_answer_is_no_bug() -> None:
    """As Spark wraps the error of its client."""
    java = OfStore("MetaException")
    for name in ("InvocationTargetException", "RuntimeException", "HiveException", "AnalysisException"):
        java = OfStore(name, cause=java)
    told = failures.translated(AnalysisException(java))
    assert isinstance(told, errors.StoreUnreachable) and "metastore" in str(told) and "--debug" in str(told)


def test_a_store_that_fails_a_catalog_is_no_bug() -> None:
    told = failures.translated(AnalysisException(OfStore("AnalysisException", cause=REFUSED)))
    assert isinstance(told, errors.StoreUnreachable) and "AccessDeniedException" in str(told)


def test_a_file_that_a_store_does_not_find_is_missing() -> None:
    """ABFS raises the same for a missing file as for a refused request."""
    cause = OfStore("AbfsRestOperationException")
    told = failures.translated(OfJava(Raised("FAILED_READ_FILE.FILE_NOT_EXIST", FILE, cause)))
    assert isinstance(told, errors.FilesMissing)


def test_a_file_on_a_disk_that_cannot_be_read_is_told_as_missing() -> None:
    """For example one that is empty after a power failure. In a store the same error may be an outage."""
    told = failures.translated(OfJava(Raised("", "", Raised("FAILED_READ_FILE.NO_HINT", FILE))))
    assert isinstance(told, errors.FilesMissing) and "or damaged" in str(told)
    assert failures.translated(Raised("FAILED_READ_FILE.NO_HINT", FILE.replace("file:", "s3a:/"))) is None


def test_an_entry_of_a_log_that_is_cut_off_is_for_a_person() -> None:
    commit = "/lake/gold/shop/a%2520b/_delta_log/00000000000000000006.json"
    told = failures.translated(OfJava(Raised("", "", Raised("FAILED_READ_FILE.NO_HINT", f"file://{commit}"))))
    assert type(told) is errors.DecisionNeeded and str(told).startswith(f"{commit.replace('%2520', '%20')}: this entry")
    assert failures.translated(Raised("FAILED_READ_FILE.NO_HINT", f"s3a://bucket{commit}")) is None


def test_a_folder_that_refuses_java_is_told_with_its_path() -> None:
    """The exception is the same as in a store, and the advice is another."""
    told = failures.translated(OfJava(OfStore("AccessDeniedException", "/lake/silver")))
    assert type(told) is errors.DecisionNeeded and str(told).startswith("/lake/silver: Permission denied; give")
    by_server = failures.translated(of_server("java.nio.file.AccessDeniedException: /lake/silver"))
    assert (type(by_server), str(by_server)) == (type(told), str(told))


def test_a_jvm_that_is_gone_explains_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error is explained by it, except our own."""
    monkeypatch.setattr(jvm, "is_gone", lambda: True)
    assert isinstance(failures.translated(ConnectionRefusedError()), errors.SparkLost)
    refused = errors.TableOwned("process 7 writes it")
    assert failures.translated(refused) is refused


def test_a_connection_to_the_jvm_that_breaks_is_no_bug() -> None:
    """Even if its process still exists: it no longer answers, and the next start resumes from the tables."""
    told = failures.translated(Py4JNetworkError("Answer from Java side is empty"))
    assert isinstance(told, errors.SparkLost) and told.exit_code == 75


NO_ANSWER = SparkConnectGrpcException("failed to connect", grpc_status_code=StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(
    "error", [NO_ANSWER, Raised("INVALID_HANDLE.SESSION_CHANGED"), Raised("INVALID_HANDLE.SESSION_CLOSED")]
)
def test_a_server_of_spark_connect_that_is_gone_is_no_bug(error: Exception) -> None:
    """It was restarted, or a platform ended the session: the error is temporary, so that a scheduler tries again."""
    told = failures.translated(error)
    assert isinstance(told, errors.SparkLost) and told.exit_code == 75
    with pytest.raises(errors.SparkLost):
        parallel.Failures().note("shop.a", error)


@pytest.mark.parametrize(
    "text",
    [
        "Cannot call methods on a stopped SparkContext.\nThis stopped SparkContext was created at:",
        "Job 7 cancelled because SparkContext was shut down",
        "SparkContext has been shutdown",
    ],
)
def test_a_spark_that_was_stopped_is_lost(text: str) -> None:
    """A cluster that ends the application stops it, while its JVM still answers: every query fails from then on, for every table."""
    with pytest.raises(errors.SparkLost):
        parallel.Failures().note("shop.a", Raised(text))


@pytest.mark.parametrize(
    "condition", ["DELTA_VERSIONS_NOT_CONTIGUOUS", "DELTA_TRUNCATED_TRANSACTION_LOG", "DELTA_STATE_RECOVER_ERROR"]
)
def test_a_log_that_lacks_entries_is_no_bug(condition: str) -> None:
    """`medallion check`, too, reads bronze's log: it ended with Java's error, without its other findings."""
    told = failures.translated(OfJava(Raised(condition)))
    assert isinstance(told, errors.DecisionNeeded) and "lacks entries" in str(told)


class UnauthorizedAccessException(Exception):
    """Has the name of Unity Catalog's exception."""


@pytest.mark.parametrize("error", [UnauthorizedAccessException("x"), Raised("INSUFFICIENT_PERMISSIONS")])
def test_a_right_that_is_missing_is_no_bug(error: Exception) -> None:
    told = failures.translated(error)
    assert isinstance(told, errors.AccessRefused) and told.exit_code == 3
    assert "--debug" in str(told)


@pytest.mark.parametrize("condition", ["REQUIRES_SINGLE_PART_NAMESPACE", "NO_SUCH_CATALOG_EXCEPTION"])
def test_a_catalog_that_is_not_there_is_a_mistake_in_the_settings(condition: str) -> None:
    """In a session that a platform provides, it is first used for the first table."""
    told = failures.translated(Raised(condition))
    assert isinstance(told, errors.SettingsError) and told.exit_code == 2 and "lakehouse.catalog" in str(told)


def test_what_a_server_of_spark_connect_refuses_is_not_taken_for_its_end() -> None:
    refused = SparkConnectGrpcException("too large", grpc_status_code=StatusCode.RESOURCE_EXHAUSTED)
    assert failures.translated(refused) is None


@pytest.mark.parametrize("error", [ValueError("x"), Raised("PATH_NOT_FOUND", "/lake/nowhere"), Raised("DIVIDE_BY_ZERO")])
def test_what_says_nothing_that_we_know_is_left_as_it_is(error: Exception) -> None:
    assert failures.translated(error) is None


def test_a_table_that_is_held_for_now_is_tried_again() -> None:
    """Maintenance, or a second service that ends, releases it. An error that needs a decision waits for the next start."""
    noted = parallel.Failures()
    noted.note("shop.a", errors.TableOwned("silver/shop/a: process 7 on this host writes it"))
    noted.note("shop.b", errors.DecisionNeeded("silver/shop/b: columns cannot change in place"))
    assert not noted.is_set_aside("shop.a") and noted.is_set_aside("shop.b")


def test_what_fails_when_jobs_were_cancelled_is_told_as_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stop that takes long cancels Spark's jobs: each table's statement then fails, and that is no bug."""
    monkeypatch.setattr(sparks, "is_cancelling", lambda: True)
    found = parallel.Failures()
    found.note("shop.orders", ValueError())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    with pytest.raises(errors.Temporary):
        found.raised()


class UnsupportedFileSystemException(Raised):
    """Hadoop's exception for an unknown scheme."""


@pytest.mark.parametrize(("scheme", "says"), [("s3", "write s3a://"), ("zz", "the package that has it")])
def test_a_root_of_no_file_system_is_told_with_what_to_do(scheme: str, says: str) -> None:
    table = tables.TableRef.at(f"{scheme}://bucket/lake/bronze/shop")
    told = failures.of_store(OfJava(Raised(cause=UnsupportedFileSystemException())), table.label)
    assert isinstance(told, errors.DecisionNeeded) and says in str(told)
    assert str(told).startswith(f"{table.path}: this Spark has no file system for {scheme}://")
    assert failures.of_store(OfJava(UnsupportedFileSystemException()), "/lake") is None


class OutOfMemoryError(Raised):
    """Java raises it if its heap is full, or if the system gives it no more threads."""


def test_a_spark_without_memory_or_threads_is_no_bug() -> None:
    """Spark is not lost either, with the other collections' work: the documents of one may have been too large."""
    told = failures.translated(OfJava(Raised(cause=OutOfMemoryError())))
    assert (
        isinstance(told, errors.Temporary) and not isinstance(told, errors.SparkLost) and "spark.driver.memory" in str(told)
    )
    assert type(failures.translated(of_server("java.lang.OutOfMemoryError: Java heap space"))) is errors.Temporary
    killed_worker = (
        "Lost task 0.0 in stage 7.0: org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"
    )
    assert type(failures.translated(Raised(f"Job aborted due to stage failure: {killed_worker}"))) is errors.Temporary


def test_an_executor_that_is_gone_is_no_bug() -> None:
    """A cluster took it away, or the whole machine slept for longer than Spark's time limit; the job succeeds later."""
    reason = "ExecutorLostFailure (executor driver exited caused by one of the running tasks) Reason: Executor heartbeat timed out"
    told = failures.translated(
        Raised(f"Job aborted due to stage failure: Lost task 0.0 in stage 7.0: {reason} after 130000 ms")
    )
    assert type(told) is errors.Temporary


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'org.apache.spark.SparkException: Job aborted\nCaused by: java.io.IOException: Cannot run program "/opt/python": error=2, '
            "No such file or directory\n\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)\n\tat "
            "org.apache.spark.api.python.PythonWorkerFactory.startDaemon(PythonWorkerFactory.scala:346)",
            "its tasks, /opt/python: No such file or directory; set spark.pyspark.python, or",
        ),
        (
            "pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in "
            "driver: 3.11, PySpark cannot run with different minor versions.",
            "Spark's tasks run Python 3.12, this process runs 3.11; set",
        ),
        (
            "Traceback (most recent call last):\n  File \"worker.py\", line 9\nModuleNotFoundError: No module named 'orjson'",
            "has no module orjson; install mongo-medallion on each machine",
        ),
    ],
)
def test_a_cluster_without_our_python_is_for_a_person(text: str, says: str) -> None:
    """The first mistake that is made with a cluster: the tasks' Python is not the driver's."""
    told = failures.translated(Raised(text))
    assert isinstance(told, errors.DecisionNeeded) and says in str(told)
    assert failures.translated(ModuleNotFoundError("No module named 'orjson'")) is None, "one of this process"


def test_a_program_that_hadoop_starts_is_no_python() -> None:
    """Without its native library Hadoop sets the permissions of a file by `chmod`, which an image may lack."""
    text = (
        'java.io.IOException: Cannot run program "chmod": error=2, No such file or directory\n\tat java.base/java.lang.ProcessBuilder.start'
        "(ProcessBuilder.java:1143)\n\tat org.apache.hadoop.util.Shell.runCommand(Shell.java:937)\n\tat "
        "org.apache.spark.api.python.PythonRunner$.main(PythonRunner.scala:1)"
    )
    assert failures.translated(Raised(text)) is None
