"""Delta's log with a compare-and-set, and a local file system that starts no processes: Java, beside the jars built from it.

`python -m pipelines.spark.log_store.build` builds the jars anew after a change; a test compares them with their source.
"""

from __future__ import annotations

from pathlib import Path

FILES_JAR = Path(__file__).with_name("mongo-medallion-local-files.jar")
JAR = Path(__file__).with_name("mongo-medallion-log-store.jar")
LOCAL = "io.mongomedallion.storage.HardLinkLogStore"
CONDITIONAL_PUT = "io.mongomedallion.storage.ConditionalPutLogStore"
CHECKSUMS = {"spark.sql.streaming.checkpointFileManagerClass": "io.mongomedallion.storage.ChecksumFileManager"}
"""The setting by which the checksum of each version is one PUT on S3, in place of a file that is renamed."""
FILE_SYSTEM = {
    "spark.hadoop.fs.file.impl": "io.mongomedallion.storage.InProcessLocalFileSystem",
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "io.mongomedallion.storage.InProcessLocalFs",
}
"""Settings of a JVM that has `FILES_JAR` on its class path, and no executors elsewhere: Hadoop asks for the classes
before any other jar is there. The log stores need Delta's classes, which come later, and have a jar of their own.
"""
