"""Delta log stores with a compare-and-set, and a local file system that starts no processes: Java sources and the jars built from them.

`python -m tests.harness.log_store_jars` builds the jars after a change; a test compares them with the sources.
"""

from __future__ import annotations

from pathlib import Path

FILES_JAR = Path(__file__).with_name("mongo-medallion-local-files.jar")
JAR = Path(__file__).with_name("mongo-medallion-log-store.jar")
LOCAL = "io.mongomedallion.storage.HardLinkLogStore"
CONDITIONAL_PUT = "io.mongomedallion.storage.ConditionalPutLogStore"
CHECKSUMS = {"spark.sql.streaming.checkpointFileManagerClass": "io.mongomedallion.storage.ChecksumFileManager"}
"""The setting with which a version's checksum is written by one PUT on S3, instead of by a rename."""
FILE_SYSTEM = {
    "spark.hadoop.fs.file.impl": "io.mongomedallion.storage.InProcessLocalFileSystem",
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "io.mongomedallion.storage.InProcessLocalFs",
}
"""Settings for `InProcessLocalFileSystem`, for a JVM with `FILES_JAR` on its class path and no executors on other machines.

Hadoop loads the classes before all other jars. The log stores are in a separate jar, because they need Delta's classes, which come later.
"""
