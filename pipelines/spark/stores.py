"""Packages and settings that Spark needs for tables in a store: its file system, and a log store with a compare-and-set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipelines.spark import log_store

HADOOP = "3.5.0"
"""The Hadoop version of the pinned Spark, which file systems must have, too."""
AWS_SDK = "2.35.4"
"""The version of the AWS SDK that this Hadoop was built with. S3A needs only three of its parts, 18 MB; the bundle has 690 MB."""
_AWS = tuple(f"software.amazon.awssdk:{part}:{AWS_SDK}" for part in ("s3", "s3-transfer-manager", "sts"))
_S3A = (
    f"org.apache.hadoop:hadoop-aws:{HADOOP}",
    *_AWS,
    "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1",
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


@dataclass(frozen=True)
class ObjectStore:
    """Maven packages, dependencies of them to exclude, and settings of Spark."""

    packages: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)

    def log_stores(self) -> dict[str, str]:
        """The settings that name log stores."""
        return {name: value for name, value in self.conf.items() if name.startswith("spark.delta.logStore.")}

    def checksums(self) -> dict[str, str]:
        """The setting that names the writer of the versions' checksums, if there is one."""
        return {name: value for name, value in self.conf.items() if name in log_store.CHECKSUMS}

    def without_log_stores(self) -> ObjectStore:
        """A copy without log stores, for a Spark where `LOG_STORE_OF_ALL` is set."""
        return replace(self, conf={name: value for name, value in self.conf.items() if name not in self.log_stores()})


LOG_STORE_OF_ALL = "spark.delta.logStore.class"
"""The setting that names one log store for all schemes. With it, Delta refuses settings for a single scheme."""


def log_store_of(scheme: str) -> str:
    """The name of the setting for the log store of a scheme."""
    return f"spark.delta.logStore.{scheme}.impl"


LOCAL = ObjectStore(conf={log_store_of("file"): log_store.LOCAL})

STORES: Mapping[str, ObjectStore] = {
    "s3a": ObjectStore(
        _S3A,
        ("software.amazon.awssdk:bundle", "org.wildfly.openssl:wildfly-openssl", "org.slf4j:slf4j-api"),
        {
            log_store_of("s3a"): log_store.CONDITIONAL_PUT,
            **log_store.CHECKSUMS,
            # The default stream, Amazon's accelerator, requests a file's length even if it is known.
            "spark.hadoop.fs.s3a.input.stream.type": "classic",
            # Uploads are buffered in memory, so that a kill leaves nothing on the disk. An open file takes up to three blocks of the direct
            # memory, which is as large as the heap, and 32 cores write 32 files.
            "spark.hadoop.fs.s3a.fast.upload.buffer": "bytebuffer",
            "spark.hadoop.fs.s3a.multipart.size": "8M",
            "spark.hadoop.fs.s3a.fast.upload.active.blocks": "2",
        },
    ),
    "abfss": ObjectStore((f"org.apache.hadoop:hadoop-azure:{HADOOP}",)),
    "gs": ObjectStore(
        ("com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26",),
        conf={
            "spark.hadoop.fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
            log_store_of("gs"): "io.delta.storage.GCSLogStore",
        },
    ),
}


def scheme(root: str | None) -> str:
    """The scheme of a root or path, in lower case; `file` for a plain path."""
    match = _SCHEME.match(root or "")
    return match[1].lower() if match else "file"


def of(root: str | None) -> ObjectStore:
    """The packages and settings for a lakehouse below `root`; those of local tables are always included."""
    store = STORES.get(scheme(root), ObjectStore())
    return ObjectStore(store.packages, store.excludes, {**LOCAL.conf, **store.conf})
