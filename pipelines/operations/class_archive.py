"""The classes that Spark and Delta load, archived once in an environment: a JVM that maps them starts in half the time.

`python -m pipelines.operations.class_archive` makes the archive (HotSpot's dynamic class data archive, JEP 350), some 200 MB at
`jvm.CLASS_ARCHIVE`, in about a minute. Every JVM that starts from this environment later uses it. HotSpot ignores the archive if its
version, or the path or time of a jar, differs: after an upgrade of Java, Spark or this project make it again. With ``--root s3a://…``
it also contains the classes of S3A and of Amazon's SDK.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_core import errors
from cdc_core.tables import layout as tables
from pipelines.delta import maintenance, table_files
from pipelines.delta import tables as delta
from pipelines.spark import conf as spark_conf
from pipelines.spark import jvm, scratch, stores
from pipelines.spark import session as sparks

_WRITING_SECONDS = 300.0


def make(root: str | None = None) -> Path:
    """Make or replace the archive: start a session, run the layers' kinds of statements on a table, and end its JVM.

    With a `root` in S3 it also sends requests, which this process answers: no store is needed.

    Raises `DecisionNeeded` if this user may not write into the environment or the JVM wrote no archive, `Temporary` if the JVM took
    too long, and what `session` raises.
    """
    archive = jvm.CLASS_ARCHIVE
    draft = archive.with_suffix(f".{os.getpid()}")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        for old_draft in draft.parent.glob(f"{archive.stem}.*"):  # left by a run that was killed
            if scratch.is_gone(old_draft.suffix[1:]):
                old_draft.unlink()
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise errors.DecisionNeeded(f"{draft.parent}: {error.strerror}; run this as a user with write access") from None
    java = f'{spark_conf.SHORT_RUN["spark.driver.extraJavaOptions"]} "{jvm.ARCHIVING}{draft}"'
    spark = sparks.session("mongo-medallion class archive", root=root, conf={"spark.driver.extraJavaOptions": java})
    try:
        with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
            _use(spark, tables.TableRef.at(f"{folder}/table"))
        if stores.scheme(root) == "s3a":
            _use_s3(spark)
        if not sparks.stop(_WRITING_SECONDS):  # the JVM writes the archive when it ends
            raise errors.Temporary(
                f"Java did not write the archive in {_WRITING_SECONDS:.0f} s; try again when the machine is less busy"
            )
        if not draft.is_file():
            raise errors.DecisionNeeded(f"Java wrote no archive (log: {jvm.log_file()})")
        table_files.sync(draft)  # a JVM that maps a file cut short by a power failure ends at once
        draft.replace(archive)
    finally:
        draft.unlink(missing_ok=True)
    return archive


def _use(spark: SparkSession, table: tables.TableRef) -> None:
    """Load the classes that the layers use: create a table, merge, alter, optimize and query it, and pass rows through Python."""
    columns = "key STRING, document STRUCT<a: INT, b: ARRAY<STRING>>, at TIMESTAMP, amount DECIMAL(38, 10)"
    delta.create(spark, table, columns=columns, properties={"delta.enableDeletionVectors": "true"}, cluster_by=["key"])
    rows = spark.range(100).selectExpr(
        "CAST(id AS STRING) AS key",
        "named_struct('a', 1, 'b', array('x')) AS document",
        "TIMESTAMP '2020-01-01' AS at",
        "CAST(1 AS DECIMAL(38, 10)) AS amount",
    )
    rows.createOrReplaceTempView("rows")
    for _ in range(2):
        spark.sql(
            f"MERGE INTO {table} AS stored USING rows ON stored.key = rows.key "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
    spark.sql(f"ALTER TABLE {table} ADD COLUMNS (more INT)")
    maintenance.optimize(spark, table)
    spark.sql(f"SHOW TBLPROPERTIES {table}").collect()
    stored = spark.table(str(table))
    stored.groupBy("document.a").count().orderBy("count").toArrow()
    stored.mapInArrow(lambda batches: batches, stored.schema).collect()
    newest = "row_number() OVER (PARTITION BY key ORDER BY at DESC) AS place"
    stored.join(stored.select("key"), "key").selectExpr("*", newest).where("place = 1").toArrow()
    stored.selectExpr("from_json(to_json(document), 'a INT') AS again", "parse_json('{}') AS any").collect()


def _use_s3(spark: SparkSession) -> None:
    """Load the classes that a lakehouse in S3 needs: check, list, read, write and delete an object."""
    path = jvm.java_class(spark, "org.apache.hadoop.fs.Path")
    file_system = jvm.java_class(spark, "org.apache.hadoop.fs.FileSystem")
    with _answering() as url:
        configuration = spark.sparkContext._jsc.hadoopConfiguration()
        for name, value in {**_NO_KEYS, "fs.s3a.endpoint": url}.items():
            configuration.set(name, value)
        file = path("s3a://lake/table/file")
        files = file_system.newInstance(file.toUri(), configuration)
        files.exists(file)
        files.listStatus(file.getParent())
        files.open(file).read()
        files.create(file, True).close()
        files.delete(file, False)
        files.close()


_NO_KEYS = {
    "fs.s3a.endpoint.region": "us-east-1",
    "fs.s3a.path.style.access": "true",
    "fs.s3a.connection.ssl.enabled": "false",
    "fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "fs.s3a.access.key": "none",
    "fs.s3a.secret.key": "none",
}


class _EveryObject(BaseHTTPRequestHandler):
    """An S3 store in which every object exists with one byte, and every list is empty."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_list = self.command == "GET" and "list-type" in self.path
        body = _EMPTY_LIST if is_list else b"1" if self.command in ("GET", "HEAD") else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: the client closes its connections without notice."""


_EMPTY_LIST = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>lake</Name><Prefix></Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


@contextlib.contextmanager
def _answering() -> Iterator[str]:
    """Yields the URL of an S3 store in this process, until the block ends."""
    with _Server(("127.0.0.1", 0), _EveryObject) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    """Make the archive, and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.operations.class_archive", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--root", help="where the tables will lie: for s3a://… the classes that reach S3 are archived, too")
    root = parser.parse_args().root
    began = time.monotonic()
    print("Archiving the classes of Spark and Delta, for quick starts (about a minute)", flush=True)
    try:
        archive = make(root)
    except errors.MedallionError as error:
        sys.exit(f"No archive of Spark's classes: {error}")
    print(f"Archived in {archive} ({archive.stat().st_size / 1e6:.0f} MB, {time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
